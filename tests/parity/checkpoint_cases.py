"""Small models with checkpointed regions, each showing one thing that eager's checkpoint does.

Adding a case is adding one function under :func:`case`, which returns a module and its
arguments.  ``tests/test_checkpoint_parity.py`` runs every case through every front end and
replay, and compares each with eager.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as checkpoint_module
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

WIDTH = 4
BATCH = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        build: makes the module and its arguments, the same each time.
        section: line of the README's table to which the case belongs.
        inlined: how many of the checkpoint calls that eager makes record no gradient and so
            leave no region in the graph.
        regions: the number of regions in the graph, where eager's calls do not tell it.
        reference: makes the model to compare with, where it is not the model itself.
        stock_fails: front ends and replays that fail in stock torch for the same model without
            any checkpoint, as "front end-replay"; they are not run.
        dynamic: whether the first dimension of every tensor argument is dynamic.
        backward: "together" sums all outputs; "reversed" runs one backward for each output, the
            last one first.
        compiled: whether the case is also run under ``torch.compile``.
        requires: whether the installed torch has what the case uses.
    """

    name: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    section: str = ""
    inlined: int = 0
    regions: int | None = None
    reference: Callable[[], tuple[nn.Module, tuple[Any, ...]]] | None = None
    stock_fails: frozenset[str] = frozenset()
    dynamic: bool = False
    backward: str = "together"
    compiled: bool = False
    requires: bool = True


CASES: list[Case] = []


_section = ""


def section(title: str) -> None:
    """Give the cases that follow a line of their own in the README's table."""
    global _section
    _section = title


def case(**attributes: Any) -> Callable[[Any], Any]:
    def register(build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]) -> Any:
        CASES.append(Case(build.__name__, build, _section, **attributes))
        return build

    return register


