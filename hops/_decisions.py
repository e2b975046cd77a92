"""What a selective policy decided, written on the nodes of a captured body.

A node of a body carries, in ``meta["custom"]`` (which passes copy, deepcopy
keeps, and files hold), the text of what was decided for each operation that it
dispatches to: one for ``sin``, two for ``linear`` (``t`` and ``addmm``), those of
all nodes inside for a nested region::

    "aten.t.default PREFER_RECOMPUTE, aten.addmm.default MUST_SAVE"

So an operation that a pass inserts or removes leaves the decisions of the
others alone, and one without a text is one that nobody decided on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from hops._torch import sac_context, sac_ignored_operations
from hops.autograd_function_apply import MARK
from hops.errors import ReplayError

#: The operations that a node dispatches to, in order, with the decision for each.
Decisions = tuple[tuple[str, CheckpointPolicy], ...]

DEFAULT = CheckpointPolicy.PREFER_RECOMPUTE

Policy = Callable[..., Any]


def decisions_of(node: fx.Node) -> Decisions | None:
    """The decisions that a node carries, or None.

    Raises:
        ReplayError: its text is not one.
    """
    text = (node.meta.get("custom") or {}).get(MARK)
    if text is None:
        return None
    return tuple(_read_one(part, text) for part in text.split(", ")) if text else ()


def _read_one(part: str, text: str) -> tuple[str, CheckpointPolicy]:
    operation, _, decision = part.rpartition(" ")
    if not operation:
        raise damaged(text)
    return operation, policy_named(decision, text)


def policy_named(name: str, text: str) -> CheckpointPolicy:
    """The member of ``CheckpointPolicy`` of that name."""
    if name not in CheckpointPolicy.__members__:
        raise damaged(text)
    return CheckpointPolicy[name]


def damaged(text: str) -> ReplayError:
    return ReplayError(
        f"hops: the policy of a checkpointed region holds {text!r}, which this torch and hops "
        "cannot read; the file is damaged or from a newer version. Capture the model again."
    )


def mark(node: fx.Node, decisions: Decisions) -> None:
    """Write decisions on a node; its dictionary of annotations is not shared with others."""
    text = ", ".join(f"{operation} {decision.name}" for operation, decision in decisions)
    node.meta["custom"] = {**(node.meta.get("custom") or {}), MARK: text}


def is_marked(body: fx.GraphModule) -> bool:
    return any(MARK in (node.meta.get("custom") or {}) for node in body.graph.nodes)


class Recorder(TorchDispatchMode):
    """Asks a policy about each operation, and notes which node of a body it belongs to.

    Attributes:
        taken: for each node that ran, what was decided, in order.
        node: the node that runs.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.taken: dict[fx.Node, list[tuple[str, CheckpointPolicy]]] = {}
        self._policy = policy
        self.node: fx.Node | None = None
        self._places: dict[Any, list[tuple[fx.Node, int]]] = {}
        if hasattr(policy, "save_earlier"):
            policy.save_earlier = self._save_earlier

    @contextmanager
    def at(self, node: fx.Node) -> Iterator[None]:
        before, self.node = self.node, node
        self.taken.setdefault(node, [])
        try:
            yield
        finally:
            self.node = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in sac_ignored_operations or self.node is None:
            return output
        decision = self._policy(sac_context(False, output), func, *args, **kwargs)
        if isinstance(decision, bool):
            decision = CheckpointPolicy.MUST_SAVE if decision else DEFAULT
        elif not isinstance(decision, CheckpointPolicy):
            decision = DEFAULT  # None, say; torch saves what a policy says to save, and no more
        taken = self.taken[self.node]
        self._places.setdefault(func, []).append((self.node, len(taken)))
        taken.append((str(func), decision))
        return output

    def _save_earlier(self, operation: Any, index: int, output: Any) -> bool:
        node, position = self._places[operation][index]
        self.taken[node][position] = (str(operation), CheckpointPolicy.MUST_SAVE)
        return True


class RecordingInterpreter(fx.Interpreter):
    """Runs a body under a recorder, node by node."""

    def __init__(self, body: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(body)
        self.extra_traceback = False
        self._recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method", "call_module"):
            return super().run_node(n)
        with self._recorder.at(n):
            return super().run_node(n)


class Follower:
    """The policy that repeats the decisions on the nodes of a body.

    It is told which node runs by :func:`following`.  One serves all executions
    of the body: on each thread they run one after the other.

    Args:
        decisions: of each node, None for one that has none.
        complain: called with the operation and the node where there is no decision.
    """

    def __init__(
        self,
        decisions: Sequence[Decisions | None],
        complain: Callable[[Any, int], None],
    ) -> None:
        self._decisions = decisions
        self._lookup = [None if d is None else _by_count(d) for d in decisions]
        self._complain = complain
        self._now = threading.local()

    def enter(self, position: int) -> None:
        """The node at ``position`` starts."""
        self._now.position = position
        self._now.counts = Counter()
        self._now.total = 0

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        now, name = self._now, str(operation)
        found = self._lookup[now.position]
        if found is None:
            self._complain(operation, now.position)
            return DEFAULT
        key = (name, now.counts[name])
        now.counts[name] += 1
        now.total += 1
        if key in found:
            return found[key]
        return self._of_another_kernel(operation, now.position, now.total - 1)

    def _of_another_kernel(self, operation: Any, position: int, index: int) -> CheckpointPolicy:
        """A node that runs other operations than when it was captured, as attention does
        on another device: what was decided for the operation in the same place."""
        decisions = self._decisions[position] or ()
        if all(decision is DEFAULT for _, decision in decisions):
            return DEFAULT
        if index < len(decisions):
            return decisions[index][1]
        self._complain(operation, position)
        return DEFAULT


def _by_count(decisions: Decisions) -> dict[tuple[str, int], CheckpointPolicy]:
    counts: Counter[str] = Counter()
    found = {}
    for operation, decision in decisions:
        found[operation, counts[operation]] = decision
        counts[operation] += 1
    return found


def following(body: fx.GraphModule, follower: Follower) -> fx.GraphModule:
    """``body`` with a call before each node that tells a follower which node comes; run as
    code or node by node, it does what ``body`` does."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    # One object: fx wants that of every node of the same name.
    enter = follower.enter
    position = 0
    for node in body.graph.nodes:
        if node.op in _CALLS:
            graph.call_function(enter, (position,))
            position += 1
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(body, graph)


_CALLS = ("call_function", "call_method", "call_module")


def called_nodes(body: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a body that run something, in order."""
    return [node for node in body.graph.nodes if node.op in _CALLS]
