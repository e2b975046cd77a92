"""Outputs of compiled code that a Function made as views keep the Function's backward.

[Note: views made by a Function]
AOTAutograd does not return an output that is a view of another output, or of an input: its
caller makes the view anew from the base, by which the gradient takes the way of the view and
not of the Function that returned it.  Where a Function lies between a view and its base, the
output is handed to AOTAutograd as a tensor that shares memory with the base and is no view in
autograd's eyes, as AOTAutograd itself does where it need not make a view anew.  (In eager such
an output is a view that may not be written to.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hops._torch import compiler_is_tracing


def hiding_views(
    position: int, is_captured: Callable[[Any], bool]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A patch for a function of AOTAutograd that is handed what it compiles.

    Args:
        position: of that among the arguments.
        is_captured: whether a node of autograd belongs to a captured Function.
    """

    def patched(entry: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(entry)
        def with_views_hidden(*args: Any, **kwargs: Any) -> Any:
            compiled = _hiding(args[position], is_captured)
            return entry(*args[:position], compiled, *args[position + 1 :], **kwargs)

        return with_views_hidden

    return patched


def _hiding(compiled: Callable[..., Any], is_captured: Callable[[Any], bool]) -> Callable[..., Any]:
    @functools.wraps(compiled)
    def run(*args: Any) -> Any:
        outputs = compiled(*args)
        if not compiler_is_tracing():
            return outputs
        hidden = {
            id(value): torch.ops.aten._unsafe_view.default(value, value.shape)
            for value in pytree.tree_leaves(outputs)
            if _is_view_by_a_function(value, is_captured, args)
        }
        return pytree.tree_map(lambda v: hidden.get(id(v), v), outputs) if hidden else outputs

    return run


def _is_view_by_a_function(
    value: Any, is_captured: Callable[[Any], bool], inputs: tuple[Any, ...]
) -> bool:
    """Whether a captured Function lies on the way from a view to its base."""
    if not isinstance(value, torch.Tensor) or value.grad_fn is None or value._base is None:
        return False
    if any(value._base is given for given in inputs) and is_captured(value.grad_fn):
        # AOTAutograd knows of this case.
        return False
    return any(map(is_captured, _way(value.grad_fn, value._base.grad_fn)))


def _way(node: Any, end: Any) -> Iterator[Any]:
    """The nodes from that of a view up to that of its base; a view has one input."""
    yield node
    while node is not end and node.next_functions:
        node = node.next_functions[0][0]
        if node is None or node is end:
            return
        yield node
