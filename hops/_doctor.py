"""``python -m hops doctor``: this torch, and what became of every site of the patch in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch

from hops._changes import Change, is_absent
from hops._patches import installation
from hops._sites import Site, State
from hops._torch import torch_checkpoint
from hops._version import __version__

_STANDARD_LIBRARY = os.path.dirname(os.__file__)
_TORCH = os.path.dirname(torch.__file__) + os.sep


def report() -> str:
    """The table, for people; it imports what the sites belong to, so that none is left open."""
    installation.import_modules()
    active = "installed" if installation.active else "not installed"
    if not installation.active and os.environ.get("HOPS_DISABLE") == "1":
        active += " (HOPS_DISABLE=1)"
    lines = [
        f"torch {torch.__version__}, python {sys.version.split()[0]}, hops {__version__} {active}",
        "",
        "native: torch has it itself; others: somebody else has patched it, before or after hops",
        "",
        _ROW.format("status", "native", "others", "site of torch, and why"),
    ]
    for site, state in zip(installation.sites, installation.states):
        lines += _rows(site, state)
    lines.append(_ROW.format("during", "", "", "and these, while a capture runs"))
    for name, value in _hooked():
        strangers = [] if _is_torchs(value) else [f"{name}, by {_origin(value)}"]
        lines += _row("a capture", "no", strangers, name, "")
    return "\n".join(lines)


_ROW = "{:13}{:8}{:8}{}"


def _rows(site: Site, state: State) -> list[str]:
    changes = state.changes
    native = {"native": "yes", "absent": "-"}.get(
        state.status, "partly" if changes.native else "no"
    )
    strangers = [line for change in changes.made for line in _by_others(change)]
    details = [state.detail] if state.detail else []
    details += [f"native: {name}" for name in changes.native]
    return _row(state.status, native, strangers, site.where, site.why, *details)


def _row(status: str, native: str, strangers: list[str], where: str, *details: str) -> list[str]:
    rows = [_ROW.format(status, native, "yes" if strangers else "no", where)]
    return rows + [_ROW.format("", "", "", f"  {d}") for d in (*details, *strangers) if d]


def _hooked() -> list[tuple[str, Any]]:
    """What ``hops._capture_hooks`` hooks, and what it must be able to see past."""
    function_meta: Any = type(torch.autograd.Function)
    return [
        ("torch.autograd.Function.apply", torch.autograd.Function.apply),
        ("torch.autograd.function.FunctionMeta.__getattribute__", function_meta.__getattribute__),
        ("torch.utils.checkpoint.checkpoint", torch_checkpoint.checkpoint),
        ("torch.autograd._engine_run_backward", vars(torch.autograd)["_engine_run_backward"]),
    ]


def _by_others(change: Change) -> Iterator[str]:
    """Who else has been at a place: before us, or since."""
    before = change.before
    if before is not None and not is_absent(before) and not _is_torchs(before):
        yield f"{change.name} before hops, by {_origin(before)}"
    if not change.holds():
        now = change.read()
        yield f"{change.name} after hops, by {'removal' if is_absent(now) else _origin(now)}"


def _code(value: Any) -> Any:
    """Where a value was written, seen through what the standard library puts around it."""
    value = getattr(value, "func", getattr(value, "__func__", value))
    code = getattr(value, "__code__", None)
    if code is not None and os.path.dirname(code.co_filename) == _STANDARD_LIBRARY:
        return getattr(getattr(value, "__wrapped__", None), "__code__", code)
    return code


def _is_torchs(value: Any) -> bool:
    code = _code(value)
    if code is not None:
        return code.co_filename.startswith(_TORCH)
    module = getattr(value, "__module__", None) or type(value).__module__
    return module.split(".")[0] in ("torch", "builtins")


def _origin(value: Any) -> str:
    code = _code(value)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    shown = value if isinstance(value, type) else type(value)
    return f"{shown.__module__}.{shown.__qualname__}"
