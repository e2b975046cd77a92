"""What only strict capture meets: Dynamo reads the model's Python, and runs it nowhere."""

import functools

import pytest
import torch
from models import FunctionModel, assert_same, gradients, operators
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import hops
from hops._dynamo_modules import separate_shared_modules


def export(model):
    return torch.export.export(model, (torch.ones(2, 3),), strict=True)


def assert_captured(model, *expected):
    """Captured with these operators, and equal to eager in outputs and gradients."""
    x = torch.ones(2, 3)
    want = gradients(model, x)
    ep = export(model)
    assert operators(ep.graph_module) == list(expected)
    assert_same(with_all(gradients(ep.module(), x), want), want)


def with_all(got, want):
    """Strict export drops the parameters that nothing uses: they have no gradient."""
    return got[0], {**dict.fromkeys(want[1]), **got[1]}


class Holder:
    """An object to set attributes on."""


class Closure(FunctionModel):
    """A region whose gradient only a closure records."""

    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return checkpoint(self.linear, x, **self.options) + self.weight


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("options", [{"use_reentrant": True}, {}], ids=["reentrant", "default"])
def test_a_reentrant_region_without_input_gradient(options):
    """Eager gives its parameters no gradient, and says so."""
    if gradients(Closure(**options), torch.ones(2, 3))[1]["linear.weight"] is None:
        with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
            assert_captured(Closure(**options))
    else:
        assert_captured(Closure(**options), "tag_activation_checkpoint")


class Negated(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return -result if func is torch.sin else result


def test_a_region_under_a_function_mode():
    class Moded(FunctionModel):
        def forward(self, x):
            with Negated():
                return checkpoint(lambda h: torch.sin(h).cos(), self.linear(x), use_reentrant=False)

    model, x = Moded(), torch.ones(2, 3)
    ep = export(model)
    assert operators(ep.graph_module) == ["tag_activation_checkpoint"]
    torch.testing.assert_close(ep.module()(x), model(x))
    # Eager's own recompute runs without the mode: its gradient is not that of its output.
    (want,) = torch.autograd.grad((-torch.sin(model.linear(x))).cos().sum(), model.linear.weight)
    ep_model = ep.module()
    ep_model(x).sum().backward()
    torch.testing.assert_close(dict(ep_model.named_parameters())["linear.weight"].grad, want)


def test_what_a_region_leaves_behind():
    """On a list, on an object, in a variable around it: all is as if it were no region."""

    class Leaves(FunctionModel):
        def forward(self, x):
            seen, count, holder = [], 0, Holder()

            def region(h):
                nonlocal count
                count += 1
                seen.append(h.sin() * 2)
                holder.last = h.cos()
                return seen[-1] * self.weight

            y = checkpoint(region, self.linear(x), use_reentrant=False)
            y = checkpoint(region, y, use_reentrant=False)
            return y * count + seen[0] + seen[1] + holder.last

    assert_captured(Leaves(), *["tag_activation_checkpoint"] * 2)


def test_a_no_grad_block_around_and_at_the_start_of_a_region():
    """The switches of grad mode on both sides of a region's border belong to their side."""

    class Switching(FunctionModel):
        def forward(self, x):
            def region(h):
                with torch.no_grad():
                    still = h.sin()
                return (still + h) * self.weight

            y = self.linear(x)
            with torch.no_grad():
                y = y + y.cos()
            y = checkpoint(region, y, use_reentrant=False)
            with torch.no_grad():
                z = y.exp()
            return y * z

    assert_captured(Switching(), "tag_activation_checkpoint")


def test_a_policy_that_is_made_in_forward():
    class Selective(FunctionModel):
        def forward(self, x):
            saved = [torch.ops.aten.sin.default]

            def policy(context, operation, *args, **kwargs):
                if operation in saved:
                    return CheckpointPolicy.MUST_SAVE
                return CheckpointPolicy.PREFER_RECOMPUTE

            def contexts():
                return create_selective_checkpoint_contexts(policy)

            return checkpoint(
                lambda h: (h.sin() * self.weight).cos(),
                self.linear(x),
                use_reentrant=False,
                context_fn=contexts,
            )

    model = Selective()
    assert_captured(model, "tag_activation_checkpoint")
    (node,) = export(model).graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint
    )
    assert node.kwargs["policy"] == ["aten.sin.default 0 MUST_SAVE"]


def test_what_dynamo_cannot_trace_names_the_region():
    class Opening(FunctionModel):
        def forward(self, x):
            def opening(h):
                print(h.sum().item(), file=open("/dev/null"))
                return h.sin() * self.weight

            return checkpoint(opening, self.linear(x), use_reentrant=False)

    with pytest.raises(Exception, match=r"checkpointed region of .*opening(.|\n)*strict=False"):
        export(Opening())


