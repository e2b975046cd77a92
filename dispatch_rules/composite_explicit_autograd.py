"""CompositeExplicitAutograd: no gradient can be asked for, so only forwards run."""

from __future__ import annotations

from typing import Any

from hops._torch import DispatchKey
from hops.autograd_function_apply import CallForm, run_body


def autograd_function_apply(fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
    form = CallForm(fwd, bwd, operands, options)
    return form.visible(form.forward(operands)[0])


def tag_activation_checkpoint(body: Any, *operands: Any, **options: Any) -> Any:
    return run_body(body, operands)


RULES = {
    "autograd_function_apply": {DispatchKey.CompositeExplicitAutograd: autograd_function_apply},
    "tag_activation_checkpoint": {DispatchKey.CompositeExplicitAutograd: tag_activation_checkpoint},
}
