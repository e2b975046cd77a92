"""The selective policy of a checkpointed region, from capture to replay.

While the process lives and the body is as it was captured, the body's metadata
holds the user's ``context_fn`` itself, and each execution calls it.  Everywhere
else the recorded decisions are repeated: those on the nodes of the body
(``hops._decisions``), or, in a body whose nodes lost theirs (a module that was
pickled), the keyword ``policy`` of the region's node, a list of texts
``"<operation> <n> <decision>"`` for the n-th call of an operation in the region,
where the decision is not the default ``PREFER_RECOMPUTE``.  A policy of
``hops.policies`` also leaves its text, the keyword ``policy_name``.  Nothing of
a file is run.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hops import policies
from hops._decisions import (
    DEFAULT,
    Follower,
    called_nodes,
    damaged,
    decisions_of,
    following,
    is_marked,
    policy_named,
)
from hops._source_lines import last_line
from hops.errors import HopsWarning, ReplayError
from hops.tag_activation_checkpoint import CONTEXT_FN

#: Stands for a policy whose decisions cannot be seen from outside.
OPAQUE = "opaque"

#: Stands for a policy that decided nothing but the default (a file cannot hold an empty list).
NOTHING = "none 0 PREFER_RECOMPUTE"


class KeptPolicy:
    """A body's ``meta["_checkpoint_context_fn"]``: the user's ``context_fn``, and the
    operations of the body for which it stands.  It goes with copies of the body;
    a pickle of the body forgets it."""

    def __init__(self, context_fn: Any, operations: tuple[str, ...]) -> None:
        self.context_fn = context_fn
        self.operations = operations
        if hasattr(context_fn, "cache_hash"):
            # By which AOTAutograd's cache tells policies apart.
            self.cache_hash = context_fn.cache_hash

    def __call__(self) -> Any:
        return self.context_fn()

    def __deepcopy__(self, memo: Any) -> KeptPolicy:
        return self

    def __reduce__(self) -> Any:
        return KeptPolicy, (None, ())


@dataclass(frozen=True)
class Selective:
    """How a region with a policy is run: this body, with these contexts."""

    context_fn: Any
    body: fx.GraphModule


#: What :func:`policy_of` found, with the code and keywords for which it holds: the contexts, and
#: the body to run, None for the one that is the key (a reference to it would keep it alive).
_found: weakref.WeakKeyDictionary[fx.GraphModule, tuple[Any, Any, Any]] = (
    weakref.WeakKeyDictionary()
)


def policy_of(body: fx.GraphModule, options: dict[str, Any]) -> Selective | None:
    """How a region is run, or None for a region without a policy.

    Raises:
        ReplayError: the region was loaded from a file that could not hold its policy,
            or holds a policy that cannot be read.
    """
    kept = body.meta.get(CONTEXT_FN)
    if "policy" not in options:
        return None if kept is None else Selective(kept, body)
    key = (body.code, kept, options["policy"], options.get("policy_name"))
    if body not in _found or _found[body][0] != key:
        live = live_context_fn(body, options)
        found = (kept, None) if live is not None else _recorded(body, options)
        _found[body] = (key, *found)
    _, context_fn, other = _found[body]
    return Selective(context_fn, body if other is None else other)


def live_context_fn(body: fx.GraphModule, options: dict[str, Any]) -> Any:
    """The user's own ``context_fn``, or None where it is gone or stands for another body."""
    kept = body.meta.get(CONTEXT_FN)
    if not isinstance(kept, KeptPolicy) or kept.context_fn is None:
        return None
    unchanged = kept.operations == operations_of(body) or OPAQUE in options.get("policy", ())
    return kept.context_fn if unchanged else None


def shown_context_fn(body: fx.GraphModule, options: dict[str, Any]) -> Any:
    """What a reader of the graph is told: the user's ``context_fn``, a policy of
    ``hops.policies`` that a file names, or None."""
    kept = body.meta.get(CONTEXT_FN)
    if isinstance(kept, KeptPolicy):
        kept = kept.context_fn
    if kept is None and "policy_name" in options:
        return policies.from_text(options["policy_name"])
    return kept


def operations_of(body: fx.GraphModule) -> tuple[str, ...]:
    return tuple(str(node.target) for node in called_nodes(body))


def _recorded(body: fx.GraphModule, options: dict[str, Any]) -> tuple[Any, Any]:
    """Contexts that repeat the recorded decisions, and the body to run under them."""
    if "policy_name" in options:
        policies.from_text(options["policy_name"])
    decisions = read_counted(options["policy"])
    if not is_marked(body):
        return functools.partial(_counting_contexts, decisions, options), None
    nodes = called_nodes(body)
    follower = Follower([decisions_of(node) for node in nodes], _Complaint(body, nodes))
    contexts = functools.partial(_contexts, follower, options)
    return contexts, following(body, follower)


def _contexts(policy: Any, options: dict[str, Any]) -> Any:
    mutable = options.get("allow_cache_entry_mutation", False)
    return create_selective_checkpoint_contexts(policy, allow_cache_entry_mutation=mutable)


class _Complaint:
    """Says, once a node, that an operation is recomputed for want of a decision."""

    def __init__(self, body: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        self._region = region_name(body)
        self._names = [node.name for node in nodes]
        self._said: set[int] = set()

    def __call__(self, operation: Any, position: int) -> None:
        if position in self._said:
            return
        self._said.add(position)
        warnings.warn(
            f"hops: {self._region} has no decision of its policy for {operation} (node "
            f"{self._names[position]!r}), which a pass put there after the capture; it is "
            "recomputed. Copy node.meta['custom'] from the node that it replaces, or capture "
            "the model again after the pass.",
            HopsWarning,
            stacklevel=2,
        )


def region_name(body: fx.GraphModule) -> str:
    """Words for a region, for messages: where in the user's source it is."""
    for node in called_nodes(body):
        place = last_line(node.meta.get("stack_trace") or "")
        if place:
            return f"the checkpointed region at {place}"
    names = ", ".join(node.name for node in called_nodes(body)[:3])
    return f"the checkpointed region of {names}"


def read_counted(policy: Sequence[str]) -> dict[tuple[str, int], CheckpointPolicy]:
    """Decisions by operation and count, from the keyword ``policy``."""
    if OPAQUE in policy:
        raise _not_held()
    decisions = {}
    for line in policy:
        operation, _, rest = line.partition(" ")
        count, _, decision = rest.partition(" ")
        if not count.isdecimal():
            raise damaged(line)
        decisions[operation, int(count)] = policy_named(decision, line)
    return decisions


def _not_held() -> ReplayError:
    return ReplayError(
        "hops: this checkpointed region had a policy made of context managers of the user's "
        "own, which a file cannot hold. Capture the model again in this process, or give the "
        "policy by torch.utils.checkpoint.create_selective_checkpoint_contexts."
    )


def counting(decisions: dict[tuple[str, int], CheckpointPolicy]) -> Any:
    """The policy that repeats decisions by count; forward and recompute count apart."""
    calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, counter = str(operation), calls[context.is_recompute]
        decision = decisions.get((name, counter[name]), DEFAULT)
        counter[name] += 1
        return decision

    return policy


def _counting_contexts(
    decisions: dict[tuple[str, int], CheckpointPolicy], options: dict[str, Any]
) -> Any:
    return _contexts(counting(decisions), options)
