"""Decomposing an exported program with the operators kept."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.export import ExportedProgram

from hops._gradient_stops import detach_marked, gradient_stops_marked
from hops._torch import stock_autograd_function_apply, stock_tag_activation_checkpoint

_KNOWN = {
    "autograd_function_apply": stock_autograd_function_apply,
    "tag_activation_checkpoint": stock_tag_activation_checkpoint,
}

_state = threading.local()


def is_kept(operator: Any) -> bool:
    """Whether this thread decomposes a program in which ``operator`` stays a node."""
    return operator in getattr(_state, "kept", ())


@contextmanager
def _keeping(operators: frozenset[Any]) -> Iterator[None]:
    before: frozenset[Any] = getattr(_state, "kept", frozenset())
    _state.kept = operators
    try:
        yield
    finally:
        _state.kept = before


def run_decompositions(
    ep: ExportedProgram,
    decomp_table: dict[Any, Any] | None = None,
    *,
    keep: Iterable[Any] = (),
) -> ExportedProgram:
    """``ep.run_decompositions``, with chosen operators kept as nodes.

    Args:
        ep: a program captured with hops.
        decomp_table: as for ``ExportedProgram.run_decompositions``; None for torch's default.
        keep: which of ``torch.ops.higher_order.autograd_function_apply`` and
            ``.tag_activation_checkpoint`` to keep; their bodies are decomposed.
            Without any, both dissolve into their forward, as every lowering
            back end expects.

    Raises:
        ValueError: ``keep`` holds something else.
        CaptureError: a kept operator writes into a tensor that is not its own.

    Warns:
        HopsWarning: what stops a gradient is inside another operator's body, and lost.
    """
    operators = frozenset(keep)
    for operator in operators:
        if operator not in _KNOWN.values():
            raise ValueError(
                f"hops.run_decompositions: keep holds {operator!r}; it can keep "
                + " and ".join(f"torch.ops.higher_order.{name}" for name in _KNOWN)
            )
    if not operators:
        return ep.run_decompositions(decomp_table)
    with _keeping(operators), gradient_stops_marked(ep) as marked:
        decomposed = ep.run_decompositions(decomp_table)
    detach_marked(decomposed, marked)
    return decomposed
