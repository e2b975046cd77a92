"""Where an operation comes from: the user's line, the region and the Function around it.

Read off the Python stack, so that it works for eager code as it is.  For
captured code the generated ``forward`` of a graph is on the stack instead of the
user's; its line numbers tell the node, and the node tells the user's line.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import fx

from hops._capture_function import function_name
from hops._source_lines import NOT_THE_USERS, last_line, line
from hops._torch import torch_checkpoint

_FunctionNode: Any = torch.autograd.function.BackwardCFunction


@dataclass(frozen=True)
class Place:
    """Where an operation was called.

    Attributes:
        source: the user's line, "file:line in function", or "" where the model has only
            torch's own modules.
        region: the innermost checkpointed region around it, in words, or "".
        function_node: id of the autograd node of the Function around it, or None.
    """

    source: str
    region: str
    function_node: int | None


def place_of() -> Place:
    """Where the operation that is being dispatched was called."""
    source, region, node = "", "", None
    for frame in _frames(sys._getframe(2)):
        if not source:
            source = _source(frame)
        if node is None:
            node = _function_node(frame)
        if frame.f_code is _checkpoint_code():
            region = _region(frame)
            source = source or _source_outside(frame)
            break
    return Place(source, region, node)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames from ``frame`` out to the call of ``saved_for_backward``."""
    while frame is not None and frame.f_code.co_name != "saved_for_backward":
        yield frame
        frame = frame.f_back


@functools.cache
def _checkpoint_code() -> Any:
    return inspect.unwrap(torch_checkpoint.checkpoint).__code__


def _region(frame: FrameType) -> str:
    """Words for the region that a frame of ``checkpoint`` runs: what is checkpointed, and
    the line of the call."""
    function = frame.f_locals.get("function")
    while isinstance(function, functools.partial):
        function = function.func
    kind = type(function)
    name = getattr(function, "__qualname__", kind.__qualname__).replace("<locals>.", "")
    if kind.__module__ == "dispatch_rules.autograd":
        nodes = (_captured_node(outer) for outer in _frames(frame.f_back))
        name = next((node for node, _ in nodes if node), name)
    source = _source_outside(frame)
    return f"checkpoint {name}" + (f" ({source})" if source else "")


def _source_outside(frame: FrameType) -> str:
    return next(filter(None, map(_source, _frames(frame.f_back))), "")


def _source(frame: FrameType) -> str:
    """The user's line of a frame: its own, or the one that a captured node holds."""
    _, source = _captured_node(frame)
    code = frame.f_code
    if source or code.co_filename.startswith(NOT_THE_USERS):
        return source
    return line(code.co_filename, frame.f_lineno, code.co_name)


#: For each generated ``forward``: its code, and name and user's line of the node of each line.
_lines: weakref.WeakKeyDictionary[fx.GraphModule, tuple[str, dict[int, tuple[str, str]]]] = (
    weakref.WeakKeyDictionary()
)


def _captured_node(frame: FrameType) -> tuple[str, str]:
    """Name and user's line of the node that a generated ``forward`` is at; empty otherwise."""
    if not frame.f_code.co_filename.startswith("<eval_with_key>"):
        return "", ""
    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return "", ""
    code = module.code
    if module not in _lines or _lines[module][0] is not code:
        nodes = {node.name: node for node in module.graph.nodes}
        found = {}
        for number, text in enumerate(code.splitlines(), start=1):
            match = re.match(r"\s*(\w+)\s*[:=]", text)
            if match and match[1] in nodes:
                node = nodes[match[1]]
                found[number] = (node.name, last_line(node.meta.get("stack_trace") or ""))
        _lines[module] = (code, found)
    return _lines[module][1].get(frame.f_lineno, ("", ""))


def _function_node(frame: FrameType) -> int | None:
    """The id of the node whose Function's ``forward`` or ``setup_context`` a frame runs."""
    code = frame.f_code
    if code.co_name not in ("forward", "setup_context") or not code.co_argcount:
        return None
    first = frame.f_locals.get(code.co_varnames[0])
    return id(first) if isinstance(first, _FunctionNode) else None


def custom_nodes(graph: Sequence[Any]) -> Iterator[Any]:
    """The nodes of Functions in an autograd graph, those of torch itself left out."""
    seen, waiting = set(), list(graph)
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        if isinstance(node, _FunctionNode) and not _class_of(node).__module__.startswith("torch."):
            yield node


def _class_of(node: Any) -> type:
    return type(node)._forward_cls


def function_name_of(node: Any) -> str:
    """The module-qualified name of the Function of a node, also of a captured one."""
    name = getattr(getattr(node, "form", None), "name", None)
    return f"Function {name or function_name(_class_of(node))}"
