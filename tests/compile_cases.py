"""Eager models for ``torch.compile``: Functions that stock Dynamo misreads, and near relatives
that it reads right.

A case is one function that gives ``(function, arguments)``, built anew for every program
that is compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from models import Flat
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    #: Stock Dynamo reads it right on every torch: the graph must stay as stock's.
    stock_is_right: bool = False
    #: Stock Dynamo does not get as far as the Function when the whole graph is asked for.
    stock_refuses: bool = False
    #: The feature of ``version_differences.FEATURES`` without which it does not go on in eager.
    break_needs: str = ""


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build.__name__, build, **options)
        return build

    return register


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape or (2, 3)).requires_grad_()


# ------------------------------------------------------------------------- set_materialize_grads


class UnusedIsNone(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 10
        if first is None:
            return second * 20
        return first + second


class UnusedIsNoneNewStyle(Function):
    @staticmethod
    def forward(x):
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    backward = UnusedIsNone.backward


@case()
def unused_output_is_none():
    return lambda x: UnusedIsNone.apply(x)[0].exp(), (leaf(),)


@case()
def other_output_is_none():
    return lambda x: UnusedIsNone.apply(x)[1].exp(), (leaf(),)


@case()
def both_outputs_are_used():
    return lambda x: torch.stack(UnusedIsNone.apply(x)), (leaf(),)


@case()
def unused_output_is_none_new_style():
    return lambda x: UnusedIsNoneNewStyle.apply(x)[0].exp(), (leaf(),)


class NoneForNone(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x.sin(), y.sin()

    @staticmethod
    def backward(ctx, first, second):
        return (
            first * 2 if first is not None else None,
            second * 3 if second is not None else None,
        )


@case()
def none_stays_none():
    return lambda x, y: NoneForNone.apply(x, y)[0].exp(), (leaf(), leaf())


class MaterializeByName(Function):
    """The call is made by a function that forward calls."""

    @staticmethod
    def forward(ctx, x):
        dont_materialize(ctx)
        return x.sin(), x.cos()

    backward = UnusedIsNone.backward


def dont_materialize(ctx):
    ctx.set_materialize_grads(False)


@case()
def materialize_in_a_called_function():
    return lambda x: MaterializeByName.apply(x)[0].exp(), (leaf(),)


class MaterializeTrue(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(True)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        return first * 2 + second * 3


@case()
def materialize_true():
    return lambda x: MaterializeTrue.apply(x)[0].exp(), (leaf(),)


@case()
def materialize_in_a_row():
    return (
        lambda x: UnusedIsNone.apply(UnusedIsNone.apply(x.sin())[0])[1].exp(),
        (leaf(),),
    )


@case()
def materialize_in_a_region():
    def region(x):
        return UnusedIsNone.apply(x.sin())[0].exp()

    return lambda x: checkpoint(region, x, use_reentrant=False).cos(), (leaf(),)


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3))

    def forward(self, x):
        return UnusedIsNone.apply(x * self.weight)[0].exp()


@case()
def materialize_in_a_module():
    return Scaled(), (leaf(),)


# ----------------------------------------------------------------------- mark_non_differentiable


class LoneMask(Function):
    @staticmethod
    def forward(ctx, x):
        y = (x > 0).float()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


class LoneMaskNewStyle(Function):
    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5


@case()
def lone_non_differentiable():
    return lambda x: LoneMask.apply(x) * x, (leaf(),)


@case()
def lone_non_differentiable_new_style():
    return lambda x: LoneMaskNewStyle.apply(x) * x, (leaf(),)


class LoneInteger(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.argmax(-1)
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad


@case()
def lone_non_differentiable_in_a_region():
    def region(x):
        return LoneMask.apply(x) * x

    return lambda x: checkpoint(region, x, use_reentrant=False).cos(), (leaf(),)


@case()
def lone_integer():
    return lambda x: LoneInteger.apply(x) * x.sum(-1), (leaf(),)


class OneOfTwo(Function):
    @staticmethod
    def forward(ctx, x):
        y, mask = x.sin(), (x > 0).float()
        ctx.mark_non_differentiable(mask)
        return y, mask

    @staticmethod
    def backward(ctx, grad, unused):
        return grad * 5


@case()
def one_of_two_non_differentiable():
    def call(x):
        y, mask = OneOfTwo.apply(x)
        return y * mask

    return call, (leaf(),)


class BothOfTwo(Function):
    @staticmethod
    def forward(ctx, x):
        y, mask = x.sin(), (x > 0).float()
        ctx.mark_non_differentiable(y, mask)
        return y, mask

    @staticmethod
    def backward(ctx, grad, unused):
        return grad * 5


@case()
def both_of_two_non_differentiable():
    def call(x):
        y, mask = BothOfTwo.apply(x)
        return y * mask * x

    return call, (leaf(),)


# ------------------------------------------------------------------------------------ torch.func


@case()
def a_view_beside_its_base():
    def function(x):
        base = x.sin()
        return Flat.apply(base), base

    return function, (leaf(2, 3),)


class AndAView(Function):
    @staticmethod
    def forward(ctx, x):
        doubled = x * 2
        return doubled, doubled.view(-1)

    @staticmethod
    def backward(ctx, grad, grad_of_view):
        return grad * 5 + grad_of_view.view(2, 3) * 7


@case()
def outputs_that_are_views_of_each_other():
    return lambda x: AndAView.apply(x.sin()), (leaf(2, 3),)


class Doubled(Function):
    """New style; its backward is twice the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * 2


