"""Captures and threads.

[Note: one capture at a time]
torch keeps the stack of pre-dispatch modes in one place for all threads, so two
traces at once would record into each other's graphs.  They are made to wait for
each other.  Dynamo has a lock of its own, under which it traces, and may be
entered from inside of a capture and the other way round; so the lock of a
capture is that one and ours, always taken in this order.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

_this_thread = threading.local()
_one_capture = threading.RLock()
#: The thread that holds it.
_capturing: int | None = None


def captures_on_this_thread() -> int:
    """How many pre-dispatch traces run here, one inside of the other."""
    return getattr(_this_thread, "captures", 0)


@contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Wait until no other thread captures; see [Note: one capture at a time]."""
    global _capturing
    with _dynamo_lock(), _one_capture:
        before, _capturing = _capturing, threading.get_ident()
        try:
            yield
        finally:
            _capturing = before


def annotating_own_capture(annotate: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.fx.traceback.annotate``, which writes into what all threads share, for the thread
    that captures: torch annotates what runs without Dynamo (``checkpoint``) while anybody exports.
    """

    @functools.wraps(annotate)
    def annotated(annotation_dict: dict[str, Any]) -> Any:
        if _capturing not in (None, threading.get_ident()):
            return nullcontext()
        return annotate(annotation_dict)

    return annotated


def one_at_a_time(capture: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that captures, which keeps what it knows in global variables."""

    @functools.wraps(capture)
    def captured(*args: Any, **kwargs: Any) -> Any:
        with one_capture_at_a_time():
            return capture(*args, **kwargs)

    return captured


@contextmanager
def capture_on_this_thread() -> Iterator[None]:
    """Note that a pre-dispatch trace runs here, and on no other thread."""
    with one_capture_at_a_time():
        depth = captures_on_this_thread()
        _this_thread.captures = depth + 1
        try:
            yield
        finally:
            _this_thread.captures = depth


def _dynamo_lock() -> Any:
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return getattr(convert_frame, "compile_lock", None) or nullcontext()


def _forget_other_threads() -> None:
    """A lock that another thread held when the process forked would stay locked."""
    global _one_capture, _capturing
    if not captures_on_this_thread():
        _one_capture, _capturing = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
