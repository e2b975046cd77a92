"""Captured regions of unusual kinds, compiled and decomposed."""

import contextlib

import pytest
import torch
from models import FunctionModel, assert_same, gradients, operators
from torch.utils.checkpoint import checkpoint
from version_differences import needs

import hops


class Region(FunctionModel):
    def __init__(self, function, **options):
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x):
        return checkpoint(self.function, self.linear(x), use_reentrant=False, **self.options)


def branching(h):
    return torch.cond(h.sum() > 0, lambda v: v.sin() * 2, lambda v: v.cos(), (h,))


def other_contexts():
    return contextlib.nullcontext(), contextlib.nullcontext()


def exported(model, x):
    ep = torch.export.export(model, (x,), strict=False)
    assert operators(ep.graph_module) == ["tag_activation_checkpoint"]
    return ep


@pytest.mark.parametrize(
    "model",
    [
        lambda: Region(torch.sin, debug=True),
        pytest.param(
            lambda: Region(branching),
            marks=needs("compiled_cond_backward"),
        ),
    ],
    ids=["debug", "cond"],
)
def test_compiles_as_it_runs(model):
    model, x = model(), torch.ones(2, 3)
    ep = exported(model, x)
    want = gradients(model, x)
    torch._dynamo.reset()
    program = ep.module()
    compiled = torch.compile(program, backend="aot_eager")
    assert_same(gradients(compiled, x, parameters=program), want)
    assert_same(gradients(ep.module(), x), want)
    torch.testing.assert_close(ep.run_decompositions().module()(x), model(x))


def test_contexts_of_another_kind_are_refused_by_name_when_compiled():
    model, x = Region(torch.sin, context_fn=other_contexts), torch.ones(2, 3)
    ep = exported(model, x)
    assert_same(gradients(ep.module(), x), gradients(model, x))
    torch.testing.assert_close(ep.run_decompositions().module()(x), model(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="checkpointed region at .* gives nullcontext"):
        torch.compile(ep.module(), backend="aot_eager")(x)


@pytest.mark.parametrize("contexts", [lambda: None, lambda: (1, 2, 3)])
def test_a_context_fn_that_gives_no_pair_is_refused_by_name(contexts):
    with pytest.raises(hops.CaptureError, match="region .* pair of context managers"):
        exported(Region(torch.sin, context_fn=contexts), torch.ones(2, 3))


def test_a_policy_that_gives_no_decision_recomputes_as_in_eager():
    """A policy of the form ``if op is mm: return MUST_SAVE``."""

    def contexts():
        return torch.utils.checkpoint.create_selective_checkpoint_contexts(lambda *a, **k: None)

    model, x = Region(torch.sin, context_fn=contexts), torch.ones(2, 3)
    assert_same(gradients(exported(model, x).module(), x), gradients(model, x))


class Positive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        index = (x > 0).nonzero()[:, 0]
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add(0, index, grad * 2)


def selecting(h):
    return Positive.apply(h.flatten()).sum()


def selecting_in_a_region(h):
    index = (h > 0).nonzero()[:, 0]
    return h.index_select(0, index).sum()


class Leading(torch.autograd.Function):
    """Of which the checks on a size that it reads belong to the body, not to the program."""

    @staticmethod
    def forward(ctx, x, count):
        size = count.item()
        torch._check(size >= 1)
        torch._check(size <= x.shape[0])
        ctx.size, ctx.shape = size, x.shape
        return x[:size].sum()

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_zeros(ctx.shape)
        out[: ctx.size] = grad * ctx.size
        return out, None


def leading(h):
    return Leading.apply(h.flatten(), torch.tensor(2))


class DividedWherePositive(torch.autograd.Function):
    """Of which the backward alone makes a size out of values, to read and write by a mask."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x >= 0).to(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        grad, mask = grad.clone(), x > 0
        grad[mask] = grad[mask] / x[mask]
        return grad


def dividing(h):
    return DividedWherePositive.apply(h)


@needs("data_dependent_break")
@pytest.mark.parametrize("function", [selecting_in_a_region, selecting, leading, dividing])
def test_sizes_that_depend_on_values_leave_the_compiled_graph(function):
    class Selecting(FunctionModel):
        def forward(self, x):
            h = self.linear(x)
            if function is not selecting_in_a_region:
                return function(h)
            return checkpoint(function, h, use_reentrant=False)

    model, x = Selecting(), torch.ones(2, 3)
    want = gradients(model, x)
    program = torch.export.export(model, (x,), strict=False).module()
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="aot_eager")
    assert_same(gradients(compiled, x, parameters=program), want)


class Narrowed(torch.autograd.Function):
    """Of which an output has the size that it reads."""

    @staticmethod
    def forward(ctx, x, count):
        size = count.item()
        torch._check(size >= 1)
        torch._check(size <= x.shape[0])
        ctx.rest = x.shape[0] - size
        return x.narrow(0, 0, size) * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad * 3, grad.new_zeros(ctx.rest, *grad.shape[1:])]), None


def narrowed(x, count):
    size = count.item()
    torch._check(size >= 1)
    torch._check(size <= x.shape[0])
    return x.narrow(0, 0, size).sin()


@needs("data_dependent_break")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("function", [Narrowed.apply, narrowed])
def test_a_size_that_is_read_from_an_input_of_the_program(function, strict, backend):
    """Its name in the capture is none that Dynamo knows."""

    class Reading(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x, count):
            h = self.linear(x)
            if function is not narrowed:
                return function(h, count)
            return checkpoint(function, h, count, use_reentrant=False)

    model, args = Reading(), (torch.ones(4, 3), torch.tensor(2))
    want = gradients(model, *args)
    program = torch.export.export(model, args, strict=strict).module()
    torch._dynamo.reset()
    compiled = torch.compile(program, backend=backend)
    assert_same(gradients(compiled, *args, parameters=program), want)
