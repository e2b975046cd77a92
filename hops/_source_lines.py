"""The user's lines of source: which they are, and how they are written."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

_HERE = os.path.dirname(__file__)
#: Files whose lines are not the user's.
NOT_THE_USERS = (
    "<",
    contextlib.__file__,
    os.path.join(os.path.dirname(torch.__file__), ""),
    os.path.join(_HERE, ""),
    os.path.join(os.path.dirname(_HERE), "dispatch_rules", ""),
)


def line(file: str, number: int | str, function: str) -> str:
    return f"{os.path.basename(file)}:{number} in {function}"


def last_line(stack_trace: str) -> str:
    """The innermost line of the user's in the text of a stack."""
    for file, number, function in reversed(
        re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack_trace)
    ):
        if not file.startswith(NOT_THE_USERS):
            return line(file, number, function)
    return ""


@contextlib.contextmanager
def lines_recorded(tracer: Any, outermost: FrameType, always: bool) -> Iterator[None]:
    """Let the nodes that ``tracer`` creates tell the user's lines that run inside ``outermost``.

    Tracers of torch keep the lines of functions that are called ``forward`` only, and so
    none of a backward.

    Args:
        always: also where the tracer records no stack traces.
    """
    if "create_node" in vars(tracer):
        # Lines from further out on are being recorded.
        yield
        return
    create_node = tracer.create_node

    def create_node_with_lines(*args: Any, **kwargs: Any) -> Any:
        node = create_node(*args, **kwargs)
        if always or node.stack_trace:
            add_lines(node, "", _lines_inside(outermost))
        return node

    tracer.create_node = create_node_with_lines
    try:
        yield
    finally:
        del tracer.create_node


def add_lines(node: Any, before: str, after: str = "") -> None:
    """Put text of a stack around what the node has of it."""
    parts = (before, node.stack_trace, after)
    node.stack_trace = "\n".join(p.rstrip() for p in parts if p) or None


def _lines_inside(outermost: FrameType) -> str:
    frames = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame is not outermost:
        code = frame.f_code
        if not code.co_filename.startswith(NOT_THE_USERS):
            frames.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return "".join(traceback.StackSummary.from_list(reversed(frames)).format())
