"""Joint graphs of a captured program: tags, what is saved, and random numbers, as of the eager model."""

import contextlib
import re
from collections import Counter

import pytest
import torch
from models import BothModel, CheckpointModel
from test_policies import build as build_named
from test_policy import CONTEXT_FN, Selective, reloaded
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import aot_autograd as aot
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint
from version_differences import needs

from hops.policies import save_names, save_ops

PARTITIONERS = [min_cut_rematerialization_partition, default_partition]


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        def inner(y):
            return self.linear(y.sin()).tanh()

        def outer(y):
            return checkpoint(inner, y.cos(), use_reentrant=False).exp()

        return checkpoint(outer, self.linear(x), use_reentrant=False).sin()


def models():
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    named, matrix = build_named(save_names("scores") | save_ops("aten.sin"))
    return {
        "plain": (CheckpointModel(), x),
        "function": (BothModel(), x),
        "selective": (Selective(CONTEXT_FN), x),
        "named": (named, matrix),
        "nested": (Nested(), x),
    }


class Joint:
    """What torch.compile makes of a module, seen by its partitioner."""

    def __init__(self, module, x, partitioner):
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=self.partition
        )
        self.partitioner = partitioner
        torch.compile(module, backend=backend, fullgraph=True, dynamic=False)(x)

    def partition(self, joint, inputs, **keywords):
        self.tags = tags_of(joint)
        forward, backward = self.partitioner(joint, inputs, **keywords)
        (output,) = forward.graph.find_nodes(op="output")
        self.saved = Counter(
            (str(n.target) if n.op == "call_function" else n.op, _shape(n))
            for n in output.args[0]
            if isinstance(n, torch.fx.Node)
        )
        return forward, backward


def _as_it_is(module, inputs):
    return module


def _shape(node):
    # The size of the state of a generator is a symbol, numbered as the trace goes.
    return re.sub(r"s\d+", "s", str(tuple(getattr(node.meta.get("val"), "shape", ()))))


def tags_of(graph_module):
    """Operation, decision and number of the region of each node, whatever the order of nodes."""
    numbers, tags = {}, Counter()
    for node in graph_module.graph.nodes:
        if node.op != "call_function":
            continue
        region = node.meta.get("ac_graph_id")
        number = None if region is None else numbers.setdefault(region, len(numbers))
        tags[str(node.target), str(node.meta.get("recompute")), number] += 1
    return tags


def test_the_models_have_tags():
    for module, x in models().values():
        assert any(
            decision != "None" for _, decision, _ in Joint(module, x, default_partition).tags
        )


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize("name", models())
def test_tags_and_saved_values_are_those_of_the_eager_model(name, partitioner):
    module, x = models()[name]
    expected = Joint(module, x, partitioner)
    ep = torch.export.export(module, (x,), strict=False)
    for program in (ep, reloaded(ep)):
        joint = Joint(program.module(), x, partitioner)
        assert joint.tags == expected.tags
        assert joint.saved == expected.saved


@needs("joint_with_descriptors")
@pytest.mark.parametrize("name", models())
def test_exported_joint_graph(name):
    module, x = models()[name]
    expected = Joint(module, x, default_partition).tags
    captured = torch.export.export(module, (x,), strict=False).module()
    with contextlib.ExitStack() as stack:
        joint = aot.aot_export_joint_with_descriptors(stack, captured, (x,))
    got = tags_of(joint.graph_module)
    tagged = {key: n for key, n in expected.items() if key[1] != "None"}
    assert {key: n for key, n in got.items() if key[1] != "None"} == tagged


class Random(nn.Module):
    """Gradients are 0 just where the forward is, if recompute sees the same numbers."""

    def __init__(self, nested=False, preserve=True):
        super().__init__()
        self.nested, self.preserve = nested, preserve
        self.scale = nn.Parameter(torch.ones(64))

    def region(self, x):
        return torch.sin(nn.functional.dropout(x * self.scale, 0.5))

    def around(self, x):
        return checkpoint(self.region, x * 2, use_reentrant=False).sin()

    def forward(self, x):
        region = self.around if self.nested else self.region
        return [
            checkpoint(region, x, use_reentrant=False, preserve_rng_state=self.preserve)
            for _ in range(3)
        ]


def assert_same_numbers(module, x, backward_order):
    for seed in range(3):
        torch.manual_seed(seed)
        outputs = module(x)
        for i in backward_order:
            (gradient,) = torch.autograd.grad(outputs[i].sum(), x, retain_graph=True)
            assert torch.equal(outputs[i] == 0, gradient == 0)
            assert (gradient == 0).any() and (gradient != 0).any()


@pytest.mark.parametrize("nested", [False, True], ids=["several", "nested"])
@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager", "inductor", *PARTITIONERS])
def test_recompute_sees_the_same_random_numbers(backend, nested):
    x = torch.full((64,), 0.5, requires_grad=True)
    module = torch.export.export(Random(nested), (x,), strict=False).module()
    if backend in PARTITIONERS:
        backend = aot_autograd(fw_compiler=_as_it_is, bw_compiler=_as_it_is, partition_fn=backend)
    if backend != "none":
        module = torch.compile(module, backend=backend, fullgraph=True)
    assert_same_numbers(module, x, (0, 1, 2))
    assert_same_numbers(module, x, (2, 0, 1))


def test_without_preserving_the_state_recompute_is_eagers():
    x = torch.full((64,), 0.5, requires_grad=True)
    model = Random(preserve=False)
    module = torch.export.export(model, (x,), strict=False).module()
    results = []
    for candidate in (model, module):
        torch.manual_seed(0)
        outputs = candidate(x)
        (gradient,) = torch.autograd.grad(outputs[1].sum(), x)
        results.append((outputs[1], gradient, torch.get_rng_state()))
        assert not torch.equal(outputs[1] == 0, gradient == 0)
    torch.testing.assert_close(results[0], results[1])


def test_compiling_a_captured_program_leaves_its_bodies_alone():
    """Dynamo takes outputs that nothing uses out of the bodies that its graph holds."""

    class Model(torch.nn.Module):
        def forward(self, x):
            return checkpoint(lambda y: (y.sin(), y.cos()), x, use_reentrant=False)[1]

    x = torch.randn(2, 3, requires_grad=True)
    program = torch.export.export(Model(), (x,), strict=False).module()
    before = program.code, program.wrap_body_0.code
    torch.compile(program, backend="aot_eager", fullgraph=True)(x)
    assert (program.code, program.wrap_body_0.code) == before
    torch.testing.assert_close(program(x), Model()(x))
