"""From a call of ``torch.utils.checkpoint.checkpoint`` to ``tag_activation_checkpoint``.

[Note: where a checkpoint is caught]
``checkpoint`` may have been imported under any name before hops.  While a
capture runs, the code object of the function itself is exchanged
(``hops._patches``), so every alias leads to :func:`checkpoint_entered`; a
thread that does not capture goes on to the original.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from hops._assigned_buffers import AssignedBuffers
from hops._effects import Watch
from hops._policy_record import carry_policy, numbered, record_policy
from hops._refusals import running_as_a_graph
from hops._subgraph import ClosedBody, Recording, add_output, close_body, emit, node_of, owner_of
from hops._torch import (
    CHECKPOINT_KEYWORDS,
    SYMBOLIC_TYPES,
    pre_dispatch_tracer,
    set_grad_enabled_silently,
    torch_checkpoint,
    without_torch_functions,
)
from hops.autograd_function_apply import run_body
from hops.tag_activation_checkpoint import (
    CONTEXT_FN,
    node_options,
    tag_activation_checkpoint,
)


def checkpoint_entered(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Called in place of ``checkpoint`` while any thread captures.

    Args:
        original: ``checkpoint`` as torch wrote it.
        args, kwargs: what the user called it with.
    """
    if pre_dispatch_tracer() is None:
        return original(*args, **kwargs)
    kwargs = dict(kwargs)
    function = args[0] if args else kwargs.pop("function", None)
    if function is None:
        return original(*args, **kwargs)
    options = {k: kwargs.pop(k) for k in CHECKPOINT_KEYWORDS if k in kwargs}
    use_reentrant = resolve_use_reentrant(original, options, kwargs)
    return _capture_region(function, args[1:], kwargs, {**options, "use_reentrant": use_reentrant})


def resolve_use_reentrant(
    original: Callable[..., Any], options: dict[str, Any], kwargs: dict[str, Any]
) -> bool:
    """Which implementation eager would take, after torch's own checks and warnings.

    Where the answer is not written down, or the keywords may not go together,
    a probe is checkpointed instead of the user's function: torch raises or
    warns as it would, and grad mode inside tells the implementation.
    """
    asked = options.get("use_reentrant")
    context_fn = options.get("context_fn", torch_checkpoint.noop_context_fn)
    doubtful = kwargs or options.get("debug") or context_fn is not torch_checkpoint.noop_context_fn
    if asked is False or (asked and not doubtful):
        return asked
    grad_modes: list[bool] = []

    def probe(**ignored: Any) -> None:
        grad_modes.append(torch.is_grad_enabled())

    with without_torch_functions(), set_grad_enabled_silently(True):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            original(probe, **options, **kwargs)
    return not grad_modes[0]


