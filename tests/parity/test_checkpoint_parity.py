"""Every case of ``checkpoint_cases`` x front end x replay equals eager on the same seed.

Compared are outputs, the gradients of parameters and inputs (None stays None), buffers after the
step, and the number of regions in the graph with the number of checkpoint calls that eager makes.
"""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from checkpoint_cases import CASES, WIDTH, Case, model, tensor
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hops

FRONT_ENDS = ("nonstrict", "strict", "make_fx")
#: Those whose graph runs on the parameters of the model itself: nothing to save or to load.
GRAPHS = ("make_fx", "dynamo_export")
REPLAYS = ("module", "deepcopy", "save_load", "reexport", "aot_eager")
PREFIX = "_checkpoint_wrapped_module."
SEED = 7

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def isolated(monkeypatch):
    """Keep what a failing replay leaves behind from the tests that follow."""
    # `debug=True` logs in a way that pytest's log capture turns into an exception, in eager too.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    for setting in ("_enable_checkpoint_early_stop", "_checkpoint_debug_enabled"):
        monkeypatch.setattr(
            torch.utils.checkpoint, setting, getattr(torch.utils.checkpoint, setting)
        )
    yield
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()
    torch.set_grad_enabled(True)
    while torch._C._functorch.maybe_current_level() is not None:
        torch._C._functorch._vmap_decrement_nesting()


# ------------------------------------------------------------------------------------- one step


@dataclass
class Step:
    """What one forward and backward did."""

    outputs: list[Any]
    gradients: dict[str, torch.Tensor | None]
    before: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    calls: int


def build(case: Case) -> tuple[nn.Module, tuple[Any, ...]]:
    torch.manual_seed(0)
    return case.build()


def count_calls(run: Any) -> tuple[Any, int]:
    """``run()`` and how often it enters ``checkpoint``, by whatever name it is called."""
    code = inspect.unwrap(checkpoint).__code__
    entered = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal entered
        if event == "call" and frame.f_code is code:
            entered += 1

    sys.setprofile(profile)
    try:
        return run(), entered
    finally:
        sys.setprofile(None)


def plain_name(name: str) -> str:
    """The name that the model as written has for a parameter or buffer."""
    for wrapper in ("_orig_mod.", "model."):
        name = name.removeprefix(wrapper)
    return name.replace(PREFIX, "")


