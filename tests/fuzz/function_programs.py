"""Small random Functions, and models that call them, as the source of a script.

Values are known by their kind: ``M`` is (rows, 3), ``T`` its transpose, ``V`` is
(3,), ``S`` has no dimension.
"""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from hypothesis import strategies as st

DTYPES = ("float32", "float64", "bfloat16", "complex64")
REPLAYS = ("module", "deepcopy", "save_load", "aot_eager")


@dataclasses.dataclass
class Program:
    """A program, and how it is captured and run."""

    source: str
    front_end: str
    replay: str
    dynamic: bool
    double: bool

    def options(self) -> str:
        return f"{self.front_end!r}, {self.replay!r}, dynamic={self.dynamic}, double={self.double}"


@dataclasses.dataclass
class Value:
    """A variable of a program.

    Attributes:
        own: it may be written in place: a fresh tensor that nothing aliases.
        intermediate: it is made by the code itself, not handed to it.
        view: it may be a view of another value.
    """

    name: str
    kind: str
    own: bool = False
    intermediate: bool = True
    is_float: bool = True
    view: bool = False


@dataclasses.dataclass
class FunctionSpec:
    """What the model has to know to call a Function."""

    name: str
    inputs: list[str]
    constant: str | None
    dirty: bool
    outputs: list[Value | None]
    single: bool


class Draw:
    """Draws of one program.

    Attributes:
        random: whether it may use random numbers.
    """

    def __init__(self, draw: Any) -> None:
        self._draw = draw
        self.random = True

    def one_of(self, choices: Any) -> Any:
        return self._draw(st.sampled_from(list(choices)))

    def number(self, least: int, most: int) -> int:
        return self._draw(st.integers(least, most))

    def rarely(self) -> bool:
        return self._draw(st.sampled_from([False, False, False, True]))

    def often(self) -> bool:
        return self._draw(st.sampled_from([True, True, False]))


def _new_value(draw: Draw, known: list[Value], name: str, dtype: str) -> tuple[str, Value]:
    """One operation on known values."""
    value = draw.one_of([v for v in known if v.is_float])
    v, kind = value.name, value.kind
    unary = [f"{v}.sin()", f"{v} * 1.5", f"{v} + 0.5", f"torch.tanh({v})", f"-{v}", f"{v}.clone()"]
    if dtype != "complex64":
        unary += [f"torch.relu({v})"]
        # AOTAutograd drops random numbers that nothing uses, and so draws others for the rest.
        unary += [f"torch.rand_like({v})"] * draw.random
    made: list[tuple[str, str, bool]] = [(text, kind, True) for text in unary]
    if kind == "M":
        made += [(f"{v}.sum(0)", "V", True), (f"{v}.t()", "T", False)]
        made += [(f"{v}.t().contiguous().t()", "M", True), (f"{v}[0]", "V", False)]
        made += [(f"{v}.sum()", "S", True)]
    if kind in "MTV":
        made += [(f"{v}.detach()", kind, False), (f"{v}.view_as({v})", kind, False)]
    for other in known:
        if other.is_float and (other.kind == kind or other.kind == "S"):
            made += [(f"{v} * {other.name}", kind, True), (f"{v} - {other.name}", kind, True)]
        elif other.is_float and {kind, other.kind} == {"M", "V"}:
            made += [(f"{v} + {other.name}", "M", True)]
    text, kind, own = draw.one_of(made)
    return f"{name} = {text}", Value(name, kind, own, view=not own)


SHAPES = {"M": "(ctx.rows, 3)", "T": "(3, ctx.rows)", "V": "(3,)", "S": "()"}