class Layers(nn.Module):
    """The layers that most cases use; :func:`model` adds the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.other = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))


def model(forward: Callable[..., Any], **members: nn.Module) -> nn.Module:
    """A module with the usual layers, ``members``, and the given forward."""
    module = type("Model", (Layers,), {"forward": forward})()
    for name, member in members.items():
        setattr(module, name, member)
    return module


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape or (BATCH, WIDTH)).requires_grad_(grad)


# ---------------------------------------------------------------------------------- call forms

section("call forms")


@case(compiled=True)
def plain():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(compiled=True)
def reentrant():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def use_reentrant_unset():
    def forward(self, x):
        return self.other(checkpoint(self.block, x))

    return model(forward), (tensor(),)


@case()
def called_through_its_module():
    def forward(self, x):
        return checkpoint_module.checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(requires="respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters)
def curried():
    def forward(self, x):
        return checkpoint(use_reentrant=False)(self.block)(x)

    return model(forward), (tensor(),)


@case()
def function_by_keyword():
    def forward(self, x):
        return checkpoint(function=self.block, input=x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def keyword_arguments():
    def forward(self, x, y):
        def scaled(x, *, bias, factor=1.0, power=1):
            return (torch.sin(x) * factor + bias) ** power

        return checkpoint(scaled, x, bias=y, factor=2.0, power=2, use_reentrant=False)

    return model(forward), (tensor(), tensor())


@case()
def positional_arguments_of_many_kinds():
    def forward(self, x):
        def mixed(x, none, number, flag, text, sizes):
            y = x.reshape(sizes) * number
            return torch.sin(y) if flag and none is None and text == "sin" else y

        return checkpoint(mixed, x, None, 3, True, "sin", (-1,), use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def sequential():
    def forward(self, x):
        return checkpoint_sequential(self.stack, 2, x, use_reentrant=False)

    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]
    return model(forward, stack=nn.Sequential(*layers)), (tensor(),)


@case()
def sequential_reentrant():
    def forward(self, x):
        return checkpoint_sequential(self.stack, 3, x, use_reentrant=True)

    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()]
    return model(forward, stack=nn.Sequential(*layers)), (tensor(),)


@case(compiled=True)
def wrapper():
    def forward(self, x):
        return self.other(self.wrapped(x))

    wrapped = checkpoint_wrapper(nn.Linear(WIDTH, WIDTH))
    return model(forward, wrapped=wrapped), (tensor(),)


@case()
def wrapper_reentrant():
    def forward(self, x):
        return self.other(self.wrapped(x))

    wrapped = checkpoint_wrapper(nn.Linear(WIDTH, WIDTH), checkpoint_impl=CheckpointImpl.REENTRANT)
    return model(forward, wrapped=wrapped), (tensor(),)


@case()
def applied_to_submodules():
    def forward(self, x):
        return torch.tanh(self.stack(x))

    stack = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    module = model(forward, stack=stack)
    apply_activation_checkpointing(module, check_fn=lambda m: isinstance(m, nn.Linear))
    return module, (tensor(),)


@case(requires="early_stop" in inspect.signature(inspect.unwrap(checkpoint)).parameters)
def early_stop_keyword():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, early_stop=False)

    return model(forward), (tensor(),)


@case()
def early_stop_context():
    def forward(self, x):
        with set_checkpoint_early_stop(False):
            return checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def determinism_check():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, determinism_check="none")

    return model(forward), (tensor(),)


@case()
def debug():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, debug=True)

    return model(forward), (tensor(),)


@case()
def debug_context():
    def forward(self, x):
        with set_checkpoint_debug_enabled(True):
            return checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def preserve_rng_state_off():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(self.block(x)), x, use_reentrant=False, preserve_rng_state=False
        )

    return model(forward), (tensor(),)


@case()
def preserve_rng_state_off_reentrant():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True, preserve_rng_state=False)

    return model(forward), (tensor(),)


@case()
def bound_method():
    def forward(self, x):
        return checkpoint(self.region, x, use_reentrant=False)

    module = model(forward)
    type(module).region = lambda self, x: torch.sin(self.block(x)) * self.scale
    return module, (tensor(),)


@case()
def partial():
    def forward(self, x):
        function = functools.partial(torch.mul, torch.sin(x))
        return checkpoint(function, self.scale, use_reentrant=False)

    return model(forward), (tensor(),)


# --------------------------------------------------------------------------- inputs and outputs

section("inputs and outputs")


@case(compiled=True)
def pytrees():
    def forward(self, x, y):
        def region(tree):
            left, (right,) = tree["left"], tree["right"]
            return {"sum": left + torch.sin(right), "rest": [left * right, (self.other(left),)]}

        out = checkpoint(region, {"left": x, "right": (y,)}, use_reentrant=False)
        return out["sum"], out["rest"]

    return model(forward), (tensor(), tensor())


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@case()
def named_tuple():
    def forward(self, x, y):
        pair = checkpoint(
            lambda p: Pair(torch.sin(p.second), p.first * 2), Pair(x, y), use_reentrant=False
        )
        return pair.first, pair.second

    return model(forward), (tensor(), tensor())


@dataclasses.dataclass
class Holder:
    value: torch.Tensor
    factor: float = 2.0


@case()
def dataclass_in_and_out():
    def forward(self, x):
        def region(holder):
            return Holder(torch.sin(self.block(holder.value)) * holder.factor, 3.0)

        out = checkpoint(region, Holder(x), use_reentrant=False)
        return out.value * out.factor

    return model(forward), (tensor(),)


@case()
def dataclass_reentrant():
    def forward(self, x):
        def region(x, holder):
            return torch.sin(self.block(x)) * holder.factor

        return checkpoint(region, x, Holder(x), use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def none_and_numbers_out():
    def forward(self, x):
        def region(x):
            return torch.sin(x), None, 3, "text", x.shape[1], 0.5

        y, none, number, text, width, factor = checkpoint(region, x, use_reentrant=False)
        assert none is None and text == "text"
        return y * (number + width + factor), number

    return model(forward), (tensor(),)


@case()
def output_is_operand():
    def forward(self, x):
        same, scale, y = checkpoint(
            lambda x: (x, self.scale, torch.sin(x) * self.scale), x, use_reentrant=False
        )
        return same * 2, scale * 3, y

    return model(forward), (tensor(),)


@case(inlined=1)
def output_is_the_only_operand():
    def forward(self, x):
        return checkpoint(lambda x: x, torch.sin(x), use_reentrant=False) * 2

    return model(forward), (tensor(),)


@case()
def output_twice():
    def forward(self, x):
        def region(x):
            y = torch.sin(x)
            return y, y, y * 2

        a, b, c = checkpoint(region, x, use_reentrant=False)
        return a * 2 + b * 3 + c

    return model(forward), (tensor(),)


@case()
def output_is_a_view():
    def forward(self, x):
        a, b = checkpoint(
            lambda x: (x.view(-1), torch.sin(x).t()), torch.cos(x), use_reentrant=False
        )
        return a, b

    return model(forward), (tensor(),)


@case()
def integer_and_detached_outputs():
    def forward(self, x):
        def region(x):
            return torch.sin(x), x.argmax(dim=1), torch.sin(x).detach()

        y, index, still = checkpoint(region, x, use_reentrant=False)
        return y * still, index

    return model(forward), (tensor(),)


@case()
def integer_operand():
    def forward(self, index):
        return checkpoint(
            lambda i: torch.sin(self.embed(i)) @ self.other.weight, index, use_reentrant=False
        )

    return model(forward, embed=nn.Embedding(7, WIDTH)), (torch.tensor([1, 4, 4]),)


@case()
def input_without_gradient():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(grad=False),)


@case()
def same_tensor_twice():
    def forward(self, x):
        return checkpoint(lambda a, b: torch.sin(a) * b, x, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(dynamic=True)
def symint_argument():
    def forward(self, x):
        def region(x, size):
            return torch.sin(x).sum(0) / size, size + 1

        y, size = checkpoint(region, x, x.shape[0], use_reentrant=False)
        return y * size

    return model(forward), (tensor(),)


@case(dynamic=True)
def symint_closure():
    def forward(self, x):
        size = x.shape[0] * 2
        y = checkpoint(lambda x: torch.sin(x).repeat(2, 1) * size, x, use_reentrant=False)
        return y.reshape(size, -1) + x.shape[0]

    return model(forward), (tensor(),)


@case(dynamic=True)
def items_in_and_out():
    def forward(self, x):
        largest = x.detach().abs().max().item()

        def region(x):
            y = self.other(x) / largest
            return y, y.sum().item()

        y, total = checkpoint(region, x, use_reentrant=False)
        return y * total

    return model(forward), (tensor(),)


@case(dynamic=True, compiled=True)
def dynamic_shapes():
    def forward(self, x):
        y = checkpoint(self.block, x, use_reentrant=False)
        return checkpoint(lambda y: y.view(y.shape[0] * 2, -1) * y.shape[0], y, use_reentrant=False)

    return model(forward), (tensor(),)


@case(dynamic=True)
def dynamic_reentrant():
    def forward(self, x):
        return checkpoint(lambda x: self.block(x).sum(1, keepdim=True), x, use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def data_dependent_shape():
    def forward(self, x):
        def region(x):
            picked = torch.sin(x)[x > 0]
            return picked.sum() * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def data_dependent_shape_out():
    def forward(self, x):
        picked = checkpoint(lambda x: torch.sin(x)[x > 0] * 2, x, use_reentrant=False)
        return picked.sum() + self.scale

    return model(forward), (tensor(),)


# ------------------------------------------------------------------------------------- closures

section("closures")


@case(compiled=True)
def closures():
    def forward(self, x):
        middle = torch.cos(x)

        def region(x):
            return torch.sin(x) * middle + self.scale * self.shift

        return checkpoint(region, x, use_reentrant=False) * middle

    return model(forward), (tensor(),)


@case()
def closures_reentrant():
    # A reentrant region gives no gradient to the intermediate that it only closes over, but
    # adds to those of parameters.
    def forward(self, x):
        return checkpoint(lambda x: torch.sin(x) * self.scale + self.shift, x, use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def constant_tensor():
    table = torch.arange(WIDTH, dtype=torch.float32)

    def forward(self, x):
        return checkpoint(lambda x: torch.sin(x) * table, x, use_reentrant=False) + table

    return model(forward), (tensor(),)


@case()
def tensor_made_inside():
    def forward(self, x):
        def region(x):
            ramp = torch.arange(WIDTH, dtype=x.dtype)
            return torch.sin(x) * ramp + torch.tensor([2.0, 3.0, 4.0, 5.0])

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def intermediate_escapes():
    def forward(self, x):
        seen = []

        def region(x):
            y = torch.sin(x)
            seen.append(y * 2)
            return y * self.scale

        out = checkpoint(region, x, use_reentrant=False)
        return out + seen[0]

    return model(forward), (tensor(),)


@case()
def intermediate_escapes_from_nested():
    def forward(self, x):
        seen = []

        def inner(x):
            y = torch.sin(x)
            seen.append(y)
            return y * self.scale

        def outer(x):
            return checkpoint(inner, torch.cos(x), use_reentrant=False) + 1

        out = checkpoint(outer, x, use_reentrant=False)
        return out * seen[0]

    return model(forward), (tensor(),)


@case()
def intermediate_used_in_next_region():
    def forward(self, x):
        seen = []

        def first(x):
            seen.append(torch.sin(x))
            return seen[0] * self.scale

        y = checkpoint(first, x, use_reentrant=False)
        return checkpoint(lambda y: torch.cos(y) * seen[0], y, use_reentrant=False)

    return model(forward), (tensor(),)


# -------------------------------------------------------------------------- several and nested

section("several and nested")


@case(compiled=True)
def several():
    def forward(self, x):
        x = checkpoint(self.block, x, use_reentrant=False)
        x = self.other(x)
        return checkpoint(torch.sigmoid, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(backward="reversed")
def branches_with_a_backward_each():
    def forward(self, x):
        a = checkpoint(self.block, x, use_reentrant=False)
        b = checkpoint(self.other, x, use_reentrant=False)
        return a, torch.sin(b)

    return model(forward), (tensor(),)


@case(compiled=True)
def loop():
    def forward(self, x):
        for _ in range(4):
            x = checkpoint(self.block, x, use_reentrant=False)
        return x

    return model(forward), (tensor(),)


@case()
def shared_module():
    def forward(self, x, y):
        a = checkpoint(self.block, x, use_reentrant=False)
        b = checkpoint(self.block, y, use_reentrant=False)
        return a * self.block(b)

    return model(forward), (tensor(), tensor())


@case(stock_fails=frozenset({"nonstrict-save_load"}))
def tied_weights():
    def forward(self, x):
        return checkpoint(lambda x: self.tied(torch.sin(self.other(x))), x, use_reentrant=False)

    module = model(forward, tied=nn.Linear(WIDTH, WIDTH, bias=False))
    module.tied.weight = module.other.weight
    return module, (tensor(),)


@case(compiled=True)
def nested():
    def forward(self, x):
        def inner(x):
            return torch.sin(self.other(x)) * self.scale

        def outer(x):
            return checkpoint(inner, self.block(x), use_reentrant=False) + x

        return checkpoint(outer, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def nested_three_deep():
    def forward(self, x):
        def deep(x):
            return torch.sin(x) * self.scale

        def inner(x):
            return checkpoint(deep, torch.cos(x), use_reentrant=False) + self.other(x)

        def outer(x):
            y = checkpoint(inner, self.block(x), use_reentrant=False)
            return checkpoint(deep, y, use_reentrant=False) * 2

        return checkpoint(outer, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def reentrant_that_returns_what_a_region_inside_returns():
    def forward(self, x):
        def outer(x):
            deep = checkpoint(self.block, x * 2, use_reentrant=True)
            return checkpoint(torch.sin, x, use_reentrant=False), deep

        y, z = checkpoint(outer, self.other(x), use_reentrant=True)
        return y * z

    return model(forward), (tensor(),)


@case()
def an_autocast_and_a_no_grad_region_that_nothing_uses():
    def forward(self, x):
        with torch.no_grad():
            unused = torch.cos(x)

        def region(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                self.block(x + unused)
            return torch.sin(x) * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def reentrant_inside_reentrant():
    def forward(self, x):
        def outer(x):
            return torch.sin(checkpoint(self.block, x * 2, use_reentrant=True))

        return checkpoint(outer, x, use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def plain_inside_reentrant():
    def forward(self, x):
        def outer(x):
            return torch.sin(checkpoint(self.block, x * 2, use_reentrant=False))

        return checkpoint(outer, x, use_reentrant=True)

    return model(forward), (tensor(),)


@case(inlined=1)
def region_of_one_of_two_calls_records():
    # The first call has nothing to record, the second has.
    def forward(self, x):
        still = checkpoint(torch.sin, x.detach(), use_reentrant=False)
        return checkpoint(torch.sin, x, use_reentrant=False) * still

    return model(forward), (tensor(),)


# ------------------------------------------------------------------------- no gradient to record

section("no gradient to record")


@case(inlined=1)
def nothing_to_record():
    def forward(self, x):
        still = checkpoint(torch.sin, x, use_reentrant=False)
        return still * self.scale

    return model(forward), (tensor(grad=False),)


@case(inlined=1)
def called_under_no_grad():
    def forward(self, x):
        with torch.no_grad():
            still = checkpoint(self.block, x, use_reentrant=False)
        return still * x

    return model(forward), (tensor(),)


@case(inlined=1)
def reentrant_called_under_no_grad():
    def forward(self, x):
        with torch.no_grad():
            still = checkpoint(self.block, x, use_reentrant=True)
        return still * x

    return model(forward), (tensor(),)


@case(inlined=1)
def frozen_parameters():
    def forward(self, x):
        return self.other(checkpoint(self.block, x, use_reentrant=False))

    module = model(forward)
    module.block.requires_grad_(False)
    return module, (tensor(grad=False),)


@case()
def some_frozen_parameters():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)

    module = model(forward)
    module.block[0].requires_grad_(False)
    return module, (tensor(grad=False),)


@case(inlined=1)
def reentrant_without_gradient():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=True) * self.scale

    return model(forward), (tensor(grad=False),)


@case(inlined=1)
def reentrant_gradient_hidden_in_pytree():
    # Eager looks at the positional arguments only, not into them.
    def forward(self, x):
        return checkpoint(lambda d: self.block(d["x"]), {"x": x}, use_reentrant=True) * self.scale

    return model(forward), (tensor(),)


@case(inlined=1)
def reentrant_gradient_only_by_closure():
    def forward(self, x):
        y = torch.sin(x)
        return checkpoint(lambda z: self.block(z + y), self.shift, use_reentrant=True) * self.scale

    return model(forward), (tensor(),)


# ----------------------------------------------------------------------- modes, side effects

section("modes, side effects")


@case()
def no_grad_block_inside():
    def forward(self, x):
        def region(x):
            y = torch.sin(x)
            with torch.no_grad():
                still = torch.cos(y) * 2
            return y * still * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def enable_grad_block_inside():
    def forward(self, x):
        def region(x):
            with torch.no_grad():
                still = torch.cos(x)
                with torch.enable_grad():
                    y = torch.sin(x) * self.scale
                still = torch.cos(still)
            return y * still

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def no_grad_around_the_whole_inside():
    def forward(self, x):
        def region(x):
            y = torch.sin(x)
            with torch.no_grad():
                y = torch.cos(y)
            return y, x * 2

        still, y = checkpoint(region, x, use_reentrant=False)
        return still * y

    return model(forward), (tensor(),)


@case(inlined=1)
def no_grad_decorated():
    def forward(self, x):
        @torch.no_grad()
        def region(x):
            return self.block(x)

        return checkpoint(region, x, use_reentrant=False) * x

    return model(forward), (tensor(),)


@case()
def autocast_outside():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(self.block, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def autocast_around_only_the_region():
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(self.block, x, use_reentrant=False)
        return self.other(torch.sin(y) * self.scale)

    return model(forward), (tensor(),)


@case()
def autocast_entered_and_left_inside():
    def forward(self, x):
        def region(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.block(x)
            return self.other(y.float())

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def autocast_off_inside():
    def forward(self, x):
        def region(x):
            y = self.other(x)
            with torch.autocast("cpu", enabled=False):
                return self.other(torch.sin(y) * self.scale)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def autocast_around_nested_regions():
    def forward(self, x):
        def region(x):
            y = checkpoint(self.block, x, use_reentrant=False)
            with torch.autocast("cpu", enabled=False):
                y = checkpoint(self.other, y.float(), use_reentrant=False)
            return y * self.scale

        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(region, x, use_reentrant=False)
        with torch.no_grad():
            shift = y.mean()
        return self.other(y.float()) - shift

    return model(forward), (tensor(),)


@case()
def autocast_around_a_function_in_a_region():
    def forward(self, x):
        def region(x):
            return _Cast.apply(self.other(x), self.other.weight) * self.scale

        with torch.autocast("cpu", dtype=torch.bfloat16):
            return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


class _Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight.T) * 2, x.T @ grad


@case()
def in_place_on_intermediate():
    def forward(self, x):
        def region(x):
            y = self.other(x)
            y.mul_(2).add_(self.scale)
            y[:, 0] = 1.0
            return torch.sin(y).relu_()

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def in_place_on_closure():
    # A clamp gives the same however often it runs.
    def forward(self, x):
        still = x.detach().clone()

        def region(x):
            still.clamp_(min=0)
            return torch.sin(x) * 3

        return checkpoint(region, x, use_reentrant=False) + still

    return model(forward), (tensor(),)


@case()
def batch_norm():
    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.norm(x)), x, use_reentrant=False)

    return model(forward, norm=nn.BatchNorm1d(WIDTH)), (tensor(),)


@case()
def batch_norm_reentrant():
    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.norm(x)), x, use_reentrant=True)

    return model(forward, norm=nn.BatchNorm1d(WIDTH)), (tensor(),)


@case()
def batch_norm_at_the_end():
    # Recompute stops at the last saved tensor, so eager may update only some of the buffers.
    def forward(self, x):
        return checkpoint(lambda x: self.norm(self.other(x)), x, use_reentrant=False)

    return model(forward, norm=nn.BatchNorm1d(WIDTH)), (tensor(),)


@case()
def counter_buffer():
    def forward(self, x):
        def region(x):
            self.shift.add_(1)
            return torch.sin(torch.sin(x) * self.scale)

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def evaluation():
    def forward(self, x):
        return checkpoint(lambda x: self.drop(self.norm(x)) * self.scale, x, use_reentrant=False)

    module = model(forward, norm=nn.BatchNorm1d(WIDTH), drop=nn.Dropout(0.5)).eval()
    return module, (tensor(),)


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


def call_directly(function, *args, use_reentrant):
    return function(*args)


def under_torch_function_mode(call=checkpoint):
    def forward(self, x):
        with Doubling():
            y = call(lambda x: torch.sin(torch.sin(x)) * self.scale, x, use_reentrant=False)
        return torch.sin(y)

    return model(forward), (tensor(),)


# Eager's recompute runs without the mode, and its gradients are wrong.
@case(regions=1, reference=functools.partial(under_torch_function_mode, call_directly))
def torch_function_mode():
    return under_torch_function_mode()


@case()
def attribute_written_inside():
    def forward(self, x):
        def region(x):
            self.last = 3
            return torch.sin(self.block(x))

        return checkpoint(region, x, use_reentrant=False) * self.last

    module = model(forward)
    module.last = 0
    return module, (tensor(),)


@case()
def half_precision():
    def forward(self, x):
        return checkpoint(self.block, x.to(torch.bfloat16), use_reentrant=False).float()

    module = model(forward)
    module.block.to(torch.bfloat16)
    return module, (tensor(),)


@case()
def gradient_of_the_region_inside_it():
    def forward(self, x):
        def region(x):
            y = torch.sin(x).detach().requires_grad_()
            return torch.cos(x) * y

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


# ----------------------------------------------------------------- Functions and other operators

section("Functions and other operators")


class Clip(torch.autograd.Function):
    """A straight-through clamp: its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x, low):
        ctx.save_for_backward(x)
        ctx.low = low
        return x.clamp(min=low)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 + torch.cos(x) * ctx.low, None


