"""``checkpoint_name``: an identity that gives a value a name, for policies to keep it by.

The operation ``hops::checkpoint_name`` is a view: it copies nothing and keeps
no memory of its own.  It has three kernels:

- below autograd it is ``alias``, so that dispatch modes (those of a selective
  policy, tracers) see the operation with its name;
- for autograd it is a Function, since torch.library gives no autograd formula
  to views;
- its composite form is ``alias`` too, by which functionalization (AOTAutograd,
  ``run_decompositions``) removes it.

Under torch.func transforms and forward-mode AD it is ``alias`` itself, whose
derivatives of every kind torch knows.
"""

from __future__ import annotations

from typing import Any

import torch

from hops._torch import (
    DispatchKey,
    below_autograd,
    forward_mode_is_active,
    functorch_is_active,
    view_tracking_active,
)

_library = torch.library.Library("hops", "DEF")
_library.define("checkpoint_name(Tensor(a) x, str name) -> Tensor(a)")

#: The operation, as policies and graphs see it.
CHECKPOINT_NAME = torch.ops.hops.checkpoint_name.default

_alias = torch.ops.aten.alias.default


class CheckpointName(torch.autograd.Function):
    """The autograd node of a named value."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        with below_autograd():
            return CHECKPOINT_NAME(x, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def _below_autograd(x: torch.Tensor, name: str) -> torch.Tensor:
    with view_tracking_active():
        return _alias(x)


def _autograd(x: torch.Tensor, name: str) -> torch.Tensor:
    if functorch_is_active() or forward_mode_is_active():
        return _alias(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return CheckpointName.apply(x, name)
    with below_autograd():
        return CHECKPOINT_NAME(x, name)


def _as_alias(x: torch.Tensor, name: str) -> torch.Tensor:
    return _alias(x)


_library.impl("checkpoint_name", _below_autograd, "CompositeExplicitAutograd")
_library.impl("checkpoint_name", _as_alias, "CompositeImplicitAutograd")
_library.impl("checkpoint_name", _as_alias, DispatchKey.FuncTorchBatched.name)
_library.impl("checkpoint_name", _autograd, "Autograd")


def checkpoint_name(x: torch.Tensor, name: str) -> torch.Tensor:
    """``x`` itself, with a name by which a policy can keep it (JAX's ``checkpoint_name``).

    Inside a checkpointed region whose policy is ``hops.policies.save_names("attention")``,
    ``checkpoint_name(y, "attention")`` is kept for backward, and the operation that
    made ``y`` is not run again.  Everywhere else it changes nothing: it is a view,
    with the gradient of the identity.  Captured graphs show it as
    ``torch.ops.hops.checkpoint_name``; ``ep.run_decompositions()`` removes it.

    Where the operation that made ``x`` has several outputs (fused attention,
    layer_norm) it is run again, and only ``x`` is kept; ``hops.policies.save_matmuls``
    and ``save_ops`` keep whole operations.  A name for part of a tensor keeps the
    storage that the part lies in.

    Args:
        x: any tensor.
        name: not empty.

    Returns:
        A view of all of ``x``: same shape, dtype and storage.

    Raises:
        TypeError: ``x`` is not a tensor, or ``name`` not a string.
        ValueError: ``name`` is empty.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"checkpoint_name: expected a tensor, got {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"checkpoint_name: the name must be a string, got {type(name).__name__}")
    if not name:
        raise ValueError("checkpoint_name: the name must not be empty")
    return CHECKPOINT_NAME(x, name)
