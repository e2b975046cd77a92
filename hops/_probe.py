"""Private names of torch that are used inside functions only, looked up early.

What a module uses while it is imported fails there; a name in this list would
fail in the middle of a capture instead, on a torch that has moved it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
import torch.fx.experimental.proxy_tensor
import torch.utils.checkpoint

USED_IN_FUNCTIONS = (
    "torch._C.DisableTorchFunction",
    "torch._C._SetExcludeDispatchKeyGuard",
    "torch._C._TorchDispatchModeKey.FUNCTIONAL",
    "torch._C._TorchDispatchModeKey.PROXY",
    "torch._C._VariableFunctions",
    "torch._C._current_graph_task_id",
    "torch._C._functorch.unwrap_if_dead",
    "torch._C._get_dispatch_mode",
    "torch._C._len_torch_function_stack",
    "torch._C._set_grad_enabled",
    "torch._from_functional_tensor",
    "torch._functorch",
    "torch._ops.HigherOrderOperator",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.fx.experimental.proxy_tensor._CURRENT_MAKE_FX_TRACER",
    "torch.fx.experimental.proxy_tensor._MakefxTracer",
    "torch.ops.aten._unsafe_view.default",
    "torch.utils.checkpoint._VersionWrapper",
)


def look_up(names: Sequence[str]) -> None:
    """Look up names that begin with ``torch.``.

    Raises:
        AttributeError: names those that do not exist.
    """
    missing = [name for name in names if not _exists(name)]
    if missing:
        raise AttributeError(f"torch has no {', '.join(missing)}")


def _exists(name: str) -> bool:
    try:
        attrgetter(name.removeprefix("torch."))(torch)
    except AttributeError:
        return False
    return True


look_up(USED_IN_FUNCTIONS)
