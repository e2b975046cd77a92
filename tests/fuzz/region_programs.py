"""Random trees of checkpointed regions, as the source of a script.

Every value is (rows, 3).  A region is a function written inside ``forward``, so
that it can use parameters, buffers and intermediates of what is around it.
"""

from __future__ import annotations

from typing import Any

from function_programs import REPLAYS, Draw, Program, _indented
from hypothesis import strategies as st

PROGRAM = """
import functools

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * 3 * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * 5 * x, (grad * x).sum(0)


def keep_products(ctx, op, *args, **kwargs):
    kept = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.sin.default)
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_every_second():
    calls = {{"forward": 0, "recompute": 0}}

    def policy(ctx, op, *args, **kwargs):
        mode = "recompute" if ctx.is_recompute else "forward"
        calls[mode] += 1
        even = calls[mode] % 2 == 0
        return CheckpointPolicy.MUST_SAVE if even else CheckpointPolicy.MUST_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


POLICIES = {{
    "products": functools.partial(create_selective_checkpoint_contexts, keep_products),
    "tanh": functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]
    ),
    "second": keep_every_second,
}}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3) + 0.5)
        self.frozen = torch.nn.Parameter(torch.rand(3), requires_grad=False)
        self.linear = torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("running", torch.rand(3))

{forward}

def build(rows):
    torch.manual_seed(1)
    return Model(), (torch.randn(rows, 3).requires_grad_({requires_grad}),)
"""

_UNARY = (
    "{v}.sin()",
    "torch.tanh({v})",
    "{v} * self.weight",
    "{v} + self.frozen",
    "{v} * self.running",
    "self.linear({v})",
    "self.norm({v})",
    "torch.dropout({v}, 0.5, True)",
    "{v} * torch.rand_like({v})",
    "Triple.apply({v}, self.weight)",
    "{v}.detach() * 2",
    "{v}.t().contiguous().t()",
)

_MOST_REGIONS = 5