@case(compiled=True)
def function_inside_region():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(Clip.apply(self.block(x), 0.5)), x, use_reentrant=False
        )

    return model(forward), (tensor(),)


@case()
def function_inside_reentrant_region():
    def forward(self, x):
        return checkpoint(lambda x: Clip.apply(self.block(x), 0.5), x, use_reentrant=True)

    return model(forward), (tensor(),)


@case()
def function_inside_nested_region():
    def forward(self, x):
        def outer(x):
            y = checkpoint(lambda x: Clip.apply(x, 0.1), torch.sin(x), use_reentrant=False)
            return Clip.apply(y, 0.2) * self.scale

        return checkpoint(outer, x, use_reentrant=False)

    return model(forward), (tensor(),)


class CheckpointsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return checkpoint(torch.sin, x, use_reentrant=False)

    @staticmethod
    def backward(ctx, grad):
        return grad * 5 * torch.cos(ctx.saved_tensors[0])


@case(inlined=1)
def region_inside_function():
    def forward(self, x):
        return CheckpointsInForward.apply(x) * self.scale

    return model(forward), (tensor(),)


@case()
def cond_inside_region():
    def forward(self, x):
        def region(x):
            y = torch.cond(
                x.sum() > 0, lambda x: torch.sin(x), lambda x: torch.cos(x) * 2, (x * 2,)
            )
            return y * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(regions=1)
