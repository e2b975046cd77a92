"""FakeTensorMode: the forward bodies run on fake tensors, operation by operation."""

from __future__ import annotations

from typing import Any

from dispatch_rules import composite_explicit_autograd
from hops._torch import FakeTensorMode


def autograd_function_apply(mode: Any, fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
    with mode:
        return composite_explicit_autograd.autograd_function_apply(fwd, bwd, *operands, **options)


def tag_activation_checkpoint(mode: Any, body: Any, *operands: Any, **options: Any) -> Any:
    with mode:
        return composite_explicit_autograd.tag_activation_checkpoint(body, *operands, **options)


RULES = {
    "autograd_function_apply": {FakeTensorMode: autograd_function_apply},
    "tag_activation_checkpoint": {FakeTensorMode: tag_activation_checkpoint},
}