class TreeWriter:
    """Writes the forward of a model: a tree of regions.

    Args:
        compiled: it is to be compiled.  Compiled code, of the eager model too, updates the
            buffers of a region once where eager does it again in recompute, and drops random
            numbers that nothing uses: there every value is used, and no region has a norm.
            Of a reentrant region it asks no gradient for an output that needs none.
        strict: it is captured by Dynamo, which takes the dtype of a cast under autocast for
            another and checks for that, also where there is no region.
    """

    def __init__(self, draw: Draw, compiled: bool, strict: bool) -> None:
        self.draw = draw
        self.compiled = compiled
        self.strict = strict
        self.count = 0
        self.regions = 0
        self.reentrant = False

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def block(
        self, known: list[str], own: list[str], depth: int, reentrant: bool = False
    ) -> list[str]:
        """Statements, which add to the values that are known; ``own`` may be written."""
        self.reentrant = reentrant
        lines: list[str] = []
        for _ in range(self.draw.number(1, 4)):
            kind = self.draw.one_of(["unary"] * 4 + ["binary", "in place", "switch", "region"])
            if kind == "region" and depth < 3 and self.regions < _MOST_REGIONS:
                lines += self.region(known, own, depth)
            elif kind == "in place" and own:
                lines.append(f"{self.draw.one_of(own)}.mul_(1.5)")
            elif kind == "switch":
                lines += self.switch(known)
            else:
                lines.append(self.operation(known, own, depth, kind == "binary"))
        return lines

    def operation(self, known: list[str], own: list[str], depth: int, binary: bool) -> str:
        name, value = self.fresh(), self.draw.one_of(known)
        if binary:
            text = f"{value} * {self.draw.one_of(known)} + {self.draw.one_of(known)}"
        else:
            text = self.draw.one_of(_UNARY).format(v=value)
            left_out = "self.norm" in text and (self.reentrant or self.compiled and depth)
            if left_out or "detach" in text and self.reentrant and self.compiled:
                text = f"{value}.exp()"
        known.append(name)
        # Nothing saves its own result of these for backward.
        if binary or text.endswith("self.frozen"):
            own.append(name)
        return f"{name} = {text}"

    def switch(self, known: list[str]) -> list[str]:
        name, value = self.fresh(), self.draw.one_of(known)
        known.append(name)
        inside = self.draw.one_of(
            [
                ("torch.no_grad()", f"{name} = {value}.cos()"),
                (
                    "torch.no_grad()"
                    if self.reentrant and self.compiled
                    else "torch.enable_grad()",
                    f"{name} = {value}.cos()",
                ),
                (
                    'torch.autocast("cpu", dtype=torch.bfloat16)',
                    f"{name} = self.linear({value}){' + h' if self.strict else '.float()'}",
                ),
                ("torch.no_grad()", f"{name} = {value} + self.running.add_(0.1).sum()"),
            ][: 3 if self.reentrant else 4]
        )
        return [f"with {inside[0]}:", f"    {inside[1]}"]

    def region(self, known: list[str], writable: list[str], depth: int) -> list[str]:
        draw, number = self.draw, self.regions
        self.regions += 1
        parameters = [f"a{number}_{i}" for i in range(draw.number(1, 2))]
        arguments = [draw.one_of(known) for _ in parameters]
        visible = list(parameters)
        if draw.often():
            visible += known
            # Eager would recompute from what is written into them after the region.
            writable.clear()
        own: list[str] = []
        around, options = self.reentrant, self.options()
        # Whether it is recomputed at all, and so updates its buffers again, is another matter
        # where nothing that backward needs is inside: left out.
        body = self.block(visible, own, depth + 1, around or options[0].endswith("True"))
        self.reentrant = around
        # The values that the body itself made, or else its argument.
        made = [v for v in visible if v not in known and v not in parameters]
        results = [draw.one_of(made or parameters) for _ in range(draw.number(1, 2))]
        if made:
            results = made if self.compiled else [made[-1], *results[1:]]
        names = [self.fresh() for _ in results]
        form = draw.one_of(["tuple", "dict"]) if len(results) > 1 else "single"
        call = f"checkpoint(region{number}, {', '.join([*arguments, *options])})"
        if form == "single":
            returned, lines = results[0], [f"{names[0]} = {call}"]
        elif form == "tuple":
            returned = f"{results[0]}, 3, {', '.join(results[1:])}"
            lines = [f"{names[0]}, _, {', '.join(names[1:])} = {call}"]
        else:
            returned = f"{{'one': {results[0]}, 'two': [{', '.join(results[1:])}, None]}}"
            lines = [
                f"result{number} = {call}",
                f"{names[0]} = result{number}['one']",
                f"{', '.join(names[1:])}, _ = result{number}['two']",
            ]
        known += names
        head = f"def region{number}({', '.join(parameters)}):"
        return [head, *[f"    {line}" for line in [*body, f"return {returned}"]], *lines]

    def options(self) -> list[str]:
        draw = self.draw
        if draw.rarely():
            return ["use_reentrant=True"]
        options = ["use_reentrant=False"]
        if draw.rarely():
            options.append(f"context_fn=POLICIES[{draw.one_of(['products', 'tanh', 'second'])!r}]")
        if draw.rarely():
            options.append("determinism_check='none'")
        return options

    def write(self) -> str:
        known, own = ["x", "h"], ["h"]
        lines = ["h = x * self.weight", *self.block(known, own, 0)]
        while not self.regions or self.draw.rarely() and self.regions < _MOST_REGIONS:
            lines += self.region(known, own, 0)
        results = [v for v in known[2:] if self.compiled or self.draw.rarely()] + [known[-1]]
        lines.append(f"return {''.join(f'{name}, ' for name in results)}")
        return "def forward(self, x):\n" + _indented("\n".join(lines))


@st.composite
def programs(draw: Any, front_ends: tuple[str, ...], replays: tuple[str, ...] = REPLAYS) -> Program:
    drawn = Draw(draw)
    front_end = drawn.one_of(front_ends)
    replay = "module" if front_end == "make_fx" else drawn.one_of(replays)
    writer = TreeWriter(drawn, replay == "aot_eager", front_end == "strict")
    source = PROGRAM.format(forward=_indented(writer.write()), requires_grad=drawn.often())
    return Program(
        source,
        front_end,
        replay,
        drawn.rarely(),
        False,
    )
