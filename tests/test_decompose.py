"""``hops.run_decompositions`` with operators kept: what it gives still trains as eager does."""

import pytest
import torch
from models import FunctionModel, Scale, assert_same, gradients, operators
from torch.utils.checkpoint import checkpoint

import hops

KEPT = (
    torch.ops.higher_order.autograd_function_apply,
    torch.ops.higher_order.tag_activation_checkpoint,
)


class Written(torch.autograd.Function):
    """Writes into what is its own, and into its gradient."""

    @staticmethod
    def forward(ctx, x):
        out = torch.zeros_like(x)
        out.add_(x).mul_(2)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad.mul_(3)
        grad[0].zero_()
        return grad


class WrittenSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.count = torch.ones_like(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return grad * ctx.count


class Model(FunctionModel):
    def __init__(self, run):
        super().__init__()
        self.run = run
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x):
        return self.run(self, self.linear(x))


def straight_through(model, h):
    y = Scale.apply(h, model.weight)
    with torch.no_grad():
        scale = y.exp()
        with torch.enable_grad():
            slope = y.cos()
    return y + (y.round() - y).detach() + y * scale + slope


def block_in_a_region(model, h):
    def region(h):
        with torch.no_grad():
            gate = model.linear(h).softmax(-1)
        return Scale.apply(h, model.weight) * gate

    return checkpoint(
        lambda v: checkpoint(region, v, use_reentrant=False) * v.detach(), h, use_reentrant=False
    )


def detached_outputs(model, h):
    y = Scale.apply(h, model.weight)
    return y.detach() * 2 + y


def updates_a_buffer(model, h):
    with torch.no_grad():
        model.seen.add_(h.mean(0))
    return Scale.apply(h, model.weight) * model.seen


def written(model, h):
    y = Written.apply(h) * h
    return checkpoint(
        lambda v: v.sin().mul_(2).index_add_(0, torch.tensor([1]), v[:1]), y, use_reentrant=False
    )


def exported(run):
    torch.manual_seed(0)
    model, x = Model(run), torch.randn(2, 3)
    return model, x, torch.export.export(model, (x,), strict=False)


@pytest.mark.parametrize(
    "run", [straight_through, block_in_a_region, detached_outputs, updates_a_buffer, written]
)
def test_gradients_are_those_of_eager(run):
    model, x, ep = exported(run)
    want = gradients(model, x)
    kept = hops.run_decompositions(ep, keep=KEPT)
    assert sorted(operators(kept.graph_module)) == sorted(operators(ep.graph_module))
    program = kept.module()
    program.seen.zero_()
    assert_same(gradients(program, x), want)
    torch.testing.assert_close(program.seen, model.seen)
    again = torch.export.export(program, (x,), strict=False)
    assert again.graph_module.graph.find_nodes(
        op="call_function", target=KEPT[0]
    ) or again.graph_module.graph.find_nodes(op="call_function", target=KEPT[1])
    assert "hops_computes" not in str([n.meta.get("custom") for n in ep.graph.nodes])


def test_a_backward_that_writes_into_what_was_saved_is_refused_by_name():
    _, _, ep = exported(lambda model, h: WrittenSaved.apply(h))
    with pytest.raises(hops.CaptureError, match="backward of .*WrittenSaved writes into a tensor"):
        hops.run_decompositions(ep, keep=KEPT)


def test_a_region_whose_no_grad_block_writes_into_a_buffer_is_refused():
    """The write is in a body inside the region's body, by ``out=``."""

    def run(model, h):
        def region(h):
            with torch.no_grad():
                torch.add(model.seen, h.mean(0), out=model.seen)
            return h * model.seen

        return checkpoint(region, h, use_reentrant=False)

    _, _, ep = exported(run)
    with pytest.raises(hops.CaptureError, match="region at .* writes into its operand"):
        hops.run_decompositions(ep, keep=KEPT)


def test_a_detach_that_is_lost_in_a_block_of_autocast_is_told():
    def run(model, h):
        with torch.autocast("cpu", torch.bfloat16):
            h = model.linear(h)
            h = h.detach() * h
        return checkpoint(torch.sin, h.float(), use_reentrant=False)

    _, _, ep = exported(run)
    with pytest.warns(hops.HopsWarning, match=r"stops gradients at test_decompose.py:\d+"):
        hops.run_decompositions(ep, keep=KEPT)