def run_step(module: nn.Module, args: tuple[Any, ...], case: Case) -> Step:
    """One forward and backward of ``module`` from a fixed seed."""
    args = pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), args
    )
    before = copies_of_buffers(module)
    torch.manual_seed(SEED)
    result, calls = count_calls(lambda: module(*args))
    leaves = pytree.tree_leaves(result)
    losses = [
        (leaf * torch.linspace(0.5, 2, leaf.numel()).reshape(leaf.shape)).sum()
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    outputs = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    needs = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]
    if case.backward == "reversed":
        for loss in reversed(losses):
            loss.backward(retain_graph=True)
    else:
        torch.stack(losses).sum().backward()
    gradients = {plain_name(name): p.grad for name, p in module.named_parameters()}
    for position, leaf in enumerate(pytree.tree_leaves(args)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            gradients[f"input {position}"] = leaf.grad
    return Step([*outputs, needs], gradients, before, copies_of_buffers(module), calls)


def copies_of_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {plain_name(name): b.detach().clone() for name, b in module.named_buffers()}


def eager_step(case: Case) -> Step:
    torch.manual_seed(0)
    return run_step(*(case.reference or case.build)(), case)


def expected_regions(case: Case, eager: Step) -> int:
    return eager.calls - case.inlined if case.regions is None else case.regions


# ------------------------------------------------------------------------------------ front ends


class FromMakeFx(nn.Module):
    """A graph of ``make_fx`` whose parameters and buffers are inputs, as a module."""

    def __init__(self, model: nn.Module, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.model = model
        self.graph_module = graph

    def forward(self, *args: Any) -> Any:
        return self.graph_module(list(state_of(self.model).values()), *args)


class FromDynamo(nn.Module):
    """A graph of ``torch._dynamo.export``, which uses the parameters and buffers of the model."""

    def __init__(self, model: nn.Module, graph: torch.fx.GraphModule) -> None:
        super().__init__()
        self.model = model
        self.graph_module = graph

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_buffers(*args, **kwargs)

    def forward(self, *args: Any) -> Any:
        return self.graph_module(*args)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def dynamic_shapes(case: Case, args: tuple[Any, ...]) -> Any:
    if not case.dynamic:
        return None
    return tuple({0: torch.export.Dim("batch", min=2, max=64)} for _ in args)


def export(case: Case, module: nn.Module, args: tuple[Any, ...], *, strict: bool) -> Any:
    shapes = dynamic_shapes(case, args)
    if shapes is not None and isinstance(module, FromMakeFx):
        shapes = (shapes,)
    return torch.export.export(module, args, strict=strict, dynamic_shapes=shapes)


def trace(case: Case, module: nn.Module, args: tuple[Any, ...]) -> torch.fx.GraphModule:
    state = state_of(module)

    def flat(values: list[torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(module, dict(zip(state, values)), args)

    mode = "symbolic" if case.dynamic else "real"
    with torch.random.fork_rng():
        return make_fx(flat, pre_dispatch=True, tracing_mode=mode)(list(state.values()), *args)


def capture(case: Case, front_end: str) -> Any:
    torch._dynamo.reset()
    module, args = build(case)
    if front_end == "make_fx":
        return FromMakeFx(build(case)[0], trace(case, module, args))
    if front_end == "dynamo_export":
        shapes = dynamic_shapes(case, args)
        graph = torch._dynamo.export(
            module, aten_graph=True, pre_dispatch=True, dynamic_shapes=shapes
        )
        return FromDynamo(module, graph(*args).graph_module)
    return export(case, module, args, strict=front_end == "strict")


_last_capture: dict[tuple[str, str], Any] = {}


def captured(case: Case, front_end: str) -> Any:
    """The capture of a case; kept, with its exception if it raised, until the next one."""
    key = (case.name, front_end)
    if key not in _last_capture:
        _last_capture.clear()
        try:
            _last_capture[key] = capture(case, front_end)
        except Exception as error:
            _last_capture[key] = error
    result = _last_capture[key]
    if isinstance(result, Exception):
        raise result
    return result


# --------------------------------------------------------------------------------------- replays


def module_of(program: Any) -> nn.Module:
    return program.module() if isinstance(program, torch.export.ExportedProgram) else program


def prepare(case: Case, program: Any, replay: str) -> tuple[nn.Module, torch.fx.GraphModule | None]:
    """The program to run, and its graph where it is one."""
    if replay == "module":
        return module_of(program), program.graph_module
    if replay == "deepcopy":
        program = copy.deepcopy(program)
        return copy.deepcopy(module_of(program)), program.graph_module
    if replay == "save_load":
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
        buffer.seek(0)
        program = torch.export.load(buffer)
        return module_of(program), program.graph_module
    if replay == "reexport":
        _, args = build(case)
        program = export(case, module_of(program), args, strict=False)
        return module_of(program), program.graph_module
    torch._dynamo.reset()
    return torch.compile(module_of(program), backend="aot_eager", fullgraph=True), None


def restore_state(module: nn.Module, case: Case) -> None:
    """Undo what other replays of the same program did to parameters and buffers."""
    initial = {plain_name(name): value for name, value in state_of(build(case)[0]).items()}
    for name, value in state_of(module).items():
        value.grad = None
        if plain_name(name) in initial:
            value.detach().copy_(initial[plain_name(name)])


def regions(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """All calls of ``tag_activation_checkpoint``, those in subgraphs too."""
    found = []
    for node in graph.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            found.append(node)
        if node.op == "get_attr":
            attribute = graph
            for part in str(node.target).split("."):
                attribute = getattr(attribute, part)
            if isinstance(attribute, torch.fx.GraphModule):
                found += regions(attribute) * max(len(node.users), 1)
    return found


def combinations() -> list[Any]:
    return [
        pytest.param(case, front_end, replay, id=f"{case.name}-{front_end}-{replay}")
        for case, front_end, replay in itertools.product(
            CASES, (*FRONT_ENDS, "dynamo_export"), REPLAYS
        )
        if case.requires
        and (front_end != "dynamo_export" or replay == "module")
        and (replay != "aot_eager" or case.compiled)
        and (replay != "save_load" or front_end not in GRAPHS)
        and f"{front_end}-{replay}" not in case.stock_fails
    ]


@pytest.mark.parametrize(("case", "front_end", "replay"), combinations())
def test_equals_eager(case, front_end, replay):
    expected = eager_step(case)
    module, graph = prepare(case, captured(case, front_end), replay)
    restore_state(module, case)
    _, args = build(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = run_step(module, args, case)
    compare(expected, actual)
    if graph is not None:
        assert len(regions(graph)) == expected_regions(case, expected)


def compare(expected: Step, actual: Step) -> None:
    assert expected.outputs[-1] == actual.outputs[-1], "requires_grad of the outputs"
    torch.testing.assert_close(actual.outputs[:-1], expected.outputs[:-1])
    for name, gradient in expected.gradients.items():
        other = actual.gradients.get(name)
        if gradient is None or other is None:
            assert gradient is other, f"gradient of {name}: {other} instead of {gradient}"
        else:
            assert_close(other, gradient, f"gradient of {name}")
    for name, buffer in expected.buffers.items():
        # Strict export drops the buffers that nothing uses.
        assert_close(actual.buffers.get(name, expected.before[name]), buffer, f"buffer {name}")


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, msg=lambda message: f"{what}: {message}")


# ------------------------------------------------------------------------- beyond one step each

BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("front_end", ["nonstrict", "strict"])
@pytest.mark.parametrize("name", ["wrapper", "wrapper_reentrant", "applied_to_submodules"])
def test_wrappers_leave_no_prefix_in_names(name, front_end):
    program = captured(BY_NAME[name], front_end)
    names = [*program.state_dict, *dict(program.module().named_parameters())]
    assert names
    assert not [name for name in names if PREFIX in name]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_reentrant_region_without_gradient_warns_as_eager(front_end):
    case = BY_NAME["reentrant_without_gradient"]
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        capture(case, front_end)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_equal_regions_share_a_body(front_end):
    program = captured(BY_NAME["loop"], front_end)
    bodies = {str(node.args[0].target) for node in regions(program.graph_module)}
    assert len(bodies) == 1


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_checkpoint_arguments_are_kept_on_the_node(front_end):
    given = {
        "use_reentrant": False,
        "preserve_rng_state": False,
        "determinism_check": "none",
        "debug": True,
        "early_stop": False,
    }
    if "early_stop" not in inspect.signature(inspect.unwrap(checkpoint)).parameters:
        del given["early_stop"]

    def build():
        def forward(self, x):
            return checkpoint(self.block, x, **given)

        return model(forward), (tensor(),)

    program = capture(Case("arguments", build), front_end)
    (node,) = regions(program.graph_module)
    assert {name: hops.checkpoint_parts(node).options.get(name) for name in given} == given


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_two_backwards_through_one_forward(front_end):
    case = BY_NAME["dropout_in_nested"]

    def gradients(module):
        _, (x,) = build(case)
        torch.manual_seed(SEED)
        loss = module(x).sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        return first, torch.autograd.grad(loss, x)

    expected = gradients(build(case)[0])
    torch.testing.assert_close(gradients(module_of(captured(case, front_end))), expected)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_forward_under_no_grad(front_end):
    case = BY_NAME["nested"]
    module = module_of(captured(case, front_end))
    reference, (x,) = build(case)
    with torch.no_grad():
        out = module(x)
        torch.testing.assert_close(out, reference(x))
    assert not out.requires_grad


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_random_state_after_a_step_equals_eager(front_end):
    case = BY_NAME["dropout_in_several"]
    module = module_of(captured(case, front_end))
    restore_state(module, case)
    states = []
    for candidate in (build(case)[0], module):
        run_step(candidate, build(case)[1], case)
        states.append(torch.random.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("name", ["dropout", "dropout_in_several", "dropout_in_nested"])
def test_capture_leaves_the_random_state_alone(name):
    torch.manual_seed(SEED)
    before = torch.random.get_rng_state()
    module, args = build(BY_NAME[name])
    torch.random.set_rng_state(before)
    export(BY_NAME[name], module, args, strict=False)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_explicit_generator_gives_the_same_numbers_in_recompute(use_reentrant):
    generator = torch.Generator()

    def build():
        def forward(self, x):
            def region(x):
                return torch.sin(x * torch.bernoulli(self.shift * 0 + 0.5, generator=generator))

            return checkpoint(region, x, use_reentrant=use_reentrant)

        return model(forward), (torch.ones(1, WIDTH, requires_grad=True),)

    program = capture(Case("generator", build), "nonstrict").module()
    for seed in range(4):
        generator.manual_seed(seed)
        _, (x,) = build()
        out = program(x)
        out.sum().backward()
        # Where the mask is 0 in the forward, so is the gradient.
        assert torch.equal(out != 0, x.grad != 0)
