"""What the nodes of bodies tell: the user's lines, and the module that the code stands in."""

import re

import pytest
import torch
from models import text
from torch import fx
from torch.utils.checkpoint import checkpoint

from dispatch_rules import proxy_torch_dispatch_mode


def doubled(x):
    return x * 2


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return doubled(grad) * x.cos()


class GateInside(torch.autograd.Function):
    """Its backward applies a Function, which has bodies of its own in the body."""

    @staticmethod
    def forward(ctx, x):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return Gate.apply(grad)


class Block(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.function = function

    def forward(self, x):
        return self.function.apply(self.linear(x))


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.plain = Block(function)
        self.region = Block(function)

    def forward(self, x):
        return self.plain(x) + checkpoint(self.region, x, use_reentrant=False)


def export(function, strict):
    return torch.export.export(Model(function), (torch.ones(2, 3),), strict=strict)


def operations(module, path=()):
    """Each operation in a body with the names of the bodies around it."""
    for node in module.graph.nodes:
        if node.op == "call_function" and path:
            yield path, node
    for name, body in module.named_children():
        if isinstance(body, fx.GraphModule):
            yield from operations(body, (*path, name.rstrip("0123456789_")))


def lines(node):
    """The functions whose lines the node tells, outermost first; of this file only."""
    found = re.findall(r'File "(.+?)", line \d+, in (\w+)', node.stack_trace or "")
    return [function for file, function in found if file == __file__]


def place(node):
    return [path for path, _ in node.meta["nn_module_stack"].values()]


both = pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])


@both
def test_bodies_tell_the_lines_of_the_user(strict):
    seen = set()
    for path, node in operations(export(Gate, strict).graph_module):
        seen.add(path)
        # Model.forward, Block.forward and what of the Function runs.
        expected = ["forward", "forward"]
        if path[-1] == "fwd_body":
            expected += ["forward"]
        if path[-1] == "bwd_body":
            expected += ["backward"]
            if node.args[-1] == 2:
                expected += ["doubled"]
        assert lines(node) == expected, (path, node)
    assert seen == {
        ("fwd_body",),
        ("bwd_body",),
        ("wrap_body",),
        ("wrap_body", "fwd_body"),
        ("wrap_body", "bwd_body"),
    }


@both
def test_bodies_tell_the_module(strict):
    for path, node in operations(export(Gate, strict).graph_module):
        module = "region" if path[0] == "wrap_body" else "plain"
        expected = ["", module]
        if "linear" in str(node.target):
            expected += [f"{module}.linear"]
        assert place(node) == expected, (path, node)
        kinds = [kind for _, kind in node.meta["nn_module_stack"].values()]
        assert all(isinstance(kind, str) for kind in kinds)


@both
def test_bodies_inside_the_bodies_of_a_function(strict):
    seen = set()
    for path, node in operations(export(GateInside, strict).graph_module):
        seen.add(path)
        assert place(node)[:2] == ["", "region" if path[0] == "wrap_body" else "plain"]
        if "bwd_body" in path:
            assert "backward" in lines(node), (path, node)
    assert {("bwd_body", "fwd_body"), ("wrap_body", "bwd_body", "bwd_body")} <= seen


@both
def test_captured_again_they_tell_the_same(strict):
    ep = export(Gate, strict)
    again = torch.export.export(ep.module(), (torch.ones(2, 3),), strict=False)
    first, second = (list(operations(e.graph_module)) for e in (ep, again))
    assert [(path, lines(n)) for path, n in first] == [(path, lines(n)) for path, n in second]


def test_bodies_traced_by_dynamo_are_as_if_traced_again(monkeypatch):
    """Strict capture copies them; a second trace gives the same, and takes longer."""
    copied = []

    def spy(bodies, operands):
        copied.append(taken(bodies, operands))
        return copied[-1]

    taken = proxy_torch_dispatch_mode.copied_if_traced
    monkeypatch.setattr(proxy_torch_dispatch_mode, "copied_if_traced", spy)
    with_copies = export(Gate, strict=True)
    assert len(copied) == 2 and all(copied)
    monkeypatch.setattr(proxy_torch_dispatch_mode, "copied_if_traced", lambda *_: None)
    traced_again = export(Gate, strict=True)
    assert text(with_copies.graph_module) == text(traced_again.graph_module)
    one, other = (list(operations(e.graph_module)) for e in (with_copies, traced_again))
    assert [(place(n), lines(n)) for _, n in one] == [(place(n), lines(n)) for _, n in other]


def test_bodies_are_traced_again_on_other_values(monkeypatch):
    """A program captured again, for other sizes, does not get the bodies of the first."""
    ep = export(Gate, strict=True)
    taken = proxy_torch_dispatch_mode.copied_if_traced
    answers = []
    monkeypatch.setattr(
        proxy_torch_dispatch_mode,
        "copied_if_traced",
        lambda bodies, operands: answers.append(taken(bodies, operands)),
    )
    again = torch.export.export(ep.module(), (torch.ones(2, 3),), strict=False)
    assert answers and not any(answers)
    assert text(again.graph_module) == text(ep.graph_module)
