"""``hops.canonicalize``: one reader for the graphs of every torch."""

import copy

import pytest
import torch
from models import Scale, assert_same, gradients
from torch import fx
from torch.utils.checkpoint import checkpoint
from version_differences import needs

import hops
from hops._torch import graph_capture_for_export

FUNCTION = torch.ops.higher_order.autograd_function_apply
REGION = torch.ops.higher_order.tag_activation_checkpoint


class Two(torch.autograd.Function):
    """Two outputs, one that is not differentiable, and a constant argument."""

    @staticmethod
    def forward(ctx, x, factor, weight):
        out, mask = x * weight * factor, (x > 0).to(x.dtype)
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(weight)
        ctx.factor = factor
        return out, mask

    @staticmethod
    def backward(ctx, grad, _):
        (weight,) = ctx.saved_tensors
        return grad * weight * ctx.factor * 3, None, grad.sum(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        h = Scale.apply(self.linear(x), self.weight).sin()
        out, mask = Two.apply(h, 2.0, self.weight)
        return (
            checkpoint(lambda v: Scale.apply(v, self.weight).cos(), out, use_reentrant=False) * mask
        )


def graph_of(model, x):
    """The graph that a backend of torch.compile gets, with its arguments."""
    seen = []

    def backend(graph_module, inputs):
        seen.append((graph_module, inputs))
        return graph_module

    torch.compile(model, backend=backend, fullgraph=True)(x)
    return seen[0]


def assert_canonical(graph_module):
    for module in graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if node.target is FUNCTION:
                assert {"name", "num_outputs", "num_inputs"} <= node.kwargs.keys()
                assert "args_tensor_mask" not in node.kwargs
                for body in node.args[:2]:
                    body = getattr(module, body.target)
                    values = body.graph.find_nodes(op="output")[0].args[0]
                    assert all(not isinstance(v, (tuple, list)) for v in values)
                assert all(user.target.__name__ == "getitem" for user in node.users)
            elif node.target is REGION:
                assert node.kwargs["form"] == 1


def test_a_graph_of_the_running_torch():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(4, 3)
    want = gradients(model, x)
    graph_module, inputs = graph_of(model, x)
    before = graph_module.print_readable(print_output=False)
    canonical = hops.canonicalize(graph_module)
    assert_canonical(canonical)
    assert graph_module.print_readable(print_output=False) == before
    got = gradients(lambda v: canonical(*inputs)[0], x, parameters=model)
    assert_same(got, want)
    names = [n.kwargs["name"] for n in canonical.graph.nodes if n.target is FUNCTION]
    assert names == ["models.Scale", f"{__name__}.Two"]
    again = hops.canonicalize(canonical)
    assert again.print_readable(print_output=False) == canonical.print_readable(print_output=False)


def by_hand(forward, backward, arguments, **keywords):
    """A graph of one call, with bodies of traced callables."""
    root = torch.nn.Module()
    root.fwd, root.bwd = fx.symbolic_trace(forward), fx.symbolic_trace(backward)
    graph = fx.Graph()
    operands = [graph.placeholder(f"arg_{i}") for i in range(arguments)]
    call = graph.call_function(
        FUNCTION, (graph.get_attr("fwd"), graph.get_attr("bwd"), *operands), keywords
    )
    graph.output(call)
    return fx.GraphModule(root, graph)


def old_forward(ctx, x, weight):
    torch._C._set_grad_enabled(False)
    out = x * weight
    torch._C._set_grad_enabled(True)
    return out, [x, weight]


def old_backward(ctx, grad, x, weight):
    torch._C._set_grad_enabled(False)
    results = grad * weight * 2, (grad * x).sum(0)
    torch._C._set_grad_enabled(True)
    return results


def new_backward(grad, x, weight):
    return grad * weight * 2, (grad * x).sum(0)


FORMS = {
    "2.6 to 2.10: ctx and args_tensor_mask": (
        old_forward,
        old_backward,
        {"args_tensor_mask": [True, False, True], "non_differentiable_idx": []},
    ),
    "2.11 on: no ctx": (
        lambda x, weight: (x * weight, [x, weight]),
        new_backward,
        {"non_differentiable_idx": [], "saved_for_backward_idx": [0, 1]},
    ),
    "2.13 on: dirty_idx": (
        lambda x, weight: (x * weight, [x, weight]),
        new_backward,
        {"non_differentiable_idx": [], "saved_for_backward_idx": [0, 1], "dirty_idx": []},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_every_torch(form):
    forward, backward, keywords = FORMS[form]
    graph = by_hand(forward, backward, 2, **keywords)
    canonical = hops.canonicalize(graph)
    assert_canonical(canonical)
    torch.manual_seed(0)
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)
    results = []
    for call in (Scale.apply, canonical):
        output = call(x, weight)
        first = torch.autograd.grad(output.sin().sum(), (x, weight), create_graph=True)
        second = torch.autograd.grad(first[0].sum(), weight)
        results.append((output, *first, *second))
    for got, want in zip(*reversed(results)):
        torch.testing.assert_close(got, want)
    (node,) = [n for n in canonical.graph.nodes if n.target is FUNCTION]
    parts = hops.function_parts(node)
    assert parts.num_outputs == 1 and len(parts.saved) == 2
    assert len(parts.forward.graph.find_nodes(op="placeholder")) == 2
    copy.deepcopy(canonical)


def test_what_no_torch_writes_is_refused_by_the_name_of_the_node():
    uses_ctx = by_hand(
        lambda ctx, x: (x * ctx, [x]), lambda ctx, g, x: g, 1, args_tensor_mask=[True]
    )
    with pytest.raises(hops.OperatorCallError, match="autograd_function_apply: the forward body"):
        hops.canonicalize(uses_ctx)
    flat = by_hand(lambda x: (x, x, x), lambda g, x: g, 1, non_differentiable_idx=[])
    with pytest.raises(
        hops.OperatorCallError, match="autograd_function_apply: without num_outputs"
    ):
        hops.canonicalize(flat)


@needs("dynamo_graph_capture")
def test_a_lean_capture_keeps_its_parameters_and_runs():
    model, x = Model(), torch.randn(4, 3)
    captured = graph_capture_for_export()(model)(x)
    canonical = hops.canonicalize(captured)
    assert_canonical(canonical)
    names = [name for name, _ in captured.named_parameters()]
    assert [name for name, _ in canonical.named_parameters()] == names
    torch.testing.assert_close(canonical(x), model(x))


def test_what_is_no_graph_module_is_a_type_error():
    exported = torch.export.export(Model(), (torch.randn(4, 3),), strict=False)
    with pytest.raises(TypeError, match="got ExportedProgram; .* graph_module"):
        hops.canonicalize(exported)