@case()
def func_grad():
    return lambda x: torch.func.grad(lambda v: Doubled.apply(v).sum())(x), (torch.randn(2, 3),)


@case()
def func_grad_of_leaf():
    return lambda x: torch.func.grad(lambda v: Doubled.apply(v).sum())(x), (leaf(),)


@case()
def func_vjp():
    def call(x):
        out, pull = torch.func.vjp(Doubled.apply, x)
        return pull(torch.ones_like(out))[0]

    return call, (torch.randn(2, 3),)


@case()
def func_grad_of_grad():
    def call(x):
        inner = torch.func.grad(lambda v: Doubled.apply(v).sum())
        return torch.func.grad(lambda v: inner(v).sum())(x)

    return call, (torch.randn(2, 3),)


@case()
def vmap():
    return lambda x: torch.vmap(lambda v: Doubled.apply(v))(x), (leaf(),)


@case(stock_is_right=True)
def vmap_without_gradients():
    return lambda x: torch.vmap(lambda v: Doubled.apply(v))(x), (torch.randn(2, 3),)


@case(stock_refuses=True)
def vmap_of_apply():
    return lambda x: torch.vmap(Doubled.apply)(x), (leaf(),)


@case()
def vmap_of_grad():
    return (
        lambda x: torch.vmap(torch.func.grad(lambda v: Doubled.apply(v).sum()))(x),
        (torch.randn(2, 3),),
    )


class OwnRule(Function):
    """A hand-written rule that shows: it adds one."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * 2

    @staticmethod
    def vmap(info, in_dims, x):
        return OwnRule.apply(x) + 1, in_dims[0]


@case()
def vmap_with_own_rule():
    return lambda x: torch.vmap(lambda v: OwnRule.apply(v))(x), (leaf(),)


class Mean(Function):
    """Looks at all of its input: a wrong vmap shows in the values."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x.sum() * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return (grad * y).sum().expand_as(x) * 2, grad * x.sum() * 3


@case()
def vmap_over_second():
    return lambda x, y: torch.vmap(lambda a, b: Mean.apply(a, b), in_dims=(None, 0))(x, y), (
        leaf(4),
        leaf(2, 3),
    )


@case()
def vmap_over_both():
    return lambda x, y: torch.vmap(lambda a, b: Mean.apply(a, b))(x, y), (leaf(2, 3), leaf(2, 3))


# ------------------------------------------------------------------------------ gradient strides


def _strided(body):
    class Strided(Function):
        @staticmethod
        def forward(ctx, x):
            return x.sin()

        backward = staticmethod(body)

    return Strided


def is_contiguous(ctx, grad):
    return grad * 2 if grad.is_contiguous() else grad * 3


def stride_zero(ctx, grad):
    return grad * 2 if 0 in grad.stride() else grad * 3


def stride_of_dim(ctx, grad):
    return grad * 2 if grad.stride(-1) == 1 else grad * 3


def through_helper(ctx, grad):
    return helper(grad)


def helper(value):
    return value * 2 if value.is_contiguous() else value * 3


