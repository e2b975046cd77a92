"""Equal calls of an operator have one body; calls that differ in anything have their own."""

from __future__ import annotations

import functools
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hops

FUNCTION = torch.ops.higher_order.autograd_function_apply
REGION = torch.ops.higher_order.tag_activation_checkpoint
WIDTH = 3


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0] * ctx.factor, None


class Model(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def export(body):
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)
    return torch.export.export(Model(body), (x,), strict=False)


def bodies(program, operator):
    """The bodies of the calls of ``operator`` in the outer graph, as modules."""
    module = program.graph_module
    calls = module.graph.find_nodes(op="call_function", target=operator)
    names = [(node.args[0].target, node.args[1]) for node in calls]
    if operator is FUNCTION:
        return [(getattr(module, name), getattr(module, bwd.target)) for name, bwd in names]
    return [getattr(module, name) for name, _ in names]


def repeated(self, x):
    for _ in range(4):
        x = Scale.apply(x, 2)
        x = checkpoint(self.layer, x, use_reentrant=False)
    return x


def nested(self, x):
    def region(x):
        for _ in range(2):
            x = Scale.apply(x, 2)
            x = checkpoint(self.layer, x, use_reentrant=False)
        return x

    for _ in range(3):
        x = checkpoint(region, x, use_reentrant=False)
    return x


def test_repetition_does_not_make_the_graph_grow():
    program = export(repeated)
    assert len(bodies(program, FUNCTION)) == len(bodies(program, REGION)) == 4
    assert len(set(bodies(program, FUNCTION))) == len(set(bodies(program, REGION))) == 1
    held = [m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    assert len(held) == 1 + 3


def test_bodies_inside_bodies_are_shared():
    program = export(nested)
    (body,) = set(bodies(program, REGION))
    held = [m for m in body.modules() if isinstance(m, torch.fx.GraphModule)]
    assert len(held) == 1 + 3


@pytest.mark.parametrize("body", [repeated, nested])
@pytest.mark.parametrize("saved", [False, True])
def test_shared_bodies_give_what_eager_gives(body, saved):
    program = export(body)
    if saved:
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        program = torch.export.load(buffer)
        assert len(set(bodies(program, REGION))) == 1
    results = []
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)
    eager = Model(body)
    replayed = program.module()
    eager.load_state_dict(replayed.state_dict())
    for module in (eager, replayed):
        out = module(x)
        parameters = [module.layer.weight, module.layer.bias]
        results.append((out, *torch.autograd.grad(out.sum(), [x, *parameters])))
    torch.testing.assert_close(*results)


def test_constants_keep_bodies_apart():
    def body(self, x):
        for factor in (1, 1.0, True, 0.0, -0.0):
            x = x + checkpoint(lambda x, k: torch.sin(x) * k, x, factor, use_reentrant=False)
        return x

    assert len(set(bodies(export(body), REGION))) == 5


def test_module_paths_and_source_lines_keep_bodies_apart():
    def forward(self, x):  # torch notes the lines of functions of this name
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return checkpoint(self.layers[1], x, use_reentrant=False)

    assert len(set(bodies(export(forward), REGION))) == 3


def keep(what, ctx, op, *args, **kwargs):
    kept = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if kept is what else CheckpointPolicy.PREFER_RECOMPUTE


def test_policies_keep_bodies_apart():
    def body(self, x):
        for what in (True, True, False):
            policy = functools.partial(keep, what)
            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            x = checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)
        return x

    program = export(body)
    first, second, third = bodies(program, REGION)
    assert first is second is not third
    for node in program.graph_module.graph.find_nodes(op="call_function", target=REGION):
        assert hops.checkpoint_parts(node).context_fn is not None
