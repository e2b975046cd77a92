"""What differs between torch versions in fake tensors and symbolic sizes: a part of
:mod:`hops._torch`, which the rest of the code imports it from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


@contextmanager
def fake_conversion_allowed(mode: Any) -> Iterator[None]:
    """Let operations on fake tensors meet real ones (parameters in a closure)."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


@contextmanager
def unbacked_symbols_bound(mode: Any) -> Iterator[None]:
    """Data-dependent sizes made inside are bound by the nodes of the trace inside;
    the tracer around must not look for them among the outputs of its own nodes."""
    shape_env = getattr(mode, "shape_env", None)
    pending = getattr(shape_env, "pending_fresh_unbacked_symbols", None)
    before = list(pending or ())
    yield
    if pending is not None:
        pending[:] = before


class SymbolicValues:
    """What a tracer knows of symbolic sizes, kept while it records elsewhere.

    A tracer caches the node of each symbolic expression, lazily: the node of
    ``x.shape[0]`` is made on first use, in whichever graph is being recorded.
    A node made while a body is recorded must not serve the enclosing graph, so
    the caches go back to their state before the body; only values that the
    body itself brought into being (unbacked symbols) stay.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        entries = tracer.symnode_tracker.sym_node_dict
        self._entries = dict(entries)
        self._expressions = dict(getattr(tracer, "sympy_expr_tracker", ()))
        self._pending = [
            (thunk, thunk.f) for thunk in entries.values() if getattr(thunk, "f", None) is not None
        ]

    def restore(self) -> None:
        entries = self._tracer.symnode_tracker.sym_node_dict
        born_inside = {
            key: value
            for key, value in entries.items()
            if key not in self._entries and _is_unbacked(key)
        }
        entries.clear()
        entries.update(self._entries)
        entries.update(born_inside)
        if hasattr(self._tracer, "sympy_expr_tracker"):
            kept = {
                symbol: value
                for symbol, value in self._tracer.sympy_expr_tracker.items()
                if symbol in self._expressions or _has_unbacked_symbols(symbol)
            }
            self._tracer.sympy_expr_tracker.clear()
            self._tracer.sympy_expr_tracker.update(kept)
            self._tracer.sympy_expr_tracker.update(self._expressions)
        for thunk, pending in self._pending:
            if thunk.f is None:
                thunk.f, thunk.r = pending, None


def is_data_dependence(error: Exception) -> bool:
    """Whether torch says that tracing stopped at the value of a tensor."""
    # Imported late: it brings sympy, which costs more than all of hops.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, (GuardOnDataDependentSymNode, *_DATA_DEPENDENT_EXCEPTIONS)):
        return True
    return any(message in str(error) for message in _DATA_DEPENDENCE)


_DATA_DEPENDENT_EXCEPTIONS = (DataDependentOutputException, DynamicOutputShapeException)

#: An item of a real tensor; numpy() and the memory of a fake one.
_DATA_DEPENDENCE = (
    "trying to get a value out of symbolic",
    "trying to get value out of a tracing tensor",
    "is not supported for tensor subclasses",
    "Cannot access data pointer of Tensor",
)


def _is_unbacked(sym_node: Any) -> bool:
    expression = getattr(sym_node, "expr", None)
    return expression is not None and _has_unbacked_symbols(expression)


def _has_unbacked_symbols(expression: Any) -> bool:
    # Imported late: it brings sympy, which costs more than all of hops.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(expression))


def statically_known_true(condition: Any) -> bool:
    """``symbolic_shapes.statically_known_true``, whose module is too heavy to import early."""
    if isinstance(condition, bool):
        return condition
    from torch.fx.experimental import symbolic_shapes

    return symbolic_shapes.statically_known_true(condition)