def region_inside_cond():
    def forward(self, x):
        def taken(x):
            return checkpoint(lambda x: torch.sin(torch.sin(x)), x, use_reentrant=False)

        return torch.cond(self.shift.sum() > -100.0, taken, lambda x: torch.cos(x), (x,))

    return model(forward), (tensor(),)


# Stock make_fx in real mode burns the batched tensor in as a constant.
VMAP_FAILS = frozenset(
    {"make_fx-module", "make_fx-deepcopy", "make_fx-reexport", "dynamo_export-module"}
)


@case(stock_fails=VMAP_FAILS)
def vmap_inside_region():
    def forward(self, x):
        def region(x):
            return torch.vmap(lambda row: torch.sin(row) * row.sum())(x) * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(inlined=1, stock_fails=VMAP_FAILS)
def region_inside_vmap():
    # With a gradient to record eager's checkpoint fails inside vmap.
    def forward(self, x):
        def row(row):
            return checkpoint(lambda r: torch.sin(r) * r.sum(), row, use_reentrant=False)

        return torch.vmap(row)(x) * self.scale

    return model(forward), (tensor(grad=False),)


# Traced on real tensors scan gives fake ones, in stock torch too.
@case(
    regions=1, stock_fails=frozenset({f"make_fx-{r}" for r in ("module", "deepcopy", "reexport")})
)
def region_inside_scan():
    from torch._higher_order_ops.scan import scan

    def forward(self, x):
        def step(carry, row):
            new = checkpoint(lambda c, r: torch.sin(c) * r, carry, row, use_reentrant=False)
            return new, new + 1

        last, rows = scan(step, torch.cos(self.scale), x)
        return last, rows * self.scale

    return model(forward), (tensor(grad=False),)


