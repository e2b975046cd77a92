"""Classes of Functions that the model's forward makes or changes while Dynamo traces it.

Dynamo cannot trace a class statement (torch 2.6 and 2.9 know nothing of it,
later ones only of one without a closure), and it refuses to set an attribute of
a Function's class.  Both are plain Python: under export they are carried out,
and a closure of the methods gets its contents when the Function is applied.
"""

from __future__ import annotations

import builtins
import dis
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.misc import AutogradFunctionVariable

from hops._capture_function import function_name
from hops._changes import Changes
from hops._dynamo_changes import NotPython
from hops._dynamo_errors import CaptureErrorInDynamo, naming
from hops._dynamo_python import PythonView

_TRANSLATORS = (
    symbolic_convert.InstructionTranslatorBase,
    symbolic_convert.InstructionTranslator,
    symbolic_convert.InliningInstructionTranslator,
    symbolic_convert.InliningGeneratorInstructionTranslator,
)

Handler = Callable[[Any, Any], Any]


class _BuildClass(VariableTracker):
    """``__build_class__`` in code that is exported."""

    def __init__(self, otherwise: Callable[[], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._otherwise = otherwise

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        view = PythonView(tx)
        bases = [_class_of(view, base) for base in args[2:]]
        if not any(isinstance(b, type) and issubclass(b, torch.autograd.Function) for b in bases):
            return self._otherwise().call_function(tx, args, kwargs)
        name = args[1].as_python_constant()
        with naming(f"the class {name}"):
            return AutogradFunctionVariable(_build(view, name, bases, args[0], kwargs))


def _class_of(view: PythonView, base: Any) -> Any:
    try:
        return view.object_of(base)
    except NotPython:
        return None


def _build(view: PythonView, name: str, bases: list[Any], body: Any, kwargs: Any) -> Any:
    try:
        keywords = {k: view.object_of(v) for k, v in kwargs.items()}
        view.put_pending_in_place()
        return builtins.__build_class__(view.object_of(body), name, *bases, **keywords)
    except NotPython as error:
        raise CaptureErrorInDynamo(
            f"hops: strict capture cannot make the class {name}, which is defined in code that "
            f"is captured and needs {error}. Define it outside, or capture with strict=False."
        ) from error
    finally:
        view.restore()


def _load_build_class(stock: Handler) -> Handler:
    def load(self: Any, instruction: Any) -> Any:
        if not self.output.export:
            return stock(self, instruction)

        def otherwise() -> Any:
            stock(self, instruction)
            return self.pop()

        self.push(_BuildClass(otherwise))
        return None

    return load


def _store_attribute(stock: Handler) -> Handler:
    def store(self: Any, instruction: Any) -> Any:
        owner = self.stack[-1].realize()
        if not (self.output.export and isinstance(owner, AutogradFunctionVariable)):
            return stock(self, instruction)
        view = PythonView(self)
        try:
            value = view.object_of(self.stack[-2])
        except NotPython as error:
            raise CaptureErrorInDynamo(
                f"hops: strict capture cannot set {function_name(owner.fn_cls)}."
                f"{instruction.argval} to {error}. Capture with strict=False."
            ) from error
        finally:
            view.restore()
        self.popn(2)
        setattr(owner.fn_cls, instruction.argval, value)
        return None

    return store


def _subscript(stock: Handler) -> Handler:
    """A generic Function of certain types (``Fn[int]``) is applied as the Function itself is."""

    def subscript(self: Any, instruction: Any) -> Any:
        owner = self.stack[-2].realize()
        if not (self.output.export and isinstance(owner, AutogradFunctionVariable)):
            return stock(self, instruction)
        self.popn(2)
        self.push(owner)
        return None

    return subscript


#: Python 3.14 has no BINARY_SUBSCR; there a generic Function is Dynamo's to refuse.
_OPCODES = {
    "LOAD_BUILD_CLASS": _load_build_class,
    "STORE_ATTR": _store_attribute,
    "BINARY_SUBSCR": _subscript,
}


def patch(changes: Changes) -> None:
    """Handle these instructions in every translator of Dynamo's."""
    for translator in _TRANSLATORS:
        table = translator.dispatch_table
        for name in _OPCODES.keys() & dis.opmap.keys():
            opcode, wrap = dis.opmap[name], _OPCODES[name]
            shown = f"{translator.__name__}.dispatch_table[{name}]"
            changes.entry(table, opcode, wrap(table[opcode]), shown)
