"""A captured program keeps for backward what eager's checkpoint keeps, and lets go of it.

Memory is the sum of the storages that operations have made and that are still alive, seen by a
dispatch mode that holds none of them.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from checkpoint_cases import selective_by_function, selective_by_list
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hops  # noqa: F401

SIZE = 64

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Allocations(TorchDispatchMode):
    """Follows the storages made by operations, on all tensors that pass by.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata
            for t in pytree.tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in given:
                storage = leaf.untyped_storage()
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.alive())
        return out

    def alive(self) -> int:
        """Bytes that are alive now."""
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        return sum(size for _, size in self._storages.values())


# ---------------------------------------------------------------------------------------- models


class Stack(nn.Module):
    """Four blocks, each run by :meth:`call`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(SIZE, SIZE), nn.Tanh(), nn.Linear(SIZE, SIZE), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(4)
        )

    def forward(self, x):
        for block in self.blocks:
            x = self.call(block, x)
        return x

    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False)


class Reentrant(Stack):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class Nested(Stack):
    def forward(self, x):
        for i in (0, 2):
            pair = functools.partial(self.pair, self.blocks[i], self.blocks[i + 1])
            x = checkpoint(pair, x, use_reentrant=False)
        return x

    def pair(self, first, second, x):
        x = torch.sin(checkpoint(first, x, use_reentrant=False))
        return torch.cos(checkpoint(second, x, use_reentrant=False))


class Closure(Stack):
    def call(self, block, x):
        y = torch.sin(x)
        return checkpoint(lambda x: torch.sigmoid(block(x) * y), x, use_reentrant=False)


class SeveralOutputs(Stack):
    def call(self, block, x):
        def region(x):
            y = block(x)
            return y, torch.sin(y), torch.cos(y)

        y, sin, cos = checkpoint(region, x, use_reentrant=False)
        return y + sin * cos


class SelectiveFunction(Stack):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False, context_fn=selective_by_function)


class SelectiveList(Stack):
    def call(self, block, x):
        return checkpoint(block, x, use_reentrant=False, context_fn=selective_by_list)


class SelectiveInsidePlain(Stack):
    def call(self, block, x):
        def region(x):
            inner = checkpoint(block, x, use_reentrant=False, context_fn=selective_by_function)
            return torch.sin(inner)

        return checkpoint(region, x, use_reentrant=False)


class NoCheckpoint(Stack):
    def call(self, block, x):
        return block(x)


MODELS = [
    Stack,
    Reentrant,
    Nested,
    Closure,
    SeveralOutputs,
    SelectiveFunction,
    SelectiveList,
    SelectiveInsidePlain,
]


def build(kind: type[Stack]) -> Stack:
    torch.manual_seed(0)
    return kind()


def inputs() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(SIZE, SIZE, requires_grad=True)


class Traced(nn.Module):
    """The model by ``make_fx``, with its parameters as inputs of the graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        state = dict(model.named_parameters())

        def flat(values, x):
            return torch.func.functional_call(model, dict(zip(state, values)), (x,))

        self.graph_module = make_fx(flat, pre_dispatch=True)(list(state.values()), inputs())

    def forward(self, x):
        return self.graph_module(list(self.model.parameters()), x)


def capture(kind: type[Stack], how: str) -> nn.Module:
    torch._dynamo.reset()
    model = build(kind)
    if how == "make_fx":
        return Traced(model)
    program = torch.export.export(model, (inputs(),), strict=how == "strict")
    if how == "save_load":
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        program = torch.export.load(buffer)
    elif how == "deepcopy":
        program = copy.deepcopy(program)
    elif how == "reexport":
        program = torch.export.export(program.module(), (inputs(),), strict=False)
    return program.module()


@pytest.fixture(autouse=True)
def no_collector():
    """Only reference counts free memory while a test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def measure(module: nn.Module) -> tuple[int, int]:
    """Bytes kept between forward and backward, and the peak over the step."""
    x = inputs()
    module(x).sum().backward()  # Gradients of parameters are there from now on.
    x.grad.zero_()
    with Allocations() as memory:
        out = module(x)
        kept = memory.alive()
        out.sum().backward()
        del out
    return kept, memory.peak


# ----------------------------------------------------------------------------------------- tests


def test_the_measure_sees_what_checkpoint_saves():
    without, _ = measure(build(NoCheckpoint))
    plain, _ = measure(build(Stack))
    selective, _ = measure(build(SelectiveFunction))
    assert plain < selective < without
    # One input of each block, and the output.
    assert plain == 4 * SIZE * SIZE * 4


@pytest.mark.parametrize(
    "how", ["nonstrict", "strict", "make_fx", "deepcopy", "save_load", "reexport"]
)
@pytest.mark.parametrize("kind", MODELS)
def test_keeps_and_peaks_as_eager(kind, how):
    expected_kept, expected_peak = measure(build(kind))
    kept, peak = measure(capture(kind, how))
    assert kept <= 1.01 * expected_kept, f"kept {kept / expected_kept:.3f} of eager"
    assert peak <= 1.01 * expected_peak, f"peak {peak / expected_peak:.3f} of eager"
    if kind is not Reentrant:
        assert kept >= 0.99 * expected_kept, f"kept {kept / expected_kept:.3f} of eager"


def saved_when_compiled(module: nn.Module) -> int:
    """Bytes that a compiled step saves for its backward, parameters and inputs included."""
    torch._dynamo.reset()
    saved: dict[int, int] = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    compiled(inputs()).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(inputs())
    del out
    return sum(saved.values())


@pytest.mark.parametrize("kind", [Stack, Reentrant, SelectiveFunction])
def test_saves_as_eager_when_compiled(kind):
    expected = saved_when_compiled(build(kind))
    assert expected < saved_when_compiled(build(NoCheckpoint))
    assert saved_when_compiled(capture(kind, "nonstrict")) <= 1.10 * expected


@pytest.mark.parametrize("how", ["nonstrict", "strict"])
@pytest.mark.parametrize("kind", MODELS)
def test_lets_go_of_everything(kind, how):
    module = capture(kind, how)
    x = inputs()
    module(x).sum().backward()
    with Allocations() as memory:
        module(x).sum().backward()
        after_backward = memory.alive()
        out = module(x)
        assert memory.alive() > 0
        del out
        after_forward_only = memory.alive()
        with torch.no_grad():
            module(x)
        after_no_grad = memory.alive()
    # Gradients are accumulated in place, so that a step adds nothing.
    assert (after_backward, after_forward_only, after_no_grad) == (0, 0, 0)


@pytest.mark.parametrize("how", ["nonstrict", "strict"])
@pytest.mark.parametrize("kind", MODELS)
def test_outputs_die_with_their_last_reference(kind, how):
    module = capture(kind, how)
    out = module(inputs())
    reference: Any = weakref.ref(out)
    del out
    assert reference() is None


@pytest.mark.parametrize("kind", MODELS)
def test_the_module_dies_with_its_last_reference_after_a_step(kind):
    module = capture(kind, "nonstrict")
    gc.collect()  # What capture leaves behind is not this test's subject.
    out = module(inputs())
    parameters = [weakref.ref(p) for p in module.parameters()]
    del module
    gc.collect()  # An fx.Graph and its module refer to each other.
    out.sum().backward()
    del out
    gc.collect()
    assert not [p for p in parameters if p() is not None]
