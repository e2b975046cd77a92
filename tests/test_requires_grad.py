"""An operator follows what requires grad when the captured program runs, not at its capture."""

from itertools import product

import pytest
import torch
from models import operators
from torch.autograd import Function


class OtherBackward(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 10


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return OtherBackward.apply(self.weight * x)


def gradients(program, needs):
    x = torch.tensor([4.0, 5.0, 6.0], requires_grad=needs[0])
    program.weight.requires_grad_(needs[1])
    y = program(x)
    if y.requires_grad:
        y.sum().backward()
    return y.requires_grad, x.grad, program.weight.grad


NEEDS = list(product([False, True], repeat=2))


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("at_capture", [n for n in NEEDS if any(n)])
@pytest.mark.parametrize("at_run", NEEDS)
def test_what_requires_grad_may_change_after_the_capture(at_capture, at_run, strict):
    model = Model()
    model.weight.requires_grad_(at_capture[1])
    x = torch.ones(3, requires_grad=at_capture[0])
    ep = torch.export.export(model, (x,), strict=strict)
    assert operators(ep.graph_module) == ["autograd_function_apply"]
    want = gradients(Model(), at_run)
    got = gradients(ep.module(), at_run)
    assert got[0] == want[0]
    for ours, theirs in zip(got[1:], want[1:]):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours, theirs)
