"""The operator ``tag_activation_checkpoint``: one checkpointed region.

    tag_activation_checkpoint(body, *operands, use_reentrant=..., ...)

``body(*operands)`` gives the outputs of the region as a flat tuple.  Operands
are all values that the region uses from outside: arguments, parameters,
buffers, closures.  Keywords are those of ``torch.utils.checkpoint.checkpoint``
(``use_reentrant``, ``preserve_rng_state``, ``determinism_check``, ``debug``,
``early_stop``), as the user gave them, and ``form`` (:data:`FORM`).  A selective policy is kept as
``body.meta["_checkpoint_context_fn"]`` while the process lives; what it decided
for each operation is on the nodes of the body and in the keyword ``policy``
(``hops._policy``).  ``policy_name`` is the text of a policy of ``hops.policies``,
``allow_cache_entry_mutation`` as the policy's contexts had it.

Upstream: ``torch/_higher_order_ops/wrap.py``, pytorch#103953.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from hops._torch import (
    CHECKPOINT_KEYWORDS,
    StockTagActivationCheckpoint,
    stock_tag_activation_checkpoint,
)
from hops.autograd_function_apply import nothing_but_autograd, takes
from hops.errors import OperatorCallError

#: The keyword ``form`` marks a node in ATen form.  Stock torch does not know it
#: and stops; it would run the region otherwise, and from 2.13 draw other random
#: numbers in recompute than in forward, without a word.
FORM = 1

#: How a node holds its policy.
POLICY_KEYWORDS = ("policy", "policy_name", "allow_cache_entry_mutation")

KEYWORDS = frozenset(CHECKPOINT_KEYWORDS) | {
    "early_stop",
    "preserve_rng_state",
    "respect_saved_tensors_hooks",
    "form",
    *POLICY_KEYWORDS,
}

#: Where a body keeps its selective policy (stock torch's key).
CONTEXT_FN = "_checkpoint_context_fn"

_plain_rule: Callable[..., Any] | None = None


class TagActivationCheckpoint(StockTagActivationCheckpoint):
    """See the module's documentation.

    Raises:
        OperatorCallError: a body that is not a GraphModule, a number of
            operands that does not fit it, an unknown keyword.
    """

    def __call__(self, body: Any, *operands: Any, **options: Any) -> Any:
        if not (takes(body, len(operands)) and options.keys() <= KEYWORDS):
            validate(body, operands, options)
        if _plain_rule is not None and nothing_but_autograd(operands):
            return _plain_rule(body, *operands, **options)
        return super(StockTagActivationCheckpoint, self).__call__(body, *operands, **options)


tag_activation_checkpoint = stock_tag_activation_checkpoint


_KEPT_OPTIONS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")


def node_options(options: dict[str, Any]) -> dict[str, Any]:
    """The keywords of a node in ATen form: all that say how the region is run."""
    defaults = {"early_stop": True, **CHECKPOINT_KEYWORDS}
    kept = {name: options.get(name, defaults[name]) for name in _KEPT_OPTIONS}
    kept.update({name: options[name] for name in POLICY_KEYWORDS if name in options})
    return {**kept, "form": FORM}


def validate(body: Any, operands: Sequence[Any], options: dict[str, Any]) -> None:
    if not isinstance(body, fx.GraphModule):
        raise OperatorCallError(
            "tag_activation_checkpoint: the body must be a torch.fx.GraphModule, got "
            f"{type(body).__name__}. Trace the callable first, "
            "for example with torch.fx.experimental.proxy_tensor.make_fx."
        )
    unknown = sorted(set(options) - KEYWORDS)
    if unknown:
        raise OperatorCallError(
            f"tag_activation_checkpoint: unknown keyword {unknown[0]!r}; known are "
            f"{', '.join(sorted(KEYWORDS))}"
        )
    expected = len(body.graph.find_nodes(op="placeholder"))
    if expected != len(operands):
        raise OperatorCallError(
            f"tag_activation_checkpoint: the body takes {expected} operands, got {len(operands)}"
        )
