"""Selective policies: obeyed in every replay, and repeated after a file."""

import functools
import io

import pytest
import torch
from models import assert_same, gradients
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hops

MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def save_matmuls(ctx, operation, *args, **kwargs):
    if operation in MATMULS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class Selective(torch.nn.Module):
    def __init__(self, context_fn):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.context_fn = context_fn

    def forward(self, x):
        def region(h):
            return self.linear(self.linear(h).sin()).tanh()

        return checkpoint(region, self.linear(x), use_reentrant=False, context_fn=self.context_fn)


CONTEXT_FN = functools.partial(create_selective_checkpoint_contexts, save_matmuls)


def captured(strict):
    model, x = Selective(CONTEXT_FN), torch.randn(2, 3)
    return model, x, gradients(model, x), torch.export.export(model, (x,), strict=strict)


def reloaded(ep):
    buffer = io.BytesIO()
    torch.export.save(ep, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def region_node(ep):
    (node,) = [n for n in ep.graph.nodes if "tag_activation_checkpoint" in n.name]
    return node


def matmuls_in_backward(module, x):
    """How many matrix products the backward runs: two less for each one that was saved."""
    counts = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts.append(func in MATMULS)
            return func(*args, **(kwargs or {}))

    loss = module(x).sum()
    with Count():
        loss.backward()
    return sum(counts)


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_decisions_are_on_the_node(strict):
    ep = captured(strict)[3]
    assert region_node(ep).kwargs["policy"] == [
        "aten.addmm.default 0 MUST_SAVE",
        "aten.addmm.default 1 MUST_SAVE",
    ]


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_decisions_are_obeyed_in_replay_and_after_loading(strict):
    model, x, want, ep = captured(strict)
    everything_recomputed = Selective(torch.utils.checkpoint.noop_context_fn)
    again = torch.export.export(reloaded(ep).module(), (x,), strict=False)
    for module in (ep.module(), reloaded(ep).module(), reloaded(again).module()):
        assert_same(gradients(module, x), want)
        assert matmuls_in_backward(module, x) == matmuls_in_backward(model, x)
    assert matmuls_in_backward(everything_recomputed, x) > matmuls_in_backward(model, x)


def test_a_damaged_policy_is_an_error():
    model, x, _, ep = captured(False)
    node = region_node(ep)
    for policy in (["aten.addmm.default MUST_SAVE"], ["aten.addmm.default 0 EVERYTHING"]):
        node.kwargs = {**node.kwargs, "policy": policy}
        with pytest.raises(hops.ReplayError, match="damaged"):
            reloaded(ep).module()(x)


def test_a_policy_of_the_users_own_contexts_cannot_be_loaded():
    import contextlib

    def contexts():
        return contextlib.nullcontext(), contextlib.nullcontext()

    model, x = Selective(contexts), torch.randn(2, 3)
    want = gradients(model, x)
    ep = torch.export.export(model, (x,), strict=False)
    assert_same(gradients(ep.module(), x), want)
    with pytest.raises(hops.ReplayError, match="cannot hold"):
        reloaded(ep).module()(x)
