"""What a run of user code changed in Python objects that Dynamo knows.

Each class compares one object before and after the run, and writes what
changed into Dynamo's variable for it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.variables.base import ValueMutationNew
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable

from hops._dynamo_variables import attribute

_MISSING = object()


class NotPython(Exception):
    """A value cannot be handed over between Dynamo and real Python code."""


class Unknown:
    """Stands for a pending value that has no Python counterpart: whoever uses it is told."""

    def __init__(self, what: str) -> None:
        self.__dict__["what"] = what

    def __getattr__(self, name: str) -> Any:
        raise NotPython(self.__dict__["what"])

    __hash__ = object.__hash__


_USES = (
    "setattr delattr bool len iter next reversed contains getitem setitem delitem call enter exit "
    "eq ne lt le gt ge int float index add radd sub rsub mul rmul truediv rtruediv floordiv "
    "rfloordiv mod rmod pow rpow matmul rmatmul and rand or ror xor rxor neg pos abs invert"
)
for _use in _USES.split():
    # Python looks these up on the class, past __getattr__.
    setattr(Unknown, f"__{_use}__", lambda self, *args: self.used)


Build = Callable[[Any], Any]


class Items:
    """A list."""

    def __init__(self, variable: Any, container: list[Any]) -> None:
        self.variable = variable
        self.container = container
        self.before = list(container)
        self.after: list[Any] = []

    def look(self) -> list[Any]:
        """Compare; the new values."""
        self.after = list(self.container)
        if len(self.after) == len(self.before) and all(map(_is, self.after, self.before)):
            self.after = self.before
            return []
        return self.after

    def write(self, tx: Any, build: Build) -> None:
        if self.after is not self.before:
            tx.output.side_effects.mutation(self.variable)
            self.variable.items[:] = [build(value) for value in self.after]


class Mapping:
    """A dict."""

    def __init__(self, variable: Any, container: dict[Any, Any]) -> None:
        self.variable = variable
        self.container = container
        self.before = dict(container)
        self.after: dict[Any, Any] = {}

    def look(self) -> list[Any]:
        self.after = dict(self.container)
        if list(self.after) == list(self.before) and all(
            map(_is, self.after.values(), self.before.values())
        ):
            self.after = self.before
            return []
        return list(self.after.values())

    def write(self, tx: Any, build: Build) -> None:
        if self.after is not self.before:
            tx.output.side_effects.mutation(self.variable)
            changed = new_dict({key: build(value) for key, value in self.after.items()}, build)
            self.variable.items.clear()
            self.variable.items.update(changed.items)


class Fixed:
    """A container whose changes Dynamo is not told of: there must be none."""

    def __init__(self, variable: Any, container: Any) -> None:
        self.container = container
        self.before = list(container.items() if isinstance(container, dict) else container)

    def look(self) -> list[Any]:
        now = list(self.container.items() if isinstance(self.container, dict) else self.container)
        if len(now) != len(self.before) or not all(map(_same_item, now, self.before)):
            raise NotPython(f"a {type(self.container).__name__} that is changed")
        return []

    def write(self, tx: Any, build: Build) -> None:
        pass


class Attributes:
    """The attributes of an object or module.

    One that only holds Python state stays changed, as after a capture in which Dynamo has
    no part: Dynamo looks at the object itself when it reads it next.
    """

    def __init__(self, variable: Any, owner: Any, pending: set[str]) -> None:
        self.variable = variable
        self.owner = owner
        self.pending = pending
        self.before = dict(getattr(owner, "__dict__", {}))
        self.after: dict[str, Any] = {}

    def look(self) -> list[Any]:
        now = dict(getattr(self.owner, "__dict__", {}))
        changed = {k: v for k, v in now.items() if self.before.get(k, _MISSING) is not v}
        self.after = {k: v for k, v in changed.items() if self._is_dynamos(k, v)}
        for name in self.after:
            if name in self.before:
                self.owner.__dict__[name] = self.before[name]
            else:
                del self.owner.__dict__[name]
        return list(self.after.values())

    def _is_dynamos(self, name: str, value: Any) -> bool:
        new = self.variable.source is None
        return new or name in self.pending or isinstance(value, torch.Tensor)

    def write(self, tx: Any, build: Build) -> None:
        effects = tx.output.side_effects
        for name, value in self.after.items():
            if not effects.is_attribute_mutation(self.variable):
                # Before torch 2.13 Dynamo does not follow what export sets on a module.
                kind = type(self.owner).__name__
                raise NotPython(f"the attribute {name!r}, which is set on a {kind},")
            effects.store_attr(self.variable, name, build(value))


class Parts:
    """The parameters and buffers of a module.

    A buffer that is assigned is written into, which is what export makes of it; anything
    else that is exchanged has no counterpart in Dynamo.
    """

    def __init__(self, variable: Any, module: torch.nn.Module) -> None:
        self.variable = variable
        self.module = module
        self.before = self._now()
        self.after: dict[str, Any] = {}

    def _now(self) -> dict[str, Any]:
        return {
            f"{prefix}.{name}" if prefix else name: (kind, name, held)
            for prefix, module in self.module.named_modules()
            for kind in (module._parameters, module._buffers)
            for name, held in kind.items()
        }

    def look(self) -> list[Any]:
        now = self._now()
        for path in self.before.keys() - now.keys():
            raise self._refusal(path)
        for path, (kind, name, held) in now.items():
            _, _, before = self.before.get(path, (None, None, None))
            if held is before:
                continue
            self.after[path] = held
            if path not in self.before:
                del kind[name]
            if not self._fits(before, held):
                raise self._refusal(path)
        return list(self.after.values())

    def _fits(self, before: Any, after: Any) -> bool:
        return (
            isinstance(before, torch.Tensor)
            and isinstance(after, torch.Tensor)
            and not isinstance(before, torch.nn.Parameter)
            and before.shape == after.shape
            and before.dtype == after.dtype
        )

    def _refusal(self, path: str) -> NotPython:
        kind = type(self.module).__name__
        return NotPython(f"the parameter or buffer {path!r}, which is exchanged on a {kind},")

    def write(self, tx: Any, build: Build) -> None:
        for path, value in self.after.items():
            attribute(tx, self.variable, path).call_method(tx, "copy_", [build(value)], {})


class Cell:
    """A variable of an enclosing function."""

    def __init__(self, variable: Any, cell: types.CellType) -> None:
        self.variable = variable
        self.cell = cell
        self.before = self.contents_of(cell)
        self.after = self.before

    @staticmethod
    def contents_of(cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _MISSING

    @staticmethod
    def put(cell: types.CellType, contents: Any) -> None:
        if contents is _MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = contents

    def look(self) -> list[Any]:
        self.after = self.contents_of(self.cell)
        return [] if self.after is self.before or self.after is _MISSING else [self.after]

    def write(self, tx: Any, build: Build) -> None:
        if self.after is not self.before and self.after is not _MISSING:
            tx.output.side_effects.store_cell(self.variable, build(self.after))


def new_dict(values: dict[Any, Any], build: Build) -> Any:
    """A dict that the traced code made, of variables."""
    items = {
        ConstantVariable.create(key) if ConstantVariable.is_literal(key) else build(key): value
        for key, value in values.items()
    }
    return ConstDictVariable(items, mutation_type=ValueMutationNew())


def _same_item(one: Any, other: Any) -> bool:
    if type(one) is tuple and type(other) is tuple and len(one) == len(other):
        return all(map(_is, one, other))
    return one is other


def _is(one: Any, other: Any) -> bool:
    return one is other
