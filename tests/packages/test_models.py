"""Checkpointed models of real libraries: every region is found, and all equals eager.

Compared are outputs, gradients of all parameters, buffers, and the number of operators in
the graph with the number of regions that eager checkpoints.  Run it with ``make packages``.
"""

from __future__ import annotations

import io
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models_cases import CASES, fresh
from test_function_parity import Run, assert_equal, run
from torch import fx

FRONT_ENDS = ("nonstrict", "strict")
OPERATOR = torch.ops.higher_order.tag_activation_checkpoint
#: What ``test_function_parity.run`` asks of a case.
PLAIN = SimpleNamespace(double=False, raises=None)


def replay(exported: Any, name: str) -> Run:
    """A run of the program; a parameter that has several names is known by its first."""
    program, (module, args) = exported.module(), fresh(name)
    found = run(program, program, args, PLAIN)
    first = {id(parameter): key for key, parameter in module.named_parameters()}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        if key in found.gradients:
            found.gradients[first[id(parameter)]] = found.gradients.pop(key)
    return found


def count_regions(module: fx.GraphModule) -> int:
    return sum(
        node.target is OPERATOR
        for graph in module.modules()
        if isinstance(graph, fx.GraphModule)
        for node in graph.graph.nodes
    )


def regions_in_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls of checkpoint an eager forward makes."""
    calls = []
    module, args = fresh(name)
    original = torch.utils.checkpoint.checkpoint

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    for child in module.modules():
        kept = getattr(child, "_gradient_checkpointing_func", None)
        if kept is not None:
            monkeypatch.setattr(child, "_gradient_checkpointing_func", _counting(kept, calls))
    if not calls_through_attribute(module):
        monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", counted)
        _rebind(original, counted, monkeypatch)
    module(*args)
    return len(calls)


def calls_through_attribute(module: torch.nn.Module) -> bool:
    return any(hasattr(child, "_gradient_checkpointing_func") for child in module.modules())


def _counting(function: Any, calls: list[int]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return function(*args, **kwargs)

    return counted


def _rebind(original: Any, counted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries import ``checkpoint`` by name."""
    for name, library in list(sys.modules.items()):
        if name.startswith("timm") and getattr(library, "checkpoint", None) is original:
            monkeypatch.setattr(library, "checkpoint", counted)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str, front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if CASES[name].left_out():
        pytest.skip(CASES[name].elsewhere)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if front_end in CASES[name].refused:
            with pytest.raises(Exception, match=CASES[name].refused[front_end]):
                torch.export.export(*fresh(name), strict=front_end == "strict")
        else:
            assert_captured(name, front_end, monkeypatch)


def assert_captured(name: str, front_end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region of the model is captured, and the program equals eager."""
    module, args = fresh(name)
    want = run(module, module, args, PLAIN)
    exported = torch.export.export(*fresh(name), strict=front_end == "strict")
    with monkeypatch.context() as patch:
        assert count_regions(exported.graph_module) == regions_in_eager(name, patch) > 0
    file = io.BytesIO()
    if front_end == "nonstrict":
        torch.export.save(exported, file)
        file.seek(0)
    assert_equal(replay(exported, name), want)
    if front_end == "nonstrict":
        assert_equal(replay(torch.export.load(file), name), want)
