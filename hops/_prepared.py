"""What a replayed call needs over and over, made once for each body.

[Note: kept on the class of a body]
fx makes a class for each GraphModule and puts the generated ``forward`` there,
so what is derived from it is kept there too: a copy or a pickle of the module
does not take the class along, and a pass that edits the body and recompiles it
exchanges ``forward``, by which what was derived from the body before shows.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from hops._torch import native_call
from hops._validation import check_function_call
from hops.autograd_function_apply import CallForm, MarkingInterpreter, tensor_slots

_FORM = "_hops_call_form"
_RUNNER = "_hops_runner"


class PreparedForm(CallForm):
    """The form of a call that meets nothing but autograd.

    It serves all executions of one node, so it keeps nothing of any of them.

    Attributes:
        is_simple: operands are the arguments of ``apply``, outputs are tensors, all saved
            values went through ``save_for_backward``, and the user did no more with ``ctx``.
    """

    __slots__ = ("generated", "is_simple", "num_operands", "run_forward")

    def __init__(self, fwd: Any, bwd: Any, operands: Sequence[Any], options: dict[str, Any]):
        own = {k: list(v) if isinstance(v, list) else v for k, v in options.items()}
        super().__init__(fwd, bwd, operands, own)
        self.run = run_prepared
        self.run_forward = runner(fwd)
        self.generated = type(fwd).forward
        self.num_operands = len(operands)
        self.is_simple = self._is_simple()

    def _is_simple(self) -> bool:
        if self.num_outputs is None or self.num_inputs != self.num_operands or self.marks:
            return False
        (values,) = self.fwd.graph.find_nodes(op="output")[0].args
        return (
            len(self.saved_for_backward) == len(values) - self.num_outputs
            and all(map(_is_tensor, values[: self.num_outputs]))
            and "needs_input_grad" not in self.options
            and "no_backward" not in self.options
        )

    def forward(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        if self.num_outputs is None:
            return super().forward(operands)
        values = self.run_forward(self.fwd, *operands)
        outputs = values[: self.num_outputs]
        if self.tensor_slots is None:
            self.tensor_slots = tensor_slots(outputs)
        return outputs, values[self.num_outputs :]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)


def prepared_form(
    fwd: Any, bwd: Any, operands: Sequence[Any], options: dict[str, Any]
) -> PreparedForm:
    """The form of a call, checked and made on its first execution.

    Raises:
        OperatorCallError: as ``AutogradFunctionApply``.
    """
    own_class = type(fwd)
    form = own_class.__dict__.get(_FORM)
    if (
        form is None
        or form.generated is not own_class.forward
        or form.bwd is not bwd
        or form.num_operands != len(operands)
        or form.options != options
        or "forward" in fwd.__dict__
    ):
        check_function_call(fwd, bwd, operands, options)
        form = PreparedForm(fwd, bwd, operands, options)
        setattr(own_class, _FORM, form)
    return form


def run_prepared(body: fx.GraphModule, arguments: Sequence[Any]) -> Any:
    """As ``run_body``, faster for a body that is run many times."""
    if fx.traceback.has_preserved_node_meta():
        return MarkingInterpreter(body).run(*arguments)
    return runner(body)(body, *arguments)


def runner(body: fx.GraphModule) -> Callable[..., Any]:
    """What ``body.forward`` does, as a function of ``body`` and its arguments.

    See [Note: kept on the class of a body].
    """
    own_class = type(body)
    made = own_class.__dict__.get(_RUNNER)
    if made is None or made[0] is not own_class.forward or "forward" in body.__dict__:
        return _make_runner(body)
    return made[1]


def _make_runner(body: fx.GraphModule) -> Callable[..., Any]:
    if "forward" in body.__dict__:
        return _run_own_forward
    source = body.code
    generated = type(body).forward
    run = generated
    if generated.__code__.co_filename.startswith("<eval_with_key>"):
        run = _with_native_calls(source, generated)
    setattr(type(body), _RUNNER, (generated, run))
    return run


def _run_own_forward(body: fx.GraphModule, *arguments: Any) -> Any:
    return body.forward(*arguments)


# fx writes ``torch.ops.aten.mul.Tensor(a, b)``: four look-ups and a call of Python
# at each operation of each run, a third of what a small operation costs.


def _with_native_calls(source: str, forward: Any) -> Callable[..., Any]:
    scope = dict(forward.__globals__)
    tree = ast.fix_missing_locations(_NativeCalls(scope).visit(ast.parse(source)))
    exec(compile(tree, forward.__code__.co_filename, "exec", dont_inherit=True), scope)
    return scope["forward"]


class _NativeCalls(ast.NodeTransformer):
    """Names the operation of each call by a global that holds its native function."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope

    def visit_Call(self, call: ast.Call) -> ast.AST:
        self.generic_visit(call)
        path = _dotted(call.func)
        if path[:2] == ["torch", "ops"]:
            operation: Any = torch
            for part in path[1:]:
                operation = getattr(operation, part)
            name = "_".join(["_native", *path])
            self.scope[name] = native_call(operation)
            call.func = ast.Name(name, ast.Load())
        return call


def _dotted(expression: ast.expr) -> list[str]:
    """The parts of a dotted name, or [] for another expression."""
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute):
        owner = _dotted(expression.value)
        return [*owner, expression.attr] if owner else []
    return []