def test_a_region_is_named_by_what_it_runs():
    """Model libraries hand over the method of a layer, decorated and with keywords bound."""

    class Decorated(FunctionModel):
        def __init__(self):
            super().__init__()

            @functools.wraps(Decorated.opening)
            def wrapper(*args):
                return self.opening(*args)

            self.region = functools.partial(wrapper)

        def opening(self, h):
            print(h.sum().item(), file=open("/dev/null"))
            return h.sin() * self.weight

        def forward(self, x):
            return checkpoint(self.region, self.linear(x), use_reentrant=False)

    with pytest.raises(Exception, match=r"checkpointed region of .*Decorated\.opening\."):
        export(Decorated())


class IntoItsOwnMemory(torch.autograd.Function):
    """A backward that eager can run, but not differentiate."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mul(x, weight, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        into = torch.empty_like(grad)
        return torch.mul(grad, weight, out=into), (grad * x).sum(0)


def test_a_backward_that_cannot_be_differentiated_is_traced_as_eager_runs_it():
    class Writing(FunctionModel):
        def forward(self, x):
            return IntoItsOwnMemory.apply(self.linear(x), self.weight)

    model, x = Writing(), torch.ones(2, 3)
    assert_captured(model, "autograd_function_apply")
    again = torch.export.export(export(model).module(), (x,), strict=False)
    assert operators(again.graph_module) == ["autograd_function_apply"]
    assert_same(gradients(again.module(), x), gradients(model, x))


# ----------------------------------------------------------- Functions and pending Python state


class Factor(torch.autograd.Function):
    """Multiplies by what it finds in Python objects when it is applied."""

    @staticmethod
    def forward(ctx, x, find):
        ctx.found = find()
        return x * ctx.found

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.found * 2, None


class Finding(FunctionModel):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.items = [1.0]
        self.table = {"a": 1.0}


def test_a_function_finds_what_the_model_has_set():
    class Set(Finding):
        def forward(self, x):
            self.factor = 3.0
            return Factor.apply(self.linear(x), lambda: self.factor)

    assert_captured(Set(), "autograd_function_apply")


def test_a_function_finds_what_the_model_has_put_on_a_list_and_in_a_dict():
    class Put(Finding):
        def forward(self, x):
            self.items.append(5.0)
            self.table["b"] = 7.0
            return Factor.apply(self.linear(x), lambda: self.items[-1] * self.table["b"])

    model = Put()
    assert_equal(export(model), Put(), model)


def assert_equal(ep, fresh, model):
    fresh.load_state_dict(model.state_dict())
    x = torch.ones(2, 3)
    want = gradients(fresh, x)
    assert_same(with_all(gradients(ep.module(), x), want), want)


def test_a_function_finds_tensors_that_the_model_has_set():
    class Set(Finding):
        def forward(self, x):
            y = self.linear(x)
            holder = Holder()
            holder.cache = y.sin()
            self.items.append(y.cos())
            return Factor.apply(y, lambda: holder.cache * self.items[-1])

    model = Set()
    assert_equal(export(model), Set(), model)


def test_a_function_finds_a_variable_around_it():
    class Around(FunctionModel):
        def forward(self, x):
            y = self.linear(x)
            scale = y.detach().sin()
            z = Factor.apply(y, lambda: scale)
            scale = scale + 1
            return Factor.apply(z, lambda: scale)

    assert_captured(Around(), *["autograd_function_apply"] * 2)


class Leave(torch.autograd.Function):
    """Leaves a value behind in a Python object."""

    @staticmethod
    def forward(ctx, x, leave):
        leave(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None


def test_the_model_finds_what_a_function_has_left():
    class Find(FunctionModel):
        def forward(self, x):
            items, table, last = [], {}, None

            def leave(value):
                nonlocal last
                items.append(value)
                table["key"] = value * 2
                last = value * 3

            y = Leave.apply(self.linear(x), leave)
            y = Leave.apply(y, leave)
            return y * items[0] + items[1] + table["key"] * last + len(items)

    assert_captured(Find(), *["autograd_function_apply"] * 2)


def test_the_model_finds_what_a_function_has_set_on_an_object():
    class Find(FunctionModel):
        def forward(self, x):
            holder = Holder()
            holder.count = 1

            def leave(value):
                holder.cache = value
                holder.count = holder.count + 1

            before = holder.count
            y = Leave.apply(self.linear(x), leave)
            return y * holder.cache * holder.count + before

    assert_captured(Find(), "autograd_function_apply")


def test_what_a_function_sets_on_the_model_is_found_or_refused_by_name():
    class Find(FunctionModel):
        def leave(self, value):
            self.cache = value

        def forward(self, x):
            return Leave.apply(self.linear(x), self.leave) * self.cache

    model = Find()
    try:
        ep = export(model)
    except hops.CaptureError as refusal:
        assert "Leave" in str(refusal) and "strict=False" in str(refusal)
    else:
        assert_equal(ep, Find(), model)
    assert "cache" not in vars(model), "no fake tensor stays on the model"


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sin(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


def test_a_function_that_uses_a_process_group_names_it():
    """Dynamo's graph cannot hold one; the default group is in no argument."""
    import torch.distributed as dist

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group):
            total = x.clone()
            dist.all_reduce(total, group=group)
            return total

        @staticmethod
        def backward(ctx, grad):
            return grad * 3, None

    class Model(torch.nn.Module):
        def __init__(self, group):
            super().__init__()
            self.group = group

        def forward(self, x):
            return Reduced.apply(x.sin(), self.group)

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(2, 3, requires_grad=True)
    for group in (None, dist.group.WORLD):
        with pytest.raises(Exception, match=r"hops: .*Reduced.*strict=False"):
            torch.export.export(Model(group), (x,), strict=True)


