"""Switches of grad mode inside a recorded body, brought to as few as mean the same.

torch records a switch wherever a context is entered and left, also where the mode
stays what it is.  torch.export later cuts a graph at each switch, and an autocast
region with it: of pieces that hold nothing it makes operators without outputs, which
save but do not load.
"""

from __future__ import annotations

import torch
from torch import fx

from hops._torch import set_grad_enabled

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


def simplify_mode_switches(graph: fx.Graph) -> None:
    """Remove switches that change nothing, and move the others out of the ends of an
    autocast region, with which they commute."""
    _move_out_of_autocast(graph)
    mode: bool | None = None
    pending: fx.Node | None = None
    for node in list(graph.nodes):
        if _is_switch(node):
            if pending is not None:
                graph.erase_node(pending)
            pending = node
        elif node.op not in ("placeholder", "get_attr"):
            if pending is not None and pending.args[0] == mode:
                graph.erase_node(pending)
            elif pending is not None:
                mode = bool(pending.args[0])
            pending = None


def _move_out_of_autocast(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if not _is_switch(node):
            continue
        while node.prev.target is _ENTER:
            node.prev.prepend(node)
        while node.next.target is _EXIT:
            node.next.append(node)


def drop_empty_regions(graph: fx.Graph) -> None:
    """Remove the autocast and grad mode regions of which dead code elimination has left
    nothing."""
    for node in reversed(list(graph.nodes)):
        if node.target is _ENTER and node.next.target is _EXIT and node.next.args == (node,):
            graph.erase_node(node.next)
            graph.erase_node(node)
        elif _is_switch(node) and _is_switch(node.next):
            graph.erase_node(node)


def _is_switch(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is set_grad_enabled and not node.users