@case()
def attention_inside_region():
    def forward(self, x):
        def region(x):
            q, k, v = (self.qkv(x)).chunk(3, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return checkpoint(region, x, use_reentrant=False)

    module = model(forward, qkv=nn.Linear(WIDTH, 3 * WIDTH))
    return module, (tensor(2, BATCH, WIDTH),)


@case()
def encoder_layer():
    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)

    layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=8, dropout=0.2, batch_first=True)
    return model(forward, layer=layer), (tensor(2, BATCH, WIDTH),)


# ----------------------------------------------------------------------------------- randomness

section("randomness")


@case(compiled=True)
def dropout():
    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.drop(self.block(x))), x, use_reentrant=False)

    return model(forward, drop=nn.Dropout(0.5)), (tensor(),)


@case()
def dropout_reentrant():
    def forward(self, x):
        return checkpoint(lambda x: torch.sin(self.drop(self.block(x))), x, use_reentrant=True)

    return model(forward, drop=nn.Dropout(0.5)), (tensor(),)


@case(compiled=True)
def dropout_in_several():
    def forward(self, x):
        for _ in range(3):
            x = checkpoint(lambda x: torch.sin(self.drop(self.other(x))), x, use_reentrant=False)
            x = self.drop(x)
        return x

    return model(forward, drop=nn.Dropout(0.3)), (tensor(),)


