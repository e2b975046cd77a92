"""Comparing a captured program with eager; the first part of every script that a failure prints."""

import contextlib
import copy
import io
import warnings

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import hops

REFUSED = (hops.CaptureError, hops.ReplayError)


def fit(value, shape):
    """Sum or expand ``value`` to ``shape``; what the backwards of the programs are made of."""
    while value.dim() > len(shape):
        value = value.sum(0)
    return value.expand(shape)


def run(program, module, args, double):
    """Outputs, gradients, buffers and inputs after one step, or the error of its backward."""
    leaves = dict(module.named_parameters())
    leaves.update({f"input {i}": a for i, a in enumerate(args) if a.requires_grad})
    for leaf in leaves.values():
        leaf.grad = None
    before = {name: b.detach().clone() for name, b in module.named_buffers()}
    torch.manual_seed(7)
    outputs = tree_leaves(program(*args))
    tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
    differentiable = [t for t in tensors if t.requires_grad]
    found = {"output": [o.detach().clone() if isinstance(o, torch.Tensor) else o for o in outputs]}
    found["requires_grad"] = [t.requires_grad for t in tensors]
    generator = torch.Generator().manual_seed(3)
    weights = [(torch.rand(t.shape, generator=generator) + 0.5).to(t.dtype) for t in tensors]
    weights = [w for w, t in zip(weights, tensors) if t.requires_grad]
    try:
        if differentiable:
            torch.autograd.backward(differentiable, weights, retain_graph=double)
        found["error"] = None
    except REFUSED:
        raise
    except Exception as error:
        found["error"] = str(error)
        return found
    found["gradient"] = {name: leaf.grad for name, leaf in leaves.items()}
    after = {name: b.detach().clone() for name, b in module.named_buffers()}
    # Strict export drops the buffers that the model does not use.
    found["buffer"] = {n: b for n, b in after.items() if not torch.equal(b, before[n])}
    found["input"] = [a.detach().clone() for a in args]
    if double and differentiable:
        found["second"] = second_order(differentiable, leaves)
    return found


def second_order(outputs, leaves):
    """Gradients of gradients, or the error that they end in."""
    wanted = list(leaves.values())
    total = sum((o * o).sum() for o in outputs)
    first = torch.autograd.grad(total, wanted, create_graph=True, allow_unused=True)
    first = [g for g in first if g is not None and g.requires_grad]
    if not first:
        return None
    try:
        total = sum((g * g).sum() for g in first)
        return dict(zip(leaves, torch.autograd.grad(total, wanted, allow_unused=True)))
    except RuntimeError:
        return "error"


def assert_same(got, want, what=""):
    if isinstance(want, dict):
        assert isinstance(got, dict), f"{what}: {got} where eager has {want}"
        for key, value in want.items():
            # Strict export drops what the model does not use; eager gives it no gradient.
            assert_same(got.get(key), value, f"{what} {key}")
    elif isinstance(want, list):
        assert len(got) == len(want), what
        for position, (ours, theirs) in enumerate(zip(got, want)):
            assert_same(ours, theirs, f"{what} {position}")
    elif isinstance(want, torch.Tensor):
        assert got is not None, f"{what}: None where eager has {want}"
        torch.testing.assert_close(got, want, equal_nan=True, msg=lambda m: f"{what}: {m}")
    else:
        assert got == want, f"{what}: {got} where eager has {want}"


class Traced(torch.nn.Module):
    """What make_fx gives, with the state of the module."""

    def __init__(self, graph, state):
        super().__init__()
        self.graph, self.state = graph, state

    def forward(self, *args):
        return self.graph({**self.state_of()}, *args)

    def state_of(self):
        return dict(self.state.named_parameters()) | dict(self.state.named_buffers())

    def named_parameters(self, *args, **kwargs):
        return self.state.named_parameters(*args, **kwargs)

    def named_buffers(self, *args, **kwargs):
        return self.state.named_buffers(*args, **kwargs)


def capture(build, front_end, dynamic):
    """The captured program, and the module whose state it uses."""
    module, args = build(4)
    if front_end == "make_fx":
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        mode = "symbolic" if dynamic else "real"
        graph = make_fx(
            lambda state, *args: torch.func.functional_call(module, state, args),
            pre_dispatch=True,
            tracing_mode=mode,
        )(state, *args)
        return Traced(graph, build(4)[0])
    rows = ({0: torch.export.Dim("rows", min=2, max=64)},) if dynamic else None
    return torch.export.export(module, args, strict=front_end == "strict", dynamic_shapes=rows)


def replayed(captured, replay):
    """``(program, module)``: what to run, and whose state it uses."""
    if isinstance(captured, Traced):
        return captured, captured
    if replay == "save_load":
        file = io.BytesIO()
        torch.export.save(captured, file)
        file.seek(0)
        captured = torch.export.load(file)
    module = captured.module()
    if replay == "deepcopy":
        module = copy.deepcopy(module)
    if replay == "aot_eager":
        return torch.compile(module, backend="aot_eager", fullgraph=True), module
    return module, module


def fails(program, module, args):
    """Whether a step that fails in eager fails here too, in its forward or backward."""
    try:
        return run(program, module, args, False)["error"] is not None
    except Exception:
        return True


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def compare(build, front_end, replay, dynamic=False, double=False):
    """Capture what ``build(rows)`` gives, and run it beside eager.

    Returns:
        None, or the text of the refusal.
    """
    with quiet():
        rows = [4, 5] if dynamic else [4]
        double = double and replay != "aot_eager"
        wanted = []
        for number in rows:
            module, args = build(number)
            wanted.append(run(module, module, args, double))
        try:
            captured = capture(build, front_end, dynamic)
            for number, want in zip(rows, wanted):
                fresh, args = build(number)
                program, module = replayed(captured, replay)
                with torch.no_grad():
                    for name, buffer in module.named_buffers():
                        if name in dict(fresh.named_buffers()):
                            buffer.copy_(dict(fresh.named_buffers())[name])
                if want["error"] is None:
                    assert_same(run(program, module, args, double), want)
                else:
                    assert fails(program, module, args), f"eager fails: {want['error']}"
        except REFUSED as refusal:
            return str(refusal)
    return None
