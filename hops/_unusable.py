"""What ``hops`` is on a torch that lacks something without which it cannot even be imported.

Nothing is patched then.  The import succeeds, since the program around it may not
need a capture, but says what is missing; every function of the API raises an error
that says it again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hops.errors import CaptureError, HopsWarning

#: What is missing, when it is.
missing = ""


def stand_back(error: Exception, names: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Warn of what ``error`` names, and give what stands for the names of the API.

    Warns:
        HopsWarning: always.
    """
    global missing
    missing = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"hops: torch {torch.__version__} lacks what hops is built on ({missing}). Nothing is "
        "patched, and captures are those of stock torch.",
        HopsWarning,
        stacklevel=3,
    )
    api = {name: _refused(name) for name in names}
    return {**api, "install": _nothing, "uninstall": _nothing}


def _nothing() -> None:
    """Nothing is patched, and nothing is to be given back."""


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise CaptureError(
            f"hops.{name} cannot be used with torch {torch.__version__}, which lacks what hops "
            f"is built on ({missing}). Use a torch that the README of hops lists."
        )

    return refuse
