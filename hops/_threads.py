"""Captures and threads.

[Note: one capture at a time]
torch keeps the stack of pre-dispatch modes in one place for all threads, so two
traces at once would record into each other's graphs.  They are made to wait for
each other.  Dynamo has a lock of its own, under which it traces, and may be
entered from inside of a capture and the other way round; so the lock of a
capture is that one and ours, always taken in this order.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

_this_thread = threading.local()
_one_capture = threading.RLock()


def captures_on_this_thread() -> int:
    """How many pre-dispatch traces run here, one inside of the other."""
    return getattr(_this_thread, "captures", 0)


@contextmanager
def one_capture_at_a_time() -> Iterator[None]:
    """Wait until no other thread captures; see [Note: one capture at a time]."""
    with _dynamo_lock(), _one_capture:
        yield


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
    global _one_capture
    if not captures_on_this_thread():
        _one_capture = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)
