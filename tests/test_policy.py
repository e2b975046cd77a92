"""Selective policies: obeyed in every replay, and repeated after a file."""

import copy
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


def saved_bytes(module, x):
    """Bytes alive between forward and backward, parameters and inputs left out."""
    from torch.multiprocessing.reductions import StorageWeakRef

    owned = {t.untyped_storage()._cdata for t in (*module.parameters(), x)}
    made = {}

    class Storages(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    if storage._cdata not in owned:
                        made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return out

    with Storages():
        output = module(x)
    total = sum(size for reference, size in made.values() if not reference.expired())
    del output
    return total


class Count:
    """A policy of the user's that keeps state: every other product, each mode for itself."""

    def __init__(self):
        self.calls = {False: 0, True: 0}

    def __call__(self, ctx, operation, *args, **kwargs):
        if operation not in MATMULS:
            return CheckpointPolicy.MUST_RECOMPUTE
        self.calls[ctx.is_recompute] += 1
        return (
            CheckpointPolicy.PREFER_SAVE
            if self.calls[ctx.is_recompute] % 2
            else CheckpointPolicy.PREFER_RECOMPUTE
        )


def by_operation(decisions, ctx, operation, *args, **kwargs):
    return decisions.get(operation, CheckpointPolicy.PREFER_RECOMPUTE)


def bool_policy(ctx, operation, *args, **kwargs):
    return operation is torch.ops.aten.sin.default


POLICIES = {
    "function": CONTEXT_FN,
    "list": functools.partial(create_selective_checkpoint_contexts, list(MATMULS)),
    "bool": functools.partial(create_selective_checkpoint_contexts, bool_policy),
    "stateful": lambda: create_selective_checkpoint_contexts(Count()),
    "partial": functools.partial(
        create_selective_checkpoint_contexts,
        functools.partial(by_operation, {torch.ops.aten.tanh.default: CheckpointPolicy.MUST_SAVE}),
    ),
    "mutable": functools.partial(
        create_selective_checkpoint_contexts, list(MATMULS), allow_cache_entry_mutation=True
    ),
    **{
        decision.name: functools.partial(
            create_selective_checkpoint_contexts,
            functools.partial(by_operation, dict.fromkeys(MATMULS, decision)),
        )
        for decision in CheckpointPolicy
    },
}


def every_replay(ep, x):
    loaded = reloaded(ep)
    return {
        "module": ep.module(),
        "deepcopy": copy.deepcopy(ep.module()),
        "loaded": loaded.module(),
        "loaded twice": reloaded(loaded).module(),
        "exported again": torch.export.export(ep.module(), (x,), strict=False).module(),
        "exported again strictly": torch.export.export(ep.module(), (x,), strict=True).module(),
        "loaded, exported again": reloaded(
            torch.export.export(loaded.module(), (x,), strict=False)
        ).module(),
    }


@pytest.mark.parametrize(
    ("name", "strict"),
    [*((name, False) for name in POLICIES), ("stateful", True), ("mutable", True)],
)
def test_every_kind_of_policy_in_every_replay(name, strict):
    torch.manual_seed(0)
    model, x = Selective(POLICIES[name]), torch.randn(2, 3)
    want, bytes_wanted = gradients(model, x), saved_bytes(model, x)
    ep = torch.export.export(model, (x,), strict=strict)
    for replay, module in every_replay(ep, x).items():
        assert_same(gradients(module, x), want)
        assert saved_bytes(module, x) == bytes_wanted, replay
        assert matmuls_in_backward(module, x) == matmuls_in_backward(model, x), replay


def test_all_decisions_are_told_apart():
    for decision in CheckpointPolicy:
        ep = torch.export.export(
            Selective(POLICIES[decision.name]), (torch.randn(2, 3),), strict=False
        )
        told = region_node(ep).kwargs["policy"]
        if decision is CheckpointPolicy.PREFER_RECOMPUTE:
            assert told == ["none 0 PREFER_RECOMPUTE"]
        else:
            assert told == [f"aten.addmm.default {i} {decision.name}" for i in (0, 1)]


def test_the_context_fn_is_called_once_an_execution():
    calls = []

    def contexts():
        calls.append(1)
        return CONTEXT_FN()

    model, x = Selective(contexts), torch.randn(2, 3)
    module = torch.export.export(model, (x,), strict=False).module()
    for times in (1, 2, 3):
        calls.clear()
        for _ in range(times):
            gradients(module, x)
        assert len(calls) == times


class InPlace(torch.nn.Module):
    """Writes into the product that is kept, which is right only with the permission."""

    def __init__(self, allow):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.context_fn = functools.partial(
            create_selective_checkpoint_contexts, list(MATMULS), allow_cache_entry_mutation=allow
        )

    def forward(self, x):
        def region(h):
            return self.linear(self.linear(h).relu_().mul(2)).sin()

        return checkpoint(region, self.linear(x), use_reentrant=False, context_fn=self.context_fn)


@pytest.mark.parametrize("allow", [False, True])
def test_mutation_of_what_is_kept(allow):
    torch.manual_seed(0)
    model, x = InPlace(allow), torch.randn(2, 3)
    ep = torch.export.export(model, (x,), strict=False)
    for module in (model, *every_replay(ep, x).values()):
        if allow:
            assert_same(gradients(module, x), gradients(model, x))
        else:
            with pytest.raises(RuntimeError, match="has been mutated"):
                gradients(module, x)


PACKETS = {torch.ops.aten.mm, torch.ops.aten.addmm}


def in_packets(ctx, operation, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operation in PACKETS else CheckpointPolicy.PREFER_RECOMPUTE


def test_packets_that_match_nothing_are_warned_of():
    x = torch.randn(2, 3)
    for policy in (in_packets, functools.partial(lambda p, *a: a[1] in p, PACKETS)):
        model = Selective(functools.partial(create_selective_checkpoint_contexts, policy))
        with pytest.warns(hops.HopsWarning, match="addmm and saves nothing .*aten.mm.default"):
            torch.export.export(model, (x,), strict=False)
    with pytest.warns(hops.HopsWarning, match="names aten.cos and saves nothing.*aten.addmm"):
        torch.export.export(Selective(hops.policies.save_ops("aten.cos")), (x,), strict=False)
    with pytest.raises(ValueError, match="change it to"):
        model = Selective(functools.partial(create_selective_checkpoint_contexts, list(PACKETS)))
        torch.export.export(model, (x,), strict=False)
