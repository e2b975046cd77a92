"""Dynamo's variables as Python objects, for one run of user code in the middle of a trace.

Dynamo keeps what the model does to Python objects to itself until its trace is
over: an attribute that was set, an item that was appended are pending, and the
objects themselves are as they were before.  User code that is run for real has
to find them as eager would have left them, and what it does to them has to
become known to Dynamo.  So for the time of the run everything that is pending
is put in place (:meth:`PythonView.put_pending_in_place`), and afterwards taken
back (:meth:`PythonView.restore`); what the run changed is handed to Dynamo
(:mod:`hops._dynamo_changes`).

Tensors are Dynamo's fake ones.  A parameter or buffer of a module that the code
can reach is exchanged for the fake tensor that Dynamo knows it by.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.base import AttributeMutationExisting
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import (
    FunctoolsPartialVariable,
    NestedUserFunctionVariable,
    UserFunctionVariable,
    UserMethodVariable,
)
from torch._dynamo.variables.misc import (
    AutogradFunctionVariable,
    CellVariable,
    DeletedVariable,
    GetAttrVariable,
    NewGlobalVariable,
)
from torch._dynamo.variables.tensor import (
    NumpyNdarrayVariable,
    SymNodeVariable,
    TensorVariable,
    UnspecializedPythonVariable,
)
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from hops._dynamo_changes import (
    Attributes,
    Cell,
    Fixed,
    Items,
    Mapping,
    NotPython,
    Parts,
    Unknown,
)
from hops._dynamo_variables import (
    CONTAINERS,
    attribute_or_none,
    items_of,
    kind_of,
    module_of,
    proxy_of,
    replace_contents,
)
from hops._torch import real_object

_CELLS = "_hops_cells"


class PythonView:
    """The Python objects of one run.

    Attributes:
        tensors: the variable of each tensor and symbolic number, by the identity of its
            example value.
        parts: for each fake tensor that took the place of a real one, the variable of the
            object that holds it, and the path there.
        watched: what the run may change, to be compared afterwards.
    """

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        self.tensors: dict[int, tuple[Any, Any]] = {}
        self.parts: dict[int, tuple[Any, str]] = {}
        self.watched: list[Any] = []
        self._modules: list[tuple[Any, torch.nn.Module]] = []
        self._objects: dict[int, tuple[Any, Any]] = {}
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------ one variable

    def object_of(self, variable: Any) -> Any:
        """The Python object that stands for ``variable``, the same one each time.

        Raises:
            NotPython: there is none.
        """
        variable = variable.realize()
        if id(variable) not in self._objects:
            self._keep(variable, self._make(variable))
        return self._objects[id(variable)][1]

    def variable_of(self, value: Any) -> Any:
        """The variable that ``value`` was made from, or None."""
        if id(value) in self.tensors:
            return self.tensors[id(value)][1]
        for variable, known in self._objects.values():
            if known is value and not ConstantVariable.is_literal(value):
                return variable
        return None

    def _keep(self, variable: Any, value: Any) -> Any:
        self._objects[id(variable)] = (variable, value)
        return value

    def _make(self, variable: Any) -> Any:
        if isinstance(variable, (UnspecializedPythonVariable, NumpyNdarrayVariable)):
            raise NotPython(type(variable).__name__)
        if isinstance(variable, (TensorVariable, SymNodeVariable)):
            return self._tensor(variable)
        if isinstance(variable, CellVariable):
            return self.cell(variable)
        for kind, make in _FUNCTIONS:
            if isinstance(variable, kind):
                return make(self, variable)
        container = self._container(variable)
        if container is not None:
            return container
        module = module_of(self.tx, variable)
        if module is not None:
            return self._module(variable, module)
        if isinstance(variable, UserDefinedObjectVariable):
            real = real_object(variable.value)
            return self._instance(variable, variable.value) if real is None else real
        return self._constant(variable)

    def _tensor(self, variable: Any) -> Any:
        proxy = proxy_of(variable)
        if not isinstance(proxy, torch.fx.Proxy):
            raise NotPython(str(proxy))
        value = proxy.node.meta["example_value"]
        self.tensors.setdefault(id(value), (value, variable))
        return value

    def _constant(self, variable: Any) -> Any:
        try:
            if variable.is_python_constant():
                return variable.as_python_constant()
        except NotImplementedError:
            raise NotPython(type(variable).__name__) from None
        value = attribute_or_none(variable, "value")
        if value is None or isinstance(value, torch.Tensor) or variable.source is None:
            raise NotPython(type(variable).__name__)
        return value

    # ------------------------------------------------------------------- containers

    def _container(self, variable: Any) -> Any:
        kind, items = kind_of(variable), items_of(variable)
        if attribute_or_none(variable, "dv_dict") is not None:
            return self._view_of_dict(variable, self.object_of(variable.dv_dict))
        if items is None:
            return None
        if kind is list:
            return self._fill(variable, items, [], Items)
        if kind is dict and isinstance(variable, ConstDictVariable):
            return self._fill(variable, items, {}, Mapping)
        if kind in (tuple, torch.Size):
            return kind(self.object_of(item) for item in items)
        if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_make"):
            return kind._make(self.object_of(item) for item in items)
        own = self.original(variable)
        if isinstance(own, CONTAINERS) and self.tx.output.side_effects.is_modified(variable):
            return self._fill(variable, items, own, Fixed)
        return self._fill(variable, items, set(), Fixed) if kind is set and own is None else None

    def _view_of_dict(self, variable: Any, held: Any) -> Any:
        kind = attribute_or_none(variable, "kv")
        return types.MappingProxyType(held) if kind is None else getattr(held, kind)()

    def _fill(self, variable: Any, items: Any, empty: Any, watch: Any) -> Any:
        """A container of the contents that Dynamo knows: the user's own if there is one."""
        own = self.original(variable)
        is_own = type(own) is type(empty)
        container = self._keep(variable, own if is_own else empty)
        convert = self._pending if is_own else self.object_of
        before = container.copy()
        if isinstance(container, dict):
            contents: Any = {convert(k.vt): convert(v) for k, v in items.items()}
        else:
            contents = [convert(getattr(item, "vt", item)) for item in items]
        replace_contents(container, contents)
        if is_own:
            self._undo.append(lambda: replace_contents(container, before))
        self.watched.append(watch(variable, container))
        return container

    def original(self, variable: Any) -> Any:
        """The user's object that Dynamo tracks as ``variable``, or None."""
        effects = self.tx.output.side_effects
        for item in effects.keepalive:
            if effects.id_to_variable.get(id(item)) is variable:
                return item
        return None

    # -------------------------------------------------------------- objects, modules

    def _instance(self, variable: Any, value: Any) -> Any:
        self._keep(variable, value)
        for name, held in list(_namespace(value).items()):
            if isinstance(held, torch.Tensor) and variable.source is not None:
                self._set(value, name, self._part(held, variable, name))
        pending = self.tx.output.side_effects.store_attr_mutations.get(variable, {})
        for name, held in list(pending.items()):
            self._set(value, name, self._pending(held))
        self.watched.append(Attributes(variable, value, set(pending)))
        return value

    def _module(self, variable: Any, module: torch.nn.Module) -> Any:
        for prefix, submodule in module.named_modules():
            for kind in (submodule._parameters, submodule._buffers):
                for name, held in list(kind.items()):
                    if isinstance(held, torch.Tensor):
                        path = f"{prefix}.{name}" if prefix else name
                        self._put(kind, name, self._part(held, variable, path))
        self._modules.append((variable, module))
        return self._instance(variable, module)

    def _part(self, real: torch.Tensor, variable: Any, path: str) -> torch.Tensor:
        """The fake tensor by which Dynamo knows, or will know, a part of an object."""
        known = self.tx.output.side_effects.id_to_variable.get(id(real))
        if isinstance(known, TensorVariable):
            fake = known.as_proxy().node.meta["example_value"]
        else:
            fake = self.tx.output.fake_mode.from_tensor(real, static_shapes=True)
        self.parts.setdefault(id(fake), (variable, path))
        return fake

    def _set(self, owner: Any, name: str, value: Any) -> None:
        namespace = _namespace(owner)
        if isinstance(owner, torch.nn.Module):
            for kind in (owner._parameters, owner._buffers, owner._modules):
                namespace = kind if name in kind else namespace
        self._put(namespace, name, value)

    def _put(self, namespace: dict[str, Any], name: str, value: Any) -> None:
        had, before = name in namespace, namespace.get(name)
        if value is DeletedVariable:
            namespace.pop(name, None)
        else:
            namespace[name] = value

        def undo() -> None:
            namespace.pop(name, None)
            if had:
                namespace[name] = before

        self._undo.append(undo)

    def _pending(self, variable: Any) -> Any:
        if isinstance(variable, DeletedVariable):
            return DeletedVariable
        try:
            return self.object_of(variable)
        except NotPython as error:
            return Unknown(str(error))

    # ---------------------------------------------------------------- functions, cells

    def _nested_function(self, variable: Any) -> Any:
        code = variable.get_code()
        cells = items_of(variable.closure) if variable.closure is not None else ()
        defaults = variable.defaults and tuple(self.object_of(variable.defaults))
        function = types.FunctionType(
            code,
            variable.f_globals,
            variable.fn_name.as_python_constant(),
            defaults,
            tuple(self.cell(cell.realize()) for cell in cells or ()),
        )
        if variable.kwdefaults:
            function.__kwdefaults__ = dict(self.object_of(variable.kwdefaults))
        return function

    def _method(self, variable: Any) -> Any:
        if hasattr(variable, "im_func"):  # torch 2.15 on
            function, owner = self.object_of(variable.im_func), variable.im_self
        else:
            function, owner = variable.fn, variable.obj
        return types.MethodType(function, self.object_of(owner))

    def _partial(self, variable: Any) -> Any:
        args = [self.object_of(a) for a in variable.args]
        keywords = {k: self.object_of(v) for k, v in variable.keywords.items()}
        return functools.partial(self.object_of(variable.func), *args, **keywords)

    def cell(self, variable: Any) -> types.CellType:
        """The cell of a closure.  One that the traced code made is the same for the whole
        trace, since a class that was made in the meantime may hold it."""
        if id(variable) in self._objects:
            return self._objects[id(variable)][1]  # type: ignore[no-any-return]
        own = self.original(variable)
        if not isinstance(own, types.CellType):
            own = self._made_cells().setdefault(variable, types.CellType())
        self._keep(variable, own)
        self._fill_cell(variable, own)
        return own

    def _fill_cell(self, variable: Any, cell: types.CellType) -> None:
        contents = self._contents(variable)
        if contents is None:
            return
        before = Cell.contents_of(cell)
        cell.cell_contents = self._pending(contents)
        self._undo.append(lambda: Cell.put(cell, before))
        self.watched.append(Cell(variable, cell))

    def _contents(self, variable: Any) -> Any:
        effects = self.tx.output.side_effects
        if effects.has_pending_mutation_of_attr(variable, "cell_contents"):
            found = effects.load_attr(variable, "cell_contents", deleted_ok=True)
            return None if isinstance(found, DeletedVariable) else found
        return variable.pre_existing_contents

    def _made_cells(self) -> dict[Any, types.CellType]:
        output = self.tx.output
        if not hasattr(output, _CELLS):
            setattr(output, _CELLS, {})
        made: dict[Any, types.CellType] = getattr(output, _CELLS)
        return made

    # ------------------------------------------------------------------- before, after

    def put_pending_in_place(self) -> None:
        """Let the objects be as eager would have left them at this point."""
        for variable in list(self._made_cells()):
            self.cell(variable)
        effects = self.tx.output.side_effects
        for variable in list(effects.store_attr_mutations):
            if not isinstance(variable.mutation_type, AttributeMutationExisting):
                continue
            if isinstance(variable, NewGlobalVariable):
                self._put_global(variable)
            elif not isinstance(variable, TensorVariable):
                self._put_attributes(variable, self.object_of(variable))
        for item in list(effects.keepalive):
            if isinstance(item, CONTAINERS):
                variable = effects.id_to_variable.get(id(item))
                if variable is not None and effects.is_modified(variable):
                    self.object_of(variable)

    def _put_attributes(self, variable: Any, value: Any) -> None:
        """What is set on a module of Python's, where globals of inlined code are (2.9 on)."""
        if isinstance(value, types.CellType) or isinstance(variable, UserDefinedObjectVariable):
            return
        if isinstance(value, torch.nn.Module):
            return
        namespace = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if not isinstance(namespace, dict):
            raise NotPython(f"a {type(value).__name__} that has been changed")
        for name, pending in self.tx.output.side_effects.store_attr_mutations[variable].items():
            self._put(namespace, name, self._pending(pending))

    def _put_global(self, variable: Any) -> None:
        effects = self.tx.output.side_effects
        frame = self.tx
        for name, pending in effects.store_attr_mutations[variable].items():
            while frame is not None:
                if effects.id_to_variable.get(id(frame.symbolic_globals.get(name))) is variable:
                    self._put(frame.f_globals, name, self._pending(pending))
                    break
                frame = getattr(frame, "parent", None)
            else:
                raise NotPython(f"the global {name!r}, which has been set,")

    def watch_modules(self) -> None:
        """Note what the modules hold, now that all that is pending is in place: a module may
        be reached as a part of another one before what is set on it is known."""
        self.watched += [Parts(variable, module) for variable, module in self._modules]

    def function_modes(self) -> list[Any]:
        """The function modes around this point, which Dynamo applies without entering them."""
        stack = getattr(self.tx.symbolic_torch_function_state, "mode_stack", ())
        return [self.object_of(mode) for mode in stack]

    def restore(self) -> None:
        """Take back all that was put in place."""
        while self._undo:
            self._undo.pop()()


