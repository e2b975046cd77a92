"""Errors of Dynamo's that name the Function or region which they are about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError, Unsupported

from hops.errors import CaptureError

_NAMED = "_hops_named"


class CaptureErrorInDynamo(CaptureError, TorchRuntimeError):
    """A :class:`CaptureError` on its way through Dynamo, which gives every error that it
    does not know (2.6, 2.9), or takes for a graph break, another type and text."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Say of an error of Dynamo's what it is about, and what to do."""
    try:
        yield
    except CaptureError as error:
        if isinstance(error, CaptureErrorInDynamo):
            raise
        raise CaptureErrorInDynamo(str(error)) from error
    except (Unsupported, AssertionError) as error:
        # Dynamo of torch 2.6 and 2.9 asserts that export sets no tensor on a module.
        if not hasattr(error, _NAMED):
            text = f"{_failure(what)}\n{error.args[0] if error.args else ''}"
            error.args = (text, *error.args[1:])
            setattr(error, _NAMED, what)
            if isinstance(error, Unsupported):
                error.msg = text
        raise
    except RuntimeError as error:
        # The user's, whose text stays in front, or one of torch's that Dynamo calls internal.
        if not hasattr(error, _NAMED) and not isinstance(error, TorchDynamoException):
            setattr(error, _NAMED, what)
            error.args = (f"{error}\n{_failure(what)}",)
        raise


def _failure(what: str) -> str:
    return (
        f"hops: strict capture fails in {what}. Capture with strict=False, which runs the "
        "model's Python as it is."
    )
