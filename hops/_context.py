"""The ``ctx`` that a Function sees while it is captured."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from hops.errors import CaptureError

_HIDDEN = ("_needs_input_grad", "_forward_cls", "_read")


class RecordedContext(FunctionCtx):
    """Stands for the context object of one call of ``Function.apply``.

    It keeps what ``forward`` or ``setup_context`` says, gives it to the
    ``backward`` that is traced from the same values, and is then copied onto
    the real context, on which torch carries it out.  Saved tensors are handed
    back as the very tensors that were saved, so that the graph shows which
    value of the forward the backward uses.

    Attributes set by the user stay what they are; whether ``needs_input_grad``
    was looked at is kept in :attr:`read_needs_input_grad`.
    """

    to_save: tuple[torch.Tensor | None, ...]

    def __init__(self, function: type, needs_input_grad: tuple[bool, ...]) -> None:
        self._forward_cls = function
        self._needs_input_grad = needs_input_grad
        self._read = {"needs_input_grad": False}

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        self._read["needs_input_grad"] = True
        return self._needs_input_grad

    @property
    def read_needs_input_grad(self) -> bool:
        return self._read["needs_input_grad"]

    @property
    def saved_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self.__dict__.get("to_save") or ())

    @property
    def saved_variables(self) -> tuple[torch.Tensor | None, ...]:
        return self.saved_tensors

    @property
    def next_functions(self) -> tuple[Any, ...]:
        return ()

    def name(self) -> str:
        return f"{self._forward_cls.__name__}Backward"

    def said(self, what: str, default: Any) -> Any:
        """What the user told the context: ``dirty_tensors``, ``materialize_grads``..."""
        value = self.__dict__.get(what, default)
        return default if value is None else value

    def for_backward(self) -> RecordedContext:
        """A context of the same state, so that a backward's own changes stay its own."""
        other = RecordedContext(self._forward_cls, self._needs_input_grad)
        other.__dict__.update(self.__dict__)
        return other

    def with_own_containers(self) -> RecordedContext:
        """The same with copies of the lists, dicts and sets on it: a backward may empty
        them, and is traced more than once."""
        other = self.for_backward()
        for name, value in self.__dict__.items():
            if name not in _HIDDEN:
                other.__dict__[name] = _copied(value)
        return other

    def copy_to(self, ctx: Any) -> None:
        """Say the same to the real context."""
        for name, value in self.__dict__.items():
            if name not in _HIDDEN:
                setattr(ctx, name, value)


class _Newer:
    """What the context offers only on newer torch."""

    #: 2.15 on.  In eager, too, a buffer may be missing for any input.
    input_grad_buffers = property(lambda self: (None,) * len(self._needs_input_grad))

    def set_output_grad_dtype(self, *dtypes: Any) -> None:
        """2.14 on; a captured backward gets its gradients in the dtype of the outputs."""
        function = self._forward_cls  # type: ignore[attr-defined]
        raise CaptureError(
            f"hops: {function.__module__}.{function.__qualname__} calls "
            "ctx.set_output_grad_dtype, which a captured call does not hold: its backward would "
            "get gradients in the dtype of the outputs. Convert the gradient in the backward, "
            "or give the output in the dtype of the gradient."
        )


for _name in ("input_grad_buffers", "set_output_grad_dtype"):
    if hasattr(FunctionCtx, _name):
        setattr(RecordedContext, _name, vars(_Newer)[_name])


def _copied(value: Any) -> Any:
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.copy(value) if type(value) in (set, collections.deque) else value