def test_modules_that_several_bodies_call_are_separated_but_for_their_parameters():
    linear = torch.nn.Linear(3, 3)
    graph = torch.fx.Graph()
    graph.output(graph.call_module("linear", (graph.placeholder("x"),)))
    bodies = {name: torch.fx.GraphModule({"linear": linear}, graph) for name in ("one", "two")}
    separate_shared_modules(torch.fx.GraphModule(bodies, both(bodies)))
    one, two = bodies["one"].linear, bodies["two"].linear
    assert one is not two and one.weight is two.weight is linear.weight
    x = torch.ones(2, 3)
    torch.testing.assert_close(bodies["two"](x), bodies["one"](x))


def both(bodies):
    graph = torch.fx.Graph()
    graph.output([graph.get_attr(name) for name in bodies])
    return graph


class Keeping(FunctionModel):
    """A model that keeps ``apply`` itself, as its attribute."""

    def __init__(self):
        super().__init__()
        self.function = Sine.apply

    def forward(self, x):
        return self.function(self.linear(x))


def test_an_apply_that_the_model_keeps():
    assert_captured(Keeping(), "autograd_function_apply")


def test_a_function_under_a_function_mode():
    class Moded(FunctionModel):
        def forward(self, x):
            y = self.linear(x)
            with Negated():
                y = Sine.apply(y)
            return Sine.apply(y)

    assert_captured(Moded(), *["autograd_function_apply"] * 2)


def test_a_class_of_a_function_in_forward():
    class Defining(FunctionModel):
        def forward(self, x):
            y = self.linear(x)
            middle = y.cos()

            class Inside(torch.autograd.Function):
                scale = 2.0

                @staticmethod
                def forward(ctx, h):
                    ctx.save_for_backward(h, middle)
                    ctx.scale = Inside.scale
                    return h * middle * self.weight

                @staticmethod
                def backward(ctx, grad):
                    h, middle = ctx.saved_tensors
                    return grad * h * middle * ctx.scale

            y = Inside.apply(y)
            middle = middle + 1
            Inside.scale = 5.0
            return Inside.apply(y)

    assert_captured(Defining(), *["autograd_function_apply"] * 2)


def test_what_cannot_be_handed_to_a_function_names_it():
    class Handing(FunctionModel):
        def forward(self, x):
            return Factor.apply(self.linear(x), x.numpy())

    with pytest.raises(Exception, match=r"Factor(.|\n)*strict=False"):
        export(Handing())


class _Holder:
    def __init__(self, value):
        self.value = value


OPAQUE = {
    "dict": (lambda a, kept: {"it": a}, lambda out, kept: out["it"]),
    "tuple_in_a_tuple": (lambda a, kept: (a.cos(), (a,)), lambda out, kept: out[1][0]),
    "object": (lambda a, kept: _Holder(a), lambda out, kept: out.value),
    "list_outside": (lambda a, kept: kept.append(a) or a.cos(), lambda out, kept: kept[0]),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("way", list(OPAQUE))
def test_what_leaves_a_reentrant_region_in_another_way_has_no_gradient(way, strict):
    """Eager runs the forward of such a region without gradients, and gives one to outputs only."""
    give, take = OPAQUE[way]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            kept = []
            h = x * self.weight
            out = checkpoint(lambda y: give(y.sin() * self.weight, kept), h, use_reentrant=True)
            return take(out, kept) * self.weight + h

    model, x = Model(), torch.randn(2, 3)
    want = gradients(model, x)
    program = torch.export.export(model, (x,), strict=strict).module()
    assert_same(gradients(program, x), want)
