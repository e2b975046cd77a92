"""What replay keeps of a body between executions follows the body, and nothing else."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import fx

import hops
from hops._prepared import runner

sin, cos = torch.ops.aten.sin.default, torch.ops.aten.cos.default


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin() * 3

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * x.cos() * 3


class Model(torch.nn.Module):
    def forward(self, x):
        return Triple.apply(x)


@pytest.fixture
def x():
    return torch.linspace(-1, 1, 5, requires_grad=True)


@pytest.fixture
def module(x):
    module = torch.export.export(Model(), (x,), strict=False).module()
    module(x).sum().backward()
    x.grad = None
    return module


def results(module, x):
    y = module(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), gradient


def replace(body, old, new):
    """What a pass does: edit the graph, recompile."""
    for node in body.graph.find_nodes(op="call_function", target=old):
        node.target = new
    body.recompile()


def test_a_recompiled_forward_is_run(module, x):
    replace(module.fwd_body_0, sin, cos)
    assert torch.equal(module(x), x.cos() * 3)


def test_a_recompiled_backward_is_run(module, x):
    replace(module.bwd_body_0, cos, sin)
    assert torch.equal(results(module, x)[1], x.sin() * 3)


def test_a_backward_that_is_recompiled_between_forward_and_backward_is_run(module, x):
    y = module(x)
    replace(module.bwd_body_0, cos, sin)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], x.sin() * 3)


def test_a_recompiled_forward_with_other_operands_is_refused(module, x):
    body = module.fwd_body_0
    with body.graph.inserting_before(next(iter(body.graph.nodes))):
        body.graph.placeholder("another")
    body.recompile()
    with pytest.raises(hops.OperatorCallError, match="takes 2 operands, got 1"):
        module(x)


def test_another_forward_on_the_body_itself_is_run(module, x):
    module.fwd_body_0.forward = lambda x: (x.exp(), x)
    assert torch.equal(module(x), x.exp())


def test_another_backward_body_is_run(module, x):
    other = copy.deepcopy(module.bwd_body_0)
    replace(other, cos, sin)
    module.bwd_body_0 = other
    assert torch.equal(results(module, x)[1], x.sin() * 3)


def test_other_options_are_minded(module, x):
    (call,) = module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.autograd_function_apply
    )
    call.update_kwarg("non_differentiable_idx", [0])
    module.recompile()
    assert not module(x).requires_grad


def test_a_list_of_options_that_changes_in_place_is_minded(module, x):
    operator = torch.ops.higher_order.autograd_function_apply
    marked = []
    options = {"num_outputs": 1, "saved_for_backward_idx": [0], "non_differentiable_idx": marked}
    bodies = module.fwd_body_0, module.bwd_body_0
    assert operator(*bodies, x, **options)[0].requires_grad
    marked.append(0)
    assert not operator(*bodies, x, **options)[0].requires_grad


def test_a_copy_goes_its_own_way(module, x):
    want = results(module, x)
    other = copy.deepcopy(module)
    replace(other.fwd_body_0, sin, cos)
    replace(other.bwd_body_0, cos, sin)
    assert torch.equal(results(other, x)[1], x.sin() * 3)
    torch.testing.assert_close(results(module, x), want)


def test_a_body_that_ran_can_be_pickled_and_saved(module, x):
    body = pickle.loads(pickle.dumps(module.fwd_body_0))
    assert torch.equal(body(x)[0], x.sin() * 3)
    buffer = io.BytesIO()
    torch.save(module.bwd_body_0, buffer)


def test_nothing_of_an_execution_is_kept(module, x):
    gc.disable()
    try:
        y = module(x)
        output = weakref.ref(y)
        y.sum().backward()
        del y
        assert output() is None
    finally:
        gc.enable()


def test_what_a_finished_transform_left_behind_gets_its_gradient(module, x):
    kept = []
    torch.func.grad(lambda v: (kept.append(v), (v * v).sum())[1])(x)
    y = kept[0]
    want = torch.autograd.grad(Triple.apply(y).sum(), x, allow_unused=True)
    assert results_equal(torch.autograd.grad(module(y).sum(), x, allow_unused=True), want)


def results_equal(got, want):
    return all((g is None) == (w is None) for g, w in zip(got, want)) and all(
        torch.equal(g, w) for g, w in zip(got, want) if w is not None
    )


def body_of(build):
    graph = fx.Graph()
    graph.output((build(graph, graph.placeholder("x")),))
    return fx.GraphModule({}, graph)


def call(operation, x):
    assert isinstance(operation, torch._ops.OpOverload)
    return operation(x)


def test_an_operation_that_is_an_argument_stays_what_it_is():
    body = body_of(lambda graph, x: graph.call_function(call, (sin, x)))
    x = torch.ones(2)
    assert torch.equal(runner(body)(body, x)[0], x.sin())


def test_operations_with_and_without_a_native_function_run_as_generated():
    def build(graph, x):
        scaled = graph.call_function(torch.ops.aten.add.Tensor, (x, 2), {"alpha": 3})
        summed = graph.call_function(torch.ops.aten.sum.dim_IntList, (scaled, [0], True))
        return graph.call_function(torch.ops.aten.div.Tensor, (x, summed))

    body = body_of(build)
    x = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(runner(body)(body, x)[0], body(x)[0])
    assert runner(body) is not type(body).forward
