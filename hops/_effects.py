"""Side effects of captured code on Python objects, found and told.

A captured program replays operations, not Python: a counter that ``forward``
raises, or a list that it appends to, changes once, during the capture.  hops
says so, with the file and line (:class:`hops.errors.HopsWarning`).

[Note: how side effects are found]
Tracing every line that runs would be slow, and would take ``sys.settrace``
from debuggers and coverage.  Instead the code that may run is read for
instructions that can change an object that outlives it
(:mod:`hops._effect_sites`).  Where there is none, and that is nearly always,
nothing more is done.  Otherwise the objects that the code can name are compared
before and after, shallowly; so only a change that really happened is told, and
the instruction gives its line.

What is told waits for the end of the capture: a list that is gone by then was
a local of the model's own ``forward``, and no state.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from hops._effect_sites import Reachable, Site
from hops.errors import HopsWarning

_MISSING = object()
_MANY = 1000
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device)

_thread = threading.local()


@dataclass
class Effect:
    """One change of an object, as it will be told."""

    code: str
    what: str
    site: Site
    owner: Any

    def message(self) -> str:
        return (
            f"hops: {self.code} {self.what} ({self.site.filename}:{self.site.line}). That happened "
            "once, during this capture; the captured program does not repeat it. Keep such state "
            "in a registered buffer that tensor operations update, or change it outside of the "
            "captured code."
        )


class _Slot:
    """A name that may be bound to something else: an attribute, a global, a closure cell."""

    def __init__(self, owner: Any, namespace: Any, name: str, what: str) -> None:
        self.owner, self.namespace, self.name, self.what = owner, namespace, name, what
        self.before = self.value()

    def value(self) -> Any:
        if isinstance(self.namespace, types.CellType):
            return _contents(self.namespace)
        return self.namespace.get(self.name, _MISSING)

    def changed(self) -> bool:
        return not _same(self.before, self.value())

    def undo(self) -> None:
        if isinstance(self.namespace, types.CellType):
            if self.before is not _MISSING:
                self.namespace.cell_contents = self.before
        elif isinstance(self.namespace, types.MappingProxyType):
            if self.before is _MISSING:
                type.__delattr__(self.owner, self.name)
            else:
                type.__setattr__(self.owner, self.name, self.before)
        elif self.before is _MISSING:
            del self.namespace[self.name]
        else:
            self.namespace[self.name] = self.before


class _Container:
    """The items of a list, dict, set or deque.  Of a big one, how many there are."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.what = f"changes the {type(owner).__name__} {name!r}"
        self.before = self.value()

    def value(self) -> Any:
        if len(self.owner) > _MANY:
            return len(self.owner)
        if isinstance(self.owner, dict):
            return dict(self.owner)
        return set(self.owner) if isinstance(self.owner, set) else list(self.owner)

    def changed(self) -> bool:
        before, after = self.before, self.value()
        if type(before) is not type(after) or isinstance(before, (int, set)):
            return bool(type(before) is not type(after) or before != after)
        if len(before) != len(after):
            return True
        if isinstance(before, dict):
            return any(not _same(v, after.get(k, _MISSING)) for k, v in before.items())
        return any(not _same(b, a) for b, a in zip(before, after))

    def undo(self) -> None:
        if isinstance(self.before, int):
            return
        self.owner.clear()
        if isinstance(self.owner, (dict, set)):
            self.owner.update(self.before)
        else:
            self.owner.extend(self.before)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    return type(before) is type(after) and isinstance(before, _CONSTANTS) and before == after


class Watch:
    """Compares what a piece of user code can name, before and after it runs.

    Args:
        code: the name of the code, as the warning gives it.
        functions: what runs.
        values: objects that it is handed, or that belong to it.
    """

    def __init__(self, code: str, functions: Iterable[Any], values: Iterable[Any]) -> None:
        self.code = code
        self.reachable = Reachable(functions, values)
        self.state: list[Any] = []
        if self.reachable.has_sites():
            self.state = [*self._slots(), *self._containers()]
        self.told_before = len(_log())

    def _slots(self) -> Iterator[_Slot]:
        reachable = self.reachable
        for owner in reachable.objects.values():
            stored = reachable.stored_attributes(owner)
            for holder, namespace in _namespaces(owner) if stored else ():
                for name in stored:
                    if holder is owner or name in namespace:
                        yield _Slot(holder, namespace, name, _attribute_set(holder, name))
        for function in reachable.functions.values():
            for name in reachable.names_of("global"):
                namespace = function.__globals__
                yield _Slot(namespace, namespace, name, f"sets the global {name!r}")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if name in reachable.names_of("variable"):
                    yield _Slot(cell, cell, name, f"sets {name!r} of an enclosing function")

    def _containers(self) -> Iterator[_Container]:
        for container, name in self.reachable.containers.values():
            yield _Container(container, name)

    def report(self) -> None:
        """Note what has changed, but for what a call inside has noted already."""
        told = {(id(e.owner), e.what) for e in _log()[self.told_before :]}
        for entry in self.state:
            if entry.changed() and (id(entry.owner), entry.what) not in told:
                told.add((id(entry.owner), entry.what))
                site = self.reachable.site_of(entry.name, isinstance(entry, _Container))
                _log().append(Effect(self.code, entry.what, site, entry.owner))

    def undo(self) -> None:
        """Take the changes back: this run was one more than eager makes."""
        for entry in self.state:
            if entry.changed():
                entry.undo()
        del _log()[self.told_before :]


def _namespaces(owner: Any) -> Iterator[tuple[Any, Any]]:
    """Where attributes of an object are kept: itself, and the classes that have them."""
    if not isinstance(owner, type):
        yield owner, owner.__dict__
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if cls is not object:
            yield cls, cls.__dict__


def _attribute_set(owner: Any, name: str) -> str:
    if isinstance(owner, (type, types.ModuleType)):
        return f"sets {owner.__name__}.{name}"
    return f"sets the attribute {name!r} of a {type(owner).__name__}"


def _log() -> list[Effect]:
    if not hasattr(_thread, "log"):
        _thread.log = []
    log: list[Effect] = _thread.log
    return log


@contextmanager
def effects_told_at_the_end() -> Iterator[None]:
    """Warn of the side effects of a capture when the outermost trace of it ends."""
    _thread.depth = getattr(_thread, "depth", 0) + 1
    try:
        yield
        if _thread.depth == 1 and _log():
            _tell()
    finally:
        _thread.depth -= 1
        if _thread.depth == 0:
            _log().clear()


def _tell() -> None:
    gc.collect()
    told = set()
    for effect in _log():
        # One reference is the effect's own, one is that of the call.
        gone = sys.getrefcount(effect.owner) <= 2
        if gone or effect.message() in told:
            continue
        told.add(effect.message())
        warnings.warn_explicit(
            effect.message(), HopsWarning, effect.site.filename, effect.site.line
        )
