"""More Functions that eager accepts: the corners of what a context, a call and a backward may do.

They join the table of ``function_cases`` and its sections; see there how a case is written.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from function_cases import Model, Model2, Scale, Triple, case, section, tensor
from models import Flat
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.autograd import Function
from torch.autograd.function import once_differentiable

Item = TypeVar("Item")

# ------------------------------------------------------------------------ Context: what is saved

section("`ctx`: what is saved")


@case()
def save_for_backward_called_twice():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.exp(), x)
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case()
def an_intermediate_written_after_it_is_saved():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            inner = x.exp()
            ctx.save_for_backward(inner)
            inner.mul_(3)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    return Model(lambda self, x: Save.apply(x * self.weight)), (tensor(),)


@case(raises="modified by an inplace operation")
def a_saved_output_may_not_be_written_before_backward():
    class Save(Function):
        @staticmethod
        def forward(ctx, x):
            out = x.exp()
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    return Model(lambda self, x: Save.apply(x * self.weight).mul_(2)), (tensor(),)


# torch saves no block of no_grad that gives nothing, with or without hops.
@case(unsaveable=True)
def a_stashed_output_written_under_no_grad_before_backward():
    class Stash(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mask = (x > 0).float()
            return x * 2, ctx.mask

        @staticmethod
        def backward(ctx, grad, _):
            return grad * ctx.mask

    def body(self, x):
        y, mask = Stash.apply(x * self.weight)
        with torch.no_grad():
            mask.add_(5)
        return y

    return Model(body), (tensor(),)


class _Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@case(aot=True)
def an_object_with_tensors_on_ctx():
    class Keep(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.holder = _Holder(x=x, inner=_Holder(exp=x.exp(), two=2))
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            holder = ctx.holder
            return grad * holder.inner.exp * holder.inner.two, (grad * holder.x).sum(0)

    return Model(lambda self, x: Keep.apply(x.sin(), self.weight)), (tensor(),)


@case()
def a_stack_on_ctx_that_backward_empties():
    class Stack(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            ctx.stack = [x, x.exp()]
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            exp, x = ctx.stack.pop(), ctx.stack.pop()
            total = 0
            if first is not None:
                total = total + first * exp
            if second is not None:
                total = total + second * x
            return total

    return Model(lambda self, x: Stack.apply(x * self.weight)[1].sin()), (tensor(),)


@case()
def attributes_deleted_in_backward():
    class Free(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x, ctx.table = x, {"exp": x.exp()}
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            x, exp = ctx.x, ctx.table.pop("exp")
            del ctx.x
            ctx.table = None
            return grad * x * exp

    return Model(lambda self, x: Free.apply(x * self.weight)), (tensor(),)


@case()
def ctx_in_a_closure_kept_for_backward():
    class Deferred(Function):
        @staticmethod
        def forward(ctx, x):
            inner = x.cos()
            ctx.pull = lambda grad: grad * inner * 2
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            return ctx.pull(grad)

    return Model(lambda self, x: Deferred.apply(x * self.weight)), (tensor(),)


# --------------------------------------------------- Views that a Function made, and their bases

section("outputs")


@case(aot=True)
def a_view_and_its_base_are_outputs_of_the_model():
    def body(self, x):
        base = (x * self.weight).sin()
        return Flat.apply(base), base

    return Model(body), (tensor(),)


@case(aot=True)
def a_view_of_a_view_and_another_view_of_the_base():
    def body(self, x):
        base = (x * self.weight).sin()
        view = Flat.apply(base)
        return view, view.view(3, 2), base.view(6, 1)

    return Model(body), (tensor(),)


@case(aot=True)
def a_view_of_a_view_of_an_input():
    return Model(lambda self, x: (Flat.apply(x).view(3, 2), x * self.weight)), (tensor(),)


@case(aot=True)
def views_of_several_outputs_beside_a_view_by_a_function():
    def body(self, x):
        base = (x * self.weight).sin()
        return (*base.unbind(), Flat.apply(base))

    return Model(body), (tensor(),)


# ------------------------------------------------- Arguments that another operator gives

section("transforms, control flow, other operators")


# In eager scan is a Function too.
@case(calls=2)
def on_what_scan_gives():
    """In the trace the outputs of scan do not require grad, as they do in eager."""

    def body(self, x):
        def step(carry, row):
            return carry + row.sin(), carry * row

        last, rows = scan(step, self.weight.cos(), x * self.weight)
        return Triple.apply(last), Scale.apply(rows.sin(), last)

    return Model(body), (tensor(),)


# -------------------------------------------------------------------------- Context: mark_dirty

section("`mark_dirty`")


# In eager its node is inside the one of the view's base, and is not counted.
@case(calls=1)
def mark_dirty_on_a_view_whose_base_is_read_later():
    class Zero(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx, grad):
            return grad * 5

    def body(self, x):
        y = x * self.weight
        Zero.apply(y[0])
        return y.sin()

    return Model(body), (tensor(),)


@case()
def mark_dirty_on_two_inputs():
    class Swap(Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.mark_dirty(a, b)
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
            return a, b

        @staticmethod
        def backward(ctx, first, second):
            return second * 2, first * 3

    def body(self, x):
        a, b = x * self.weight, x.sin()
        Swap.apply(a, b)
        return a * 2, b

    return Model(body), (tensor(),)


@case()
def mark_dirty_among_other_outputs():
    class Both(Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.mark_dirty(x)
            ctx.save_for_backward(weight)
            other = x.exp()
            return other, x.mul_(2), weight * 3

        @staticmethod
        def backward(ctx, first, second, third):
            (weight,) = ctx.saved_tensors
            return first + second * weight, third * 4

    def body(self, x):
        first, second, third = Both.apply(x.sin(), self.weight)
        return first * second + third

    return Model(body), (tensor(),)


@case()
def an_input_written_without_mark_dirty():
    class Silent(Function):
        @staticmethod
        def forward(ctx, x):
            x.mul_(2)
            return x + 1

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    def body(self, x):
        y = x * self.weight
        z = Silent.apply(y)
        return y.detach() + z

    return Model(body), (tensor(),)


@case()
def mark_dirty_twice_in_a_row():
    class Grow(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.add_(1)

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    def body(self, x):
        y = x * self.weight
        Grow.apply(y)
        Grow.apply(y)
        return y.sin()

    return Model(body), (tensor(),)


# --------------------------------------------- Context: non-differentiable, materialized, differentiable

section("`mark_non_differentiable`, `set_materialize_grads`")


@case(calls=-1)
def an_integer_lone_output():
    class Index(Function):
        @staticmethod
        def forward(ctx, x):
            return x.argmax(1)

        @staticmethod
        def backward(ctx, grad):
            return None

    return Model(lambda self, x: (x * self.weight)[:, Index.apply(x * self.weight)]), (
        tensor(3, 3),
    )


@case()
def a_non_differentiable_output_that_gates():
    class Gate(Function):
        @staticmethod
        def forward(ctx, x):
            out, mask = x * 2, (x > 0).to(x.dtype)
            ctx.mark_non_differentiable(mask)
            ctx.save_for_backward(mask)
            return mask, out

        @staticmethod
        def backward(ctx, _, grad):
            return grad * ctx.saved_tensors[0] * 5

    def body(self, x):
        mask, out = Gate.apply(x * self.weight)
        assert not mask.requires_grad and out.requires_grad
        return (mask * self.weight + out).sin()

    return Model(body), (tensor(),)


class _Three(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        return x * 2, mask, x * 3, x * 4

    @staticmethod
    def backward(ctx, first, none, second, third):
        assert none is None
        given = [(g, s) for g, s in ((first, 5), (second, 7), (third, 11)) if g is not None]
        return sum(g * s for g, s in given) if given else None


@case(aot=True)
def materialize_grads_off_with_three_outputs_one_used():
    return Model(lambda self, x: _Three.apply(x * self.weight)[2].sin()), (tensor(),)


@case()
def materialize_grads_off_with_three_outputs_two_used():
    def body(self, x):
        first, _, _, third = _Three.apply(x * self.weight)
        return first * third

    return Model(body), (tensor(),)


@case(double=True)
def custom_bwd_around_once_differentiable():
    class Once(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        @once_differentiable
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    return Model(lambda self, x: Once.apply(x * self.weight)), (tensor(),)


@case(double=True)
def once_differentiable_around_custom_bwd():
    class Once(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        @once_differentiable
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] * 2

    return Model(lambda self, x: Once.apply(x * self.weight)), (tensor(),)


@case(double=True)
def once_differentiable_classmethod():
    class Once(Function):
        factor = 3

        @staticmethod
        def forward(ctx, x):
            return x.sin()

        @classmethod
        @once_differentiable
        def backward(cls, ctx, grad):
            return grad * cls.factor

    return Model(lambda self, x: Once.apply(x * self.weight)), (tensor(),)


@case(double=True)
def custom_fwd_and_bwd_twice_differentiable():
    class Cast(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu")
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0] ** 2 * 2

    return Model(lambda self, x: Cast.apply(x * self.weight)), (tensor(),)


# ---------------------------------------------------------------------------- Call shapes: inputs

section("inputs")


class _Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class _Data:
    scale: torch.Tensor
    factor: float = 2.0


@case()
def a_named_tuple_and_a_dataclass_as_arguments():
    class Opaque(Function):
        @staticmethod
        def forward(ctx, x, pair, data):
            ctx.pair, ctx.data = pair, data
            return x * pair.first + data.scale * data.factor

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.pair.second * ctx.data.factor, None, None

    def body(self, x):
        pair = _Pair(self.weight, self.weight.exp())
        return Opaque.apply(x.sin(), pair, _Data(self.weight.cos()))

    return Model(body), (tensor(),)


@case()
def a_closure_as_an_argument():
    class Call(Function):
        @staticmethod
        def forward(ctx, x, f):
            ctx.f = f
            return f(x)

        @staticmethod
        def backward(ctx, grad):
            return ctx.f(grad) * 3, None

    def body(self, x):
        return Call.apply(x.sin(), lambda value: value * self.weight)

    return Model(body), (tensor(),)


@case()
def any_number_of_arguments():
    class Sum(Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.count = len(tensors)
            return sum(tensors)

        @staticmethod
        def backward(ctx, grad):
            return tuple(grad * (i + 1) for i in range(ctx.count))

    def body(self, x):
        return Sum.apply(x, x.sin(), self.weight.expand(2, 3), x)

    return Model(body), (tensor(),)


@case()
def apply_overridden():
    class Checked(Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor * 2, None

        @classmethod
        def apply(cls, x, factor=3.0):
            return super().apply(x, factor) + 1

    return Model(lambda self, x: Checked.apply(x * self.weight)), (tensor(),)


@case()
def a_partial_and_a_map_of_apply():
    def body(self, x):
        first, second = map(Triple.apply, (x * self.weight, x.sin()))
        return functools.partial(Scale.apply, first)(self.weight) + second

    return Model(body), (tensor(),)


@case(calls=2)
def a_parametrized_weight():
    class Quantize(nn.Module):
        def forward(self, weight):
            return Triple.apply(weight)

    model = Model(lambda self, x: self.linear(x) + self.linear(x.sin()), linear=nn.Linear(3, 3))
    nn.utils.parametrize.register_parametrization(model.linear, "weight", Quantize())
    return model, (tensor(),)


@case()
def an_expanded_operand():
    class Read(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x)
            return x * y

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return grad * x, grad * 2

    return Model(lambda self, x: Read.apply(self.weight.expand(2, 3), x[:, ::1])), (tensor(),)


# --------------------------------------------------------------------------- Call shapes: outputs

section("outputs")


# torch 2.6 saves no operator that gives no tensor.
@case(calls=-1, unsaveable=True)
def a_lone_output_that_is_no_tensor():
    class Nothing(Function):
        @staticmethod
        def forward(ctx, x):
            return None

        @staticmethod
        def backward(ctx, grad):
            return None

    def body(self, x):
        assert Nothing.apply(x) is None
        return x * self.weight

    return Model(body), (tensor(),)


@case(
    dynamic={"x": {0: torch.export.Dim("rows", min=2, max=64)}},
    others=lambda: (tensor(5, 3),),
    tracing_mode="symbolic",
)
def a_shape_among_outputs():
    class Shape(Function):
        @staticmethod
        def forward(ctx, x):
            return x.reshape(-1), x.shape

        @staticmethod
        def backward(ctx, grad, none):
            assert none is None
            return grad.reshape(-1, 3) * 2

    def body(self, x):
        flat, shape = Shape.apply(x * self.weight)
        return flat.view(shape) * shape[0]

    return Model(body), (tensor(4, 3),)


@case()
def outputs_of_odd_kinds():
    class Odd(Function):
        @staticmethod
        def forward(ctx, x):
            return x.dtype, x * 2, torch.device("cpu"), _Holder(y=x.exp()), 2.5

        @staticmethod
        def backward(ctx, *grads):
            return grads[1] * 3

    def body(self, x):
        dtype, y, device, holder, number = Odd.apply(x * self.weight)
        return (y * number).to(dtype).to(device) + holder.y * self.weight

    return Model(body), (tensor(),)


@case()
def a_detached_input_as_the_output():
    class Detach(Function):
        @staticmethod
        def forward(ctx, x):
            return x.detach()

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Detach.apply(x * self.weight).sin()), (tensor(),)


@case(aot=True)
def an_expanded_output():
    class Expand(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum(0).expand(4, 3)

        @staticmethod
        def backward(ctx, grad):
            flat = grad.reshape(-1) if not grad.is_contiguous() else grad.view(-1)
            return flat[:6].view(2, 3) * 3

    model = Model(lambda self, x: Expand.apply(x * self.weight) * torch.arange(12.0).view(4, 3))
    return model, (tensor(),)


@case(aot=True)
def a_sliced_output():
    class Slice(Function):
        @staticmethod
        def forward(ctx, x):
            return (x * 2)[:, ::2]

        @staticmethod
        def backward(ctx, grad):
            flat = grad.view(-1) if grad.is_contiguous() else grad.reshape(-1)
            return torch.cat([flat.view(2, 2), flat.view(2, 2)[:, :1]], 1) * 3

    def body(self, x):
        return Slice.apply(x * self.weight) * torch.arange(4.0).view(2, 2)

    return Model(body), (tensor(),)


@case(aot=True)
def a_transposed_output():
    class Transpose(Function):
        @staticmethod
        def forward(ctx, x):
            return (x * 2).t()

        @staticmethod
        def backward(ctx, grad):
            assert grad.shape == (3, 2)
            return grad.t().reshape(2, 3) * 3 + grad.t().contiguous().view(-1)[0]

    def body(self, x):
        return Transpose.apply(x * self.weight) * torch.arange(6.0).view(3, 2)

    return Model(body), (tensor(),)


@case()
def outputs_that_the_model_asks_about():
    def body(self, x):
        y = Triple.apply(x * self.weight)
        z = Triple.apply(x.detach())
        assert y.requires_grad and not y.is_leaf and not z.requires_grad
        if y.grad_fn is not None and z.grad_fn is None:
            return y + z
        return y - z

    return Model(body), (tensor(),)


@case()
def an_output_under_no_grad_later():
    def body(self, x):
        y = Triple.apply(x * self.weight)
        with torch.no_grad():
            scale = y.abs().max()
        return y / scale

    return Model(body), (tensor(),)


@case()
def two_functions_of_one_name():
    def make(factor):
        class Inside(Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, grad):
                return grad * factor

        return Inside

    first, second = make(3), make(5)
    return Model(lambda self, x: second.apply(first.apply(x * self.weight))), (tensor(),)


# ------------------------------------------------------------------------- How it is written

section("how the Function is written and held")


@case()
def a_class_with_a_metaclass():
    class Named(type(Function)):
        def __repr__(cls):
            return "a Function of mine"

    class Tripled(Function, metaclass=Named):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Tripled.apply(x * self.weight)), (tensor(),)


@case()
def a_class_that_is_called():
    class Calling(type(Function)):
        def __call__(cls, *args):
            return cls.apply(*args) + 1

    class Tripled(Function, metaclass=Calling):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Tripled(x * self.weight)), (tensor(),)


@case()
def a_generic_class():
    class Tripled(Function, Generic[Item]):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    return Model(lambda self, x: Tripled[int].apply(x * self.weight)), (tensor(),)


# ---------------------------------------------------------------------------------- Dtypes, tensors

section("dtypes, layouts, tensor subclasses")


@case(double=True)
def complex_gradients_that_are_conjugated():
    class Conj(Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, grad):
            (z,) = ctx.saved_tensors
            return grad * z.conj() * 3

    def body(self, x):
        return Conj.apply(x * self.weight).conj().abs()

    return Model(body), (tensor(dtype=torch.complex128),)


@case()
def half_precision_and_integers_together():
    class Gather(Function):
        @staticmethod
        def forward(ctx, x, index, keep):
            ctx.save_for_backward(index, keep)
            ctx.shape = x.shape
            return x.half()[index] * keep

        @staticmethod
        def backward(ctx, grad):
            index, keep = ctx.saved_tensors
            out = torch.zeros(ctx.shape, dtype=torch.float32)
            return out.index_add(0, index, (grad * keep).float() * 2), index, None

    def body(self, x, index):
        return Gather.apply(x * self.weight, index, (index > 0)[:, None])

    return Model2(body), (tensor(), torch.tensor([0, 1, 1]))


@case()
def an_empty_output():
    class Empty(Function):
        @staticmethod
        def forward(ctx, x):
            return x[:0], x * 2

        @staticmethod
        def backward(ctx, first, second):
            assert first.shape == (0, 3)
            return second * 3 + first.sum()

    return Model(lambda self, x: Empty.apply(x * self.weight)), (tensor(),)


# -------------------------------------------------------------------------------------- Backward

section("backward")


@case()
def a_gradient_for_an_input_that_needs_none():
    class More(Function):
        @staticmethod
        def forward(ctx, x, mask, shift):
            ctx.save_for_backward(mask)
            return x * mask + shift

        @staticmethod
        def backward(ctx, grad):
            return grad * 2, grad.sum(), grad * ctx.saved_tensors[0]

    def body(self, x):
        return More.apply(x * self.weight, torch.tensor([1, 0, 1]), torch.ones(3))

    return Model(body), (tensor(),)


@case()
def a_gradient_that_is_its_argument():
    class Pass(Function):
        @staticmethod
        def forward(ctx, x, y):
            return x + y

        @staticmethod
        def backward(ctx, grad):
            return grad, grad

    def body(self, x):
        y = x * self.weight
        return Pass.apply(y, y.sin())

    return Model(body), (tensor(),)


@case()
def a_saved_tensor_as_the_gradient():
    class Saved(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0]

    return Model(lambda self, x: Saved.apply(x * self.weight)), (tensor(),)


@case()
def a_constant_as_the_gradient():
    class Constant(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return torch.ones(ctx.shape)

    return Model(lambda self, x: Constant.apply(x * self.weight)), (tensor(),)


@case()
def an_expanded_gradient_comes_out():
    class Wide(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            return grad.expand(2, 3)

    return Model(lambda self, x: Wide.apply(x * self.weight) * Wide.apply(x)), (tensor(),)


@case()
def a_saved_tensor_written_in_backward():
    class Reuse(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.buffer = x.exp()
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return ctx.buffer.mul_(grad)

    return Model(lambda self, x: Reuse.apply(x * self.weight)), (tensor(),)


@case(refusal="Accumulates")
def backward_accumulates_into_parameters():
    class Accumulates(Function):
        @staticmethod
        def forward(ctx, x, f):
            ctx.f = f
            ctx.save_for_backward(x)
            with torch.no_grad():
                return f(x)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                ctx.f(x).backward(grad)
            return x.grad, None

    model = Model(lambda self, x: Accumulates.apply(x * self.weight, self.f), f=nn.Linear(3, 3))
    return model, (tensor(),)


@case()
def grad_of_grad_within_backward():
    class Hessian(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                x = ctx.saved_tensors[0].detach().requires_grad_()
                (first,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
                (second,) = torch.autograd.grad(first.sum(), x)
            return grad * second

    return Model(lambda self, x: Hessian.apply(x * self.weight)), (tensor(),)


@case(aot=True)
def dropout_in_forward_and_backward():
    class Drop(Function):
        @staticmethod
        def forward(ctx, x):
            mask = torch.bernoulli(torch.full_like(x, 0.5))
            ctx.mask = mask
            return x * mask

        @staticmethod
        def backward(ctx, grad):
            return torch.nn.functional.dropout(grad, 0.5, True) * ctx.mask

    return Model(lambda self, x: Drop.apply(x * self.weight)), (tensor(8, 3),)


@case(double=True)
def third_order_through_two_functions():
    class Power(Function):
        @staticmethod
        def forward(ctx, x, n):
            ctx.save_for_backward(x)
            ctx.n = n
            return x**n

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            if ctx.n == 0:
                return grad * 0, None
            return grad * ctx.n * Power.apply(x, ctx.n - 1), None

    return Model(lambda self, x: Power.apply(x * self.weight, 4)), (tensor(dtype=torch.float64),)


@case(double=True)
def second_order_with_an_intermediate_on_ctx():
    class Keep(Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.inner = x.sin()
            ctx.save_for_backward(x, y)
            return ctx.inner * y

        @staticmethod
        def backward(ctx, grad):
            x, y = ctx.saved_tensors
            return grad * ctx.inner * y * x, grad * ctx.inner

    def body(self, x):
        return Keep.apply(x * self.weight, x.exp())

    return Model(body), (tensor(dtype=torch.float64),)


# ------------------------------------------------------------------------------------------ State

section("Python state and buffers")


@case(aot=True)
def a_buffer_assigned_within_forward():
    class Assign(Function):
        @staticmethod
        def forward(ctx, x, module):
            module.running = module.running * 0.9 + x.mean(0)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    def body(self, x):
        return Assign.apply(x * self.weight, self) + self.running

    return Model(body, running=torch.ones(3)), (tensor(),)


@case()
def a_counter_buffer_within_forward():
    class Count(Function):
        @staticmethod
        def forward(ctx, x, steps):
            steps += 1
            ctx.steps = steps
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.steps, None

    def body(self, x):
        return Count.apply(x * self.weight, self.steps)

    return Model(body, steps=torch.zeros((), dtype=torch.int64)), (tensor(),)


@case()
def a_buffer_updated_within_backward():
    """Through a view too; the buffer does not require grad afterwards, so that the last call
    records none."""

    class Update(Function):
        @staticmethod
        def forward(ctx, x, largest):
            ctx.largest = largest
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.largest.view(-1)[:1].add_(grad.abs().max())
            return grad * 3, None

    def body(self, x):
        y = Update.apply(x * self.weight, self.largest)
        return y + Update.apply(self.largest, self.largest)

    return Model(body, largest=torch.zeros(3)), (tensor(),)
