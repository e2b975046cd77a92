"""What only strict capture meets: Dynamo reads the model's Python, and runs it nowhere."""

import pytest
import torch
from models import FunctionModel, assert_same, gradients, operators
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint


def export(model):
    return torch.export.export(model, (torch.ones(2, 3),), strict=True)


def assert_captured(model, *expected):
    """Captured with these operators, and equal to eager in outputs and gradients."""
    x = torch.ones(2, 3)
    want = gradients(model, x)
    ep = export(model)
    assert operators(ep.graph_module) == list(expected)
    assert_same(gradients(ep.module(), x), want)


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
    """On a list, on the module, in a variable around it: all is as if it were no region."""

    class Leaves(FunctionModel):
        def forward(self, x):
            seen, count = [], 0

            def region(h):
                nonlocal count
                count += 1
                seen.append(h.sin() * 2)
                self.last = h.cos()
                return seen[-1] * self.weight

            y = checkpoint(region, self.linear(x), use_reentrant=False)
            y = checkpoint(region, y, use_reentrant=False)
            return y * count + seen[0] + seen[1] + self.last

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


def test_what_dynamo_cannot_trace_names_the_region():
    class Opening(FunctionModel):
        def forward(self, x):
            def opening(h):
                print(h.sum().item(), file=open("/dev/null"))
                return h.sin() * self.weight

            return checkpoint(opening, self.linear(x), use_reentrant=False)

    with pytest.raises(Exception, match=r"checkpointed region of .*opening(.|\n)*strict=False"):
        export(Opening())