@case(compiled=True)
def dropout_in_nested():
    def forward(self, x):
        def inner(x):
            return torch.sin(self.drop(torch.cos(x)))

        def outer(x):
            y = torch.sin(self.drop(self.other(x)))
            return self.drop(checkpoint(inner, y, use_reentrant=False)) * self.scale

        return checkpoint(outer, x, use_reentrant=False)

    return model(forward, drop=nn.Dropout(0.3)), (tensor(),)


@case(backward="reversed")
def dropout_with_backward_in_another_order():
    def forward(self, x):
        def region(x):
            return torch.sin(self.drop(self.other(x)))

        a = checkpoint(region, x, use_reentrant=False)
        b = checkpoint(region, x, use_reentrant=False)
        return a, b, checkpoint(region, a.detach(), use_reentrant=False)

    return model(forward, drop=nn.Dropout(0.3)), (tensor(),)


@case()
def dropout_without_preserving():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(self.drop(self.block(x))),
            x,
            use_reentrant=False,
            preserve_rng_state=False,
        )

    return model(forward, drop=nn.Dropout(0.5)), (tensor(),)


@case()
def dropout_without_preserving_reentrant():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(self.drop(self.block(x))),
            x,
            use_reentrant=True,
            preserve_rng_state=False,
        )

    return model(forward, drop=nn.Dropout(0.5)), (tensor(),)


