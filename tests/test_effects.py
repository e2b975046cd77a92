"""Side effects on Python objects: they happen once per capture, and are told by file and line."""

import functools
import types
import warnings

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import hops

FRONT_ENDS = ("nonstrict", "strict", "make_fx")
COUNT = 0
EVENTS = []
TABLE = {"calls": 0}
SETTINGS = types.SimpleNamespace(steps=0)


class Double(torch.autograd.Function):
    """What the cases derive from: each overrides what has the side effect."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class Tracker:
    def __init__(self):
        self.seen = 0

    def record(self):
        self.seen += 1  # effect of Tracker


def function_cases():
    class OnTheClass(Double):
        calls = 0

        @staticmethod
        def forward(ctx, x):
            OnTheClass.calls += 1  # effect of OnTheClass
            return x * 2

    def closure():
        seen = []

        class InAClosure(Double):
            @staticmethod
            def forward(ctx, x):
                seen.append(x.shape)  # effect of InAClosure
                return x * 2

        return InAClosure, lambda: len(seen)

    def variable():
        calls = 0

        class OfAVariable(Double):
            @staticmethod
            def forward(ctx, x):
                nonlocal calls
                calls += 1  # effect of OfAVariable
                return x * 2

        return OfAVariable, lambda: calls

    class OfAGlobal(Double):
        @staticmethod
        def forward(ctx, x):
            global COUNT
            COUNT += 1  # effect of OfAGlobal
            return x * 2

    class OfAGlobalList(Double):
        @staticmethod
        def forward(ctx, x):
            EVENTS.append(1)  # effect of OfAGlobalList
            return x * 2

    class OfADict(Double):
        @staticmethod
        def forward(ctx, x):
            TABLE["calls"] += 1  # effect of OfADict
            return x * 2

    class OfSettings(Double):
        @staticmethod
        def forward(ctx, x):
            SETTINGS.steps += 1  # effect of OfSettings
            return x * 2

    class InSetupContext(Double):
        saved = {}

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            InSetupContext.saved.update(calls=1)  # effect of InSetupContext

    class InBackward(Double):
        calls = 0

        @staticmethod
        def backward(ctx, grad):
            InBackward.calls += 1  # effect of InBackward
            return grad * 3

    class ByAClassmethod(Double):
        calls = 0

        @classmethod
        def forward(cls, ctx, x):
            cls.calls += 1  # effect of ByAClassmethod
            return x * 2

    def helped():
        tracker = Tracker()

        def note(tracker):
            tracker.record()

        class Tracked(Double):
            @staticmethod
            def forward(ctx, x):
                note(tracker)
                return x * 2

        return Tracked, lambda: tracker.seen

    return {
        "OnTheClass": (OnTheClass, lambda: OnTheClass.calls),
        "InAClosure": closure(),
        "OfAVariable": variable(),
        "OfAGlobal": (OfAGlobal, lambda: COUNT),
        "OfAGlobalList": (OfAGlobalList, lambda: len(EVENTS)),
        "OfADict": (OfADict, lambda: TABLE["calls"]),
        "OfSettings": (OfSettings, lambda: SETTINGS.steps),
        "InSetupContext": (InSetupContext, lambda: len(InSetupContext.saved)),
        "InBackward": (InBackward, lambda: InBackward.calls),
        "ByAClassmethod": (ByAClassmethod, lambda: ByAClassmethod.calls),
        "Tracker": helped(),
    }


class Model(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("running", torch.zeros(3))
        self.linear = torch.nn.Linear(3, 3)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def told(model, front_end):
    """The warnings of one capture."""
    x = torch.randn(2, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if front_end == "make_fx":
            state = dict(model.named_parameters()) | dict(model.named_buffers())
            make_fx(
                lambda state, x: torch.func.functional_call(model, state, (x,)), pre_dispatch=True
            )(state, x)
        else:
            torch.export.export(model, (x,), strict=front_end == "strict")
    return [w for w in caught if issubclass(w.category, hops.HopsWarning)]


def line_of(marker):
    with open(__file__) as source:
        return [n for n, text in enumerate(source, 1) if text.rstrip().endswith(marker)]


def _grid():
    """Every case without Dynamo; a few through it, since it runs the same recording."""
    for name in function_cases():
        yield from ((name, front_end) for front_end in FRONT_ENDS if front_end != "strict")
    yield from ((name, "strict") for name in ("OnTheClass", "InSetupContext", "InBackward"))


@pytest.mark.parametrize("name, front_end", _grid())
def test_an_effect_of_a_function_happens_once_and_is_told(name, front_end):
    function, count = function_cases()[name]
    before = count()
    (warning,) = told(Model(lambda self, x: function.apply(x * self.weight)), front_end)
    assert count() == before + 1
    assert function.__qualname__ in str(warning.message)
    assert warning.filename == __file__
    assert [warning.lineno] == line_of(f"# effect of {name}")
    assert f"{__file__}:{warning.lineno}" in str(warning.message)


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_an_attribute_of_the_module_that_a_function_is_given(front_end):
    class Steps(Double):
        @staticmethod
        def forward(ctx, x, module):
            module.steps = module.steps + 1
            module.events[0] = 1
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    model = Model(lambda self, x: Steps.apply(x * self.weight, self))
    model.steps, model.events = 0, [0]
    first, second = told(model, front_end)
    assert "Steps.forward sets the attribute 'steps' of a Model" in str(first.message)
    assert "Steps.forward changes the list 'events'" in str(second.message)
    assert second.lineno == first.lineno + 1


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_a_call_made_twice_is_told_once(front_end):
    function, count = function_cases()["OnTheClass"]
    model = Model(lambda self, x: function.apply(function.apply(x * self.weight)))
    assert len(told(model, front_end)) == 1
    assert count() == 2


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_effect_of_a_region(front_end, use_reentrant):
    events = []

    def region(x):
        events.append(1)  # effect of region
        return x.sin()

    model = Model(lambda self, x: checkpoint(region, x * self.weight, use_reentrant=use_reentrant))
    (warning,) = told(model, front_end)
    assert events == [1]
    assert "region" in str(warning.message) and "'events'" in str(warning.message)
    assert [warning.lineno] == line_of("# effect of region")


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_an_effect_of_a_module_in_a_region_is_told_by_the_module(front_end):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)
            self.inner.register_forward_hook(lambda *_: EVENTS.append(1))
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.inner(x)

    model = Model(lambda self, x: checkpoint(self.block, x * self.weight, use_reentrant=False))
    model.block = Block()
    messages = [str(w.message) for w in told(model, front_end)]
    assert len(messages) == 2
    assert all("the checkpointed region test_effects" in m and "Block" in m for m in messages)
    assert "'calls' of a Block" in messages[0] and "'EVENTS'" in messages[1]


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_an_effect_of_a_function_in_a_region_is_told_of_the_function_alone(front_end):
    function, _ = function_cases()["OnTheClass"]

    def region(x):
        return function.apply(x)

    model = Model(lambda self, x: checkpoint(region, x * self.weight, use_reentrant=False))
    (warning,) = told(model, front_end)
    assert "OnTheClass.forward" in str(warning.message)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_traces_of_a_backward_beyond_the_first_leave_nothing(front_end):
    class Both(torch.autograd.Function):
        calls = 0
        seen = []

        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            Both.calls += 1
            Both.seen.append(first is None)
            if first is None or second is None:
                return (second if first is None else first) * 5
            return first + second

    model = Model(lambda self, x: Both.apply(x * self.weight))
    assert len(told(model, front_end)) == 2
    assert Both.calls == 1 and Both.seen == [False]


@functools.lru_cache
def _cached(number):
    return number + 1


def _ordinary():
    class Context(torch.autograd.Function):
        factor = 2

        @staticmethod
        def forward(ctx, x, module, holder):
            ctx.factor = Context.factor
            ctx.table = {"x": x}
            ctx.table["y"] = [x]
            local = []
            local.append(_cached(3))
            module.running.mul_(0.9).add_(x.mean(0))
            module.running[0] = 1
            holder.append(x.exp())
            SETTINGS.steps = SETTINGS.steps
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            ctx.table["z"] = 1
            return grad * ctx.factor, None, None

    def body(self, x):
        holder = []
        return Context.apply(x * self.weight, self, holder) * holder[0]

    return body


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_what_does_not_outlive_the_call_is_no_effect(front_end):
    assert not told(Model(_ordinary()), front_end)


@pytest.mark.parametrize("front_end", ["nonstrict", "make_fx"])
def test_a_region_without_effects_is_not_warned_about(front_end):
    def body(self, x):
        seen = []

        def region(x):
            seen.append(1)
            self.running.add_(1)
            return self.linear(x).sin()

        return checkpoint(region, x * self.weight, use_reentrant=False) * len(seen)

    assert not told(Model(body), front_end)


def test_a_capture_that_fails_leaves_nothing_to_tell():
    function, _ = function_cases()["OnTheClass"]

    def body(self, x):
        function.apply(x * self.weight)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        told(Model(body), "nonstrict")
    assert not told(Model(lambda self, x: x * self.weight), "nonstrict")


def test_eager_says_nothing():
    function, _ = function_cases()["OnTheClass"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Model(lambda self, x: function.apply(x * self.weight))(torch.randn(2, 3)).sum().backward()
