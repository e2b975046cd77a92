"""Whether torch catches Functions and checkpoints before dispatch by itself.

Asked only where torch has the operator's rules natively (``hops._operators``): a torch
without them cannot have the front end, and asking means to capture something.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hops._operators import is_native
from hops._torch import (
    proxy_tensor,
    set_grad_enabled_silently,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
    torch_checkpoint,
)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def _region(x: torch.Tensor) -> torch.Tensor:
    return torch_checkpoint.checkpoint(torch.sin, x, use_reentrant=False)


def catches_functions() -> bool:
    return _is_captured(stock_autograd_function_apply, _Doubled.apply)


def catches_checkpoints() -> bool:
    return _is_captured(stock_tag_activation_checkpoint, _region)


def _is_captured(operator: Any, call: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if not is_native(operator):
        return False
    with set_grad_enabled_silently(True):
        x = torch.ones(1, requires_grad=True)
        graph: fx.GraphModule = proxy_tensor.make_fx(call, pre_dispatch=True)(x)
    return any(node.target is operator for node in graph.graph.nodes)


#: Each hook of ``hops._capture_hooks`` that torch may make needless.
FRONT_ENDS: dict[str, Callable[[], bool]] = {
    "Function": catches_functions,
    "checkpoint": catches_checkpoints,
}
