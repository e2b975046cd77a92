"""Blocks of grad mode and autocast that hold an operator, as torch.export cuts them out."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import fx

from hops._torch import set_grad_enabled

#: The passes that make an operator of a block, by what opens it.
PASSES = (
    "torch._export.passes.replace_autocast_with_hop_pass",
    "torch._export.passes.replace_set_grad_with_hop_pass",
)

_OPENS = (torch.amp.autocast_mode._enter_autocast, set_grad_enabled)


def opening_each_block_first(sequential_split: Callable[..., Any]) -> Callable[..., Any]:
    """``torch._export.utils.sequential_split``, with the switch as the first node of a block.

    The passes know a block by its first node.  Where the block holds an operator
    with bodies, the split puts their ``get_attr`` nodes before it, and the switch
    is then dropped (grad mode) or left where a file cannot hold it (autocast).
    """

    @wraps(sequential_split)
    def split(*args: Any, **kwargs: Any) -> Any:
        module = sequential_split(*args, **kwargs)
        for node in module.graph.find_nodes(op="call_module"):
            block = getattr(module, str(node.target), None)
            if isinstance(block, fx.GraphModule):
                _open_first(block)
        return module

    return split


def _open_first(block: fx.GraphModule) -> None:
    early = []
    for node in block.graph.nodes:
        if node.op == "get_attr":
            early.append(node)
        elif node.op != "placeholder":
            if early and node.target in _OPENS:
                early[0].prepend(node)
                block.recompile()
            return