def _capture_region(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    direct = [a for a in args if isinstance(a, torch.Tensor)]
    if options["use_reentrant"] and not any(t.requires_grad for t in direct):
        return _run_without_gradient(function, args, kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    name = _region_name(function)
    watch = Watch(name, [function], (*args, *kwargs.values()))

    def run() -> Any:
        with running_as_a_graph(name, watch.reachable):
            result = function(*args, **kwargs)
        watch.report()
        return result

    result = _record(name, run, options, _policy_recorder(options))
    return opaque_detached(result) if options["use_reentrant"] else result


def opaque_detached(result: Any) -> Any:
    """A reentrant region is a Function, to which a tensor inside a list, dict or tuple is no
    output: it comes out without a gradient."""
    if type(result) is tuple:
        return tuple([_detached(v) for v in result])
    return _detached(result)


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value
    return pytree.tree_map(lambda v: v.detach() if isinstance(v, torch.Tensor) else v, value)


def capture_body(body: fx.GraphModule, operands: Sequence[Any], options: dict[str, Any]) -> Any:
    """Capture a region that is an operator already: in Dynamo's graph, or in one that
    is exported again."""
    if not torch.is_grad_enabled():
        return run_body(body, operands)
    name = "a checkpointed region"
    if "policy" not in options:
        # From Dynamo's graph: nothing was recorded yet.
        options = {**options, "context_fn": body.meta.get(CONTEXT_FN)}
        return _record(name, lambda: run_body(body, operands), options, _policy_recorder(options))
    numbered_body = numbered(body, options, operands)
    carried = functools.partial(carry_policy, body, options)
    return _record(name, lambda: run_body(numbered_body, operands), options, carried)


#: Writes the policy of a region on its new body, given examples of the operands; the
#: keywords of its node.
PolicyWriter = Callable[[fx.GraphModule, Sequence[Any]], dict[str, Any]]


def _policy_recorder(options: dict[str, Any]) -> PolicyWriter | None:
    context_fn = options.get("context_fn")
    if context_fn is None or context_fn is torch_checkpoint.noop_context_fn:
        return None
    return functools.partial(record_policy, context_fn)


def _record(
    name: str, run: Callable[[], Any], options: dict[str, Any], policy: PolicyWriter | None
) -> Any:
    region = Recording(pre_dispatch_tracer(), name)
    with region.active(), AssignedBuffers() as assigned:
        result = run()
    leaves, spec = pytree.tree_flatten(result)
    region.lift_free_values()
    if not _records_gradient(region, leaves):
        region.splice()
        assigned.assign_outside(region.tracer)
        return result
    _write(region, leaves, options, policy)
    assigned.assign_outside(region.tracer)
    return result


def _region_name(function: Any) -> str:
    """A region as a warning names it: by what it runs."""
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    named = type(owner) if isinstance(owner, torch.nn.Module) else function
    if not hasattr(named, "__qualname__"):
        named = type(named)
    return f"the checkpointed region {named.__module__}.{named.__qualname__}"


def _records_gradient(region: Recording, leaves: list[Any]) -> bool:
    """Whether backward would have anything to recompute.  The outputs tell, unless they
    are inside objects that are no pytrees; then any value of the region does."""
    if not region.graph.nodes:
        return False
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves):
        return True
    return any(
        tensor.requires_grad and slot.proxy.node.graph is region.graph
        for tensor, slot in region.tracer.tensor_tracker.items()
    )


def _run_without_gradient(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A reentrant region with no input that requires grad: eager runs it in
    no-grad mode, so that its parameters get no gradient, and warns."""
    if torch.is_grad_enabled():
        warnings.warn(
            "None of the inputs have requires_grad=True. Gradients will be None",
            stacklevel=5,
        )
        with torch.no_grad():
            return function(*args, **kwargs)
    return function(*args, **kwargs)


def _outputs(region: Recording, leaves: list[Any]) -> dict[fx.Node, Any]:
    """What the region gives out, by its node in the body.

    An operand that it returns untouched is none of it; but where there is nothing
    else it stands for the region, since a file cannot hold an operator without output.
    """
    made: dict[fx.Node, Any] = {}
    untouched: dict[fx.Node, Any] = {}
    for value in leaves:
        if not isinstance(value, (torch.Tensor, *SYMBOLIC_TYPES)):
            continue
        with region.active():
            node = node_of(value, region.tracer)
        if not isinstance(node, fx.Node):
            continue
        own = node.graph is region.graph and node.op not in ("placeholder", "get_attr")
        if own:
            made.setdefault(node, value)
        elif isinstance(value, torch.Tensor):
            untouched.setdefault(node, value)
    return made or {region.lift(node): value for node, value in untouched.items()}


def _write(
    region: Recording, leaves: list[Any], options: dict[str, Any], policy: PolicyWriter | None
) -> None:
    tracer = region.tracer
    outputs = _outputs(region, leaves)
    region.lift_free_values()
    body = region.finish(tuple(outputs), "wrap_body_")
    module = getattr(tracer.root, str(body.target))
    if policy is not None:
        values = [p.meta["val"] for p in module.graph.find_nodes(op="placeholder")]
        options = {**options, **policy(module, values)}
    call = emit(
        tracer,
        tag_activation_checkpoint,
        (body, *region.operands),
        node_options(options),
        tuple(outputs.values()),
    )
    close_body(tracer, region.graph, ClosedBody(call, functools.partial(_add_output, tracer)))


def _add_output(tracer: Any, call: fx.Node, inner: fx.Node) -> fx.Node:
    """One more output of a captured region, for a value that left it on its own: out of a
    reentrant one, which eager runs without gradients, it comes without a gradient."""
    body = getattr(owner_of(call, tracer), str(call.args[0].target))
    output = add_output(call, body, inner, len(call.meta["val"]))
    if not call.kwargs["use_reentrant"] or not isinstance(inner.meta.get("val"), torch.Tensor):
        return output
    with output.graph.inserting_after(output):
        detached = output.graph.call_function(torch.ops.aten.detach.default, (output,))
    detached.meta.update(output.meta)
    return detached
