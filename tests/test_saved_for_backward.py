"""``hops.saved_for_backward`` lists what a step keeps, as an independent measure finds it."""

import copy
import dataclasses
import gc
import io

import pytest
import torch
import torch.utils._pytree as pytree
from models import BothModel, CheckpointModel, FunctionModel
from test_policies import build as build_selective
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hops
from hops.policies import save_everything, save_matmuls, save_names


def both():
    torch.manual_seed(0)
    return BothModel(), (torch.randn(2, 3),)


def function():
    torch.manual_seed(0)
    return FunctionModel(), (torch.randn(2, 3, requires_grad=True),)


def region():
    torch.manual_seed(0)
    return CheckpointModel(), (torch.randn(2, 3, requires_grad=True),)


def layers():
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU())
    return block, (torch.randn(4, 8),)


class Nested(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.reentrant = reentrant

    def inner(self, x):
        return checkpoint(self.block, x.sin(), use_reentrant=False, context_fn=save_matmuls).cos()

    def forward(self, x):
        x = self.block(x)
        y = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return {"y": y.exp(), "z": checkpoint(lambda t: (t * x).sin(), y, use_reentrant=False)}


def nested():
    torch.manual_seed(0)
    return Nested(False), (torch.randn(4, 8),)


def reentrant():
    torch.manual_seed(0)
    return Nested(True), (torch.randn(4, 8),)


def selective():
    model, x = build_selective(save_names("hidden") | save_matmuls)
    return model, (x,)


def everything():
    model, x = build_selective(save_everything)
    return model, (x,)


MODELS = [both, function, region, layers, nested, reentrant, selective, everything]


class Allocations(TorchDispatchMode):
    """The storages that operations make, by a dispatch mode that holds none of them."""

    def __init__(self, owned):
        super().__init__()
        self.owned = {t.untyped_storage()._cdata for t in owned if isinstance(t, torch.Tensor)}
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.owned:
                    self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return out

    def alive(self):
        return sum(size for reference, size in self.made.values() if not reference.expired())


def measured(module, args):
    """Bytes that the autograd graph alone keeps alive."""
    with Allocations([*module.parameters(), *module.buffers(), *args]) as memory:
        output = module(*args)
        graph = [t.grad_fn for t in pytree.tree_leaves(output)]
        del output
        gc.collect()
        total = memory.alive()
    del graph
    return total


def reloaded(ep):
    buffer = io.BytesIO()
    torch.export.save(ep, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


@pytest.mark.parametrize("build", MODELS)
def test_total_is_what_eager_keeps(build):
    module, args = build()
    saved = hops.saved_for_backward(module, *args)
    assert saved.total_bytes == measured(module, args) > 0
    assert sum(saved.bytes_kept_by.values()) == saved.total_bytes


@pytest.mark.parametrize("how", ["nonstrict", "strict", "loaded"])
@pytest.mark.parametrize("build", MODELS)
def test_captured_programs_keep_the_same(build, how):
    module, args = build()
    expected = hops.saved_for_backward(module, *args)
    ep = torch.export.export(copy.deepcopy(module), args, strict=how == "strict")
    if how == "loaded":
        ep = reloaded(ep)
    for program in (ep, ep.module()):
        saved = hops.saved_for_backward(program, *args)
        assert saved.total_bytes == measured(ep.module(), args) == expected.total_bytes

        described = [
            sorted((t.nbytes, t.shape, t.made_by) for t in listed.activations)
            for listed in (saved, expected)
        ]
        assert described[0] == described[1]
        assert build is layers or all(t.source for t in saved.activations)


def line_of(text):
    """The place of the only line of this file's models that holds ``text``."""
    import models

    for file, name in ((models.__file__, "models.py"), (__file__, "test_saved_for_backward.py")):
        with open(file) as source:
            found = [
                i for i, line in enumerate(source, 1) if text in line and "line_of" not in line
            ]
        if len(found) == 1:
            return f"{name}:{found[0]}"
    raise AssertionError(text)


def test_who_keeps_what_and_where_it_was_made():
    module, args = both()
    ep = torch.export.export(module, args, strict=False)
    here = {
        "eager": (module, "checkpoint BothModel.forward.region"),
        "captured": (ep, "checkpoint tag_activation_checkpoint"),
        "loaded": (reloaded(ep), "checkpoint tag_activation_checkpoint"),
    }
    call = line_of("checkpoint(region, y, use_reentrant=False).sin()")
    made = line_of("y = Scale.apply(self.linear(x), self.weight)")
    for program, name in here.values():
        saved = hops.saved_for_backward(program, *args)
        linear, scaled, outside = saved.activations
        assert (linear.kept_by, linear.made_by) == ("Function models.Scale", "aten.addmm.default")
        assert linear.source == f"{made} in forward"
        assert linear.shape == (2, 3) and linear.dtype == torch.float32 and linear.nbytes == 24
        assert scaled.kept_by == f"{name} ({call} in forward)"
        assert outside.kept_by == "autograd"
        there = {t.made_by: (t.role, t.kept_by) for t in saved.tensors if t.role != "activation"}
        assert there["weight"] == ("parameter", "Function models.Scale")
        assert there["0"] == ("input", "autograd")


def test_what_a_policy_keeps_is_the_regions():
    module, args = selective()
    saved = hops.saved_for_backward(module, *args)
    kept = [t for t in saved.activations if t.kept_by.startswith("checkpoint Model.forward.region")]
    assert [t.made_by for t in kept] == [
        "aten.cos.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.bmm.default",
        "aten.addmm.default",
    ]
    assert kept[2].shape == (4, 4, 4)


def test_the_result_is_a_value_that_prints_as_a_table():
    module, args = both()
    saved = hops.saved_for_backward(module, *args)
    assert saved == hops.saved_for_backward(module, *args)
    with pytest.raises(dataclasses.FrozenInstanceError):
        saved.tensors[0].nbytes = 0
    head, *rows, total = str(saved).splitlines()
    assert head.split() == ["bytes", "tensor", "kept", "by", "made", "by", "source"]
    assert len(rows) == len(saved.tensors)
    assert rows[0].split()[:3] == ["24", "float32[2,", "3]"]
    assert total.startswith("total 72 bytes in 3 tensors")


def test_the_module_is_left_as_it_was():
    module, args = layers()
    torch.manual_seed(3)
    before = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    hops.saved_for_backward(module, *args)
    torch.testing.assert_close(module.state_dict(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(p.grad is None for p in module.parameters())


def test_without_a_backward_there_is_nothing_to_list():
    with pytest.raises(ValueError, match="no output requires grad"):
        hops.saved_for_backward(lambda x: x.sin(), torch.ones(2))
    x = torch.ones(2, requires_grad=True)
    (kept,) = hops.saved_for_backward(lambda x: x.sin(), x).tensors
    assert (kept.role, kept.made_by) == ("input", "0")