@case(compiled=True)
def random_factories():
    def forward(self, x):
        def region(x):
            noise = torch.rand_like(x) + torch.randn(x.shape) + torch.bernoulli(torch.sigmoid(x))
            return torch.sin(x * noise) * torch.randint(1, 5, x.shape)

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def attention_dropout():
    def forward(self, x):
        return checkpoint(
            lambda x: nn.functional.scaled_dot_product_attention(
                x, self.other(x), x, dropout_p=0.4
            ),
            x,
            use_reentrant=False,
        )

    return model(forward), (tensor(2, BATCH, WIDTH),)


@case()
def random_numbers_that_nothing_uses():
    def forward(self, x):
        def region(x):
            torch.rand_like(x)
            return nn.functional.dropout(self.other(x), 0.5)

        y = checkpoint(region, x, use_reentrant=False)
        return nn.functional.dropout(y, 0.5)

    return model(forward), (tensor(),)


@case()
def compiled_helper():
    helper = torch.compile(lambda x: torch.sin(x) * 2, backend="eager")

    def forward(self, x):
        return checkpoint(lambda x: helper(self.other(x)), x, use_reentrant=False)

    return model(forward), (tensor(),)


@case(regions=2)
def output_that_nothing_uses():
    def forward(self, x):
        def region(x):
            checkpoint(nn.functional.dropout, self.norm(x), use_reentrant=False)
            return nn.functional.dropout(self.other(x), 0.5)

        return checkpoint(region, x, use_reentrant=False)

    return model(forward, norm=nn.BatchNorm1d(WIDTH)), (tensor(),)


