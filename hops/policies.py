"""Policies that say what a checkpointed region keeps for its backward.

Each is a value: frozen, comparable, hashable, printed as the code that makes
it, and written into files by that text, never as code.  Each is also a
``context_fn``, in plain eager as in a captured model::

    checkpoint(block, x, use_reentrant=False, context_fn=hops.policies.save_matmuls)
    checkpoint(block, x, use_reentrant=False, context_fn=hops.policies.save_names("hidden"))

What a policy saves is ``CheckpointPolicy.MUST_SAVE``, all else
``PREFER_RECOMPUTE``, as an operation list of
``torch.utils.checkpoint.create_selective_checkpoint_contexts`` means it.

Follows ``jax.checkpoint_policies``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from hops._named_execution import contexts_of
from hops._names import CHECKPOINT_NAME
from hops.errors import ReplayError

__all__ = [
    "Policy",
    "both_of",
    "from_text",
    "save_everything",
    "save_matmuls",
    "save_matmuls_without_batch_dims",
    "save_names",
    "save_nothing",
    "save_ops",
]


@dataclass(frozen=True, repr=False)
class Policy:
    """What all policies of this module are.  A call gives the pair of contexts of one
    execution, as ``checkpoint`` asks of its ``context_fn``; ``a | b`` is ``both_of(a, b)``."""

    def __call__(self) -> tuple[Any, Any]:
        return contexts_of(self)

    def __or__(self, other: Policy) -> Policy:
        return both_of(self, other)

    def __repr__(self) -> str:
        return f"hops.policies.{self.text}"

    @property
    def text(self) -> str:
        """How the policy is written in graphs and files; :func:`from_text` reads it."""
        raise NotImplementedError

    @property
    def cache_hash(self) -> str:
        """By which AOTAutograd's cache tells policies apart."""
        return repr(self)

    @property
    def context_fn(self) -> Callable[[], tuple[Any, Any]]:
        """The policy as a plain function, for code that takes nothing else (stock Dynamo)."""

        def contexts() -> tuple[Any, Any]:
            return self()

        contexts.policy = self  # type: ignore[attr-defined]
        contexts.cache_hash = self.cache_hash  # type: ignore[attr-defined]
        return contexts

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        """Whether the outputs of this call of an operation are kept."""
        raise NotImplementedError


@dataclass(frozen=True, repr=False)
class _Constant(Policy):
    """A policy without parameters; there is one of each."""

    _text: ClassVar[str] = ""

    @property
    def text(self) -> str:
        return self._text


@dataclass(frozen=True, repr=False)
class SaveEverything(_Constant):
    _text = "save_everything"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        return True


@dataclass(frozen=True, repr=False)
class SaveNothing(_Constant):
    _text = "save_nothing"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        return False


#: Products of two matrices, a matrix and a vector, or two vectors.  ``linear`` is
#: one operation on some devices, and decomposed into these on the others.
_MATMULS = frozenset(
    "aten." + name
    for name in (
        "mm addmm mv addmv dot vdot linear _addmm_activation _int_mm _scaled_mm _scaled_mm_v2 "
        "_weight_int8pack_mm _weight_int4pack_mm"
    ).split()
)

#: Products of batches of matrices.
_BATCHED_MATMULS = frozenset({"aten.bmm", "aten.baddbmm"})

#: Operations made of such products.
_MADE_OF_BATCHED_MATMULS = frozenset(
    {"aten.addbmm", "aten._grouped_mm", "aten._scaled_grouped_mm", "flex_attention"}
    | {
        "aten._scaled_dot_product_" + name
        for name in (
            "attention_math flash_attention flash_attention_for_cpu efficient_attention "
            "cudnn_attention fused_attention_overrideable"
        ).split()
    }
)


@dataclass(frozen=True, repr=False)
class SaveMatmuls(_Constant):
    _text = "save_matmuls"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        name = _packet_name(operation)
        return name in _MATMULS or name in _BATCHED_MATMULS or name in _MADE_OF_BATCHED_MATMULS


@dataclass(frozen=True, repr=False)
class SaveMatmulsWithoutBatchDims(_Constant):
    _text = "save_matmuls_without_batch_dims"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        name = _packet_name(operation)
        if name in _MATMULS:
            return True
        return name in _BATCHED_MATMULS and _one_side_is_shared(args[-2:])


def _one_side_is_shared(factors: Sequence[Any]) -> bool:
    """Whether the matrices of one side are the same for the whole batch, so that the batch
    is rows of one product: how ``matmul`` runs some products of 3-D and 2-D tensors."""
    return any(t.shape[0] == 1 or t.stride(0) == 0 for t in factors if t.layout is torch.strided)


@dataclass(frozen=True, repr=False)
class SaveOps(Policy):
    operations: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"save_ops({', '.join(map(repr, self.operations))})"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        return str(operation) in self.operations or _packet_name(operation) in self.operations


