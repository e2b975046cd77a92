"""Models that several test modules share.

Each is built from a Function whose backward is not the derivative of its
forward, so that a lost backward shows in the gradients.
"""

from __future__ import annotations

import functools
import re

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Scale(torch.autograd.Function):
    """Multiplies; its backward doubles the gradient of the input."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight * 2, (grad * x).sum(0)


class Flat(torch.autograd.Function):
    """A view of its argument, of shape (2, 3); its backward triples the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view(-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.view(2, 3) * 3


class FunctionModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        return Scale.apply(self.linear(x), self.weight).sin()


class CheckpointModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        def region(h):
            return torch.dropout(self.linear(h).sin(), 0.5, self.training)

        return checkpoint(region, x, use_reentrant=False).cos()


class BothModel(torch.nn.Module):
    """A Function, and a region with dropout and the Function inside."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x):
        y = Scale.apply(self.linear(x), self.weight)

        def region(h):
            return Scale.apply(torch.dropout(h.sin(), 0.5, True), self.weight)

        return checkpoint(region, y, use_reentrant=False).sin()


class Halves(torch.autograd.Function):
    """Two outputs, gradients that may be absent, a backward that looks at needs_input_grad."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx, first, second):
        x, weight = ctx.saved_tensors
        grad = 0
        if first is not None:
            grad = grad + first * weight
        if second is not None:
            grad = grad + second * 3
        return grad, (grad * x).sum(0) if ctx.needs_input_grad[1] else None


def save_sines(ctx, operation, *args, **kwargs):
    if operation is torch.ops.aten.sin.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class RichModel(BothModel):
    """Every keyword that the two operators have in a file."""

    def forward(self, x):
        h = super().forward(x)
        first, second = Halves.apply(h, self.weight)
        context_fn = functools.partial(create_selective_checkpoint_contexts, save_sines)

        def region(v):
            return self.linear(v).sin() + Halves.apply(v, self.weight)[1]

        return checkpoint(region, first, use_reentrant=False, context_fn=context_fn) + second


def gradients(module, *args, parameters=None):
    """Output and gradients of all parameters (None stays None), on a fixed seed."""
    parameters = dict((parameters or module).named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    torch.manual_seed(0)
    output = module(*args)
    output.sum().backward()
    return output.detach(), {name: p.grad for name, p in parameters.items()}


def assert_same(got, want):
    torch.testing.assert_close(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        if grad is None:
            assert got[1][name] is None, name
        else:
            torch.testing.assert_close(got[1][name], grad)


def operators(module):
    """Names of the two operators in a graph module, bodies included, in order."""
    names = []
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in (
            torch.ops.higher_order.autograd_function_apply,
            torch.ops.higher_order.tag_activation_checkpoint,
        ):
            names.append(node.target.__name__)
            for argument in node.args[:1]:
                names += operators(getattr(module, argument.target))
    return names


def text(graph_module):
    """The printed graph without comments, blank lines and the order of placeholders."""
    printed = graph_module.print_readable(print_output=False)
    printed = re.sub(r"#.*|;  [\w =]+ = None", "", printed)
    printed = re.sub(r"class .*\(torch\.nn\.Module\):", "class body:", printed, count=1)
    lines = [line.rstrip() for line in printed.split("\n") if line.strip()]
    head = re.match(r"(\s+def forward\(self, )(.*)\):", lines[1])
    lines[1] = head[1] + ", ".join(sorted(re.split(r", (?=\w+:|\w+$)", head[2]))) + "):"
    return "\n".join(lines)