@case()
def random_in_place():
    def forward(self, x):
        def region(x):
            return torch.sin(x * torch.empty_like(x).bernoulli_(0.5).add_(1))

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def dropout_inside_cond_inside_region():
    def forward(self, x):
        def region(x):
            y = torch.cond(
                x.sum() > -100.0,
                lambda x: torch.sin(nn.functional.dropout(x, 0.4)),
                lambda x: torch.cos(x),
                (x * 2,),
            )
            return y * self.scale

        return checkpoint(region, x, use_reentrant=False)

    return model(forward), (tensor(),)


# --------------------------------------------------------------------------- selective policies

section("selective policies")

MM_OPS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default]


def save_matmuls(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in MM_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def selective_by_function():
    return create_selective_checkpoint_contexts(save_matmuls)


def selective_by_list():
    return create_selective_checkpoint_contexts(MM_OPS)


def policy_with_parameter(op_names, ctx, op, *args, **kwargs):
    if op._schema.name in op_names:
        return CheckpointPolicy.PREFER_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE


class EveryOther:
    """Counts operations, in forward and in recompute apart."""

    def __init__(self):
        self.count = {False: 0, True: 0}

    def __call__(self, ctx, op, *args, **kwargs):
        self.count[ctx.is_recompute] += 1
        if self.count[ctx.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.MUST_RECOMPUTE


def selective_counting():
    return create_selective_checkpoint_contexts(EveryOther())


@case(compiled=True)
def selective_policy_function():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=selective_by_function)

    return model(forward), (tensor(),)


@case()
def selective_op_list():
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, context_fn=selective_by_list)

    return model(forward), (tensor(),)


@case()
def selective_partial():
    policy = functools.partial(policy_with_parameter, ("aten::sin", "aten::addmm"))

    def forward(self, x):
        return checkpoint(
            lambda x: torch.cos(torch.sin(self.block(x))),
            x,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )

    return model(forward), (tensor(),)


@case()
def selective_stateful():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.cos(torch.sin(self.block(x))),
            x,
            use_reentrant=False,
            context_fn=selective_counting,
        )

    return model(forward), (tensor(),)


@case()
def selective_with_dropout():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(self.drop(self.block(x))),
            x,
            use_reentrant=False,
            context_fn=selective_by_function,
        )

    return model(forward, drop=nn.Dropout(0.5)), (tensor(),)


@case()
def selective_inside_plain():
    def forward(self, x):
        def outer(x):
            y = torch.sin(self.other(x))
            return (
                checkpoint(self.block, y, use_reentrant=False, context_fn=selective_by_function) + y
            )

        return checkpoint(outer, x, use_reentrant=False)

    return model(forward), (tensor(),)


@case()
def selective_in_a_loop():
    def forward(self, x):
        for _ in range(3):
            x = checkpoint(self.block, x, use_reentrant=False, context_fn=selective_by_function)
        return x

    return model(forward), (tensor(),)


@case()
def selective_with_function():
    def forward(self, x):
        return checkpoint(
            lambda x: torch.sin(Clip.apply(self.block(x), 0.5)),
            x,
            use_reentrant=False,
            context_fn=selective_by_function,
        )

    return model(forward), (tensor(),)
