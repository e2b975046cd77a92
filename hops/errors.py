"""Errors and warnings of hops.  Each names the Function or region, and says what to do."""

from __future__ import annotations


class CaptureError(RuntimeError):
    """A Function or checkpointed region cannot be captured so that it equals eager."""


class ReplayError(RuntimeError):
    """A captured operator is run in a way that its capture does not cover."""


class OperatorCallError(TypeError):
    """An operator was called with bodies, operands or keywords that do not fit."""


class HopsWarning(UserWarning):
    """Something that the captured program does not repeat as eager would."""
