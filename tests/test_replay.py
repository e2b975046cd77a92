"""A captured program equals eager, however it is run."""

import copy
import io
import random
import subprocess
import sys
import textwrap

import pytest
import torch
import torch._inductor.config
from models import (
    BothModel,
    CheckpointModel,
    FunctionModel,
    assert_same,
    gradients,
    operators,
)
from torch._functorch.aot_autograd import aot_export_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hops
from dispatch_rules import autograd

MODELS = {"function": FunctionModel, "checkpoint": CheckpointModel, "both": BothModel}
EXPECTED = {
    "function": ["autograd_function_apply"],
    "checkpoint": ["tag_activation_checkpoint"],
    "both": ["autograd_function_apply", "tag_activation_checkpoint", "autograd_function_apply"],
}


@pytest.fixture(params=MODELS)
def name(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["nonstrict", "strict"])
def strict(request):
    return request.param


@pytest.fixture
def case(name, strict):
    torch.manual_seed(1)
    model = MODELS[name]()
    x = torch.randn(2, 3)
    want = gradients(model, x)
    ep = torch.export.export(model, (x,), strict=strict)
    return model, x, want, ep


def test_every_call_is_one_operator(case, name):
    assert operators(case[3].graph_module) == EXPECTED[name]


def test_module(case):
    _, x, want, ep = case
    assert_same(gradients(ep.module(), x), want)


def test_deepcopy(case):
    _, x, want, ep = case
    assert_same(gradients(copy.deepcopy(ep.module()), x), want)


def saved(ep):
    buffer = io.BytesIO()
    torch.export.save(ep, buffer)
    buffer.seek(0)
    return buffer


def test_save_and_load(case):
    _, x, want, ep = case
    assert_same(gradients(torch.export.load(saved(ep)).module(), x), want)


def text(ep):
    import re

    return re.sub(r"\n\s*\n", "\n", re.sub(r"#.*", "", ep.graph_module.print_readable(False)))


def test_export_again_gives_the_same_graph(case):
    _, x, want, ep = case
    again = torch.export.export(ep.module(), (x,), strict=False)
    third = torch.export.export(again.module(), (x,), strict=False)
    assert operators(again.graph_module) == operators(ep.graph_module)
    assert text(third).split("\n")[2:] == text(again).split("\n")[2:]
    assert_same(gradients(again.module(), x), want)


