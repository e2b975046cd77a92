"""Programs that print what they see, in two processes: with hops, and where ``HOPS_DISABLE=1``."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hops._patches import installation  # hops comes before all that is looked at

#: As in the repr of an object, the id of a module without a name, the file name of fx's code.
ADDRESS = r"0x[0-9a-f]+|'\d{12,}'|<eval_with_key>\.\d+"

PROGRAMS: dict[str, Callable[[], Iterator[Any]]] = {}


def shows(program: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    """Register a program; it yields what it sees."""
    PROGRAMS[program.__name__] = program
    return program


def shown() -> str:
    """What every program of the running script sees, and whether hops is installed, as JSON."""
    torch.set_num_threads(1)
    own = {n: p for n, p in PROGRAMS.items() if p.__module__ == "__main__"}
    seen = {name: _lines(program) for name, program in own.items()}
    return json.dumps({"installed": installation.active, "seen": seen})


def _lines(program: Callable[[], Iterator[Any]]) -> list[str]:
    torch.manual_seed(0)
    lines: list[str] = []
    try:
        for value in program():
            lines += [re.sub(ADDRESS, "", line) for line in _text(value).split("\n")]
    except Exception:
        lines.append(f"failed: {traceback.format_exc()}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        node = None if value.grad_fn is None else value.grad_fn.name()
        return f"{value.dtype} {tuple(value.shape)} {node} {value.requires_grad} {_values(value)}"
    if isinstance(value, (tuple, list)):
        return "\n".join(_text(v) for v in value)
    return str(value)


def _values(value: torch.Tensor) -> Any:
    return "" if value.is_meta else value.detach().tolist()


def refusal(call: Callable[[], Any]) -> Any:
    """What a call gives, or how it fails."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
