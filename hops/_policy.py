"""The selective policy of a checkpointed region, as its captured body keeps it.

While the process lives, the body's metadata holds the user's ``context_fn``
itself.  A file holds what the policy decided: the keyword ``policy`` of the
node, a list of texts ``"<operation> <n> <decision>"`` for the n-th call of an
operation in the region, where the decision is not the default
``PREFER_RECOMPUTE``.  Nothing of the file is run: a region that is loaded gets
the policy that repeats the decisions.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from hops._torch import (
    FakeTensorMode,
    disable_proxy_modes_tracing,
    sac_context,
    sac_ignored_operations,
    selective_checkpoint_modes,
    set_grad_enabled_silently,
)
from hops.errors import ReplayError
from hops.tag_activation_checkpoint import CONTEXT_FN

#: Stands for a policy whose decisions cannot be seen from outside.
_OPAQUE = "opaque"


def context_fn_of(body: fx.GraphModule, options: dict[str, Any]) -> Any:
    """The ``context_fn`` of a region, or None for a region without a policy.

    Raises:
        ReplayError: the region was loaded from a file that could not hold its policy,
            or holds a policy that cannot be read.
    """
    if CONTEXT_FN not in body.meta and "policy" in options:
        decisions = _read(options["policy"])
        body.meta[CONTEXT_FN] = functools.partial(_contexts_from, decisions)
    return body.meta.get(CONTEXT_FN)


def record_policy(body: fx.GraphModule, values: Sequence[Any]) -> list[str]:
    """What the policy of ``body`` decides for each operation, as texts.

    Args:
        values: an example of each operand, of which only shape, dtype and
            device count.
    """
    forward_context, _ = body.meta[CONTEXT_FN]()
    if not isinstance(forward_context, selective_checkpoint_modes[0]):
        return [_OPAQUE]
    recorder = _Recorder(forward_context.policy_fn)
    with disable_proxy_modes_tracing(), set_grad_enabled_silently(True):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        operands = [_fake(mode, value) for value in values]
        with mode, recorder:
            body.forward(*operands)
    return recorder.decisions or ["none 0 PREFER_RECOMPUTE"]


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return _concrete(value)
    sizes, strides = ([_concrete(s) for s in f()] for f in (value.size, value.stride))
    with mode:
        fake = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
    if fake.is_floating_point() or fake.is_complex():
        fake.requires_grad_()
        return fake.view_as(fake)
    return fake


def _concrete(value: Any) -> Any:
    """A symbolic number at the value that it was traced with."""
    return value.node.hint if isinstance(value, torch.SymInt) else value


class _Recorder(TorchDispatchMode):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.decisions: list[str] = []
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func in sac_ignored_operations:
            return output
        decision = self.policy(sac_context(False, output), func, *args, **kwargs)
        if isinstance(decision, bool):
            decision = CheckpointPolicy.MUST_SAVE if decision else CheckpointPolicy.PREFER_RECOMPUTE
        if decision is not CheckpointPolicy.PREFER_RECOMPUTE:
            self.decisions.append(f"{func} {self._calls[func]} {decision.name}")
        self._calls[func] += 1
        return output


def _read(policy: Sequence[str]) -> dict[tuple[str, int], CheckpointPolicy]:
    if _OPAQUE in policy:
        raise ReplayError(
            "hops: this checkpointed region had a policy made of context managers of the user's "
            "own, which a file cannot hold. Capture the model again in this process, or give the "
            "policy by torch.utils.checkpoint.create_selective_checkpoint_contexts."
        )
    decisions = {}
    for line in policy:
        try:
            operation, count, decision = line.split(" ")
            decisions[operation, int(count)] = CheckpointPolicy[decision]
        except (ValueError, KeyError, AttributeError):
            raise ReplayError(
                f"hops: the policy of a checkpointed region holds {line!r}, which is not "
                "'<operation> <n> <decision>'; the file is damaged or from a newer version."
            ) from None
    return decisions


def _contexts_from(decisions: dict[tuple[str, int], CheckpointPolicy]) -> Any:
    """The pair of contexts of one execution; forward and recompute count apart."""
    calls: tuple[Counter[str], Counter[str]] = (Counter(), Counter())

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name, counter = str(operation), calls[context.is_recompute]
        decision = decisions.get((name, counter[name]), CheckpointPolicy.PREFER_RECOMPUTE)
        counter[name] += 1
        return decision

    return create_selective_checkpoint_contexts(policy)