class FunctionWriter:
    """Writes one Function.

    Args:
        compiled: it is to be compiled.  AOTAutograd makes an output that is a view of another
            value of the program anew from that value, and so without the Function's backward
            (stock torch.compile too): there, views are no outputs.
    """

    def __init__(self, draw: Draw, name: str, dtype: str, compiled: bool) -> None:
        self.draw, self.name, self.dtype, self.compiled = draw, name, dtype, compiled
        self.style = draw.one_of(["old", "old", "new", "classmethod"])
        self.kinds = ["M", *(draw.one_of("MMV") for _ in range(draw.number(0, 2)))]
        self.inputs = [Value(f"a{i}", k, intermediate=False) for i, k in enumerate(self.kinds)]
        self.constant = draw.one_of([None, None, "2.5", "'text'", "None"])
        self.dirty = draw.rarely()
        self.forward: list[str] = []
        self.context: list[str] = ["ctx.rows = a0.shape[0]"]
        self.saved: list[tuple[str, str]] = []
        self.materialize = True
        self.marked: list[int] = []

    def write(self) -> tuple[str, FunctionSpec]:
        known = self._values()
        outputs = self._outputs(known)
        self._save(known, outputs)
        self._say(outputs)
        single = len(outputs) == 1 and self.draw.often()
        text = self._forward_text(outputs, single) + self._backward_text(outputs)
        spec = FunctionSpec(
            self.name,
            self.kinds,
            self.constant,
            self.dirty,
            [value for _, value in outputs],
            single,
        )
        return f"class {self.name}(torch.autograd.Function):\n" + _indented(text), spec

    def _values(self) -> list[Value]:
        draw, known = self.draw, list(self.inputs)
        if self.dirty:
            self.forward.append("a0.mul_(1.5)")
            self.context.append("ctx.mark_dirty(a0)")
        if draw.rarely():
            name = draw.one_of(["model.weight", "model.running", "CONSTANT"])
            known.append(Value(name, "V", intermediate=False))
        for number in range(draw.number(0, 4)):
            line, value = _new_value(draw, known, f"v{number}", self.dtype)
            self.forward.append(line)
            known.append(value)
            if value.own and draw.rarely():
                self.forward.append(f"{value.name}.mul_(2)")
        return known

    def _outputs(self, known: list[Value]) -> list[tuple[str, Value | None]]:
        draw = self.draw
        made = [v for v in known if v.intermediate and not (self.compiled and v.view)]
        if not made:
            self.forward.append("out = a0 * 2")
            made = [Value("out", "M", True)]
            known += made
        outputs: list[tuple[str, Value | None]] = []
        if self.dirty:
            outputs.append(("a0", Value("a0", "M", intermediate=False)))
        for _ in range(draw.number(0 if self.dirty else 1, 3)):
            inputs = [] if self.compiled else self.inputs[int(self.dirty) :]
            value = draw.one_of([*made, *made, *inputs])
            outputs.append((value.name, value))
        if draw.rarely():
            extra = [("3", None), ("'text'", None), ("None", None)]
            if self.dtype != "complex64":
                extra.append(("(a0 > 0)", Value("mask", "M", is_float=False)))
                extra.append(("a0.argmax()", Value("index", "S", is_float=False)))
            outputs.insert(draw.number(0, len(outputs)), draw.one_of(extra))
        return outputs

    def _save(self, known: list[Value], outputs: list[tuple[str, Value | None]]) -> None:
        draw, through = self.draw, []
        choices = [v for v in known if v.name.startswith("a")]
        if self.style != "new":
            choices = [v for v in known if "." not in v.name]
        for number in range(draw.number(0, 3)):
            value = draw.one_of(choices)
            how = draw.one_of(["save", "save", "attribute", "list", "closure", "object"])
            if how == "save":
                self.saved.append((f"ctx.saved_tensors[{len(through)}]", value.kind))
                through.append(value.name)
                if draw.rarely():
                    through.append("None")
            elif how == "attribute":
                self.context.append(f"ctx.kept{number} = {value.name}")
                self.saved.append((f"ctx.kept{number}", value.kind))
            elif how == "list":
                self.context.append(f"ctx.stack{number} = [{{'it': {value.name}}}]")
                self.saved.append((f"ctx.stack{number}[0]['it']", value.kind))
            elif how == "closure":
                self.context.append(f"ctx.pull{number} = lambda: {value.name}.cos()")
                self.saved.append((f"ctx.pull{number}()", value.kind))
            else:
                self.context.append(f"ctx.held{number} = Held({value.name})")
                self.saved.append((f"ctx.held{number}.value", value.kind))
        if through or draw.rarely():
            self.context.append(f"ctx.save_for_backward({', '.join(through)})")

    def _say(self, outputs: list[tuple[str, Value | None]]) -> None:
        draw = self.draw
        if draw.rarely():
            self.materialize = False
            self.context.append("ctx.set_materialize_grads(False)")
        names = [text for text, _ in outputs]
        able = [
            i
            for i, (text, value) in enumerate(outputs)
            if value is not None and value.name == text and value.intermediate
            if names.count(text) == 1
        ]
        if self.style != "new" and able and draw.rarely():
            self.marked = [draw.one_of(able)]
            self.context.append(f"ctx.mark_non_differentiable({outputs[self.marked[0]][0]})")

    def _forward_text(self, outputs: list[tuple[str, Value | None]], single: bool) -> str:
        names = [v.name for v in self.inputs]
        parameters = ", ".join([*names, *(["constant"] if self.constant else [])])
        result = outputs[0][0] if single else "(" + "".join(f"{t}, " for t, _ in outputs) + ")"
        if self.style == "new":
            unpack = f"{parameters}, = inputs"
            return (
                f"@staticmethod\ndef forward({parameters}):\n"
                + _indented("\n".join([*self.forward, f"return {result}"]))
                + "@staticmethod\ndef setup_context(ctx, inputs, output):\n"
                + _indented("\n".join([unpack, *self.context]))
            )
        how = "classmethod" if self.style == "classmethod" else "staticmethod"
        first = "cls, ctx" if self.style == "classmethod" else "ctx"
        lines = [*self.forward, *self.context, f"return {result}"]
        return f"@{how}\ndef forward({first}, {parameters}):\n" + _indented("\n".join(lines))

    def _backward_text(self, outputs: list[tuple[str, Value | None]]) -> str:
        draw = self.draw
        decorators = ["@staticmethod"]
        if draw.rarely():
            decorators.append("@torch.autograd.function.once_differentiable")
        lines: list[str] = []
        usable = [
            (i, value.kind)
            for i, (_, value) in enumerate(outputs)
            if value is not None and value.is_float and i not in self.marked
        ]
        results = []
        for position, value in enumerate(self.inputs):
            name = f"r{position}"
            results.append(name)
            lines.append(f"{name} = None")
            if draw.rarely():
                continue
            block = self._gradient(name, value.kind, usable, position)
            if draw.rarely():
                lines.append(f"if ctx.needs_input_grad[{position}]:")
                block = [f"    {line}" for line in block]
            lines += block
        if self.constant:
            results.append("None")
        returned = results[0] if len(results) == 1 else ", ".join(results)
        lines.append(f"return {returned}")
        head = "\n".join(decorators) + "\ndef backward(ctx, *grads):\n"
        return head + _indented("\n".join(lines))

    def _gradient(
        self, name: str, kind: str, usable: list[tuple[int, str]], position: int
    ) -> list[str]:
        draw, shape = self.draw, SHAPES[kind]
        lines = [f"{name} = torch.zeros({shape}, dtype=DTYPE)"]
        for number, (output, output_kind) in enumerate(usable):
            if number and draw.rarely():
                continue
            term = _as_kind(f"grads[{output}]", output_kind, kind, shape)
            line = f"{name} = {name} + {term} * {position + number + 2}"
            if not self.materialize:
                lines.append(f"if grads[{output}] is not None:")
                line = f"    {line}"
            lines.append(line)
        for expression, saved_kind in self.saved:
            if draw.often():
                term = _as_kind(expression, saved_kind, kind, shape)
                lines.append(f"{name} = {name} * {term}")
        if self.saved and draw.rarely():
            expression, saved_kind = draw.one_of(self.saved)
            lines += [
                "with torch.enable_grad():",
                f"    p = {expression}.detach().requires_grad_()",
                "    (q,) = torch.autograd.grad((p.sin() * p).sum().abs(), p)",
                f"{name} = {name} + {_as_kind('q', saved_kind, kind, shape)}",
            ]
        ending = draw.one_of(["", "", "contiguous", "in place", "view"])
        if ending == "contiguous":
            lines.append(f"{name} = {name}.contiguous().view(-1).view({shape})")
        elif ending == "in place":
            lines.append(f"{name}.mul_(2)")
        return lines


