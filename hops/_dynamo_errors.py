"""Errors of Dynamo's that name the Function or region which they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._dynamo.exc import Unsupported

_NAMED = "_hops_named"


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say of an error of Dynamo's what it is about, and what to do."""
    try:
        yield
    except Unsupported as error:
        if not hasattr(error, _NAMED):
            setattr(error, _NAMED, what)
            text = (
                f"hops: Dynamo cannot trace {what}. Capture with strict=False, which runs the "
                f"model's Python as it is.\n{error.args[0] if error.args else ''}"
            )
            error.args = (text, *error.args[1:])
            error.msg = text
        raise


def python_value(variable: Any) -> Any:
    return variable.realize().as_python_constant()
