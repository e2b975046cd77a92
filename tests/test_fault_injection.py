"""An exception at any point of a capture leaves nothing behind, and the next capture works.

The profiler sees every call that this project's code makes into torch; a capture
is run once to list them, and then once for each, with an error raised there.
"""

import functools
import os
import sys

import pytest
import torch
from models import Scale, operators
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

import hops
from hops import _capture_function, _capture_hooks, _decompose, _threads
from hops import _torch as hops_torch

OURS = tuple(
    os.path.dirname(os.path.abspath(module.__file__)) + os.sep
    for module in (hops, sys.modules["dispatch_rules"])
)
TORCH = os.path.dirname(torch.__file__) + os.sep


class Twice(torch.autograd.Function):
    """setup_context, a free value, and gradients that may be absent."""

    @staticmethod
    def forward(x, weight):
        return x * weight, x.detach() + 1

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad, _):
        x, weight = ctx.saved_tensors
        return Scale.apply(grad, weight), (grad * x).sum(0) if ctx.needs_input_grad[1] else None


def save_sines(ctx, operation, *args, **kwargs):
    if operation is torch.ops.aten.sin.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


CONTEXT_FN = functools.partial(create_selective_checkpoint_contexts, save_sines)


class Everything(torch.nn.Module):
    def __init__(self, context_fn=CONTEXT_FN):
        super().__init__()
        self.context_fn = context_fn
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        h, _ = Twice.apply(self.linear(x), self.weight)

        def region(v):
            return Scale.apply(torch.dropout(v.sin(), 0.5, True), self.weight)

        h = checkpoint(region, h, use_reentrant=False, context_fn=self.context_fn)
        return checkpoint(self.linear, h, use_reentrant=True)


def by_make_fx(model):
    def call(parameters, x):
        return torch.func.functional_call(model, parameters, (x,))

    arguments = (dict(model.named_parameters()), torch.ones(2, 3))
    return make_fx(call, pre_dispatch=True, tracing_mode="fake")(*arguments)


def by_export(model):
    return torch.export.export(model, (torch.ones(2, 3),), strict=False).graph_module


def by_strict_export(model):
    torch._dynamo.reset()
    return torch.export.export(model, (torch.ones(2, 3),), strict=True).graph_module


def retraced(model):
    """A captured program captured again: the rules of the operators write the nodes."""
    arguments = (dict(model.named_parameters()), torch.ones(2, 3))
    return make_fx(captured(), pre_dispatch=True, tracing_mode="fake")(*arguments)


@functools.cache
def captured():
    return by_make_fx(Everything(noop_context_fn))


def saved_tensor_hooks():
    """Those in force; torch 2.6 cannot tell."""
    top = hops_torch.top_saved_tensors_hooks
    return None if top is None else top(False)


def state():
    """Everything that a capture changes for its time."""
    meta = type(torch.autograd.Function)
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "random state": torch.random.get_rng_state().tolist(),
        "function modes": torch._C._len_torch_function_stack(),
        "functions enabled": torch._C._is_torch_function_enabled(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "pre-dispatch modes": torch._ops._len_torch_dispatch_stack_pre_dispatch(),
        "proxy mode": torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY),
        "functorch": torch._C._functorch.peek_interpreter_stack(),
        "saved tensor hooks": saved_tensor_hooks(),
        "node metadata": dict(torch.fx.traceback.current_meta),
        "preserved metadata": torch.fx.traceback.has_preserved_node_meta(),
        "metaclass": "__getattribute__" in meta.__dict__,
        "checkpoint": not _capture_hooks._checkpoint.is_hooked(),
        "hooks": _capture_hooks.capture_hooks._active,
        "captures of this thread": _threads.captures_on_this_thread(),
        "pending look-up": getattr(_capture_function._state, "pending", None),
        "pending call": getattr(_capture_function._state, "call", None),
        "kept operators": getattr(_decompose._state, "kept", ()),
        "profiler": sys.getprofile(),
    }


class Fault(RuntimeError):
    """What torch might raise."""