def _as_kind(text: str, kind: str, wanted: str, shape: str) -> str:
    if kind == "T" and wanted != "T":
        text = f"{text}.t()"
    if kind != "T" and wanted == "T":
        return f"fit({text}, (ctx.rows, 3)).t()"
    return f"fit({text}, {shape})"


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip() + "\n", "    ")


class ModelWriter:
    """Writes the forward of the model."""

    def __init__(self, draw: Draw, functions: list[FunctionSpec], dtype: str) -> None:
        self.draw, self.functions, self.dtype = draw, functions, dtype
        self.lines = ["h = x * self.weight"]
        self.values = [
            Value("x", "M", intermediate=False),
            Value("h", "M", True),
            Value("self.weight", "V", intermediate=False),
            Value("self.running", "V", intermediate=False),
        ]

    def write(self) -> str:
        for number in range(self.draw.number(1, 3)):
            self._call(self.draw.one_of(self.functions), number)
        floats = [v for v in self.values if v.is_float]
        for number in range(self.draw.number(0, 2)):
            line, value = _new_value(self.draw, floats, f"w{number}", self.dtype)
            self.lines.append(line)
            self.values.append(value)
        results = [v.name for v in self.values if v.name[0] in "yw" and self.draw.often()]
        results = results or [self.values[-1].name]
        if self.draw.rarely():
            results.append("h")
        self.lines.append(f"return {''.join(f'{name}, ' for name in results)}")
        return "def forward(self, x):\n" + _indented("\n".join(self.lines))

    def _call(self, function: FunctionSpec, number: int) -> None:
        draw, arguments = self.draw, []
        for position, kind in enumerate(function.inputs):
            if function.dirty and position == 0:
                value = draw.one_of([v for v in self.values if v.own and v.kind == "M"])
                arguments.append(value.name)
                continue
            fitting = [v for v in self.values if v.kind == kind and v.is_float]
            texts = [v.name for v in fitting]
            if kind == "M":
                texts += ["x.sin()", "h.detach()", "h.t().contiguous().t()"]
            arguments.append(draw.one_of(texts))
        if function.constant:
            arguments.append(function.constant)
        outputs = [f"y{number}_{i}" for i in range(len(function.outputs))]
        target = outputs[0] if function.single else "".join(f"{o}, " for o in outputs).strip()
        call = f"{target} = {function.name}.apply({', '.join(arguments)})"
        if draw.rarely() and not function.dirty:
            self.lines += ["with torch.no_grad():", f"    {call}"]
        else:
            self.lines.append(call)
        for name, value in zip(outputs, function.outputs):
            if value is not None:
                self.values.append(Value(name, value.kind, False, True, value.is_float))


