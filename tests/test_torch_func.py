"""The operators under transforms of ``torch.func``: captured programs equal eager."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import Function
from torch.func import grad, jacrev, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint


class Cubed(Function):
    """Its backward is twice the derivative, and uses an input, an output, an intermediate
    and a number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        square = x * x
        return square * x * weight, square, x.argmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight = inputs
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(x, weight, output[1])
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx, first, second, unused):
        x, weight, square = ctx.saved_tensors
        return first * square * weight * 6 + second * x * ctx.rows, (first * square * x * 2).sum(0)


class Intermediate(Function):
    """Saves a value that is neither input nor output, in the old style."""

    @staticmethod
    def forward(ctx, x, weight):
        kept = x.cos()
        ctx.kept = kept
        return x.sin() * weight, kept * 1, x.argmax(-1)

    @staticmethod
    def backward(ctx, first, second, unused):
        return first * ctx.kept * 2 - second, None


def total(function):
    def call(x, weight):
        first, second, index = function.apply(x.sin(), weight)
        return (first.exp() + second.tanh()).sum() + (index * x[..., 0]).sum()

    return call


def captured(call, *args):
    leaves = [a.detach().requires_grad_() for a in args]
    return make_fx(call, pre_dispatch=True)(*leaves)


def arguments():
    torch.manual_seed(0)
    return torch.randn(2, 3), torch.rand(3)


TRANSFORMS = {
    "grad": lambda f, x, w: grad(f, argnums=(0, 1))(x, w),
    "grad_of_grad": lambda f, x, w: grad(lambda x: grad(f)(x, w).sin().sum())(x),
    "jacrev": lambda f, x, w: jacrev(lambda x: grad(f)(x, w))(x),
    "vjp": lambda f, x, w: vjp(f, x, w)[1](torch.tensor(1.5)),
    "vmap": lambda f, x, w: vmap(f, in_dims=(0, None))(torch.stack([x, x * 2]), w),
    "vmap_of_grad": lambda f, x, w: vmap(grad(f), in_dims=(0, None))(torch.stack([x, x * 2]), w),
    "grad_of_vmap": lambda f, x, w: grad(
        lambda x: vmap(f, in_dims=(0, None))(torch.stack([x, x * 2]), w).sum()
    )(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_captured_function_equals_eager(name):
    call, args = total(Cubed), arguments()
    program = captured(call, *args)
    want = TRANSFORMS[name](call, *args)
    torch.testing.assert_close(TRANSFORMS[name](program, *args), want)


@pytest.mark.parametrize("name", ["grad", "vjp"])
def test_an_old_style_function_equals_its_autograd(name):
    """Eager has no transforms for it; plain autograd says what is right."""
    call, args = total(Intermediate), arguments()
    program = captured(call, *args)
    leaves = [a.clone().requires_grad_() for a in args]
    want = torch.autograd.grad(
        call(*leaves) * (1.5 if name == "vjp" else 1), leaves, allow_unused=True
    )
    got = TRANSFORMS[name](program, *args)
    torch.testing.assert_close(got[0], want[0])
    assert want[1] is None and not got[1].any()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_captured_region_equals_its_body(name):
    def plain(x, weight):
        return (x.sin() * weight).exp().sum()

    def call(x, weight):
        return checkpoint(plain, x, weight, use_reentrant=False)

    args = arguments()
    program = captured(call, *args)
    torch.testing.assert_close(TRANSFORMS[name](program, *args), TRANSFORMS[name](plain, *args))


def test_gradients_outside_of_a_transform_are_the_functions():
    call, (x, weight) = total(Cubed), arguments()
    program = captured(call, x, weight)

    def gradients(f):
        leaf = x.clone().requires_grad_()
        value = vmap(f, in_dims=(0, None))(torch.stack([leaf, leaf * 2]), weight)
        return torch.autograd.grad(value.sum(), leaf)

    torch.testing.assert_close(gradients(program), gradients(call))
