"""The second trace of ``aot_export_module`` keeps what the first wrote on the nodes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import fx


def keeping_node_metadata(export_function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the graph that is handed back run node by node, so that a second trace
    of it copies the metadata of each node."""

    @functools.wraps(export_function)
    def _aot_export_function(*args: Any, **kwargs: Any) -> Any:
        graph_module, *rest = export_function(*args, **kwargs)
        if any("seq_nr" in node.meta for node in graph_module.graph.nodes):
            graph_module.forward = _InterpretedForward(graph_module)
        return (graph_module, *rest)

    return _aot_export_function


class _InterpretedForward:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        with fx.traceback.preserve_node_meta():
            return _SequencedInterpreter(self.module).run(*args)


class _SequencedInterpreter(fx.Interpreter):
    """Hands on ``autograd_backward`` and ``seq_nr``, which a new trace would count anew."""

    def run_node(self, n: fx.Node) -> Any:
        self._running = n
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        meta = self._running.meta
        if "seq_nr" in meta:
            fx.traceback.current_meta.update(in_grad_fn=1, grad_fn_seq_nr=[meta["seq_nr"]])
        if "autograd_backward" in meta:
            fx.traceback.current_meta["autograd_backward"] = True
        return super().call_function(target, args, kwargs)
