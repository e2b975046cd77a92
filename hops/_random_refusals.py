"""Captured code that sets the state of the default generator.

A graph holds the operations that draw random numbers, and no switch of the state that
they draw from: what saves the state in ``forward`` and puts it back in ``backward``, or
seeds the generator, would draw other numbers than eager does.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from hops._subgraph import recording_on_this_thread
from hops.errors import CaptureError

_SETTERS = ("set_state", "manual_seed", "seed")
#: Between the user's code and the generator: ``with torch.random.fork_rng()``, say.
_BETWEEN = ("torch.random", "torch._compile", "contextlib", __name__)
#: Whose code puts back what it has changed, or traces.
_OWN = ("torch", "hops", "dispatch_rules")


class MindedGenerator:
    """Stands for the default generator in the functions of ``torch.random``."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if name in _SETTERS:
            _refuse_in_a_recording(name)
        return getattr(self._generator, name)


def _refuse_in_a_recording(what: str) -> None:
    recording = recording_on_this_thread()
    if recording is None or _caller().split(".")[0] in _OWN:
        return
    raise CaptureError(
        f"hops: {recording.name} sets the state of the random number generator "
        f"(Generator.{what}), which a graph does not hold: it would draw other numbers than "
        "eager. Save the random values themselves (a mask) with ctx.save_for_backward, or use "
        "torch.utils.checkpoint, which keeps the state."
    )


def _caller() -> str:
    """The module of the code that called ``torch.random``."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))
