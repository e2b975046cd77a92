"""Functionalize: the operator is functional as it stands, and goes to the next key.

Operations in place on intermediates stay inside the bodies, which are
functionalized where they are inlined, after dispatch.

A body that writes into one of its operands is refused by name: the operator's
outputs have no place for the new value of an operand that is not among them.
"""

from __future__ import annotations

from typing import Any

from hops import autograd_function_apply as function_operator
from hops import tag_activation_checkpoint as checkpoint_operator
from hops._mutation import mutated_operands
from hops._policy import region_name
from hops._torch import FUNCTIONALIZE
from hops.errors import CaptureError


def autograd_function_apply(ctx: Any, fwd: Any, bwd: Any, *operands: Any, **options: Any) -> Any:
    _refuse_mutation(options.get("name", "autograd_function_apply"), fwd)
    with ctx.redispatch_to_next():
        result = function_operator.autograd_function_apply(
            fwd, bwd, *ctx.unwrap_tensors(operands), **options
        )
        return ctx.wrap_tensors(result)


def tag_activation_checkpoint(ctx: Any, body: Any, *operands: Any, **options: Any) -> Any:
    _refuse_mutation(region_name(body), body)
    with ctx.redispatch_to_next():
        result = checkpoint_operator.tag_activation_checkpoint(
            body, *ctx.unwrap_tensors(operands), **options
        )
        return ctx.wrap_tensors(result)


def _refuse_mutation(name: str, body: Any) -> None:
    for position in mutated_operands(body):
        raise CaptureError(
            f"hops: {name} writes into its operand {position} in place, which cannot be "
            "functionalized before dispatch. Functionalize after dispatch (AOTAutograd, "
            "ep.run_decompositions without keep), or write the result to a new tensor."
        )


RULES = {
    "autograd_function_apply": {FUNCTIONALIZE: autograd_function_apply},
    "tag_activation_checkpoint": {FUNCTIONALIZE: tag_activation_checkpoint},
}
