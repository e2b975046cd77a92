"""The hooks by which user code is caught, in place only while a capture runs."""

from __future__ import annotations

import threading
import types
from typing import Any

import torch

from hops import _capture_checkpoint, _capture_function
from hops._refusals import refusing_to_accumulate
from hops._torch import CHECKPOINT_KEYWORDS, checkpoint_function, checkpoint_takes_tuples

_lock = threading.RLock()


class capture_hooks:
    """The hooks by which user code is caught, in place while any thread captures.

    - ``FunctionMeta.__getattribute__``: see [Note: where a Function is caught].
    - ``torch.autograd._engine_run_backward``: a call of ``backward()`` in captured
      code adds to the ``grad`` of parameters, which no graph holds.
    - the code object of the function that ``torch.utils.checkpoint.checkpoint`` ends in: see
      [Note: where a checkpoint is caught].
    """

    _active = 0

    def __enter__(self) -> None:
        with _lock:
            capture_hooks._active += 1
            if capture_hooks._active == 1:
                _hook_function_meta()
                _hook_checkpoint()
                torch.autograd._engine_run_backward = refusing_to_accumulate(_engine)

    def __exit__(self, *exc_info: object) -> None:
        _capture_function.forget_lookups()
        with _lock:
            capture_hooks._active -= 1
            if capture_hooks._active == 0:
                _unhook_function_meta()
                _unhook_checkpoint()
                torch.autograd._engine_run_backward = _engine


_engine: Any = torch.autograd._engine_run_backward
_FunctionMeta: Any = type(torch.autograd.Function)


def _hook_function_meta() -> None:
    answer = _capture_function.answer_lookup

    def __getattribute__(cls: type, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        if name == "forward" or name == "setup_context":
            try:
                return answer(cls, name, found)
            except BaseException as error:
                # torch's C++ code does not expect that a look-up fails, and crashes.
                return _capture_function.postponed(name, found, error)
        return found

    _FunctionMeta.__getattribute__ = __getattribute__


def _unhook_function_meta() -> None:
    del _FunctionMeta.__getattribute__


_checkpoint_code = checkpoint_function.__code__
_original_checkpoint = types.FunctionType(
    _checkpoint_code,
    checkpoint_function.__globals__,
    checkpoint_function.__name__,
    checkpoint_function.__defaults__,
)
_original_checkpoint.__kwdefaults__ = checkpoint_function.__kwdefaults__


def _entry_code() -> types.CodeType:
    """Code that leads to :func:`checkpoint_during_capture`, with the parameters of
    the function that it stands for: Dynamo reads the signature of ``checkpoint`` to tell
    the keywords apart, also when it traces a branch of ``cond`` in the middle of a capture."""
    keywords = list(_original_checkpoint.__kwdefaults__ or ())
    if checkpoint_takes_tuples:
        parameters = f"function, args, kwargs, *, {', '.join(keywords)}"
    else:
        parameters = f"function, *args, {', '.join(keywords)}, **kwargs"
    source = (
        f"def {checkpoint_function.__name__}({parameters}):\n"
        "    from hops._capture_hooks import checkpoint_during_capture\n"
        f"    named = dict({', '.join(f'{k}={k}' for k in keywords)})\n"
        "    return checkpoint_during_capture((function, *args), {**named, **kwargs})\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)
    return namespace[checkpoint_function.__name__].__code__


_entry = _entry_code()


def _hook_checkpoint() -> None:
    checkpoint_function.__code__ = _entry


def _unhook_checkpoint() -> None:
    checkpoint_function.__code__ = _checkpoint_code


def call_original(function: Any, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` as torch wrote it."""
    if not checkpoint_takes_tuples:
        return _original_checkpoint(function, *args, **kwargs)
    options = {k: kwargs.pop(k) for k in CHECKPOINT_KEYWORDS if k in kwargs}
    return _original_checkpoint(function, args, kwargs, **options)


def checkpoint_during_capture(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _capture_checkpoint.checkpoint_entered(call_original, args, kwargs)