PROGRAM = """
DTYPE = torch.{dtype}
CONSTANT = torch.tensor([0.5, 1.5, 2.5], dtype=DTYPE)


class Held:
    def __init__(self, value):
        self.value = value


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(3).to(DTYPE) + 0.5)
        self.register_buffer("running", torch.rand(3).to(DTYPE))


def build(rows):
    torch.manual_seed(1)
    model = Model()

{functions}
{model}
    Model.forward = forward
    return model, (torch.randn(rows, 3).to(DTYPE).requires_grad_({requires_grad}),)
"""


@st.composite
def programs(draw: Any, front_ends: tuple[str, ...], replays: tuple[str, ...] = REPLAYS) -> Program:
    drawn = Draw(draw)
    front_end = drawn.one_of(front_ends)
    replay = "module" if front_end == "make_fx" else drawn.one_of(replays)
    drawn.random = replay != "aot_eager"
    dtype = drawn.one_of(["float32", *DTYPES])
    texts, functions = [], []
    for number in range(drawn.number(1, 2)):
        text, spec = FunctionWriter(drawn, f"F{number}", dtype, replay == "aot_eager").write()
        texts.append(text)
        functions.append(spec)
    source = PROGRAM.format(
        dtype=dtype,
        functions=_indented("\n".join(texts)),
        model=_indented(ModelWriter(drawn, functions, dtype).write()),
        requires_grad=drawn.often(),
    )
    return Program(
        source,
        front_end,
        replay,
        # A symbolic trace of make_fx takes no tensor from outside.
        drawn.rarely() and not (front_end == "make_fx" and source.count("CONSTANT") > 1),
        dtype == "float64" and "rand_like" not in source,
    )
