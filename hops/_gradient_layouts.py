"""Whether a backward that Dynamo reads does the same for gradients of any layout.

Dynamo cannot know the layout of a gradient, and reads a backward that asks for
it with contiguous ones.  It is read again with each of :data:`LAYOUTS`, and the
graphs are compared: to make a gradient contiguous first is no difference, and
neither are strides that are handed to a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# Each gives a backward whose gradients have that layout, written as the function
# in torch that it stands in for: Dynamo reads it.


def _expanded(original_backward: Any) -> Any:
    """As from ``sum()``: one element, repeated."""

    def new_backward(ctx: Any, *grads: Any) -> Any:
        grads = [g.as_strided(g.shape, [0] * g.dim()) for g in grads]  # type: ignore[assignment]
        return original_backward(ctx, *grads)

    return new_backward


def _transposed(original_backward: Any) -> Any:
    def new_backward(ctx: Any, *grads: Any) -> Any:
        grads = [  # type: ignore[assignment]
            g.as_strided(g.shape, _reversed_strides(g.shape)) for g in grads
        ]
        return original_backward(ctx, *grads)

    return new_backward


def _sliced(original_backward: Any) -> Any:
    """As from ``cat``: a part of each row of something wider."""

    def new_backward(ctx: Any, *grads: Any) -> Any:
        grads = [  # type: ignore[assignment]
            g.as_strided(g.shape, _wider_strides(g.shape), g.numel()) for g in grads
        ]
        return original_backward(ctx, *grads)

    return new_backward


def _spread(original_backward: Any) -> Any:
    """As from ``stack``: every other element."""

    def new_backward(ctx: Any, *grads: Any) -> Any:
        grads = [  # type: ignore[assignment]
            g.as_strided(g.shape, [2 * s for s in g.contiguous().stride()]) for g in grads
        ]
        return original_backward(ctx, *grads)

    return new_backward


def _channels_last(original_backward: Any) -> Any:
    def new_backward(ctx: Any, *grads: Any) -> Any:
        grads = [  # type: ignore[assignment]
            g.as_strided(g.shape, _channels_last_strides(g.shape)) for g in grads
        ]
        return original_backward(ctx, *grads)

    return new_backward


LAYOUTS: tuple[Callable[..., Any], ...] = (
    _expanded,
    _transposed,
    _sliced,
    _spread,
    _channels_last,
)


def _reversed_strides(shape: Any) -> list[Any]:
    strides, step = [], 1
    for size in shape:
        strides.append(step)
        step = step * size
    return strides


def _wider_strides(shape: Any) -> list[Any]:
    if len(shape) == 0:
        return []
    strides, step = [1], 2 * shape[-1]
    for size in shape[1:][::-1]:
        strides.insert(0, step)
        step = step * size
    return strides[-len(shape) :]


def _channels_last_strides(shape: Any) -> list[Any]:
    if len(shape) < 3:
        return _reversed_strides(shape)
    strides, step = [1] * len(shape), shape[1]
    for dim in [*range(len(shape) - 1, 1, -1), 0]:
        strides[dim] = step
        step = step * shape[dim]
    return strides


def same_but_for_layout(one: fx.Graph, other: fx.Graph) -> bool:
    """Whether two readings of a backward compute the same."""
    return _computation(one) == _computation(other)


def _computation(graph: fx.Graph) -> list[Any]:
    """The operations of a backward on tensors, each with what it is applied to."""
    names: dict[fx.Node, Any] = {}
    steps: list[Any] = []
    for node in graph.nodes:
        source = node.args[0] if node.args else None
        if node.op != "placeholder" and isinstance(source, fx.Node) and _is_layout(node, source):
            names[node] = names[source]
        elif _is_number(node):
            names[node] = str(node.meta["example_value"])
        else:
            names[node] = ("value", len(steps))
            steps.append((node.op, _target(node), _arguments(node, names)))
    return steps


def _is_layout(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node gives its argument's values in another layout."""
    if node.op == "call_method" and node.target == "contiguous":
        return True
    return node.op == "call_method" and node.target == "as_strided" and source.op == "placeholder"


def _is_number(node: fx.Node) -> bool:
    """Whether a node is a size or stride, or all of a tensor's."""
    value = node.meta.get("example_value")
    numbers = value if isinstance(value, tuple) else (value,)
    return all(isinstance(n, (torch.SymInt, int)) for n in numbers)


def _target(node: fx.Node) -> Any:
    return None if node.op == "placeholder" else node.target


def _arguments(node: fx.Node, names: dict[fx.Node, Any]) -> Any:
    """What a node is applied to; of what only a kernel of the user's can make something,
    the tensors only, since it may well be given their strides."""
    if _is_kernel(node.target):
        return [names[source] for source in node.all_input_nodes]
    return fx.node.map_aggregate(
        (node.args, dict(node.kwargs)), lambda a: names[a] if isinstance(a, fx.Node) else a
    )


def _is_kernel(target: Any) -> bool:
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "triton" in target.name()
    return isinstance(target, torch._ops.OpOverload) and target.namespace not in ("aten", "prims")
