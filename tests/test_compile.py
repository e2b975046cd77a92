"""``torch.compile`` of eager models: equal to eager, or out of the graph by name."""

from __future__ import annotations

import pytest
import torch
from compile_cases import CASES, UnusedIsNone
from models import text
from torch._dynamo.exc import Unsupported
from torch.autograd import Function
from version_differences import needs

import hops


def run(program, args):
    """Outputs, whether each requires grad, and gradients of inputs and parameters."""
    leaves = [a for a in args if a.requires_grad]
    leaves += getattr(program, "parameters", list)()
    for leaf in leaves:
        leaf.grad = None
    result = program(*args)
    outputs = list(result) if isinstance(result, tuple) else [result]
    loss = [o.sum() for o in outputs if o.requires_grad]
    if loss:
        sum(loss).backward()
    return outputs, [o.requires_grad for o in outputs], [leaf.grad for leaf in leaves]


def fresh(name):
    torch.manual_seed(0)
    return CASES[name].build()


def assert_equals_eager(name, backend, fullgraph):
    want = run(*fresh(name))
    function, args = fresh(name)
    got = run(torch.compile(function, backend=backend, fullgraph=fullgraph), args)
    assert got[1] == want[1]
    torch.testing.assert_close(got[0], want[0])
    for ours, theirs in zip(got[2], want[2]):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)


def broken(name):
    feature = CASES[name].break_needs
    return pytest.param(name, marks=[needs(feature)] if feature else [])


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", map(broken, CASES))
def test_equals_eager(name, backend):
    assert_equals_eager(name, backend, fullgraph=False)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", CASES)
def test_the_whole_graph_equals_eager_or_names_the_function(name, backend):
    try:
        assert_equals_eager(name, backend, fullgraph=True)
    except Unsupported as error:
        assert CASES[name].stock_refuses or "hops: compile_cases." in str(error)


@pytest.mark.parametrize("name", ["unused_output_is_none", "is_contiguous_expanded", "func_grad"])
def test_inductor_equals_eager(name):
    assert_equals_eager(name, "inductor", fullgraph=False)


WHOLE = [
    "unused_output_is_none",
    "none_stays_none",
    "materialize_in_a_module",
    "lone_non_differentiable",
    "lone_integer",
    "func_grad",
    "func_grad_of_leaf",
    "func_grad_of_grad",
    "vmap",
    "vmap_of_grad",
    "vmap_over_second",
]


@pytest.mark.parametrize("name", WHOLE)
def test_the_graph_is_whole_where_it_can_be(name):
    assert_equals_eager(name, "eager", fullgraph=True)


def graph_text(name):
    graphs = []

    def backend(graph, inputs):
        graphs.append(text(graph))
        return graph.forward

    torch._dynamo.reset()
    function, args = fresh(name)
    try:
        torch.compile(function, backend=backend, fullgraph=True)(*args)
    except Unsupported:
        return "refused"
    return graphs


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.stock_is_right])
def test_what_stock_reads_right_keeps_its_text(name):
    ours = graph_text(name)
    hops.uninstall()
    try:
        stock = graph_text(name)
    finally:
        hops.install()
    assert ours == stock


SCALE = 2.0


class ReadsGlobal(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * SCALE, x.cos()

    @staticmethod
    def backward(ctx, first, second):
        return first * 10 * SCALE if second is None else second


def test_a_function_captured_by_running_is_guarded(monkeypatch):
    compiled = torch.compile(
        lambda x: ReadsGlobal.apply(x)[0].exp(), backend="eager", fullgraph=True
    )
    x = torch.randn(2, 3, requires_grad=True)
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        want = run(lambda x: ReadsGlobal.apply(x)[0].exp(), (x,))
        got = run(compiled, (x,))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2], want[2])


class Counts(Function):
    calls = []

    @staticmethod
    def forward(ctx, x):
        Counts.calls.append(1)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    backward = UnusedIsNone.backward


def test_side_effects_of_forward_happen_once_a_call():
    compiled = torch.compile(lambda x: Counts.apply(x)[0].exp(), backend="eager")
    x = torch.randn(2, 3, requires_grad=True)
    Counts.calls.clear()
    for _ in range(3):
        compiled(x)
    assert len(Counts.calls) == 3


@pytest.mark.parametrize(
    ("name", "fullgraph"),
    [
        ("unused_output_is_none", True),
        ("lone_integer", True),
        # Dynamo of 2.6 cannot read the layout of a gradient: the Function leaves the graph.
        ("contiguous_if_not_expanded", False),
    ],
)
def test_dynamic_shapes(name, fullgraph):
    function, _ = fresh(name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=fullgraph, dynamic=True)
    for rows in (4, 5, 7):
        x = torch.randn(rows, 3, requires_grad=True)
        want, got = run(function, (x,)), run(compiled, (x,))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2], want[2])


class NoRule(Function):
    """Cannot be run by make_fx: it looks at a value."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, first, second):
        if second is None and first.sum() > 0:
            return first * 10
        return first


def test_what_cannot_be_captured_by_running_leaves_the_graph_by_name():
    def call(x):
        return NoRule.apply(x)[0].exp()

    x = torch.randn(2, 3, requires_grad=True)
    torch.testing.assert_close(
        run(torch.compile(call, backend="eager"), (x,))[2], run(call, (x,))[2]
    )
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match="test_compile.NoRule"):
        torch.compile(call, backend="eager", fullgraph=True)(x)
