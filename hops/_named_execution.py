"""One execution of a region under a policy of ``hops.policies``.

[Note: keeping a value by its name]
A region is recomputed from its first operation on, so keeping the output of
``checkpoint_name`` alone would keep memory and save no work: what made the
value is run again before it is reached.  When a name that the policy saves
comes by, the decision is therefore taken for the operation that made the value:
its output, which is the same memory, is put where the recomputation takes it
from (eager, torch 2.10 on), its node is tagged (under AOTAutograd), or it is
recorded for it (capture).  Where that cannot be (an operation with several
outputs, of which the others may be gone; one in place; a value from outside of
the region; torch before 2.10), the name itself is decided on, which is always
right and keeps the same memory.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hops._names import CHECKPOINT_NAME
from hops._torch import (
    FakeTensor,
    cache_earlier_output,
    post_dispatch_node,
    view_tracking_active,
)


class Execution:
    """Asks a policy about each operation of one execution of a region.

    Attributes:
        policy: of ``hops.policies``.
        save_earlier: ``(operation, n, output) -> bool``: decide now, for the n-th
            call of an operation that ran already, that its output is kept;
            ``output`` has the memory and layout of what it gave.
    """

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.save_earlier: Callable[[Any, int, torch.Tensor], bool] = _cannot
        self._calls: Counter[Any] = Counter()
        self._made: dict[int, _Made] = {}

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = self.policy.saves(operation, args)
        if not context.is_recompute:
            if saved and operation is CHECKPOINT_NAME and self._maker_is_saved(args[0]):
                saved = False
            self._note(operation, getattr(context, "op_output", None))
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def _note(self, operation: Any, output: Any) -> None:
        """Remember who made which memory; holds no tensor."""
        index = self._calls[operation]
        self._calls[operation] += 1
        if type(output) is not torch.Tensor and not _is_fake(output):
            return
        key = output.untyped_storage()._cdata
        schema = getattr(operation, "_schema", None)
        if schema is None or schema.is_mutable:
            self._made.pop(key, None)
        elif key not in self._made or self._made[key].storage.expired():
            self._made[key] = _Made(operation, index, output)

    def _maker_is_saved(self, value: torch.Tensor) -> bool:
        node = post_dispatch_node(value)
        if node is not None:
            return _tag_maker(node)
        if type(value) is not torch.Tensor and not _is_fake(value):
            return False
        made = self._made.get(value.untyped_storage()._cdata)
        if made is None or made.storage.expired() or made.dtype != value.dtype:
            return False
        with view_tracking_active():
            output = value.detach().as_strided(made.size, made.stride, made.offset)
        return self.save_earlier(made.operation, made.index, output)


class _Made:
    """Memory that an operation made, and how its output lies in it."""

    __slots__ = ("dtype", "index", "offset", "operation", "size", "storage", "stride")

    def __init__(self, operation: Any, index: int, output: torch.Tensor) -> None:
        self.operation = operation
        self.index = index
        self.storage = StorageWeakRef(output.untyped_storage())
        self.dtype = output.dtype
        self.size, self.stride = output.size(), output.stride()
        self.offset = output.storage_offset()


def contexts_of(policy: Any) -> tuple[Any, Any]:
    """The pair of contexts of one execution under a policy of ``hops.policies``."""
    execution = Execution(policy)
    forward, recompute = create_selective_checkpoint_contexts(execution)
    execution.save_earlier = functools.partial(cache_earlier_output, weakref.ref(forward))
    return forward, recompute


def _cannot(operation: Any, index: int, output: torch.Tensor) -> bool:
    return False


def _is_fake(value: Any) -> bool:
    return type(value) is FakeTensor


def _tag_maker(node: fx.Node) -> bool:
    """Tag the node that made a value of the region, below views of it, as saved."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    schema = getattr(node.target, "_schema", None)
    single = schema is not None and len(schema.returns) == 1 and not schema.is_mutable
    if node.op != "call_function" or "recompute" not in node.meta or not single:
        return False
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return True


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (
        schema is not None
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and not schema.returns[0].alias_info.is_write
    )