def channels_last(ctx, grad):
    last = grad.is_contiguous(memory_format=torch.channels_last)
    return grad * 2 if last else grad * 3


def derived(ctx, grad):
    view = grad.transpose(0, 1)
    return grad * 2 if view.is_contiguous() else grad * 3


def storage_offset(ctx, grad):
    return grad * 2 if grad.storage_offset() == 0 else grad * 3


def as_strided(ctx, grad):
    return torch.as_strided(grad.contiguous(), grad.shape, grad.stride()) * 2


BODIES = (is_contiguous, stride_zero, stride_of_dim, through_helper, derived, storage_offset)


def _strides(body, name, use, *shape):
    def build():
        function = _strided(body)
        return lambda x: use(function.apply(x)), (leaf(*shape),)

    build.__name__ = f"{body.__name__}_{name}"
    case()(build)


for _body in BODIES:
    _strides(_body, "expanded", lambda y: y.sum())
    _strides(_body, "transposed", lambda y: y.t().contiguous().exp())
_strides(is_contiguous, "dense", lambda y: y.exp())
_strides(is_contiguous, "sliced", lambda y: torch.cat([y, y * 2], dim=1).exp())
_strides(channels_last, "dense", lambda y: y.exp(), 2, 3, 4, 5)
_strides(
    channels_last,
    "permuted",
    lambda y: (y * torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)).exp(),
    2,
    3,
    4,
    5,
)
_strides(as_strided, "transposed", lambda y: y.t().contiguous().exp())


class ContiguousCall(Function):
    """Makes its gradient contiguous: the layout does not show."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad.contiguous() * 2


@case()
def contiguous_call():
    return lambda x: ContiguousCall.apply(x).sum(), (leaf(),)


class StrideOfSaved(Function):
    """The stride of a saved tensor, which is known."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 if x.is_contiguous() else grad * 3


@case()
def stride_of_saved():
    return lambda x: StrideOfSaved.apply(x.t()).sum(), (leaf(),)


# ------------------------------------------------------------------------------------ stock right


class Plain(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x).sum(0)


@case(stock_is_right=True)
def plain():
    return lambda x, w: Plain.apply(x.sin(), w).cos(), (leaf(), leaf(3))


@case(stock_is_right=True)
def new_style():
    return lambda x: Doubled.apply(x.sin()).cos(), (leaf(),)


class ReadsSize(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape[0]
        return x.sum(0)

    @staticmethod
    def backward(ctx, grad):
        if grad.dim() == 1 and grad.dtype == torch.float32:
            return grad.expand(ctx.size, *grad.shape) * 3
        return grad


@case(stock_is_right=True)
def size_and_dtype_of_gradient():
    return lambda x: ReadsSize.apply(x).exp(), (leaf(),)


# ------------------------------------------------ layout is looked at, and makes no difference


def contiguous_if_not(ctx, grad):
    if not grad.is_contiguous():
        grad = grad.contiguous()
    return grad * 2


def stride_of_contiguous(ctx, grad):
    grad = grad.contiguous()
    return grad * 2 if grad.stride(-1) == 1 else grad * 3


def asserts_contiguous(ctx, grad):
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    assert grad.stride(-1) == 1
    return grad * 2


for _body in (contiguous_if_not, stride_of_contiguous, asserts_contiguous):
    _strides(_body, "expanded", lambda y: y.sum())
    _strides(_body, "transposed", lambda y: y.t().contiguous().exp())


@case(stock_is_right=True)
def two_calls_of_which_one_reads_layout():
    function = _strided(contiguous_if_not)
    return lambda x: Doubled.apply(function.apply(Doubled.apply(x))).cos(), (leaf(),)


class Product(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y * 2, grad * x * 3


@case(break_needs="break_in_grad_transform")
def func_grad_of_what_dynamo_refuses():
    """The same tensor twice."""
    return lambda x: torch.func.grad(lambda v: Product.apply(v, v).sum())(x), (leaf(),)


@case(stock_refuses=True)
def one_tensor_for_two_inputs():
    return lambda x: Product.apply(x.sin(), x.cos()) + Product.apply(x, x), (leaf(),)


@case(stock_refuses=True)
def one_tensor_for_two_inputs_in_a_region():
    def region(x):
        return Product.apply(x, x).sin()

    return lambda x: checkpoint(region, x, use_reentrant=False), (leaf(),)