class CallsIntoTorch:
    """Counts the calls from this project's frames into torch, and raises at one of them.

    What torch's native code calls back in Python is none of them: an error there ends
    the process (the native ``apply`` of 2.14 on).
    """

    def __init__(self, raise_at=None, error=Fault):
        self.raise_at = raise_at
        self.error = error
        self.sites = []
        self.in_native_call = None

    def __call__(self, frame, event, argument):
        if event in ("c_return", "c_exception"):
            self.in_native_call = None
        elif event == "c_call":
            self.in_native_call = frame
        if event == "call":
            if frame.f_back is self.in_native_call:
                return
            caller, name = frame.f_back, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
            into_torch = frame.f_code.co_filename.startswith(TORCH)
        elif event == "c_call":
            caller, name = frame, argument.__qualname__
            into_torch = "torch" in f"{argument.__module__}" or isinstance(
                getattr(argument, "__self__", None), torch.Tensor
            )
        else:
            return
        if not into_torch or caller is None:
            return
        if not caller.f_code.co_filename.startswith(OURS):
            return
        self.sites.append((caller.f_code.co_filename, caller.f_lineno, name))
        if len(self.sites) - 1 == self.raise_at:
            raise self.error(f"injected into {name}")

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *exc_info):
        sys.setprofile(None)


def text(graph):
    return graph.print_readable(print_output=False)


def first_and_last(sites):
    """The first and the last call of each place in this project's code.

    Not those of ``__exit__`` of torch's own context managers: an error right there
    leaves any ``with`` statement of Python unfinished.
    """
    first, last = {}, {}
    for position, site in enumerate(sites):
        if site[2].endswith("__exit__"):
            continue
        first.setdefault(site, position)
        last[site] = position
    return sorted({*first.values(), *last.values()})


#: How it is captured, and the policy of the region.
WAYS = {
    "make_fx": (by_make_fx, noop_context_fn),
    "export": (by_export, CONTEXT_FN),
    "strict export": (by_strict_export, CONTEXT_FN),
    "retrace": (retraced, noop_context_fn),
}
#: How many calls get an error each way, evenly spread; HOPS_FAULTS=100000 is all of them.
BUDGET = int(os.environ.get("HOPS_FAULTS", 15))
ERRORS = (Fault, KeyboardInterrupt, MemoryError)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_torch_leaves_nothing_behind(way):
    capture, context_fn = WAYS[way]
    torch.manual_seed(0)
    model = Everything(context_fn)
    expected = operators(capture(model))
    with CallsIntoTorch() as counted:
        capture(model)
    before = state()
    points = first_and_last(counted.sites)
    points = points[:: max(1, len(points) // BUDGET)]
    assert len(points) > 10
    raised = 0
    for number, point in enumerate(points):
        injected = CallsIntoTorch(point, ERRORS[number % len(ERRORS)])
        torch.manual_seed(0)
        before["random state"] = torch.random.get_rng_state().tolist()
        try:
            with injected:
                capture(model)
        except BaseException:
            raised += 1
        where = counted.sites[point]
        after = state()
        assert after == before, f"after an error at {where}: {differences(after, before)}"
    assert operators(capture(model)) == expected
    assert raised > len(points) // 2


@pytest.mark.parametrize("attribute", ["setup_context", "forward"])
def test_an_error_in_a_look_up_is_raised_by_apply(attribute, monkeypatch):
    """torch's C++ looks these up without a check, so a look-up must not fail."""
    answer = _capture_function.answer_lookup

    def interrupted(cls, name, found):
        if name == attribute:
            raise KeyboardInterrupt
        return answer(cls, name, found)

    model, x = Everything(noop_context_fn), torch.ones(2, 3, requires_grad=True)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(_capture_function, "answer_lookup", interrupted)
        make_fx(model, pre_dispatch=True)(x)
    assert operators(make_fx(model, pre_dispatch=True)(x))


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, error, where):
        ctx.error, ctx.where = error, where
        if where == "forward":
            raise error("in the user's code")
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            if ctx.where == "backward":
                raise ctx.error("in the user's code")
        return grad, None, None


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["forward", "backward", "region", "policy"])
def test_an_error_of_the_users_code_comes_through_as_it_is(where, error, strict):
    def policy(ctx, operation, *args, **kwargs):
        if where == "policy":
            raise error("in the user's code")
        return CheckpointPolicy.PREFER_RECOMPUTE

    class Model(torch.nn.Module):
        def forward(self, x):
            def region(v):
                v = Raising.apply(v, error, where).sin()
                if where == "region":
                    raise error("in the user's code")
                return v

            contexts = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(region, x, use_reentrant=False, context_fn=contexts)

    before = state()
    x = torch.ones(2, requires_grad=True)
    # Dynamo has its own way with errors of the code that it reads.
    expected = BaseException if strict else error
    text = "in the user's code|Observed exception" if strict else "in the user's code"
    with pytest.raises(expected, match=text):
        torch.export.export(Model(), (x,), strict=strict)
    assert state() == before


def differences(after, before):
    return {k: (v, before[k]) for k, v in after.items() if v != before[k]}
