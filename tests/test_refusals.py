"""What cannot be captured equal to eager is refused, by name and with a way out."""

import re

import pytest
import torch
from models import FunctionModel, Scale, assert_same, gradients, operators
from torch.fx.experimental.proxy_tensor import make_fx

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
