"""``saved_for_backward``: what a training step keeps between its forward and its backward.

The forward is run once, for real, and watched: which storages operations make,
who makes them (operation, line of the user's source), and which are still alive
when only the autograd graph is left.  So nothing has to be known about how a
Function or a region keeps its values.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.export import ExportedProgram
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hops._saved_frames import Place, custom_nodes, function_name_of, place_of

ACTIVATION, INPUT, PARAMETER, BUFFER = "activation", "input", "parameter", "buffer"


@dataclass(frozen=True)
class SavedTensor:
    """One storage that is kept for backward.

    Attributes:
        shape, dtype: of the tensor for which the storage was made.
        nbytes: size of the storage.
        role: "activation" for what the forward made; "input", "parameter" or
            "buffer" for what is there anyway.
        kept_by: the checkpointed region or Function that keeps it, or "autograd".
        made_by: the operation that made it; the name of an input, parameter or buffer.
        source: the user's line that made it, "file:line in function", or "".
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    role: str
    kept_by: str
    made_by: str
    source: str


@dataclass(frozen=True)
class SavedForBackward:
    """What a step keeps, each storage once; printed as a table.

    Attributes:
        tensors: in the order in which they were made; inputs, parameters and buffers last.
    """

    tensors: tuple[SavedTensor, ...]

    @property
    def activations(self) -> tuple[SavedTensor, ...]:
        """What the forward made."""
        return tuple(t for t in self.tensors if t.role == ACTIVATION)

    @property
    def total_bytes(self) -> int:
        """Bytes that the step adds to inputs, parameters and buffers."""
        return sum(t.nbytes for t in self.activations)

    @property
    def bytes_kept_by(self) -> dict[str, int]:
        """The total, by region and Function."""
        totals: dict[str, int] = {}
        for tensor in self.activations:
            totals[tensor.kept_by] = totals.get(tensor.kept_by, 0) + tensor.nbytes
        return totals

    def __str__(self) -> str:
        head = ("bytes", "tensor", "kept by", "made by", "source")
        rows = [
            (
                f"{t.nbytes:,}" if t.role == ACTIVATION else f"({t.nbytes:,})",
                f"{str(t.dtype).removeprefix('torch.')}[{', '.join(map(str, t.shape))}]",
                t.kept_by,
                t.made_by if t.role == ACTIVATION else f"{t.role} {t.made_by}",
                t.source,
            )
            for t in self.tensors
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        lines = [
            "  ".join(
                [row[0].rjust(widths[0]), *(c.ljust(w) for c, w in zip(row[1:], widths[1:]))]
            ).rstrip()
            for row in (head, *rows)
        ]
        count = len(self.activations)
        total = f"{self.total_bytes:,} bytes in {count} tensor{'' if count == 1 else 's'}"
        return "\n".join([*lines, f"total {total}; in brackets: there anyway, not counted"])


def saved_for_backward(module: Any, *args: Any, **kwargs: Any) -> SavedForBackward:
    """List what a training step keeps from its forward for its backward.

    Follows ``jax.ad_checkpoint.print_saved_residuals``.  Print the result for a table.
    The forward is run once on the given arguments; random state and buffers are put
    back afterwards, other state that it changes is not.

    Args:
        module: an ``nn.Module`` or function, a captured module, or an ``ExportedProgram``.
        args, kwargs: of the forward.

    Returns:
        Shape, dtype and size of each storage, which region or Function keeps it, and the
        line of the user's source that made it.  For a captured program that line is the
        one that was captured, also after a file.

    Raises:
        ValueError: no output requires grad, so that there is no backward.
    """
    if isinstance(module, ExportedProgram):
        module = module.module()
    owned = _owned(module, args, kwargs)
    watch = _Watch(set(owned))
    with _unchanged(module), warnings.catch_warnings(), torch.enable_grad():
        # Since 2.14 torch announces that such hooks will see what a policy keeps.
        warnings.filterwarnings("ignore", category=FutureWarning)
        with watch, torch.autograd.graph.saved_tensors_hooks(watch.packed, _as_it_is):
            output = module(*args, **kwargs)
        graph = [tensor.grad_fn for tensor in _tensors(output) if tensor.grad_fn is not None]
        requires_grad = any(tensor.requires_grad for tensor in _tensors(output))
        del output
        gc.collect()
        if not requires_grad:
            raise ValueError(
                "saved_for_backward: no output requires grad, so there is no backward. Let a "
                "parameter or an input require grad, and give out tensors that depend on it."
            )
        watch.ask_functions(graph)
        return SavedForBackward(tuple(watch.saved(owned)))


@dataclass(frozen=True)
class _Owned:
    role: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass
class _Made:
    reference: StorageWeakRef
    tensor: tuple[tuple[int, ...], torch.dtype, int]
    operation: str
    place: Place


class _Watch(TorchDispatchMode):
    """Follows storages, and holds none of them."""

    #: Other higher-order operators pass through.
    supports_higher_order_operators = True

    def __init__(self, owned: set[int]) -> None:
        super().__init__()
        self._owned = owned
        self._made: dict[int, _Made] = {}
        self._packed: dict[int, Place] = {}
        self._functions: dict[int, str] = {}
        self._inside_regions: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        place = place_of()
        if place.region and place.function_node is not None:
            self._inside_regions.add(place.function_node)
        for tensor in pytree.tree_leaves(output):
            key = _storage_key(tensor)
            if key is None or key in self._owned:
                continue
            if key in self._made and not self._made[key].reference.expired():
                continue
            storage = tensor.untyped_storage()
            described = (tuple(tensor.shape), tensor.dtype, storage.nbytes())
            self._made[key] = _Made(StorageWeakRef(storage), described, str(func), place)
            self._packed.pop(key, None)
        return output

    def packed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A node outside of all regions saves a tensor, or a region its input."""
        key = _storage_key(tensor)
        if key is not None and key not in self._packed:
            self._packed[key] = place_of()
        return tensor

    def ask_functions(self, graph: list[Any]) -> None:
        """Ask the Functions outside of regions what they keep; a question inside of a
        region would start its recomputation."""
        for node in custom_nodes(graph):
            if id(node) in self._inside_regions:
                continue
            held = [*node.saved_tensors, *pytree.tree_leaves(list(vars(node).values()))]
            for value in held:
                key = _storage_key(value)
                if key is not None:
                    self._functions.setdefault(key, function_name_of(node))

    def saved(self, owned: dict[int, _Owned]) -> Iterator[SavedTensor]:
        for key, made in self._made.items():
            *_, nbytes = made.tensor
            if nbytes and not made.reference.expired():
                yield SavedTensor(
                    *made.tensor,
                    ACTIVATION,
                    self._keeper(key, made.place),
                    made.operation,
                    made.place.source,
                )
        for key, there in owned.items():
            if key in self._packed or key in self._functions:
                keeper = self._keeper(key, self._packed.get(key))
                described = (there.shape, there.dtype, there.nbytes)
                yield SavedTensor(*described, there.role, keeper, there.name, "")

    def _keeper(self, key: int, place: Place | None) -> str:
        """A Function that was asked; where a node saved it; where it was made."""
        if key in self._functions:
            return self._functions[key]
        place = self._packed.get(key, place)
        return (place and place.region) or "autograd"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storage_key(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()._cdata


def _tensors(output: Any) -> list[torch.Tensor]:
    """The tensors of an output: leaves, and attributes of objects that are no pytrees."""
    found = []
    for leaf in pytree.tree_leaves(output):
        inner = [leaf] if isinstance(leaf, torch.Tensor) else pytree.tree_leaves(_attributes(leaf))
        found += [value for value in inner if isinstance(value, torch.Tensor)]
    return found


def _attributes(value: Any) -> dict[str, Any]:
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _owned(module: Any, args: Any, kwargs: Any) -> dict[int, _Owned]:
    """Storages that are there before the forward, by key."""
    named: list[tuple[str, str, Any]] = []
    if isinstance(module, torch.nn.Module):
        named += [(PARAMETER, name, p) for name, p in module.named_parameters()]
        named += [(BUFFER, name, b) for name, b in module.named_buffers()]
    for position, value in enumerate(args):
        named += [(INPUT, str(position), leaf) for leaf in pytree.tree_leaves(value)]
    for name, value in kwargs.items():
        named += [(INPUT, name, leaf) for leaf in pytree.tree_leaves(value)]
    owned: dict[int, _Owned] = {}
    for role, name, tensor in named:
        key = _storage_key(tensor)
        if key is not None and key not in owned:
            size = tensor.untyped_storage().nbytes()
            owned[key] = _Owned(role, name, tuple(tensor.shape), tensor.dtype, size)
    return owned


@contextlib.contextmanager
def _unchanged(module: Any) -> Iterator[None]:
    """Put random state and buffers back."""
    modules = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    before = [
        (m, name, buffer, buffer.detach().clone())
        for m in modules
        for name, buffer in m._buffers.items()
        if buffer is not None
    ]
    with torch.random.fork_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for owner, name, buffer, value in before:
                    buffer.copy_(value)
                    owner._buffers[name] = buffer
