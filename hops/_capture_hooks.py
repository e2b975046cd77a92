"""The hooks by which user code is caught, in place only while a capture runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from hops import _capture_checkpoint, _capture_function
from hops._exchanged_code import ExchangedCode
from hops._random_state import hook_random_states
from hops._refusals import refusing_to_accumulate
from hops._threads import captures_on_this_thread
from hops._torch import CHECKPOINT_KEYWORDS, checkpoint_function, checkpoint_takes_tuples

_lock = threading.RLock()


class capture_hooks:
    """The hooks by which user code is caught, in place while any thread captures.

    - ``FunctionMeta.__getattribute__``: see [Note: where a Function is caught].
    - ``torch.autograd._engine_run_backward``: a call of ``backward()`` in captured
      code adds to the ``grad`` of parameters, which no graph holds.
    - the code objects of the functions that read and set random states: see
      [Note: states and places].
    - the code object of the function that ``torch.utils.checkpoint.checkpoint`` ends in: see
      [Note: where a checkpoint is caught].

    What other tools have put in these places is called by what is put over it, and comes
    back afterwards.
    """

    _active = 0

    def __enter__(self) -> None:
        with _lock:
            capture_hooks._active += 1
            if capture_hooks._active == 1:
                _hook_all()

    def __exit__(self, *exc_info: object) -> None:
        _capture_function.forget_lookups()
        with _lock:
            capture_hooks._active -= 1
            if capture_hooks._active == 0:
                _unhook_all()


_FunctionMeta: Any = type(torch.autograd.Function)
_autograd: Any = torch.autograd

#: What takes back the hooks that are in place.
_unhook: list[Callable[[], None]] = []


def _hook_all() -> None:
    if "Function" not in native_hooks:
        _hook_function_meta()
    if "checkpoint" not in native_hooks:
        _unhook.append(_checkpoint.hook())
    _hook_engine()
    _unhook.append(hook_random_states())


def _unhook_all() -> None:
    while _unhook:
        _unhook.pop()()


def _forget_other_threads() -> None:
    """In a forked process the captures of other threads are never left."""
    global _lock
    _lock = threading.RLock()
    if capture_hooks._active and not captures_on_this_thread():
        capture_hooks._active = 0
        _unhook_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_other_threads)


def _hook_function_meta() -> None:
    answer = _capture_function.answer_lookup
    before = vars(_FunctionMeta).get("__getattribute__")
    look_up = before or type.__getattribute__

    def __getattribute__(cls: type, name: str) -> Any:
        found = look_up(cls, name)
        if name == "forward" or name == "setup_context":
            try:
                return answer(cls, name, found)
            except BaseException as error:
                # torch's C++ code does not expect that a look-up fails, and crashes.
                return _capture_function.postponed(name, found, error)
        return found

    def restore() -> None:
        if before is None:
            del _FunctionMeta.__getattribute__
        else:
            _FunctionMeta.__getattribute__ = before

    _FunctionMeta.__getattribute__ = __getattribute__
    _unhook.append(restore)


def _hook_engine() -> None:
    before = _autograd._engine_run_backward
    _autograd._engine_run_backward = refusing_to_accumulate(before)
    _unhook.append(lambda: setattr(_autograd, "_engine_run_backward", before))


def _exchanged_checkpoint() -> ExchangedCode:
    """Code that leads to :func:`checkpoint_during_capture`, with the parameters of
    the function that it stands for: Dynamo reads the signature of ``checkpoint`` to tell
    the keywords apart, also when it traces a branch of ``cond`` in the middle of a capture."""
    keywords = list(checkpoint_function.__kwdefaults__ or ())
    if checkpoint_takes_tuples:
        parameters = f"function, args, kwargs, *, {', '.join(keywords)}"
    else:
        parameters = f"function, *args, {', '.join(keywords)}, **kwargs"
    lines = [
        "from hops._capture_hooks import checkpoint_during_capture",
        f"named = dict({', '.join(f'{k}={k}' for k in keywords)})",
        "return checkpoint_during_capture((function, *args), {**named, **kwargs})",
    ]
    return ExchangedCode(checkpoint_function, parameters, lines)


_checkpoint = _exchanged_checkpoint()


#: "Function", "checkpoint": what needs no hook, since this torch catches it by itself.
native_hooks: set[str] = set()


def call_original(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` as torch wrote it."""
    if not checkpoint_takes_tuples:
        return _checkpoint.original(function, *args, **kwargs)
    options = {k: kwargs.pop(k) for k in CHECKPOINT_KEYWORDS if k in kwargs}
    return _checkpoint.original(function, args, kwargs, **options)


def checkpoint_during_capture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _capture_checkpoint.checkpoint_entered(call_original, args, kwargs)
