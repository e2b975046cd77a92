"""What a policy decided survives what passes do to a captured program."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from models import assert_same, gradients
from test_policy import CONTEXT_FN, Selective, matmuls_in_backward, reloaded, saved_bytes
from torch import fx

import hops

aten = torch.ops.aten
CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def program(source="captured"):
    """A program with two products, both kept; from this process, or from a file."""
    torch.manual_seed(0)
    model, x = Selective(CONTEXT_FN), torch.randn(2, 3)
    ep = torch.export.export(model, (x,), strict=False)
    return model, x, reloaded(ep) if source == "file" else ep


SOURCES = pytest.mark.parametrize("source", ["captured", "file"])


def assert_keeps_as(module, model, x):
    assert_same(gradients(module, x), gradients(model, x))
    assert saved_bytes(module, x) == saved_bytes(model, x)
    assert matmuls_in_backward(module, x) == matmuls_in_backward(model, x)


def region_of(module):
    (node,) = module.graph.find_nodes(op="call_function", target=CHECKPOINT)
    return node, getattr(module, node.args[0].target)


def replace_body(module, body):
    node, _ = region_of(module)
    setattr(module, node.args[0].target, body)
    module.recompile()
    return module


def copied(body):
    graph, values = fx.Graph(), {}
    for node in body.graph.nodes:
        values[node] = graph.node_copy(node, values.__getitem__)
    return fx.GraphModule(body, graph)


REBUILDS = {
    "graph_copy": copied,
    "transformer": lambda body: fx.Transformer(body).transform(),
    "graph module": lambda body: fx.GraphModule(body, body.graph),
    "deepcopy": copy.deepcopy,
    "pickle": lambda body: pickle.loads(pickle.dumps(body)),
    "traced by symbols": fx.symbolic_trace,
}


@SOURCES
@pytest.mark.parametrize("rebuild", REBUILDS.values(), ids=REBUILDS)
def test_a_body_that_is_made_anew(rebuild, source):
    model, x, ep = program(source)
    module = ep.module()
    replace_body(module, rebuild(region_of(module)[1]))
    assert_keeps_as(module, model, x)


@SOURCES
def test_a_module_around_that_is_made_anew(source):
    model, x, ep = program(source)
    module = ep.module()
    assert_keeps_as(fx.Transformer(module).transform(), model, x)
    assert_keeps_as(fx.GraphModule(module, copy.deepcopy(module.graph)), model, x)


class Lambda(torch.nn.Module):
    """Its policy is a function that cannot be pickled."""

    def __init__(self):
        super().__init__()
        self.model = Selective(lambda: CONTEXT_FN())

    def forward(self, x):
        return self.model(x)


def test_a_pickle_holds_the_decisions_and_not_the_policy():
    model, x = Lambda(), torch.randn(2, 3)
    module = torch.export.export(model, (x,), strict=False).module()
    body = region_of(module)[1]
    stored = pickle.dumps(body)
    assert b"save_matmuls" not in stored
    assert_keeps_as(replace_body(module, pickle.loads(stored)), model, x)


def insert_products(body):
    """A pass that puts products before those of the model: by count they would be the first."""
    first = next(n for n in body.graph.nodes if n.target is aten.linear.default)
    x, *parameters = first.args
    with body.graph.inserting_before(first):
        extra = body.graph.call_function(aten.linear.default, first.args, first.kwargs)
        zero = body.graph.call_function(aten.mul.Tensor, (extra, 0))
        changed = body.graph.call_function(aten.add.Tensor, (x, zero))
    first.args = (changed, *parameters)
    body.recompile()
    return extra


@SOURCES
def test_an_inserted_operation_is_recomputed_and_told(source):
    model, x, ep = program(source)
    module = ep.module()
    insert_products(region_of(module)[1])
    want = saved_bytes(model, x)
    with pytest.warns(
        hops.HopsWarning,
        match=r"region at test_policy.py:\d+ in \w+ has no decision .* \(node 'linear_default'\)",
    ):
        gradients(module, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert saved_bytes(module, x) == want  # It is said once.
    # One more than the model's: the new one is run again, the others are not.
    assert matmuls_in_backward(module, x) > matmuls_in_backward(model, x)


@SOURCES
def test_a_removed_operation_takes_only_its_own_decision(source):
    model, x, ep = program(source)
    module = ep.module()
    _, body = region_of(module)
    first, second = body.graph.find_nodes(op="call_function", target=aten.linear.default)
    first.replace_all_uses_with(first.args[0])
    body.graph.erase_node(first)
    body.recompile()

    def shorter(h):
        return model.linear(h.sin()).tanh()

    class Shorter(torch.nn.Module):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(
                shorter, model.linear(x), use_reentrant=False, context_fn=CONTEXT_FN
            )

    reference = Shorter()
    reference.linear = model.linear
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_keeps_as(module, reference, x)


@SOURCES
def test_a_node_that_replaces_another_by_copy(source):
    model, x, ep = program(source)
    module = ep.module()
    _, body = region_of(module)
    for node in body.graph.find_nodes(op="call_function", target=aten.linear.default):
        with body.graph.inserting_after(node):
            twin = body.graph.node_copy(node, lambda n: n)
        node.replace_all_uses_with(twin)
        body.graph.erase_node(node)
    body.recompile()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_keeps_as(module, model, x)


@SOURCES
def test_a_pattern_that_is_rewritten(source):
    model, x, ep = program(source)
    module = ep.module()
    _, body = region_of(module)

    def pattern(x):
        return aten.sin.default(x)

    def replacement(x):
        return aten.cos.default(aten.sub.Tensor(x, torch.pi / 2))

    assert len(fx.subgraph_rewriter.replace_pattern(body, pattern, replacement)) == 1
    with pytest.warns(hops.HopsWarning, match="no decision"):
        got = gradients(module, x)
    assert_same(got, gradients(model, x))
    assert saved_bytes(module, x) == saved_bytes(model, x)


@SOURCES
@pytest.mark.parametrize("again", ["", "file"])
def test_decomposed_with_the_regions_kept(source, again):
    model, x, ep = program(source)
    kept = hops.run_decompositions(ep, keep=[CHECKPOINT])
    _, body = region_of(kept.graph_module)
    targets = [n.target for n in body.graph.nodes]
    assert aten.linear.default not in targets and targets.count(aten.addmm.default) == 2
    if again:
        kept = reloaded(kept)
    assert_keeps_as(kept.module(), model, x)


class Silu(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        def region(h):
            return self.linear(torch.nn.functional.silu(h)).sin()

        policy = hops.policies.save_ops("aten.silu")
        return torch.utils.checkpoint.checkpoint(
            region, self.linear(x), use_reentrant=False, context_fn=policy
        )


@SOURCES
def test_what_an_operation_is_decomposed_into_inherits_its_decision(source):
    torch.manual_seed(0)
    model, x = Silu(), torch.randn(2, 3)
    ep = torch.export.export(model, (x,), strict=False)
    if source == "file":
        ep = reloaded(ep)
    table = torch._decomp.get_decompositions([aten.silu.default])
    kept = hops.run_decompositions(ep, table, keep=[CHECKPOINT])
    node, body = region_of(kept.graph_module)
    assert aten.silu.default not in [n.target for n in body.graph.nodes]
    assert node.kwargs["policy"] == ["aten.mul.Tensor 0 MUST_SAVE"]
    assert_same(gradients(kept.module(), x), gradients(model, x))
    assert saved_bytes(kept.module(), x) == saved_bytes(model, x)


@SOURCES
def test_moved_to_another_device(source):
    passes = pytest.importorskip("torch.export.passes")
    _, _, ep = program(source)
    before = region_of(ep.graph_module)[0].kwargs["policy"]
    moved = passes.move_to_device_pass(ep, "meta")
    node, body = region_of(moved.graph_module)
    assert node.kwargs["policy"] == before
    parameter = torch.nn.Parameter(torch.empty(3, 3, device="meta"))
    x = torch.empty(2, 3, device="meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = moved.module()(x)
    out.sum().backward()
    assert parameter.device.type == next(iter(moved.module().parameters())).device.type


def test_the_decisions_are_in_the_printed_body():
    from hops._decisions import decisions_of

    for source in ("captured", "file"):
        _, _, ep = program(source)
        _, body = region_of(ep.graph_module)
        linear = body.graph.find_nodes(op="call_function", target=aten.linear.default)
        for node in linear:
            assert node.meta["custom"]["checkpoint_policy"] == (
                "aten.t.default PREFER_RECOMPUTE, aten.addmm.default MUST_SAVE"
            )
            assert len(decisions_of(node)) == 2


def test_a_damaged_decision_is_an_error():
    _, x, ep = program()
    _, body = region_of(ep.graph_module)
    (sin,) = body.graph.find_nodes(op="call_function", target=aten.sin.default)
    sin.meta["custom"] = {"checkpoint_policy": "aten.sin.default KEEP_IT"}
    buffer = io.BytesIO()
    torch.export.save(ep, buffer)
    buffer.seek(0)
    with pytest.raises(hops.ReplayError, match="KEEP_IT"):
        torch.export.load(buffer).module()(x)
