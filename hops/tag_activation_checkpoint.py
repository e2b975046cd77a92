"""The operator ``tag_activation_checkpoint``: one checkpointed region.

    tag_activation_checkpoint(body, *operands, use_reentrant=..., ...)

``body(*operands)`` gives the outputs of the region as a flat tuple.  Operands
are all values that the region uses from outside: arguments, parameters,
buffers, closures.  Keywords are those of ``torch.utils.checkpoint.checkpoint``
(``use_reentrant``, ``preserve_rng_state``, ``determinism_check``, ``debug``,
``early_stop``), as the user gave them, and ``form`` (``hops._validation.FORM``).  A
selective policy is kept as
``body.meta["_checkpoint_context_fn"]`` while the process lives; what it decided
for each operation is on the nodes of the body and in the keyword ``policy``
(``hops._policy``).  ``policy_name`` is the text of a policy of ``hops.policies``,
``allow_cache_entry_mutation`` as the policy's contexts had it.

Upstream: ``torch/_higher_order_ops/wrap.py``, pytorch#103953.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hops._torch import (
    CHECKPOINT_KEYWORDS,
    StockTagActivationCheckpoint,
    stock_tag_activation_checkpoint,
)
from hops._validation import FORM, POLICY_KEYWORDS, check_region_call, is_checked
from hops.autograd_function_apply import nothing_but_autograd

#: Where a body keeps its selective policy (stock torch's key).
CONTEXT_FN = "_checkpoint_context_fn"

_plain_rule: Callable[..., Any] | None = None


class TagActivationCheckpoint(StockTagActivationCheckpoint):
    """See the module's documentation.

    Raises:
        OperatorCallError: a body, operands or keywords that do not fit together
            (``hops._validation``).
    """

    def __call__(self, body: Any, *operands: Any, **options: Any) -> Any:
        if not is_checked(body, None, len(operands), options):
            check_region_call(body, operands, options)
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