def _namespace(value: Any) -> dict[str, Any]:
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else {}


def lasting_object(tx: Any, variable: Any) -> Any:
    """The Python object that stands for ``variable``, for use after the trace.

    Raises:
        NotPython: there is none, or it holds a tensor.
    """
    view = PythonView(tx)
    try:
        value = view.object_of(variable)
        if view.tensors or view.parts:
            raise NotPython("a function that closes over tensors or modules")
        return _with_own_cells(value, [id(cell) for cell in view._made_cells().values()])
    finally:
        view.restore()


def _with_own_cells(value: Any, made: list[int]) -> Any:
    """A function that the traced code made, with a closure that stays what it is now."""
    if isinstance(value, functools.partial):
        keywords = {k: _with_own_cells(v, made) for k, v in value.keywords.items()}
        return functools.partial(_with_own_cells(value.func, made), *value.args, **keywords)
    closure = getattr(value, "__closure__", None) or ()
    if not any(id(cell) in made for cell in closure):
        return value
    copy = types.FunctionType(
        value.__code__,
        value.__globals__,
        value.__name__,
        value.__defaults__,
        tuple(types.CellType(_with_own_cells(cell.cell_contents, made)) for cell in closure),
    )
    copy.__kwdefaults__ = value.__kwdefaults__
    return copy


_FUNCTIONS: tuple[tuple[Any, Callable[[PythonView, Any], Any]], ...] = (
    (NestedUserFunctionVariable, PythonView._nested_function),
    (UserMethodVariable, PythonView._method),
    (UserFunctionVariable, lambda view, variable: variable.fn),
    (FunctoolsPartialVariable, PythonView._partial),
    (AutogradFunctionVariable, lambda view, variable: variable.fn_cls),
    (GetAttrVariable, lambda view, v: getattr(view.object_of(v.obj), v.name)),
)
