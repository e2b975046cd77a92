"""What cannot be captured equal to eager is refused, by name and with a way out."""

import re

import pytest
import torch
from models import FunctionModel, Scale, assert_same, gradients, operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import hops

FRONT_ENDS = pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])


def export(model, strict):
    return torch.export.export(model, (torch.ones(2, 3),), strict=strict)


@FRONT_ENDS
def test_a_hook_on_a_tensor_is_refused(strict):
    class Hooked(FunctionModel):
        def forward(self, x):
            y = Scale.apply(self.linear(x), self.weight)
            y.register_hook(lambda grad: grad * 2)
            return y

    # Dynamo of torch 2.6 and 2.9 refuses the hook itself, before anything is captured; that
    # of 2.12 makes a Function of it.
    refusals = "register_hook is called on an output of Scale|Compilation of intermediate hooks"
    model, x = Hooked(), torch.ones(2, 3)
    try:
        ep = export(model, strict)
    except Exception as error:
        assert re.search(refusals, str(error))
        assert strict or isinstance(error, hops.CaptureError)
    else:
        assert strict and operators(ep.graph_module) == ["autograd_function_apply"] * 2
        assert_same(gradients(ep.module(), x), gradients(model, x))


@FRONT_ENDS
def test_a_no_grad_block_of_the_model_is_kept(strict):
    class Partly(FunctionModel):
        def forward(self, x):
            with torch.no_grad():
                y = Scale.apply(self.linear(x), self.weight)
            return y + self.linear(x) * self.weight

    model, x = Partly(), torch.ones(2, 3)
    want = gradients(model, x)
    ep = export(model, strict)
    assert operators(ep.graph_module) == []
    assert_same(gradients(ep.module(), x), want)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_a_function_under_a_transform_is_refused_by_name(transform):
    class Sine(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    class Transformed(FunctionModel):
        def forward(self, x):
            return transform(lambda v: Sine.apply(v).sum())(self.linear(x))

    with pytest.raises(hops.CaptureError, match="Sine is applied under a torch.func transform"):
        export(Transformed(), strict=False)


@pytest.mark.parametrize("read", ["numpy", "tolist", "__array__"])
def test_values_that_leave_torch_are_refused_by_name(read):
    """Where real tensors are traced, what comes back would be a constant of the graph."""

    class Outside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.as_tensor(getattr(x.detach(), read)()) * 2

        @staticmethod
        def backward(ctx, grad):
            return grad

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(hops.CaptureError, match=f"Outside looks at the values.*Tensor.{read}"):
        make_fx(lambda x: Outside.apply(x * 2), pre_dispatch=True)(x)


def test_values_that_depend_on_no_input_may_be_read():
    class Constant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.ones(2).tolist()[0]

        @staticmethod
        def backward(ctx, grad):
            return grad * 3

    x = torch.ones(3, requires_grad=True)
    graph = make_fx(lambda x: Constant.apply(x * 2), pre_dispatch=True)(x)
    assert torch.equal(graph(x), x * 2)


class RestoredDropout(torch.autograd.Function):
    """Draws its mask again in the backward, from the state that the forward began with."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.state, ctx.p = torch.get_rng_state(), p
        return x * (torch.rand_like(x) > p)

    @staticmethod
    def backward(ctx, grad):
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        mask = torch.rand_like(grad) > ctx.p
        torch.set_rng_state(now)
        return grad * mask, None


class SeededNoise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand_like(grad), None


@FRONT_ENDS
@pytest.mark.parametrize("function", [RestoredDropout, SeededNoise])
def test_a_state_of_the_generator_that_is_set_is_refused_by_name(function, strict):
    """A graph would draw other random numbers than eager."""

    class Drawing(FunctionModel):
        def forward(self, x):
            return function.apply(self.linear(x), 0.5)

    with pytest.raises(hops.CaptureError, match=f"{function.__name__}.* sets the state"):
        export(Drawing(), strict)


@FRONT_ENDS
def test_a_state_that_is_set_outside_of_captured_code_is_none_of_ours(strict):
    class Seeding(FunctionModel):
        def forward(self, x):
            return Scale.apply(self.linear(x), self.weight)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        ep = export(Seeding(), strict)
    assert operators(ep.graph_module) == ["autograd_function_apply"]
    assert torch.random.default_generator is torch.default_generator


class Paired(torch.autograd.Function):
    """Makes a wrapper subclass of plain tensors."""

    @staticmethod
    def forward(ctx, x):
        return TwoTensor(x * 2, x * 3)

    @staticmethod
    def backward(ctx, grad):
        return grad.a * 5 + grad.b * 7


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_a_tensor_subclass_that_a_function_makes_is_refused(front_end):
    """Its inner tensors were constants of the graph that make_fx gave."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return Paired.apply(x.sin()).a

    x = torch.ones(2, 3, requires_grad=True)
    with pytest.raises(hops.CaptureError, match="Paired returns a TwoTensor that it makes itself"):
        if front_end == "make_fx":
            make_fx(Model(), pre_dispatch=True)(x)
        else:
            torch.export.export(Model(), (x,), strict=False)
