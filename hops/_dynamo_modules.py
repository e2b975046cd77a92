"""Modules that several bodies of one Dynamo graph call."""

from __future__ import annotations

import copy

from torch import fx, nn


def separate_shared_modules(graph_module: fx.GraphModule) -> None:
    """Give each body modules of its own, with the same parameters and buffers.

    Up to torch 2.6 a graph of an export calls built-in modules.  Dynamo then runs it by
    ``functional_call`` on fake parameters, which puts the real ones back in the order in which it
    took them: into a module that it met under two names the fake ones.
    """
    seen: set[nn.Module] = set()
    for owner in [m for m in graph_module.modules() if isinstance(m, fx.GraphModule)]:
        for name, module in owner.named_children():
            if isinstance(module, fx.GraphModule):
                continue
            if seen.isdisjoint(module.modules()):
                seen.update(module.modules())
            else:
                setattr(owner, name, _twin(module))


def _twin(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {n: m if m is None else _twin(m) for n, m in module._modules.items()}
    return twin
