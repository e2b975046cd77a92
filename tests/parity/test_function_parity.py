"""Every case of ``function_cases`` x front end x replay equals eager on the same seed.

Compared are outputs, gradients of all parameters and of the inputs (None stays
None), buffers, inputs after the run, and the number of operators in the graph
with the number of nodes that eager's autograd graph has for Functions.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import warnings
from collections.abc import Callable
from typing import Any

import function_edge_cases  # noqa: F401
import pytest
import torch
from function_cases import CASES, Case, fresh
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

import hops

FRONT_ENDS = ("nonstrict", "strict", "make_fx")
#: Those whose graph runs on the parameters of the model itself: nothing to save or to load.
GRAPHS = ("make_fx", "dynamo_export")
REPLAYS = ("module", "deepcopy", "save_load", "reexport", "aot_eager")
OPERATOR = torch.ops.higher_order.autograd_function_apply
REFUSED = (hops.CaptureError, hops.ReplayError)


# ---------------------------------------------------------------------------------------- A run


@dataclasses.dataclass
class Run:
    """What one forward and backward of a program gave."""

    outputs: list[Any]
    requires_grad: list[bool]
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    buffers_before: dict[str, torch.Tensor]
    inputs: list[torch.Tensor]
    second: dict[str, torch.Tensor | None] | str | None
    calls: int


def run(
    program: Callable[..., Any],
    module: Any,
    args: tuple[Any, ...],
    case: Case,
    double: bool | None = None,
) -> Run:
    """Run ``program``, whose parameters and buffers are those of ``module``."""
    double = case.double if double is None else double
    named = dict(module.named_parameters())
    before = {name: detached(buffer) for name, buffer in module.named_buffers()}
    inputs = [a for a in tree_leaves(args) if isinstance(a, torch.Tensor)]
    leaves = {f"input {i}": a for i, a in enumerate(inputs) if a.requires_grad} | named
    for leaf in leaves.values():
        leaf.grad = None
    torch.manual_seed(7)
    outputs = tree_leaves(program(*args))
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    differentiable = [t for t in tensors if t.requires_grad]
    calls = count_nodes(differentiable)
    generator = torch.Generator().manual_seed(3)
    gradients = [like(t, generator) for t in differentiable]
    if case.raises:
        with pytest.raises(Exception, match=case.raises):
            torch.autograd.backward(differentiable, gradients)
    elif differentiable:
        torch.autograd.backward(differentiable, gradients, retain_graph=double)
    return Run(
        outputs=[detached(part) for o in outputs for part in parts(o)],
        requires_grad=[t.requires_grad for t in tensors],
        gradients={name: leaf.grad for name, leaf in leaves.items()},
        buffers={name: detached(buffer) for name, buffer in module.named_buffers()},
        buffers_before=before,
        inputs=[detached(i) for i in inputs],
        second=second_order(differentiable, leaves) if double else None,
        calls=calls,
    )


def like(tensor: Any, generator: torch.Generator) -> Any:
    """A gradient of its own for every output."""
    if not isinstance(tensor, torch.Tensor):  # a DTensor's mesh
        return tensor
    values = torch.rand(tensor.shape, generator=generator) + 0.5
    if is_traceable_wrapper_subclass(tensor):
        names, extra = tensor.__tensor_flatten__()
        inner = {name: like(getattr(tensor, name), generator) for name in names}
        return type(tensor).__tensor_unflatten__(inner, extra, tensor.shape, tensor.stride())
    return values.to(tensor.dtype)


def parts(value: Any) -> list[Any]:
    """A value, or the plain tensors that a tensor subclass is made of."""
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return [value]
    inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [p for i in inner if isinstance(i, torch.Tensor) for p in parts(i)]


def detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def second_order(
    outputs: list[torch.Tensor], leaves: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor | None] | str:
    """Gradients of gradients, or what eager says instead."""
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    first = torch.autograd.grad(
        [(o * o).sum() for o in outputs],
        list(wanted.values()),
        create_graph=True,
        allow_unused=True,
    )
    total = sum((g * g).sum() for g in first if g is not None)
    try:
        second = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
    except RuntimeError as error:
        return str(error)
    return dict(zip(wanted, second))


def count_nodes(outputs: list[torch.Tensor]) -> int:
    """Nodes of Functions in the autograd graph, each once."""
    seen, waiting = set(), [o.grad_fn for o in outputs]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return sum(isinstance(node, BackwardCFunction) for node in seen)


def count_operators(module: fx.GraphModule) -> int:
    """Operators in a graph and in the bodies of it, backwards aside."""
    found = 0
    for node in module.graph.nodes:
        if node.op == "call_function":
            found += node.target is OPERATOR
            bodies = node.args[:1] if node.target is OPERATOR else node.all_input_nodes
            for body in bodies:
                if body.op == "get_attr":
                    attribute = functools.reduce(getattr, body.target.split("."), module)
                    if isinstance(attribute, fx.GraphModule):
                        found += count_operators(attribute)
    return found


def assert_equal(got: Run, want: Run) -> None:
    close = functools.partial(torch.testing.assert_close, equal_nan=True)
    assert len(got.outputs) == len(want.outputs)
    for position, (ours, theirs) in enumerate(zip(got.outputs, want.outputs)):
        if isinstance(theirs, torch.Tensor):
            close(ours, theirs, msg=lambda m, p=position: f"output {p}: {m}")
        else:
            assert ours == theirs, f"output {position}"
    assert got.requires_grad == want.requires_grad, "requires_grad of outputs"
    # Strict export drops the parameters and buffers that the model does not use;
    # a deep copy has constants of the program among its buffers.
    assert got.gradients.keys() <= want.gradients.keys()
    for name, gradient in want.gradients.items():
        compare(got.gradients.get(name), gradient, f"gradient of {name}")
    for name, buffer in want.buffers.items():
        close(
            got.buffers.get(name, want.buffers_before[name]),
            buffer,
            msg=lambda m, n=name: f"buffer {n}: {m}",
        )
    for position, value in enumerate(want.inputs):
        compare(got.inputs[position], value, f"input {position} after the run")
    if got.second is None:
        return
    if isinstance(want.second, str):
        assert got.second == want.second
    elif want.second is not None:
        assert not isinstance(got.second, str), f"second order: {got.second}"
        for name, gradient in want.second.items():
            compare(got.second.get(name), gradient, f"second order gradient of {name}")


def compare(got: torch.Tensor | None, want: torch.Tensor | None, what: str) -> None:
    assert (got is None) == (want is None), f"{what}: got {got}, eager gives {want}"
    if want is None:
        return
    assert type(got) is type(want), what
    for ours, theirs in zip(parts(got), parts(want)):
        torch.testing.assert_close(ours, theirs, msg=lambda m: f"{what}: {m}")


# -------------------------------------------------------------------------------------- Captures


class Traced(torch.nn.Module):
    """What ``make_fx`` gives for a module, as a module with the same state."""

    def __init__(self, graph: fx.GraphModule, module: torch.nn.Module) -> None:
        super().__init__()
        self.graph_module = graph
        self.state = module

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.state.named_buffers(*args, **kwargs)

    def forward(self, *args: Any) -> Any:
        state = dict(self.state.named_parameters()) | dict(self.state.named_buffers())
        return self.graph_module(state, *args)


class WithState(torch.nn.Module):
    """What ``torch._dynamo.export`` gives for a module, whose parameters and buffers it uses."""

    def __init__(self, graph: fx.GraphModule, module: torch.nn.Module) -> None:
        super().__init__()
        self.graph_module = graph
        self.state = module

    named_parameters = Traced.named_parameters
    named_buffers = Traced.named_buffers

    def forward(self, *args: Any) -> Any:
        return self.graph_module(*args)


def capture(name: str, front_end: str) -> tuple[Any, list[str]]:
    """The captured program, or the error of the capture; and hops's warnings."""
    case = CASES[name]
    module, args = fresh(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            program: Any = _capture(case, front_end, module, args)
        except Exception as error:
            program = error
    assert torch.is_grad_enabled()
    return program, [str(w.message) for w in caught if issubclass(w.category, hops.HopsWarning)]


cached_capture = functools.cache(capture)


def _capture(case: Case, front_end: str, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:
    if front_end == "dynamo_export":
        torch._dynamo.reset()
        export = torch._dynamo.export(
            module, aten_graph=True, pre_dispatch=True, dynamic_shapes=case.dynamic
        )
        return WithState(export(*args).graph_module, module)
    if front_end != "make_fx":
        return torch.export.export(
            module, args, strict=front_end == "strict", dynamic_shapes=case.dynamic
        )

    def call(state: dict[str, torch.Tensor], *args: Any) -> Any:
        return torch.func.functional_call(module, state, args)

    state = dict(module.named_parameters()) | dict(module.named_buffers())
    return make_fx(call, pre_dispatch=True, tracing_mode=case.tracing_mode)(state, *args)


@functools.cache
def eager(name: str, other: bool) -> Run:
    module, args = fresh(name)
    return run(module, module, others(name) if other else args, CASES[name])


def others(name: str) -> tuple[Any, ...]:
    torch.manual_seed(2)
    return CASES[name].others()


def program(name: str, front_end: str) -> Any:
    captured, _ = cached_capture(name, front_end)
    if isinstance(captured, Exception):
        raise captured.with_traceback(None)
    return captured


def replayable(name: str, front_end: str, replay: str) -> tuple[Callable[..., Any], Any]:
    """``(program, module)``: what to run, and the module whose state it uses."""
    captured = program(name, front_end)
    if front_end == "make_fx":
        module = Traced(captured, fresh(name)[0])
        return module, module
    if front_end == "dynamo_export":
        captured.state.load_state_dict(fresh(name)[0].state_dict(), strict=False)
        return captured, captured
    module = rewound(captured, name).module()
    if replay == "deepcopy":
        module = copy.deepcopy(module)
    elif replay == "save_load":
        buffer = io.BytesIO()
        torch.export.save(captured, buffer)
        buffer.seek(0)
        module = torch.export.load(buffer).module()
    elif replay == "reexport":
        shapes = CASES[name].dynamic
        args = fresh(name)[1]
        module = torch.export.export(module, args, dynamic_shapes=shapes, strict=False).module()
    elif replay == "aot_eager":
        return torch.compile(module, backend="aot_eager", fullgraph=True), module
    return module, module


def rewound(captured: Any, name: str) -> Any:
    """The program with its buffers as they were before any run."""
    before = fresh(name)[0].state_dict()
    with torch.no_grad():
        for key, value in captured.state_dict.items():
            if key in before:
                value.copy_(before[key])
    return captured


# ----------------------------------------------------------------------------------------- Tests


def grid() -> list[Any]:
    return [
        pytest.param(name, front_end, replay, id=f"{name}-{front_end}-{replay}")
        for name, case in CASES.items()
        for front_end in (*FRONT_ENDS, "dynamo_export")
        for replay in REPLAYS
        if (front_end not in GRAPHS or replay == "module")
        and (replay != "aot_eager" or case.aot)
        and not (replay == "save_load" and case.unsaveable)
    ]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name, front_end, replay", grid())
def test_equals_eager(name: str, front_end: str, replay: str, record_property: Any) -> None:
    case = CASES[name]
    try:
        callable_, module = replayable(name, front_end, replay)
        # AOTAutograd has no gradients of gradients.
        double = case.double and replay != "aot_eager"
        got = run(callable_, module, fresh(name)[1], case, double)
    except REFUSED as error:
        if case.refusal is None:
            raise
        assert case.refusal in str(error)
        record_property("refused", True)
        return
    assert_equal(got, eager(name, False))
    if case.others is not None:
        assert_equal(run(callable_, module, others(name), case), eager(name, True))


@pytest.mark.parametrize("front_end", (*FRONT_ENDS, "dynamo_export"))
@pytest.mark.parametrize("name", CASES)
def test_one_operator_for_each_call(name: str, front_end: str) -> None:
    case = CASES[name]
    captured, told = cached_capture(name, front_end)
    if case.refusal is not None and isinstance(captured, REFUSED):
        return
    captured = program(name, front_end)
    graph = captured if front_end == "make_fx" else captured.graph_module
    if case.calls != -1:
        wanted = eager(name, False).calls if case.calls is None else case.calls
        assert count_operators(graph) == wanted
    if case.warns is not None:
        assert any(case.warns in message for message in told), told
    written = [str(n.target) for n in graph.graph.nodes if "set_grad_enabled" in str(n.target)]
    assert not written or "no_grad" in name, "a grad mode that the user did not write"


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_gradcheck(front_end: str) -> None:
    """The numerical derivative agrees where the backward is the right one."""
    module, x = _Right().double(), torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    if front_end == "make_fx":
        replayed: Any = make_fx(module, pre_dispatch=True)(x)
    else:
        replayed = torch.export.export(module, (x,), strict=front_end == "strict").module()
    assert torch.autograd.gradcheck(replayed, (x,))
    assert torch.autograd.gradgradcheck(replayed, (x,))


class _RightSin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos()


class _Right(torch.nn.Module):
    def forward(self, x):
        return _RightSin.apply(x * x)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_third_order(front_end: str) -> None:
    name = "gradients_of_gradients"

    def orders(function: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
        found, value = [], function(x)
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), x, create_graph=True)
            found.append(value)
        return found

    module, (x,) = fresh(name)
    want = orders(module, x)
    got = orders(replayable(name, front_end, "module")[0], fresh(name)[1][0])
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("unfreeze", [False, True])
def test_other_requires_grad_than_at_capture(front_end: str, unfreeze: bool) -> None:
    """Right, or refused by name, where the backward looks at ``needs_input_grad``."""
    name = "needs_input_grad_per_slot"
    key = "frozen" if unfreeze else "weight"

    def changed(module: Any) -> Any:
        dict(module.named_parameters())[key].requires_grad_(unfreeze)
        return module

    args = (fresh(name)[1][0].requires_grad_(),)
    expected = changed(fresh(name)[0])
    want = run(expected, expected, args, CASES[name])
    captured, _ = capture(name, front_end)
    if isinstance(captured, Exception):
        raise captured
    if front_end == "make_fx":
        module = changed(Traced(captured, fresh(name)[0]))
    else:
        module = changed(captured.module())
    try:
        got = run(module, module, (fresh(name)[1][0].requires_grad_(),), CASES[name])
    except REFUSED as error:
        assert "Needs" in str(error)
        return
    assert_equal(got, want)


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return (grad,)


class _WrongModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return _Wrong.apply(x, self.weight)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_a_wrong_number_of_gradients_is_an_error_of_the_capture(front_end: str) -> None:
    module, args = _WrongModel(), (torch.randn(2, 3),)
    with pytest.raises(Exception, match="incorrect number of gradients") as caught:
        if front_end == "make_fx":
            make_fx(lambda x: module(x), pre_dispatch=True)(*args)
        else:
            torch.export.export(module, args, strict=front_end == "strict")
    assert "_Wrong" in str(caught.value)


def test_every_case_runs_in_eager() -> None:
    for name in CASES:
        assert tree_map_only(torch.Tensor, detached, eager(name, False).outputs)