def test_export_again_strict(case):
    _, x, want, ep = case
    again = torch.export.export(ep.module(), (x,), strict=True)
    assert operators(again.graph_module) == operators(ep.graph_module)
    assert_same(gradients(again.module(), x), want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compile(case, backend):
    _, x, want, ep = case
    module = ep.module()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    # Inductor's own random numbers differ from eager's by design; it can be told to use eager's.
    with torch._inductor.config.patch(fallback_random=True):
        assert_same(gradients(compiled, x, parameters=module), want)


class Loss(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return (self.module(x).sum(),)


def joint_graph(module, x):
    return aot_export_module(Loss(module), (x,), trace_joint=True, output_loss_index=0)[0]


def test_joint_graph_has_the_custom_backward(case, name):
    _, x, _, ep = case
    targets = [str(n.target) for n in joint_graph(ep.module(), x).graph.nodes]
    assert not any("higher_order" in t or t in EXPECTED["both"] for t in targets)
    if name == "function":
        twice = [
            n
            for n in joint_graph(ep.module(), x).graph.nodes
            if n.target is torch.ops.aten.mul.Tensor and 2 in n.args
        ]
        assert len(twice) == 1


def test_joint_graph_tags_the_region_and_only_the_region(case, name):
    _, x, _, ep = case
    nodes = [n for n in joint_graph(ep.module(), x).graph.nodes if n.op == "call_function"]
    tagged = [n for n in nodes if n.meta.get("recompute") is not None]
    assert len({n.meta["ac_graph_id"] for n in tagged}) == (name != "function")
    if name != "function":
        assert any(n.target is torch.ops.aten.sin.default for n in tagged)
        assert nodes[0] not in tagged or name == "checkpoint"


def test_backward_of_a_function_is_marked_as_autograds_own(strict):
    x = torch.randn(2, 3)
    module = torch.export.export(FunctionModel(), (x,), strict=strict).module()
    nodes = list(joint_graph(module, x).graph.nodes)
    (double,) = [n for n in nodes if n.target is torch.ops.aten.mul.Tensor and 2 in n.args]
    forward = next(n for n in nodes if n.target is torch.ops.aten.mul.Tensor)
    assert double.meta["partitioner_tag"] == "is_backward"
    assert double.meta["seq_nr"] == forward.meta["seq_nr"]


def test_run_decompositions_dissolves_the_operators(case):
    _, x, want, ep = case
    lowered = ep.run_decompositions()
    assert operators(lowered.graph_module) == []
    torch.manual_seed(0)
    torch.testing.assert_close(lowered.module()(x).detach(), want[0])


def test_run_decompositions_keeps_what_it_is_told_to(case, name):
    _, x, want, ep = case
    keep = [getattr(torch.ops.higher_order, n) for n in EXPECTED["both"][:2]]
    lowered = hops.run_decompositions(ep, keep=keep)
    assert operators(lowered.graph_module) == EXPECTED[name]
    assert "aten.linear" not in lowered.graph_module.print_readable(False)
    assert_same(gradients(lowered.module(), x), want)
    assert_same(gradients(torch.export.load(saved(lowered)).module(), x), want)


def test_run_decompositions_refuses_to_keep_other_operators(case):
    with pytest.raises(ValueError, match="it can keep"):
        hops.run_decompositions(case[3], keep=[torch.ops.aten.linear.default])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx(name, mode):
    torch.manual_seed(1)
    model, x = MODELS[name](), torch.randn(2, 3)
    parameters = dict(model.named_parameters())
    want = gradients(model, x)

    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    graph = make_fx(call, pre_dispatch=True, tracing_mode=mode)(parameters, x)
    assert operators(graph) == EXPECTED[name]
    assert_same(gradients(lambda x: graph(parameters, x), x, parameters=model), want)


def test_dynamo_export(name):
    torch.manual_seed(1)
    model, x = MODELS[name](), torch.randn(2, 3)
    want = gradients(model, x)
    graph, _ = torch._dynamo.export(model, aten_graph=True, pre_dispatch=True)(x)
    assert operators(graph) == EXPECTED[name]
    torch.manual_seed(0)
    torch.testing.assert_close(graph(x).detach(), want[0])


PROGRAM = """
import sys, torch
{imports}
module = torch.export.load({path!r}).module()
torch.manual_seed(0)
x = torch.load({data!r})
module(x).sum().backward()
torch.save({{n: p.grad for n, p in module.named_parameters()}}, {result!r})
"""


def run_in_fresh_process(tmp_path, ep, x, imports):
    paths = {k: str(tmp_path / k) for k in ("program.pt2", "data", "result")}
    torch.export.save(ep, paths["program.pt2"])
    torch.save(x, paths["data"])
    program = PROGRAM.format(
        imports=imports,
        path=paths["program.pt2"],
        data=paths["data"],
        result=paths["result"],
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
    )
    return done, paths["result"]


def test_load_in_a_fresh_process(tmp_path):
    model, x = BothModel(), torch.randn(2, 3)
    want = gradients(model, x)
    ep = torch.export.export(model, (x,), strict=False)
    done, result = run_in_fresh_process(tmp_path, ep, x, "import hops")
    assert done.returncode == 0, done.stderr
    for name, grad in torch.load(result).items():
        torch.testing.assert_close(grad, want[1][name])


@pytest.mark.parametrize("model", [FunctionModel, CheckpointModel])
def test_without_hops_a_file_gives_an_error_or_the_right_result(tmp_path, model):
    model, x = model(), torch.randn(2, 3)
    want = gradients(model, x)
    ep = torch.export.export(model, (x,), strict=False)
    done, result = run_in_fresh_process(tmp_path, ep, x, "")
    if done.returncode == 0:
        for name, grad in torch.load(result).items():
            torch.testing.assert_close(grad, want[1][name])
    else:
        assert "Error" in done.stderr


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_buffer_that_a_region_assigns_is_updated(use_reentrant):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.register_buffer("running", torch.ones(3))

        def forward(self, x):
            def region(x):
                self.running = self.running * 0.9 + x.detach().mean(0)
                return x.sin() * self.running

            return checkpoint(region, x * self.weight, use_reentrant=use_reentrant)

    eager, x = Model(), torch.randn(2, 3)
    replay = torch.export.export(Model(), (x,), strict=False).module()
    for model in (eager, replay):
        for _ in range(2):
            model(x)
    torch.testing.assert_close(replay.running, eager.running)


@pytest.mark.parametrize("seed", range(30))
def test_gradients_are_laid_out_as_those_of_the_trace(seed):
    """A backward is traced with ``ones_like`` of the outputs, whatever their strides are."""
    draw = random.Random(seed)
    dims = draw.randint(1, 4)
    tensor = torch.empty([draw.randint(1, 3) for _ in range(dims)])
    tensor = tensor.permute(draw.sample(range(dims), dims))
    for dim in range(dims):
        kind = draw.choice(["expanded", "sliced", "kept"])
        if kind == "expanded":
            sizes = [3 if d == dim else size for d, size in enumerate(tensor.shape)]
            tensor = tensor.narrow(dim, 0, 1).expand(sizes)
        elif kind == "sliced":
            tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
    if tensor.is_contiguous():
        return
    traced = torch.ones_like(tensor)
    orders = autograd.unusual_orders([tensor])
    arrived = torch.ones(tensor.shape[::-1]).permute(*reversed(range(dims)))
    for gradient in (arrived, torch.ones(()).expand(tensor.shape)):
        laid_out = autograd.laid_out(gradient, orders, 0)
        assert laid_out.permute(orders[0]).is_contiguous()
        assert traced.permute(orders[0]).is_contiguous()
