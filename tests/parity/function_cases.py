"""Functions that eager accepts, one small case each.

A case is one function that gives ``(module, arguments)``; it is called anew, on
the same seed, for every program that is compared.  To add one, write::

    @case()
    def what_it_shows():
        class Twice(Function):
            ...

        return Model(lambda self, x: Twice.apply(x * self.weight)), (tensor(),)

Backwards here are not the derivatives of their forwards, so that a lost one
shows in the gradients.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx, once_differentiable


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the table; each argument of :func:`case` is one of these fields."""

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    #: Line of the README's table to which the case belongs.
    section: str = ""
    #: Operators that the graph must hold; None: as many as there are nodes of
    #: Functions in the autograd graph that eager builds.  -1: not looked at.
    calls: int | None = None
    #: Also replayed through ``torch.compile(..., backend="aot_eager")``.
    aot: bool = False
    #: Second order gradients are compared too (or the error that eager raises).
    double: bool = False
    #: ``dynamic_shapes`` of the export, and other arguments to replay with.
    dynamic: Any = None
    others: Callable[[], tuple[Any, ...]] | None = None
    #: Instead of being equal, it may be refused by an error that names this.
    refusal: str | None = None
    #: The backward raises, in eager and in replay, an error that matches.
    raises: str | None = None
    #: Capture warns (``hops.HopsWarning``) with a text that matches.
    warns: str | None = None
    #: How ``make_fx`` traces.
    tracing_mode: str = "fake"
    #: What makes ``torch.export.save`` refuse the program with or without hops.
    unsaveable: bool = False


CASES: dict[str, Case] = {}


_section = ""


def section(title: str) -> None:
    """Give the cases that follow a line of their own in the README's table."""
    global _section
    _section = title


def case(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build.__name__, build, _section, **options)
        return build

    return register


class Model(nn.Module):
    """A parameter, an unused parameter, and a body that takes the module and one input."""

    def __init__(self, body: Callable[..., Any], **state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3) + 0.5)
        self.unused = nn.Parameter(torch.rand(3))
        self.body = body
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    def forward(self, x):
        return self.body(self, x)


class Model2(Model):
    """The same with two inputs."""

    def forward(self, x, y):
        return self.body(self, x, y)


class Model0(Model):
    """The same without an input."""

    def forward(self):
        return self.body(self)


def tensor(*shape: int, grad: bool = True, dtype: Any = torch.float32) -> torch.Tensor:
    return torch.randn(shape or (2, 3), dtype=dtype, requires_grad=grad)


class Scale(Function):
    """Old style; what most cases below call where the Function itself is not the point."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x).sum(0)


class Triple(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


# ------------------------------------------------------------------------ Context: what is saved

section("`ctx`: what is saved")


@case(aot=True, double=True)
def save_inputs_outputs_and_intermediates():
    class Save(Function):
        @staticmethod
        def forward(ctx, x, weight):
            inner = x.sin()
            out = inner * weight
            ctx.save_for_backward(x, weight, out, inner)
            return out

        @staticmethod
        def backward(ctx, grad):
            x, weight, out, inner = ctx.saved_tensors
            return grad * weight * x * 2, (grad * inner + out).sum(0)

    return Model(lambda self, x: Save.apply(x.cos(), self.weight)), (tensor(),)


@case()
def save_none_among_tensors():
    class Save(Function):
        @staticmethod
        def forward(ctx, x, bias):
            ctx.save_for_backward(x, None, bias)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            x, none, bias = ctx.saved_tensors
            assert none is None and bias is None
            return grad * x, None

    return Model(lambda self, x: Save.apply(x * self.weight, None)), (tensor(),)


@case()
def save_the_same_tensor_twice():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            first, second = ctx.saved_tensors
            return grad * first + second

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case()
def save_for_backward_without_tensors():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward()
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert ctx.saved_tensors == ()
            return grad * 3

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case()
def saved_tensors_not_touched():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case()
def saved_tensors_read_twice():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            (again,) = ctx.saved_tensors
            return grad * x + again

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case(aot=True, double=True)
def setup_context_style():
    class Save(Function):
        @staticmethod
        def forward(x, weight, factor):
            return x * weight * factor

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, weight, ctx.factor = inputs
            ctx.save_for_backward(x, weight, output)

        @staticmethod
        def backward(ctx, grad):
            x, weight, out = ctx.saved_tensors
            return grad * weight * out, (grad * x).sum(0) * ctx.factor, None

    return Model(lambda self, x: Save.apply(x.sin(), self.weight, 2.5)), (tensor(),)


@case()
def tensors_on_ctx():
    class Stash(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.x = x
            ctx.inner = x.exp()
            ctx.nested = {"both": [weight, (ctx.inner, 2)]}
            return ctx.inner * weight

        @staticmethod
        def backward(ctx, grad):
            weight, (inner, two) = ctx.nested["both"]
            return grad * weight * ctx.x * two, (grad * inner).sum(0)

    return Model(lambda self, x: Stash.apply(x * 0.5, self.weight)), (tensor(),)


@case()
def a_stashed_tensor_may_be_written_before_backward():
    class Stash(Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.other = other
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.other, None

    def body(self, x):
        other = x.detach().clone()
        y = Stash.apply(x * self.weight, other)
        other.mul_(10)
        return y + other

    return Model(body), (tensor(),)


@case(raises="modified by an inplace operation")
def a_saved_tensor_may_not_be_written_before_backward():
    class Save(Function):
        @staticmethod
        def forward(ctx, x, other):
            ctx.save_for_backward(other)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def body(self, x):
        other = x.detach().clone()
        y = Save.apply(x * self.weight, other)
        other.mul_(10)
        return y + other

    return Model(body), (tensor(),)


class _Both(Function):
    """Sizes kept in several ways."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        ctx.rows = x.shape[0]
        ctx.numel = x.numel()
        return x.sum(0)

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.shape) * ctx.rows + ctx.numel


@case(aot=True)
def sizes_on_ctx():
    return Model(lambda self, x: _Both.apply(x * self.weight)), (tensor(),)


@case(
    aot=True,
    dynamic={"x": {0: torch.export.Dim("rows", min=2, max=64)}},
    others=lambda: (tensor(5, 3),),
    tracing_mode="symbolic",
)
def dynamic_sizes_on_ctx():
    return Model(lambda self, x: _Both.apply(x * self.weight)), (tensor(4, 3),)