@dataclass(frozen=True, repr=False)
class SaveNames(Policy):
    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"save_names({', '.join(map(repr, self.names))})"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        return operation is CHECKPOINT_NAME and args[1] in self.names


@dataclass(frozen=True, repr=False)
class BothOf(Policy):
    policies: tuple[Policy, ...]

    @property
    def text(self) -> str:
        return f"both_of({', '.join(policy.text for policy in self.policies)})"

    def __repr__(self) -> str:
        return f"hops.policies.both_of({', '.join(map(repr, self.policies))})"

    def saves(self, operation: Any, args: Sequence[Any]) -> bool:
        return any(policy.saves(operation, args) for policy in self.policies)


save_everything: Policy = SaveEverything()
"""Keep the output of every operation; nothing is run again."""

save_nothing: Policy = SaveNothing()
"""Keep nothing; what ``checkpoint`` does without a policy."""

save_matmuls: Policy = SaveMatmuls()
"""Keep every matrix product (mm, addmm, bmm, ...), and fused attention, which is made of two."""

save_matmuls_without_batch_dims: Policy = SaveMatmulsWithoutBatchDims()
"""Keep the matrix products in which no dimension is a batch dimension of both sides: the
products with weights, not those of queries, keys and values.  JAX's
``dots_with_no_batch_dims_saveable``."""


def save_ops(*operations: Any) -> Policy:
    """Keep the outputs of the given operations.

    Args:
        operations: overloads (``torch.ops.aten.mm.default``), packets
            (``torch.ops.aten.mm``, all its overloads), higher-order operators, or
            the texts of any of them (``"aten.mm"``).  Name what autograd runs:
            ``matmul`` and ``linear`` reach a policy as mm, addmm or bmm.

    Raises:
        TypeError: something else.
        ValueError: none.
    """
    return SaveOps(_sorted_texts("save_ops", [_operation_text(o) for o in operations]))


def save_names(*names: str) -> Policy:
    """Keep the values that ``hops.checkpoint_name`` gave one of these names.

    Raises:
        TypeError: a name is not a string.
        ValueError: no names.
    """
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"save_names: names are strings, got {type(name).__name__}")
    return SaveNames(_sorted_texts("save_names", names))


def both_of(*policies: Policy) -> Policy:
    """Keep what any of these policies keeps.

    Raises:
        TypeError: something that is not a policy of this module.
        ValueError: fewer than two.
    """
    if len(policies) < 2:
        raise ValueError("both_of: give two policies or more")
    flat: dict[Policy, None] = {}
    for policy in policies:
        if not isinstance(policy, Policy):
            raise TypeError(
                f"both_of: expected policies of hops.policies, got {type(policy).__name__}"
            )
        flat.update(dict.fromkeys(policy.policies if isinstance(policy, BothOf) else (policy,)))
    return next(iter(flat)) if len(flat) == 1 else BothOf(tuple(flat))


def _sorted_texts(function: str, texts: Sequence[str]) -> tuple[str, ...]:
    if not texts:
        raise ValueError(f"{function}: give at least one")
    return tuple(sorted(set(texts)))


def _operation_text(operation: Any) -> str:
    if isinstance(operation, str):
        return operation.replace("::", ".")
    kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
    if isinstance(operation, kinds):
        return str(operation)
    raise TypeError(
        f"save_ops: expected operations such as torch.ops.aten.mm or their texts, got "
        f"{type(operation).__name__}"
    )


def _packet_name(operation: Any) -> str:
    packet = getattr(operation, "overloadpacket", operation)
    return str(packet)


_CONSTANTS: dict[str, Policy] = {
    policy.text: policy
    for policy in (save_everything, save_nothing, save_matmuls, save_matmuls_without_batch_dims)
}
_MAKERS: dict[str, Any] = {"save_ops": save_ops, "save_names": save_names, "both_of": both_of}


def from_text(text: str) -> Policy:
    """The policy whose ``text`` this is.  The text is looked up, not run.

    Raises:
        ReplayError: hops has no such policy.
    """
    try:
        return _policy_of(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError, KeyError):
        raise ReplayError(
            f"hops: a checkpointed region has the policy {text!r}, which hops.policies does not "
            f"know; it has {', '.join([*_CONSTANTS, *_MAKERS])}. The file is damaged or from a "
            "newer version of hops; load it with that version, or capture the model again."
        ) from None


def _policy_of(expression: ast.expr) -> Policy:
    if isinstance(expression, ast.Name):
        return _CONSTANTS[expression.id]
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        raise ValueError("neither a name nor a call of a name")
    make = _MAKERS[expression.func.id]
    if expression.keywords:
        raise ValueError("keywords")
    read = _policy_of if make is both_of else _text_of
    return make(*[read(argument) for argument in expression.args])


def _text_of(expression: ast.expr) -> str:
    if not isinstance(expression, ast.Constant) or not isinstance(expression.value, str):
        raise ValueError("not a string")
    return expression.value
