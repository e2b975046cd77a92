"""Buffers that captured code assigns, ``module.running = ...``.

torch.export notes the node of what is assigned, by its name, and copies it into
the buffer at the end of the graph.  Inside a body that node is not one of the
enclosing graph; so the assignment is made once more outside, when the value
has a node there.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

import torch
from torch import fx
from torch.nn.modules.module import register_module_buffer_registration_hook

from hops._subgraph import surface, track


class AssignedBuffers:
    """Notes the buffers that are assigned on this thread while it is entered."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, str], torch.nn.Module] = {}

    def __enter__(self) -> AssignedBuffers:
        thread = threading.get_ident()

        def note(module: torch.nn.Module, name: str, buffer: Any) -> None:
            if threading.get_ident() == thread:
                self._noted[id(module), name] = module

        self._handle = register_module_buffer_registration_hook(note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._handle.remove()

    def assign_outside(self, tracer: Any) -> None:
        """Assign again, by the nodes of the graph that the tracer now writes."""
        for (_, name), module in self._noted.items():
            value = module._buffers.get(name)
            proxy = tracer.unwrap_proxy(value) if isinstance(value, torch.Tensor) else None
            if not isinstance(proxy, fx.Proxy):
                continue
            outer = surface(proxy.node, tracer)
            if outer is not proxy.node:
                track(value, fx.Proxy(outer, tracer), tracer)
                setattr(module, name, value)