@case(
    dynamic={"x": {0: torch.export.Dim("rows", min=2, max=64)}},
    others=lambda: (tensor(5, 3),),
    tracing_mode="symbolic",
)
def dynamic_size_as_an_argument():
    class Mean(Function):
        @staticmethod
        def forward(ctx, x, rows):
            ctx.rows = rows
            return x.sum(0) / rows

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(ctx.rows, 3) * ctx.rows, None

    return Model(lambda self, x: Mean.apply(x * self.weight, x.shape[0])), (tensor(4, 3),)


@case(
    dynamic={"x": {0: torch.export.Dim("rows", min=2, max=64)}},
    others=lambda: (tensor(5, 3),),
    tracing_mode="symbolic",
)
def dynamic_size_as_an_output():
    class Rows(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x.shape[0]

        @staticmethod
        def backward(ctx, grad, none):
            return grad * 3

    def body(self, x):
        y, rows = Rows.apply(x * self.weight)
        return y * rows

    return Model(body), (tensor(4, 3),)


@dataclasses.dataclass
class _Settings:
    factor: float
    names: tuple[str, ...] = ("a", "b")


class _Opaque:
    def __init__(self, value):
        self.value = value

    def scaled(self, x):
        return x * self.value


@case()
def constants_on_ctx():
    class Keep(Function):
        @staticmethod
        def forward(ctx, x, flag, dtype, settings, opaque):
            ctx.number, ctx.text, ctx.pair = 2.5, "text", (1, [2, 3])
            ctx.flag, ctx.dtype, ctx.settings, ctx.opaque = flag, dtype, settings, opaque
            return opaque.scaled(x)

        @staticmethod
        def backward(ctx, grad):
            assert ctx.flag and ctx.text == "text" and ctx.settings.names == ("a", "b")
            grad = ctx.opaque.scaled(grad) * ctx.number * ctx.pair[1][1] * ctx.settings.factor
            return grad.to(ctx.dtype).float(), None, None, None, None

    def body(self, x):
        x = x * self.weight
        return Keep.apply(x, True, torch.float64, _Settings(1.5), _Opaque(3.0))

    return Model(body), (tensor(),)


@case()
def ctx_methods_through_helpers():
    def remember(ctx, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(True)

    def recall(ctx):
        return ctx.saved_tensors

    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            remember(ctx, x, x.cos())
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            x, cos = recall(ctx)
            return grad * cos * x

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


# -------------------------------------------------------------------------- Context: mark_dirty

section("`mark_dirty`")


class _Double_(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


@case(aot=True)
def mark_dirty_on_an_intermediate():
    return Model(lambda self, x: _Double_.apply(x * self.weight).sin()), (tensor(),)


@case()
def mark_dirty_old_name_read_later():
    def body(self, x):
        y = x * self.weight
        z = _Double_.apply(y)
        return y.sin() + z

    return Model(body), (tensor(),)


@case()
def mark_dirty_return_value_dropped():
    def body(self, x):
        y = x * self.weight
        _Double_.apply(y)
        return y.sin()

    return Model(body), (tensor(),)


@case(aot=True)
def mark_dirty_on_a_buffer():
    class Update(Function):
        @staticmethod
        def forward(ctx, x, running):
            running.mul_(0.9).add_(x.detach().mean(0))
            ctx.mark_dirty(running)
            ctx.mark_non_differentiable(running)
            return x * 2, running

        @staticmethod
        def backward(ctx, grad, _):
            return grad * 3, None

    def body(self, x):
        y, running = Update.apply(x * self.weight, self.running)
        return y + self.running

    return Model(body, running=torch.ones(3)), (tensor(),)


@case(calls=1)
def mark_dirty_on_a_view_of_a_buffer():
    class Update(Function):
        @staticmethod
        def forward(ctx, running, x):
            running.add_(x)
            ctx.mark_dirty(running)
            return running

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, grad * 3

    def body(self, x):
        state = self.running.clone()
        y = Update.apply(state[0], (x * self.weight).sum(0))
        return y * 2

    return Model(body, running=torch.ones(2, 3)), (tensor(),)


@case()
def mark_dirty_on_an_input_without_grad():
    class Update(Function):
        @staticmethod
        def forward(ctx, x, out):
            out.copy_(x)
            ctx.mark_dirty(out)
            ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0], None

    def body(self, x):
        return Update.apply(x * self.weight, torch.zeros(2, 3)).sin()

    return Model(body), (tensor(),)


# --------------------------------------------------- Context: mark_non_differentiable, materialize

section("`mark_non_differentiable`, `set_materialize_grads`")


@case(aot=True)
def mark_non_differentiable_one_of_several():
    class Mark(Function):
        @staticmethod
        def forward(ctx, x):
            mask = x * 0.5
            ctx.mark_non_differentiable(mask)
            return x * 2, mask

        @staticmethod
        def backward(ctx, grad, grad_mask):
            return grad * 3 + grad_mask

    def body(self, x):
        y, mask = Mark.apply(x * self.weight)
        return y * mask, mask

    return Model(body), (tensor(),)


@case(calls=-1)
def mark_non_differentiable_lone_output():
    class Mark(Function):
        @staticmethod
        def forward(ctx, x):
            out = (x > 0).float()
            ctx.mark_non_differentiable(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    def body(self, x):
        x = x * self.weight
        return x * Mark.apply(x), Mark.apply(x)

    return Model(body), (tensor(),)


@case()
def integer_outputs_marked():
    class Split(Function):
        @staticmethod
        def forward(ctx, x):
            index = x.argmax(1)
            ctx.mark_non_differentiable(index)
            ctx.save_for_backward(index)
            return x.max(1).values, index

        @staticmethod
        def backward(ctx, grad, _):
            (index,) = ctx.saved_tensors
            return torch.zeros(2, 3).scatter(1, index[:, None], grad[:, None] * 2)

    return Model(lambda self, x: Split.apply(x * self.weight)), (tensor(),)


@case()
def integer_outputs_not_marked():
    class Split(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x.argmax(1)

        @staticmethod
        def backward(ctx, grad, _):
            return grad * 3

    return Model(lambda self, x: Split.apply(x * self.weight)), (tensor(),)


@case()
def integer_and_bool_outputs_without_materialized_grads():
    class Split(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x.argmax(1), x * 2, x > 0

        @staticmethod
        def backward(ctx, index, grad, mask):
            assert index is None and mask is None
            return grad * 3

    return Model(lambda self, x: Split.apply(x * self.weight)), (tensor(),)


class _Two(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if first is None:
            return second * 10
        if second is None:
            return first * 100
        return first + second


@case(aot=True)
def materialize_grads_off_second_unused():
    return Model(lambda self, x: _Two.apply(x * self.weight)[0].sin()), (tensor(),)


@case()
def materialize_grads_off_first_unused():
    return Model(lambda self, x: _Two.apply(x * self.weight)[1].sin()), (tensor(),)


@case()
def materialize_grads_off_both_used():
    return Model(lambda self, x: _Two.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def materialize_grads_by_default():
    class Zeros(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, x.sum(0)

        @staticmethod
        def backward(ctx, first, second):
            return first + second * 4 + 1

    return Model(lambda self, x: Zeros.apply(x * self.weight)[0].sin()), (tensor(),)


# ------------------------------------------------------------------------- Context: what is asked

section("`ctx`: what is asked (`needs_input_grad`, `once_differentiable`, ...)")


# torch 2.9 loads every parameter as one that requires grad; then it is refused.
@case(aot=True, refusal="Needs")
def needs_input_grad_per_slot():
    class Needs(Function):
        @staticmethod
        def forward(ctx, x, frozen, weight, number):
            ctx.save_for_backward(x, frozen, weight)
            return x * frozen * weight * number

        @staticmethod
        def backward(ctx, grad):
            x, frozen, weight = ctx.saved_tensors
            assert len(ctx.needs_input_grad) == 4 and not ctx.needs_input_grad[3]
            gx = grad * frozen * 2 if ctx.needs_input_grad[0] else None
            gf = (grad * x).sum(0) if ctx.needs_input_grad[1] else None
            gw = (grad * x).sum(0) * 3 if ctx.needs_input_grad[2] else None
            return gx, gf, gw, None

    model = Model(
        lambda self, x: Needs.apply(x, self.frozen, self.weight, 2.0),
        frozen=nn.Parameter(torch.rand(3), requires_grad=False),
    )
    return model, (tensor(grad=False),)


@case()
def needs_input_grad_in_forward():
    class Needs(Function):
        @staticmethod
        def forward(ctx, x, weight):
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2, None

    return Model(lambda self, x: Needs.apply(x, self.weight)), (tensor(),)


@case()
def jvp_present_and_unused():
    class Forward(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.save_for_forward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 5

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0] * 2

    return Model(lambda self, x: Forward.apply(x * self.weight)), (tensor(),)


@case(refusal="Forward", calls=-1)
def jvp_used():
    class Forward(Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 5

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.saved_tensors[0] * 7

    def body(self, x):
        return torch.func.jvp(Forward.apply, (x * self.weight,), (torch.ones(2, 3),))

    return Model(body), (tensor(),)


@case(double=True, aot=True)
def once_differentiable_backward():
    class Once(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    return Model(lambda self, x: Once.apply(x * self.weight)), (tensor(),)


class _Cast(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight.T) * 2, x.T @ grad


@case(aot=True)
def custom_fwd_and_bwd():
    model = Model(
        lambda self, x: _Cast.apply(x * self.weight, self.matrix),
        matrix=nn.Parameter(torch.rand(3, 3)),
    )
    return model, (tensor(),)


@case()
def custom_fwd_and_bwd_under_autocast():
    def body(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return _Cast.apply(x * self.weight, self.matrix)

    return Model(body, matrix=nn.Parameter(torch.rand(3, 3))), (tensor(),)


@case()
def custom_fwd_that_casts_inputs():
    class Cast(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return (grad @ weight.T) * 2, x.T @ grad

    def body(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Cast.apply(x * self.weight, self.matrix)

    return Model(body, matrix=nn.Parameter(torch.rand(3, 3))), (tensor(),)


@case(aot=True)
def backward_outside_of_the_autocast_of_its_forward():
    class Typed(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            # In bfloat16 only where autocast were still on.
            product = weight @ weight
            wide = product.dtype is torch.float32
            return grad.float() @ product * (2 if wide else 3), x.T @ grad.float()

    def body(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = Typed.apply(x * self.weight, self.matrix)
        return y.float().sin() * self.weight

    return Model(body, matrix=nn.Parameter(torch.rand(3, 3))), (tensor(),)


@case(calls=2)
def nested_in_a_model_with_no_grad_and_autocast_elsewhere():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.enable_grad():
                return Triple.apply(x.detach().requires_grad_()).sin()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    def body(self, x):
        y = Outer.apply(x * self.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = x @ self.matrix
        with torch.no_grad():
            shift = y.mean()
        return z.float() + y - shift

    return Model(body, matrix=nn.Parameter(torch.rand(3, 3))), (tensor(),)


@case(refusal="Triple")
def hook_on_an_output():
    def body(self, x):
        y = Triple.apply(x * self.weight)
        y.register_hook(lambda grad: grad * 2)
        return y.sin()

    return Model(body), (tensor(),)


if hasattr(FunctionCtx, "set_output_grad_dtype"):

    @case(refusal="Wide")
    def set_output_grad_dtype():
        class Wide(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.set_output_grad_dtype(torch.float32)
                return x.to(torch.bfloat16)

            @staticmethod
            def backward(ctx, grad):
                assert grad.dtype is torch.float32
                return grad * 2

        return Model(lambda self, x: Wide.apply(x * self.weight)), (tensor(),)


if hasattr(FunctionCtx, "input_grad_buffers"):

    @case(refusal="Fused")
    def input_grad_buffers():
        class Fused(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                (buffer,) = ctx.input_grad_buffers
                if buffer is not None:
                    buffer.add_(grad * 3)
                    return None
                return grad * 3

        return Model(lambda self, x: Fused.apply(x * self.weight)), (tensor(),)


# ---------------------------------------------------------------------------- Call shapes: inputs

section("inputs")


@case(aot=True)
def the_same_tensor_in_several_slots():
    class Slots(Function):
        @staticmethod
        def forward(ctx, a, b, c):
            ctx.save_for_backward(a, b, c)
            return a * b + c

        @staticmethod
        def backward(ctx, grad):
            a, b, c = ctx.saved_tensors
            return grad * b * 2, grad * a * 3, grad * 5

    def body(self, x):
        y = x * self.weight
        return Slots.apply(y, y, y)

    return Model(body), (tensor(),)


@case()
def the_same_integer_tensor_in_several_slots():
    class Slots(Function):
        @staticmethod
        def forward(ctx, x, first, second):
            ctx.save_for_backward(first, second)
            return x[first] + x[second]

        @staticmethod
        def backward(ctx, grad):
            first, second = ctx.saved_tensors
            zeros = torch.zeros(2, 3)
            return zeros.index_add(0, first, grad * 2) + second.sum(), None, None

    model = Model(lambda self, x: Slots.apply(x * self.weight, self.index, self.index))
    model.register_buffer("index", torch.tensor([1, 0]))
    return model, (tensor(),)


@case()
def optional_tensors():
    class Optional(Function):
        @staticmethod
        def forward(ctx, x, bias, scale):
            ctx.save_for_backward(x, bias, scale)
            return (x if bias is None else x + bias) * (1 if scale is None else scale)

        @staticmethod
        def backward(ctx, grad):
            x, bias, scale = ctx.saved_tensors
            gradient = grad * 2 if scale is None else grad * scale
            return gradient, None if bias is None else gradient.sum(0), None

    def body(self, x):
        return Optional.apply(x, None, self.weight) + Optional.apply(x, self.weight, None)

    return Model(body), (tensor(),)


@case()
def a_tensor_argument_without_gradient():
    class Drop(Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, None

    return Model(lambda self, x: Drop.apply(x, self.weight)), (tensor(),)


@case(aot=True)
def containers_are_opaque():
    class Containers(Function):
        @staticmethod
        def forward(ctx, x, pair, table):
            ctx.save_for_backward(x)
            ctx.pair = pair
            return x * pair[0] + table["bias"]

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.pair[1] * ctx.saved_tensors[0], None, None

    def body(self, x):
        pair = [self.weight, self.weight.exp()]
        return Containers.apply(x.sin(), pair, {"bias": self.weight * 2})

    return Model(body), (tensor(),)


@case()
def user_objects_are_opaque():
    class Objects(Function):
        @staticmethod
        def forward(ctx, x, opaque):
            ctx.opaque = opaque
            return opaque.scaled(x)

        @staticmethod
        def backward(ctx, grad):
            return ctx.opaque.scaled(grad) * 2, None

    def body(self, x):
        return Objects.apply(x.sin(), _Opaque(self.weight.exp()))

    return Model(body), (tensor(),)


@case()
def a_module_as_an_argument():
    class Run(Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.save_for_backward(x)
            ctx.module = module
            return module(x)

        @staticmethod
        def backward(ctx, grad):
            return grad @ ctx.module.weight * 2, None

    model = Model(lambda self, x: Run.apply(x * self.weight, self.linear), linear=nn.Linear(3, 3))
    return model, (tensor(),)


class _Defaults(Function):
    @staticmethod
    def forward(x, weight, factor=2.0):
        return x * weight * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[2]
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * ctx.factor, (grad * x).sum(0), None


@case()
def default_arguments():
    return Model(lambda self, x: _Defaults.apply(x.sin(), self.weight)), (tensor(),)


def _apply_takes_keywords() -> bool:
    """Older torch releases refuse them."""
    try:
        _Defaults.apply(torch.ones(1), weight=torch.ones(1))
    except TypeError:
        return False
    return True


if _apply_takes_keywords():

    @case()
    def keyword_arguments():
        def body(self, x):
            return _Defaults.apply(x.sin(), weight=self.weight, factor=4.0)

        return Model(body), (tensor(),)


@case()
def non_contiguous_operands():
    class View(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.t().contiguous().view(-1) * x.stride(0)

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad.view(x.shape[1], x.shape[0]).t() * x.stride(1)

    return Model(lambda self, x: View.apply((x * self.weight).t())), (tensor(),)


# --------------------------------------------------------------------------- Call shapes: outputs

section("outputs")


@case(aot=True, double=True)
def an_input_returned_untouched():
    class Reverse(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x

        @staticmethod
        def backward(ctx, grad):
            return -ctx.factor * grad, None

    return Model(lambda self, x: Reverse.apply(x * self.weight, 0.5).sin()), (tensor(),)


@case()
def a_model_input_returned_untouched():
    class Reverse(Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return -grad

    return Model(lambda self, x: Reverse.apply(x)), (tensor(),)


@case()
def an_input_returned_through_view_as():
    class Reverse(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return -grad

    return Model(lambda self, x: Reverse.apply(x * self.weight).sin()), (tensor(),)


@case()
def an_untouched_input_among_outputs():
    class Pair(Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x, x * weight, weight

        @staticmethod
        def backward(ctx, first, second, third):
            return first * 2 + second, third * 3

    return Model(lambda self, x: Pair.apply(x, self.weight)), (tensor(),)


@case(aot=True)
def views_of_inputs():
    class View(Function):
        @staticmethod
        def forward(ctx, x):
            return x.view(3, 2)

        @staticmethod
        def backward(ctx, grad):
            return grad.view(2, 3) * 2

    return Model(lambda self, x: View.apply(x * self.weight).sin()), (tensor(),)


@case(aot=True)
def several_views_of_an_input():
    class Split(Function):
        @staticmethod
        def forward(ctx, x):
            return x[0], x[1]

        @staticmethod
        def backward(ctx, first, second):
            return torch.stack([first * 2, second * 3])

    return Model(lambda self, x: Split.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def outputs_that_are_views_of_each_other():
    class Views(Function):
        @staticmethod
        def forward(ctx, x):
            out = x * 2
            return out, out.view(3, 2), out[0]

        @staticmethod
        def backward(ctx, first, second, third):
            return first * 2 + second.view(2, 3) * 3 + third

    return Model(lambda self, x: Views.apply(x * self.weight)), (tensor(),)


@case()
def the_same_tensor_twice_among_outputs():
    class Twice(Function):
        @staticmethod
        def forward(ctx, x):
            out = x * 2
            return out, out

        @staticmethod
        def backward(ctx, first, second):
            return first * 2 + second * 3

    return Model(lambda self, x: Twice.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def several_outputs_one_unused():
    class Several(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin(), x.cos(), x * 2

        @staticmethod
        def backward(ctx, first, second, third):
            (x,) = ctx.saved_tensors
            return first * x + second * 2 + third * 3

    def body(self, x):
        first, _, third = Several.apply(x * self.weight)
        return first, third

    return Model(body), (tensor(),)


@case(aot=True)
def constants_between_tensor_outputs():
    class Mixed(Function):
        @staticmethod
        def forward(ctx, x):
            return 3, x * 2, "text", None, x.sum(0), (1, 2.5)

        @staticmethod
        def backward(ctx, *grads):
            assert len(grads) == 6
            return grads[1] * 3 + grads[4]

    def body(self, x):
        number, y, text, none, total, (one, half) = Mixed.apply(x * self.weight)
        assert text == "text" and none is None
        return y * number * half, total, number, none, one

    return Model(body), (tensor(),)


@case()
def a_tuple_of_one_output():
    class One(Function):
        @staticmethod
        def forward(ctx, x):
            return (x * 2,)

        @staticmethod
        def backward(ctx, grad):
            return (grad * 3,)

    def body(self, x):
        (y,) = One.apply(x * self.weight)
        return y

    return Model(body), (tensor(),)


@case(calls=-1)
def list_output():
    class Listed(Function):
        @staticmethod
        def forward(ctx, x):
            return [x * 2, x * 3]

        @staticmethod
        def backward(ctx, grad):
            return None

    def body(self, x):
        first, second = Listed.apply(x * self.weight)
        return first * self.weight, second

    return Model(body), (tensor(),)


@case(calls=-1)
def dict_output():
    class Named(Function):
        @staticmethod
        def forward(ctx, x):
            return {"y": x * 2}

        @staticmethod
        def backward(ctx, grad):
            return None

    return Model(lambda self, x: Named.apply(x * self.weight)["y"] * self.weight), (tensor(),)


_Result = collections.namedtuple("_Result", "first second")


@case()
def named_tuple_output():
    class Named(Function):
        @staticmethod
        def forward(ctx, x):
            return _Result(x * 2, x * 3)

        @staticmethod
        def backward(ctx, first, second):
            return first * 5 + second * 7

    def body(self, x):
        first, second = Named.apply(x * self.weight)
        return first, second

    return Model(body), (tensor(),)


@case()
def a_tensor_and_a_list_of_tensors():
    class Both(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2, [x * 3]

        @staticmethod
        def backward(ctx, grad, none):
            assert none is None
            return grad * 5

    def body(self, x):
        y, (z,) = Both.apply(x * self.weight)
        return y, z * self.weight

    return Model(body), (tensor(),)


# --------------------------------------------------------------------- Call shapes: how it is held

section("how the Function is written and held")


@case()
def classmethod_forward_and_backward():
    class Methods(Function):
        factor = 3.0

        @classmethod
        def forward(cls, ctx, x):
            return x * cls.factor

        @classmethod
        def backward(cls, ctx, grad):
            return grad * cls.factor * 2

    return Model(lambda self, x: Methods.apply(x * self.weight)), (tensor(),)


@case()
def classmethod_forward():
    class Methods(Function):
        factor = 3.0

        @classmethod
        def forward(cls, ctx, x):
            return x * cls.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    return Model(lambda self, x: Methods.apply(x * self.weight)), (tensor(),)


@case()
def classmethod_backward():
    class Methods(Function):
        factor = 3.0

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @classmethod
        def backward(cls, ctx, grad):
            return grad * cls.factor * 2

    return Model(lambda self, x: Methods.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def inheritance():
    class Base(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Derived(Base):
        @staticmethod
        def forward(ctx, x):
            return Base.forward(ctx, x) * 3

        @staticmethod
        def backward(ctx, grad):
            return Base.backward(ctx, grad) * 5

    class Leaf(Derived):
        pass

    def body(self, x):
        return Leaf.apply(Derived.apply(x * self.weight)) + Base.apply(x)

    return Model(body), (tensor(),)


@case()
def vjp_in_place_of_backward():
    class Vjp(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def vjp(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Vjp.apply(x * self.weight)), (tensor(),)


@case(raises="must implement either the backward or vjp")
def no_backward():
    class Nothing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    return Model(lambda self, x: Nothing.apply(x * self.weight)), (tensor(),)


@case()
def a_function_defined_in_forward():
    def body(self, x):
        class Inside(Function):
            @staticmethod
            def forward(ctx, x, weight):
                ctx.save_for_backward(weight)
                return x * weight

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.saved_tensors[0] * 2, None

        return Inside.apply(x, self.weight)

    return Model(body), (tensor(),)


@case()
def functions_in_a_container():
    table = {"scale": Scale, "more": [Triple]}

    def body(self, x):
        return table["more"][0].apply(table["scale"].apply(x, self.weight))

    return Model(body), (tensor(),)


@case()
def a_function_as_an_argument():
    def call(function, *args):
        return function.apply(*args)

    def body(self, x):
        return call(self.function, call(Scale, x, self.weight))

    return Model(body, function=Triple), (tensor(),)


@case()
def a_bound_apply():
    apply = Scale.apply
    return Model(lambda self, x: apply(x, self.weight).sin()), (tensor(),)


@case()
def class_attributes():
    class Attributes(Function):
        factor = 2.5
        table = {"a": 3}

        @staticmethod
        def forward(ctx, x):
            return x * Attributes.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * Attributes.table["a"]

    return Model(lambda self, x: Attributes.apply(x * self.weight)), (tensor(),)


@case()
def mutable_class_state():
    class State(Function):
        factor = 1.0

        @staticmethod
        def forward(ctx, x):
            ctx.factor = State.factor
            return x * State.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor * 2

    def body(self, x):
        State.factor = 3.0
        x = State.apply(x * self.weight)
        State.factor = 5.0
        return State.apply(x)

    return Model(body), (tensor(),)


@case(aot=True)
def several_calls_in_a_loop():
    def body(self, x):
        for _ in range(3):
            x = Scale.apply(x, self.weight).sin()
        return x

    return Model(body), (tensor(),)


# ------------------------------------------------------------------ Call shapes: transforms, control

section("transforms, control flow, other operators")


class _Generated(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, grad * x * 3


@case(refusal="_Generated")
def vmap_with_a_generated_rule():
    def body(self, x):
        return torch.vmap(_Generated.apply, in_dims=(0, None))(x.sin(), self.weight)

    return Model(body), (tensor(),)


@case(refusal="Written")
def vmap_with_a_written_rule():
    class Written(Function):
        @staticmethod
        def forward(x, weight):
            return x * weight

        setup_context = _Generated.setup_context
        backward = _Generated.backward

        @staticmethod
        def vmap(info, in_dims, x, weight):
            return Written.apply(x, weight.expand_as(x)), in_dims[0]

    def body(self, x):
        return torch.vmap(Written.apply, in_dims=(0, None))(x.sin(), self.weight)

    return Model(body), (tensor(),)


@case(refusal="_Generated", calls=-1)
def func_grad():
    def body(self, x):
        def loss(x):
            return _Generated.apply(x, self.weight).sum()

        return torch.func.grad(loss)(x) * self.weight

    return Model(body), (tensor(),)


@case(refusal="_Generated", calls=-1)
def func_grad_of_the_call_alone():
    def body(self, x):
        return torch.func.grad(lambda x: _Generated.apply(x, x).sum())(x) * self.weight

    return Model(body), (tensor(),)


@case(calls=2, aot=True)
def both_branches_of_cond():
    def body(self, x):
        def yes(x):
            return Triple.apply(x)

        def no(x):
            return Triple.apply(x.sin())

        return torch.cond(x.sum() > 0, yes, no, (x * self.weight,))

    return Model(body), (tensor(),)


@case(calls=1)
def cond_with_a_parameter():
    def body(self, x):
        def yes(x):
            return Scale.apply(x, self.weight)

        def no(x):
            return x * self.weight

        return torch.cond(x.sum() > 0, yes, no, (x,))

    return Model(body), (tensor(),)


@case()
def a_function_called_in_forward():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return Scale.apply(x, weight) * 2

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight * 5, (grad * x).sum(0) * 7

    return Model(lambda self, x: Outer.apply(x.sin(), self.weight)), (tensor(),)


@case(double=True)
def a_function_called_in_backward():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return Scale.apply(grad, weight) * 3, (grad * x).sum(0)

    return Model(lambda self, x: Outer.apply(x.sin(), self.weight)), (tensor(),)


@case(calls=2)
def a_function_within_enable_grad_in_forward():
    class Outer(Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                out = Triple.apply(inner)
                (ctx.slope,) = torch.autograd.grad(out.sum(), inner)
            return out.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.slope

    return Model(lambda self, x: Outer.apply(x * self.weight)), (tensor(),)


@torch.library.custom_op("hops_function_cases::twice", mutates_args=())
def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@_twice.register_fake
def _(x):
    return torch.empty_like(x)


@case(aot=True)
def a_custom_op():
    class Custom(Function):
        @staticmethod
        def forward(ctx, x):
            return _twice(x)

        @staticmethod
        def backward(ctx, grad):
            return _twice(grad) * 3

    return Model(lambda self, x: Custom.apply(x * self.weight)), (tensor(),)


# ---------------------------------------------------------------------- Call shapes: dtypes, tensors

section("dtypes, layouts, tensor subclasses")


class _Any(Function):
    """For any dtype."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * 3


@case()
def complex_tensors():
    model = Model(lambda self, x: torch.view_as_real(_Any.apply(x * self.weight)))
    return model, (tensor(dtype=torch.complex64),)


@case()
def bfloat16_tensors():
    model = Model(lambda self, x: _Any.apply(x * self.weight.bfloat16()))
    return model, (tensor(dtype=torch.bfloat16),)


@case()
def float64_tensors():
    return Model(lambda self, x: _Any.apply(x * self.weight)), (tensor(dtype=torch.float64),)


@case()
def integer_and_bool_operands():
    class Embed(Function):
        @staticmethod
        def forward(ctx, index, mask, weight):
            ctx.save_for_backward(index, mask)
            return weight[index] * mask

        @staticmethod
        def backward(ctx, grad):
            index, mask = ctx.saved_tensors
            return None, None, torch.zeros(3).index_add(0, index, grad * mask * 2)

    model = Model2(lambda self, x, y: Embed.apply(x, y, self.weight))
    return model, (torch.tensor([0, 2, 2]), torch.tensor([True, False, True]))


@case()
def zero_size_tensors():
    return Model(lambda self, x: _Any.apply(x * self.weight)), (tensor(0, 3),)


@case()
def zero_dim_tensors():
    return Model(lambda self, x: _Any.apply((x * self.weight).sum())), (tensor(),)


@case()
def a_python_number_times_a_zero_dim_parameter():
    class Shift(Function):
        @staticmethod
        def forward(ctx, x, scale, number):
            ctx.save_for_backward(x, scale)
            ctx.number = number
            return x * scale + number

        @staticmethod
        def backward(ctx, grad):
            x, scale = ctx.saved_tensors
            return grad * scale * 2, (grad * x).sum(), None

    model = Model(
        lambda self, x: Shift.apply(x * self.weight, self.scale, 1),
        scale=nn.Parameter(torch.tensor(0.5)),
    )
    return model, (tensor(),)


class _Special(nn.Parameter):
    pass


@case()
def a_parameter_subclass():
    model = Model(lambda self, x: Scale.apply(x, self.special), special=_Special(torch.rand(3)))
    return model, (tensor(),)


@case(refusal="_Any", unsaveable=True)
def a_wrapper_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    model = Model(lambda self, x: _Any.apply(x * self.pair))
    model.pair = nn.Parameter(TwoTensor(torch.rand(3), torch.rand(3)))
    return model, (TwoTensor(torch.rand(2, 3), torch.rand(2, 3)).requires_grad_(),)


def _process_group():
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist


@case(refusal="Scale", unsaveable=True)
def a_dtensor():
    _process_group()
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.rand(3), mesh, [Replicate()]))
    x = distribute_tensor(torch.randn(2, 3), mesh, [Replicate()]).requires_grad_()
    return Model(lambda self, x: Scale.apply(x, self.distributed), distributed=weight), (x,)


# -------------------------------------------------------------------------------------- Backward

section("backward")


class _Layout(Function):
    """The gradient depends on the layout of what arrives, as code with raw strides does."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous() if not grad.is_contiguous() else grad
        flat = torch.as_strided(grad, (grad.numel(),), (1,))
        return flat.view(grad.shape) * (3 if grad.stride()[-1] == 1 else 5)


@case(aot=True)
def strides_of_an_expanded_gradient():
    return Model(lambda self, x: _Layout.apply(x * self.weight).sum()), (tensor(),)


@case()
def strides_of_a_gradient_sliced_from_cat():
    def body(self, x):
        return torch.cat([x, _Layout.apply(x * self.weight)], 1) * torch.arange(6.0)

    return Model(body), (tensor(),)


@case()
def strides_of_a_transposed_gradient():
    return Model(lambda self, x: _Layout.apply(x * self.weight).t().contiguous()), (tensor(),)


@case()
def strides_of_a_channels_last_gradient():
    class Pixels(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            if not grad.is_contiguous(memory_format=torch.channels_last):
                grad = grad.contiguous(memory_format=torch.channels_last)
            flat = torch.as_strided(grad, (grad.numel(),), (1,))
            shape = (grad.shape[0], grad.shape[2], grad.shape[3], grad.shape[1])
            return flat.view(shape).permute(0, 3, 1, 2) * 3

    def body(self, x):
        x = (x * self.weight).contiguous(memory_format=torch.channels_last)
        return Pixels.apply(x).contiguous()

    return Model(body), (tensor(2, 2, 3, 3),)


@case()
def the_dtype_and_type_of_the_gradient():
    class Look(Function):
        @staticmethod
        def forward(ctx, x):
            return x.bfloat16()

        @staticmethod
        def backward(ctx, grad):
            assert isinstance(grad, torch.Tensor) and grad.dtype is torch.bfloat16
            return grad.float() * 3

    return Model(lambda self, x: Look.apply(x * self.weight)), (tensor(),)


class _WriteGrad(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.mul_(3)


@case(aot=True)
def an_incoming_gradient_written_in_place():
    return Model(lambda self, x: _WriteGrad.apply(x * self.weight).sin()), (tensor(),)


@case()
def a_gradient_written_in_place_that_others_use():
    def body(self, x):
        x = x * self.weight
        return _WriteGrad.apply(x) + x.sin()

    return Model(body), (tensor(),)


@case(aot=True)
def autograd_grad_within_backward():
    class Recompute(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return (x * weight).sin()

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                weight = weight.detach().requires_grad_()
                y = (x * weight).sin()
                gx, gw = torch.autograd.grad(y, (x, weight), grad)
            return gx * 2, gw * 3

    return Model(lambda self, x: Recompute.apply(x, self.weight)), (tensor(),)


@case()
def a_reversible_block():
    class Reversible(Function):
        @staticmethod
        def forward(ctx, x, f, *parameters):
            a, b = x.chunk(2, 1)
            with torch.no_grad():
                out = torch.cat([a + f(b), b], 1)
            ctx.f, ctx.out, ctx.parameters = f, out.detach(), parameters
            return out

        @staticmethod
        def backward(ctx, grad):
            ga, gb = grad.chunk(2, 1)
            _, b = ctx.out.chunk(2, 1)
            with torch.enable_grad():
                b = b.detach().requires_grad_()
                y = ctx.f(b)
                gradients = torch.autograd.grad(y, (b, *ctx.parameters), ga)
            gb = gb + gradients[0]
            return (torch.cat([ga, gb], 1), None, *gradients[1:])

    def body(self, x):
        return Reversible.apply(x, self.f, *self.f.parameters())

    return Model(body, f=nn.Linear(2, 2)), (tensor(2, 4),)


@case()
def backward_called_within_backward():
    class Adjoint(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                x.sin().backward(grad)
            return x.grad * 2

    return Model(lambda self, x: Adjoint.apply(x * self.weight)), (tensor(),)


@case()
def an_implicit_layer():
    class FixedPoint(Function):
        @staticmethod
        def forward(ctx, x, weight):
            z = torch.zeros_like(x)
            for _ in range(3):
                z = torch.tanh(z * weight + x)
            ctx.save_for_backward(x, weight, z)
            return z

        @staticmethod
        def backward(ctx, grad):
            x, weight, z = ctx.saved_tensors
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                x = x.detach().requires_grad_()
                f = torch.tanh(z * weight.detach() + x)
            g = grad
            for _ in range(3):
                g = grad + torch.autograd.grad(f, z, g, retain_graph=True)[0]
            return torch.autograd.grad(f, x, g)[0], None

    return Model(lambda self, x: FixedPoint.apply(x, self.weight * 0.3)), (tensor(),)


@case(aot=True)
def random_numbers_in_forward():
    class Noise(Function):
        @staticmethod
        def forward(ctx, x):
            mask = torch.rand_like(x)
            ctx.save_for_backward(mask)
            return x * mask

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    def body(self, x):
        return Noise.apply(x * self.weight) + torch.rand(3)

    return Model(body), (tensor(),)


@case(aot=True)
def random_numbers_in_backward():
    class Noise(Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.rand_like(x)

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.rand_like(grad)

    return Model(lambda self, x: Noise.apply(Noise.apply(x * self.weight))), (tensor(),)


@case(tracing_mode="symbolic")
def data_dependent_sizes():
    class Positive(Function):
        @staticmethod
        def forward(ctx, x):
            index = x.nonzero()[:, 0]
            ctx.save_for_backward(index)
            ctx.found = index.shape[0]
            ctx.size = x.shape[0]
            return x[index].sum() * 2

        @staticmethod
        def backward(ctx, grad):
            (index,) = ctx.saved_tensors
            gradient = torch.zeros(ctx.size)
            return gradient.index_add(0, index, grad.expand(ctx.found) * 3)

    return Model(lambda self, x: Positive.apply((x * self.weight).relu().sum(1))), (tensor(4, 3),)


@case(tracing_mode="symbolic")
def a_data_dependent_output():
    class Positive(Function):
        @staticmethod
        def forward(ctx, x):
            index = x.nonzero()[:, 0]
            ctx.save_for_backward(index, x)
            return x[index]

        @staticmethod
        def backward(ctx, grad):
            index, x = ctx.saved_tensors
            return torch.zeros_like(x).index_add(0, index, grad * 3)

    def body(self, x):
        return Positive.apply((x * self.weight).relu().sum(1)).sum()

    return Model(body), (tensor(4, 3),)


@case(refusal="Reduce")
def functional_collectives():
    dist = _process_group()
    from torch.distributed._functional_collectives import all_reduce

    class Reduce(Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return all_reduce(x, "sum", group) * 2

        @staticmethod
        def backward(ctx, grad):
            return all_reduce(grad.contiguous(), "sum", ctx.group) * 3, None

    return Model(lambda self, x: Reduce.apply(x * self.weight, dist.group.WORLD)), (tensor(),)


@case(refusal="Reduce")
def collectives():
    dist = _process_group()

    class Reduce(Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            grad = grad.clone()
            dist.all_reduce(grad)
            return grad * 3

    return Model(lambda self, x: Reduce.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def a_parameter_through_a_closure():
    def body(self, x):
        class Closure(Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * self.weight

            @staticmethod
            def backward(ctx, grad):
                return grad * self.weight * 2 + ctx.saved_tensors[0]

        return Closure.apply(x.sin())

    return Model(body), (tensor(),)


@case(calls=-1)
def only_a_captured_parameter_requires_grad():
    def body(self, x):
        class Closure(Function):
            @staticmethod
            def forward(ctx, x):
                return x * self.weight

            @staticmethod
            def backward(ctx, grad):
                return grad * 2

        return Closure.apply(x) * self.weight

    return Model(body), (tensor(grad=False),)


@case()
def an_intermediate_and_a_buffer_through_a_closure():
    def body(self, x):
        inner = x.cos()

        class Closure(Function):
            @staticmethod
            def forward(ctx, x):
                return x * inner + self.shift

            @staticmethod
            def backward(ctx, grad):
                return grad * inner * self.shift

        return Closure.apply(x * self.weight) + inner

    return Model(body, shift=torch.rand(3)), (tensor(),)


@case(tracing_mode="real")
def a_parameter_through_an_outer_closure():
    weight = nn.Parameter(torch.rand(3))

    class Closure(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * weight * 2

    return Model(lambda self, x: Closure.apply(x.sin()), shared=weight), (tensor(),)


_GLOBAL = torch.tensor([0.5, 1.5, 2.5])


@case(tracing_mode="real")
def a_global_tensor():
    class Global(Function):
        @staticmethod
        def forward(ctx, x):
            return x * _GLOBAL

        @staticmethod
        def backward(ctx, grad):
            return grad * _GLOBAL * 2

    return Model(lambda self, x: Global.apply(x * self.weight)), (tensor(),)


@case()
def extra_none_gradients():
    class Extra(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None, None

    return Model(lambda self, x: Extra.apply(x * self.weight)), (tensor(),)


@case()
def a_gradient_of_another_dtype_or_broadcast_shape():
    class Loose(Function):
        @staticmethod
        def forward(ctx, x, weight):
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            return grad.double() * 2, grad * 3

    return Model(lambda self, x: Loose.apply(x, self.weight)), (tensor(),)


@case()
def no_gradient_at_all():
    class Nothing(Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return None

    return Model(lambda self, x: Nothing.apply(x * self.weight) + self.weight), (tensor(),)


@case(double=True)
def gradients_of_gradients():
    class Cube(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x**2 * 4

    return Model(lambda self, x: Cube.apply(x * self.weight)), (tensor(dtype=torch.float64),)


@case(double=True)
def gradients_of_gradients_with_an_output_saved():
    class Exp(Function):
        @staticmethod
        def forward(ctx, x):
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    return Model(lambda self, x: Exp.apply(x * self.weight)), (tensor(dtype=torch.float64),)


@case(double=True)
def gradients_of_gradients_through_an_input_on_ctx():
    class Square(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.x * 3

    return Model(lambda self, x: Square.apply(x * self.weight)), (tensor(dtype=torch.float64),)


@case()
def an_output_written_in_place_later():
    class Sigmoid(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sigmoid()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    def body(self, x):
        y = Sigmoid.apply(x * self.weight)
        y.mul_(3)
        return y.add_(self.weight)

    return Model(body), (tensor(),)


@case(aot=True)
def no_grad_and_autocast_within_forward():
    class Inner(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                return (x @ x.t()).float()

        @staticmethod
        def backward(ctx, grad):
            with torch.autocast("cpu", enabled=False):
                return grad @ ctx.saved_tensors[0] * 3

    return Model(lambda self, x: Inner.apply(x * self.weight)), (tensor(),)


@case()
def a_compiled_helper():
    helper = torch.compile(lambda x: x.sin() * 2, backend="eager")

    class Helped(Function):
        @staticmethod
        def forward(ctx, x):
            return helper(x)

        @staticmethod
        def backward(ctx, grad):
            return helper(grad) * 3

    return Model(lambda self, x: Helped.apply(x * self.weight)), (tensor(),)


@case(refusal="Branch")
def a_branch_on_data():
    class Branch(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.positive = bool((x.sum() > 0).item())
            return x * 2 if ctx.positive else x * 3

        @staticmethod
        def backward(ctx, grad):
            return grad * (5 if ctx.positive else 7)

    return Model(lambda self, x: Branch.apply(x * self.weight)), (tensor(),)


# torch saves no body with a symbolic float among its inputs.
@case(tracing_mode="symbolic", unsaveable=True)
def an_item_on_ctx():
    class Normal(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.scale = x.abs().max().item()
            return x / ctx.scale

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.scale

    return Model(lambda self, x: Normal.apply(x * self.weight)), (tensor(),)


@case()
def items_as_argument_and_output():
    class Scale(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * factor, (x * x).sum().item()

        @staticmethod
        def backward(ctx, grad, _):
            return grad * ctx.factor * 2, None

    def body(self, x):
        y, total = Scale.apply(x * self.weight, x.abs().max().item())
        return y / total

    return Model(body), (tensor(),)


@case(aot=True)
def operations_that_give_back_their_argument():
    """``to`` and ``contiguous`` give the same tensor; it is used again after the Function."""

    class Cast(Function):
        @staticmethod
        def forward(ctx, x, weight):
            x, weight = x.to(torch.float32), weight.contiguous()
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad.to(x.dtype) * weight.to(grad.dtype) * 2, (grad * x.to(grad.dtype)).sum(0)

    def body(self, x):
        x = x * 1
        y = Cast.apply(x, self.weight)
        return y + x * 3 + Cast.apply(x, self.weight) * self.weight

    return Model(body), (tensor(),)


# ------------------------------------------------------------------------------------------ State

section("Python state and buffers")


@case(aot=True)
def a_buffer_updated_within_forward():
    class Update(Function):
        @staticmethod
        def forward(ctx, x, module):
            module.running.mul_(0.9).add_(x.mean(0))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    def body(self, x):
        return Update.apply(x * self.weight, self) + self.running

    return Model(body, running=torch.ones(3)), (tensor(),)


@case()
def a_buffer_argument_updated_within_forward():
    class Update(Function):
        @staticmethod
        def forward(ctx, x, running):
            running.mul_(0.9).add_(x.mean(0))
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    model = Model(
        lambda self, x: Update.apply(x * self.weight, self.running), running=torch.ones(3)
    )
    return model, (tensor(),)


@case()
def a_value_that_leaves_forward_in_a_list():
    class Keep(Function):
        @staticmethod
        def forward(ctx, x, holder):
            holder.append(x.exp())
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    def body(self, x):
        holder = []
        return Keep.apply(x * self.weight, holder) * holder[0]

    return Model(body), (tensor(),)


@case(warns="Count")
def a_counter_on_the_class():
    class Count(Function):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            Count.calls += 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Count.apply(x * self.weight)), (tensor(),)


@case(warns="Append")
def a_list_append():
    seen = []

    class Append(Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(1)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Append.apply(x * self.weight)), (tensor(),)


@case(warns="Attribute")
def an_attribute_on_the_module():
    class Attribute(Function):
        @staticmethod
        def forward(ctx, x, module):
            module.steps = module.steps + 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    return Model(lambda self, x: Attribute.apply(x * self.weight, self), steps=0), (tensor(),)


# ---------------------------------------------------------------------- Calls that are not recorded

section("calls that record no gradient")


@case(calls=0)
def under_no_grad():
    def body(self, x):
        with torch.no_grad():
            y = Triple.apply(x * self.weight)
        return y * self.weight

    return Model(body), (tensor(),)


@case(calls=0)
def nothing_requires_grad():
    return Model(lambda self, x: Triple.apply(x) * self.weight), (tensor(grad=False),)


@case(calls=0)
def a_detached_input():
    return Model(lambda self, x: Triple.apply((x * self.weight).detach()) + x), (tensor(),)


@case(calls=1)
def enable_grad_within_no_grad():
    def body(self, x):
        with torch.no_grad():
            with torch.enable_grad():
                return Triple.apply(x * self.weight)

    return Model(body), (tensor(),)


@case()
def no_input_but_parameters():
    return Model0(
        lambda self: Scale.apply(self.matrix, self.weight), matrix=nn.Parameter(torch.rand(2, 3))
    ), ()


def fresh(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module and arguments of a case, the same each time."""
    torch.manual_seed(1)
    module, args = CASES[name].build()
    return module, args
