"""Captured code that sets a random state, or saves through hooks, is refused by name."""

import pytest
import torch
from models import FunctionModel, Scale, assert_same, gradients, operators
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint
from version_differences import needs

import hops


def recomputing(rate):
    """A Function that runs its forward again in backward, with the random state of before."""

    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.state = torch.get_rng_state()
            ctx.save_for_backward(x)
            return dropout(x, rate) if rate else x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            with torch.random.fork_rng(), torch.enable_grad():
                torch.set_rng_state(ctx.state)
                x = x.detach().requires_grad_()
                y = dropout(x, rate) if rate else x * 2
            return torch.autograd.grad(y, x, grad)[0]

    return Recomputing


class Applied(FunctionModel):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def seeded(h):
    torch.manual_seed(3)
    return dropout(h)


def forked(h):
    with torch.random.fork_rng():
        first = dropout(h)
    return first + dropout(h)


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_a_backward_that_draws_with_the_state_of_its_forward_is_refused(strict):
    model = Applied(recomputing(0.5).apply)
    with pytest.raises(Exception, match="Recomputing.backward sets the state of the random"):
        torch.export.export(model, (torch.ones(2, 3),), strict=strict)
    assert torch.random.set_rng_state.__code__.co_filename == torch.random.__file__


@pytest.mark.parametrize("function", [seeded, forked])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_region_that_sets_the_state_is_refused(function, reentrant):
    model = Applied(lambda h: checkpoint(function, h, use_reentrant=reentrant))
    with pytest.raises(hops.CaptureError, match=rf"region .*{function.__name__} sets the state"):
        torch.export.export(model, (torch.ones(2, 3),), strict=False)


def test_a_state_that_is_set_where_it_was_read_is_no_matter():
    model, x = Applied(recomputing(0).apply), torch.ones(2, 3)
    ep = torch.export.export(model, (x,), strict=False)
    assert operators(ep.graph_module) == ["autograd_function_apply"]
    assert_same(gradients(ep.module(), x), gradients(model, x))


KEPT = torch.Generator()


def draw(h, generator):
    return h * torch.empty_like(h).uniform_(generator=generator)


def made_inside(h):
    return draw(h, torch.Generator().manual_seed(3))


def seeded_inside(h):
    KEPT.manual_seed(3)
    return draw(h, KEPT)


def from_outside(h):
    return draw(h, KEPT) + draw(h, KEPT)


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, how):
        return how(h)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def as_a_region(function):
    return lambda h: checkpoint(function, h, use_reentrant=False)


def as_a_function(function):
    return lambda h: Drawing.apply(h, function)


@needs("generators_in_traces")
@pytest.mark.parametrize("way", [as_a_region, as_a_function])
@pytest.mark.parametrize("function", [made_inside, seeded_inside])
def test_a_generator_that_captured_code_makes_or_seeds_is_refused(function, way):
    model = Applied(way(function))
    with pytest.raises(hops.CaptureError, match="(region .*inside|Drawing) draws from a torch.Gen"):
        torch.export.export(model, (torch.ones(2, 3),), strict=False)


@needs("generators_in_traces")
# A region is read by Dynamo under strict, which takes no generator at all.
@pytest.mark.parametrize(
    "way, strict", [(as_a_region, False), (as_a_function, False), (as_a_function, True)]
)
def test_a_generator_from_outside_goes_on_where_it_is(way, strict):
    def drawn(program):
        KEPT.manual_seed(5)
        return [program(torch.ones(2, 3)) for _ in range(2)]

    model = Applied(way(from_outside))
    program = torch.export.export(model, (torch.ones(2, 3),), strict=strict).module()
    torch.testing.assert_close(drawn(program), drawn(model))


@needs("saved_tensors_hooks_known")
def test_a_function_under_saved_tensors_hooks_is_refused():
    def hooked(h):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
            return Scale.apply(h, torch.ones(3))

    with pytest.raises(hops.CaptureError, match="Scale is applied under .*saved_tensors_hooks"):
        torch.export.export(Applied(hooked), (torch.ones(2, 3),), strict=False)


def test_hooks_from_before_the_capture_or_around_a_region_are_no_matter():
    def region(h):
        with torch.autograd.graph.save_on_cpu():
            return checkpoint(Scale.apply, h, torch.ones(3), use_reentrant=False)

    model, x = Applied(region), torch.ones(2, 3)
    with torch.autograd.graph.save_on_cpu():
        ep = torch.export.export(model, (x,), strict=False)
    assert_same(gradients(ep.module(), x), gradients(model, x))
