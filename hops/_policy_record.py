"""Recording what a selective policy decides: at capture, and again when a body is traced anew."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from hops import policies
from hops._decisions import (
    DEFAULT,
    Decisions,
    Recorder,
    RecordingInterpreter,
    decisions_of,
    is_marked,
    mark,
)
from hops._named_execution import Execution
from hops._policy import (
    NOTHING,
    OPAQUE,
    KeptPolicy,
    counting,
    live_context_fn,
    operations_of,
    read_counted,
    region_name,
)
from hops._torch import (
    FakeTensorMode,
    disable_proxy_modes_tracing,
    selective_checkpoint_modes,
    set_grad_enabled_silently,
)
from hops.errors import CaptureError, HopsWarning
from hops.tag_activation_checkpoint import CONTEXT_FN

#: Where in ``node.meta["custom"]`` the nodes of a new trace tell their node of the old one.
_ORIGIN = "hops_origin"


def record_policy(context_fn: Any, body: fx.GraphModule, values: Sequence[Any]) -> dict[str, Any]:
    """Write on a body what its policy decides, and keep the policy with it.

    Args:
        values: an example of each operand, of which only shape, dtype and
            device count.

    Returns:
        The keywords by which the region's node holds the policy.
    """
    # A policy of hops.policies that came as a plain function.
    context_fn = getattr(context_fn, "policy", context_fn)
    body.meta[CONTEXT_FN] = KeptPolicy(context_fn, operations_of(body))
    contexts = context_fn()
    if not isinstance(contexts, (tuple, list)) or len(contexts) != 2:
        raise CaptureError(
            f"hops: the context_fn of {region_name(body)} gives {contexts!r}. It must give a pair "
            "of context managers, one for the forward and one for the recomputation."
        )
    if not isinstance(contexts[0], selective_checkpoint_modes[0]):
        return {"policy": [OPAQUE]}
    policy_fn = contexts[0].policy_fn
    recorder = Recorder(policy_fn)
    _run(body, values, recorder)
    options: dict[str, Any] = {"policy": _write(recorder)}
    if isinstance(context_fn, policies.Policy):
        options["policy_name"] = context_fn.text
    if getattr(contexts[1], "allow_cache_entry_mutation", False):
        options["allow_cache_entry_mutation"] = True
    _warn_of_packets(body, recorder, policy_fn)
    return options


def numbered(body: fx.GraphModule, options: dict[str, Any], values: Sequence[Any]) -> Any:
    """A body as a new trace is to read it: each node that has decisions hands its number on
    to the nodes that come of it."""
    if "policy" not in options or OPAQUE in options["policy"]:
        return body
    if not is_marked(body):
        recorder = Recorder(counting(read_counted(options["policy"])))
        _run(body, values, recorder)
        _write(recorder)
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    for position, node in enumerate(body.graph.nodes):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if decisions_of(node) is not None:
            custom = {**node.meta["custom"], _ORIGIN: position}
            copies[node].meta["custom"] = custom
    return fx.GraphModule(body, graph)


def carry_policy(
    body: fx.GraphModule, options: dict[str, Any], traced: fx.GraphModule, values: Sequence[Any]
) -> dict[str, Any]:
    """Write on a new trace of a body what was decided for the old one.

    An operation that the trace decomposed leaves its decision to the last of
    those that it became, which gives its result.

    Args:
        traced: the trace of :func:`numbered` ``(body)``.

    Returns:
        The keywords of the new region's node.
    """
    context_fn = live_context_fn(body, options)
    if OPAQUE in options["policy"]:
        if context_fn is not None:
            traced.meta[CONTEXT_FN] = KeptPolicy(context_fn, operations_of(traced))
        return options
    origins = {node: _pop_origin(node) for node in traced.graph.nodes}
    old = [decisions_of(node) for node in body.graph.nodes]
    heir = _Heir(old)
    recorder = Recorder(heir)
    heir.follow(recorder, origins)
    _run(traced, values, recorder)
    heir.settle(recorder, origins)
    undecided = [node for node in recorder.taken if origins[node] is None]
    for node in undecided:
        del recorder.taken[node]
    counted = _write(recorder)
    before = [entry for decisions in old if decisions for entry in decisions]
    after = [entry for taken in recorder.taken.values() for entry in taken]
    if context_fn is not None and before == after and not undecided:
        traced.meta[CONTEXT_FN] = KeptPolicy(context_fn, operations_of(traced))
    return {**options, "policy": counted}


def _pop_origin(node: fx.Node) -> int | None:
    custom = dict(node.meta.get("custom") or {})
    origin = custom.pop(_ORIGIN, None)
    if custom:
        node.meta["custom"] = custom
    else:
        node.meta.pop("custom", None)
    return origin


class _Heir:
    """The policy that gives the operations of a new trace the decisions of the old nodes."""

    def __init__(self, old: Sequence[Decisions | None]) -> None:
        self._left = [list(decisions or ()) for decisions in old]

    def follow(self, recorder: Recorder, origins: dict[fx.Node, int | None]) -> None:
        self._recorder, self._origins = recorder, origins

    def __call__(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        origin = self._origins[self._recorder.node]
        if origin is None:
            return DEFAULT
        left = self._left[origin]
        for position, (name, decision) in enumerate(left):
            if name == str(operation):
                del left[position]
                return decision
        return DEFAULT

    def settle(self, recorder: Recorder, origins: dict[fx.Node, int | None]) -> None:
        last = {origins[node]: node for node, taken in recorder.taken.items() if taken}
        for origin, node in last.items():
            if origin is None:
                continue
            remaining = [d for _, d in self._left[origin] if d is not DEFAULT]
            if remaining:
                operation, _ = recorder.taken[node][-1]
                recorder.taken[node][-1] = (operation, remaining[-1])


def _run(body: fx.GraphModule, values: Sequence[Any], recorder: Recorder) -> None:
    with disable_proxy_modes_tracing(), set_grad_enabled_silently(True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        statistics = _statistics(body)
        with mode:
            operands = [_fake(v, i not in statistics) for i, v in enumerate(values)]
        with mode, recorder:
            RecordingInterpreter(body, recorder).run(*operands)


def _statistics(body: fx.GraphModule) -> set[int]:
    """Which inputs of a body are running statistics of a normalization, which may not
    require grad."""
    found: set[fx.Node] = set()
    for node in body.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            named = zip(schema.arguments, node.args)
            found.update(
                a for s, a in named if s.name.startswith("running_") and isinstance(a, fx.Node)
            )
        elif node.op == "call_function" and node.args:
            bodies = [a for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"]
            inner = getattr(body, str(bodies[0].target), None) if bodies else None
            if isinstance(inner, fx.GraphModule):
                operands = node.args[len(bodies) :]
                found.update(operands[i] for i in _statistics(inner) if i < len(operands))
    placeholders = body.graph.find_nodes(op="placeholder")
    return {i for i, placeholder in enumerate(placeholders) if placeholder in found}


def _fake(value: Any, differentiable: bool) -> Any:
    """A stand-in for an operand, made in the fake mode that is active."""
    if not isinstance(value, torch.Tensor):
        return _concrete(value)
    sizes, strides = ([_concrete(s) for s in f()] for f in (value.size, value.stride))
    fake = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if differentiable and (fake.is_floating_point() or fake.is_complex()):
        fake.requires_grad_()
        return fake.view_as(fake)
    return fake


def _concrete(value: Any) -> Any:
    """A symbolic number at the value that it was traced with."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


