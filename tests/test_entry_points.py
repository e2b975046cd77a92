"""Every way by which user code reaches a Function or a checkpoint is caught."""

import subprocess
import sys
import textwrap

import pytest
import torch
import torch.utils.checkpoint
from models import Scale, assert_same, gradients, operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import hops

bound = Scale.apply
FUNCTION = "autograd_function_apply"
REGION = "tag_activation_checkpoint"


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))
        self.call = call

    def forward(self, x):
        return self.call(self, self.linear(x)) * self.weight


def region(model, h):
    return model.linear(h).sin()


def sequential(model, h):
    layers = [torch.nn.Tanh(), torch.nn.Sigmoid(), torch.nn.ReLU()]
    return checkpoint_sequential(layers, 2, h, use_reentrant=False)


WAYS = {
    "apply looked up": (lambda m, h: Scale.apply(h, m.weight), [FUNCTION]),
    "apply bound": (lambda m, h: bound(h, m.weight), [FUNCTION]),
    "checkpoint": (lambda m, h: checkpoint(region, m, h, use_reentrant=False), [REGION]),
    "checkpoint looked up": (
        lambda m, h: torch.utils.checkpoint.checkpoint(region, m, h, use_reentrant=False),
        [REGION],
    ),
    "reentrant": (lambda m, h: checkpoint(region, m, h, use_reentrant=True), [REGION]),
    "keyword": (lambda m, h: checkpoint(region, m, h=h, use_reentrant=False), [REGION]),
    "sequential": (sequential, [REGION]),
    "both": (
        lambda m, h: checkpoint(
            lambda v: bound(v, m.weight) + Scale.apply(v, m.weight), h, use_reentrant=False
        ),
        [REGION, FUNCTION, FUNCTION],
    ),
}


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("way", WAYS)
def test_export(way, strict):
    call, expected = WAYS[way]
    model, x = Model(call), torch.randn(2, 3)
    want = gradients(model, x)
    ep = torch.export.export(model, (x,), strict=strict)
    assert operators(ep.graph_module) == expected
    assert_same(gradients(ep.module(), x), want)


ORDER = """
import torch
{first}
class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
apply = Double.apply
from torch.utils.checkpoint import checkpoint
{second}
class Model(torch.nn.Module):
    def forward(self, x):
        return checkpoint(lambda v: apply(v).sin(), apply(x), use_reentrant=False)
x = torch.ones(2, requires_grad=True)
ep = torch.export.export(Model(), (x,), strict=False)
targets = [n.target.__name__ for n in ep.graph.nodes if n.op == "call_function"]
assert "autograd_function_apply" in targets and "tag_activation_checkpoint" in targets, targets
"""


@pytest.mark.parametrize(
    "first, second",
    [("import hops", ""), ("", "import hops"), ("import torch._dynamo", "import hops")],
    ids=["hops first", "hops last", "hops after dynamo"],
)
def test_the_order_of_imports_does_not_matter(first, second):
    program = textwrap.dedent(ORDER.format(first=first, second=second))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_eager_and_post_dispatch_tracing_are_as_stock():
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, requires_grad=True)
    assert type(Scale.apply(x, w).grad_fn).__name__ == "ScaleBackward"
    graph = make_fx(lambda x: Scale.apply(x, w.detach()))(torch.ones(2, 3, requires_grad=True))
    assert operators(graph) == []


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_a_function_is_inlined(context):
    class Frozen(torch.nn.Module):
        def forward(self, x):
            with context():
                return Scale.apply(x, torch.ones(3))

    ep = torch.export.export(Frozen(), (torch.ones(2, 3),), strict=False)
    assert operators(ep.graph_module) == []

    def call(x):
        return Scale.apply(x, torch.ones(3))

    assert operators(make_fx(call, pre_dispatch=True)(torch.ones(2, 3))) == []


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_no_grad_mode_switch_is_added(strict):
    model = Model(WAYS["both"][0])
    ep = torch.export.export(model, (torch.ones(2, 3),), strict=strict)
    for module in ep.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            assert "set_grad_enabled" not in module.code


def test_grad_mode_is_restored_after_a_capture_that_raises():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            raise ValueError("in forward")

    class BrokenBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("in backward")

    x = torch.ones(2, requires_grad=True)
    for function, error in ((Broken, ValueError), (BrokenBackward, hops.CaptureError)):
        with pytest.raises(error, match="in (for|back)ward"):
            make_fx(function.apply, pre_dispatch=True)(x)
        assert torch.is_grad_enabled()
    graph = make_fx(lambda x: bound(x, torch.ones(3)), pre_dispatch=True)(
        torch.ones(2, 3, requires_grad=True)
    )
    assert operators(graph) == [FUNCTION]


def test_names_are_those_of_the_model_without_operators():
    def plain(model, h):
        return region(model, h)

    names = []
    for call in (plain, WAYS["checkpoint"][0]):
        ep = torch.export.export(Model(call), (torch.ones(2, 3),), strict=False)
        placeholders = [n.name for n in ep.graph.nodes if n.op == "placeholder"]
        names.append((sorted(placeholders), list(ep.state_dict)))
    assert names[0] == names[1]


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_buffer_that_a_backward_writes_into_requires_no_grad_after_the_capture(mode):
    class Largest(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, largest):
            ctx.largest = largest
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.largest.add_(grad.abs().max())
            return grad * 2, None

    largest = torch.zeros(1)
    x = torch.ones(2, requires_grad=True)
    make_fx(
        lambda v: Largest.apply(v, largest),
        pre_dispatch=True,
        tracing_mode=mode,
        _allow_non_fake_inputs=True,
    )(x)
    assert largest.is_leaf and not largest.requires_grad