def _write(recorder: Recorder) -> list[str]:
    """Mark the nodes; the decisions of the whole region by operation and count."""
    counts: Counter[str] = Counter()
    counted = []
    for node, taken in recorder.taken.items():
        mark(node, tuple(taken))
        for operation, decision in taken:
            if decision is not DEFAULT:
                counted.append(f"{operation} {counts[operation]} {decision.name}")
            counts[operation] += 1
    return counted or [NOTHING]


def _warn_of_packets(body: fx.GraphModule, recorder: Recorder, policy_fn: Any) -> None:
    """Warn where a policy can never match what it names."""
    if isinstance(policy_fn, Execution):
        wanted = _given_operations(policy_fn.policy)
    else:
        wanted = {str(packet) for packet in _packets_in(policy_fn)}
    entries = [entry for taken in recorder.taken.values() for entry in taken]
    ran = {operation for operation, _ in entries}
    if any(decision is not DEFAULT for _, decision in entries):
        return
    if not isinstance(policy_fn, Execution):
        wanted = {packet for packet in wanted if any(o.startswith(packet + ".") for o in ran)}
    if not wanted:
        return
    advice = (
        "Operations in it are " + ", ".join(sorted(ran)) + "."
        if isinstance(policy_fn, Execution)
        else "A policy is asked about overloads, such as torch.ops.aten.mm.default, which no "
        "packet equals; compare operation.overloadpacket, or use hops.policies.save_ops."
    )
    warnings.warn(
        f"hops: the policy of {region_name(body)} names {', '.join(sorted(wanted))} and saves "
        f"nothing there. {advice}",
        HopsWarning,
        stacklevel=2,
    )


def _given_operations(policy: Any) -> set[str]:
    if isinstance(policy, policies.BothOf):
        return set().union(*map(_given_operations, policy.policies))
    return set(policy.operations) if isinstance(policy, policies.SaveOps) else set()


def _packets_in(policy_fn: Any) -> Iterable[Any]:
    """The operation packets that a policy function refers to."""
    seen: list[Any] = []
    function = policy_fn
    while hasattr(function, "func"):  # functools.partial
        seen += [*function.args, *function.keywords.values()]
        function = function.func
    if not hasattr(function, "__code__"):
        seen += vars(function).values() if hasattr(function, "__dict__") else []
        function = type(function).__dict__.get("__call__")
    code = getattr(function, "__code__", None)
    if code is not None:
        seen += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        seen += [function.__globals__[n] for n in code.co_names if n in function.__globals__]
        seen += function.__defaults__ or ()
    for value in seen:
        items = value if isinstance(value, (list, tuple, set, frozenset, dict)) else (value,)
        yield from (i for i in items if isinstance(i, torch._ops.OpOverloadPacket))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
