"""What a piece of user code can change, read from its bytecode.

See [Note: how side effects are found] in ``hops._effects``.
"""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_KINDS = {
    "STORE_ATTR": "attribute",
    "DELETE_ATTR": "attribute",
    "STORE_GLOBAL": "global",
    "DELETE_GLOBAL": "global",
    "STORE_DEREF": "variable",
    "DELETE_DEREF": "variable",
    "STORE_SUBSCR": "items",
    "STORE_SLICE": "items",
    "DELETE_SUBSCR": "items",
}

#: Methods by which lists, dicts, sets and deques are changed.
_MUTATING = frozenset(
    "add append appendleft clear difference_update discard extend extendleft insert "
    "intersection_update pop popitem popleft remove reverse rotate setdefault sort "
    "subtract symmetric_difference_update update".split()
)

#: What sets attributes without an instruction that tells which.
_SETS_ANY = frozenset({"setattr", "delattr", "vars", "__dict__", "__setattr__"})

#: torch's own state of a module; what becomes of it is torch.export's to say.
_MODULE_STATE = frozenset({"_parameters", "_buffers", "_modules"})

_CONTAINERS = (list, dict, set, collections.deque)
_NOT_USER = frozenset({"torch", "hops", "dispatch_rules", "numpy"}) | sys.stdlib_module_names
_MOST_OBJECTS = 1000
_ROUNDS = 6


@dataclass(frozen=True)
class Site:
    """An instruction that may change something.

    Attributes:
        kind: what it may change: an attribute, a global, a variable of an
            enclosing function, or the items of a container.
        name: of the attribute, global or variable.
        mentions: all names that its line loads.
    """

    kind: str
    name: str
    filename: str
    line: int
    mentions: frozenset[str] = frozenset()


@dataclass
class _Facts:
    sites: list[Site] = field(default_factory=list)
    names: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=4096)
def _facts_of(code: types.CodeType, filename: str) -> _Facts:
    """What the code object, and those written inside it, can change and can name.

    The file's name is part of the key, since code objects compare without it.
    """
    facts = _Facts(names={*code.co_names, *code.co_freevars})
    mentions: dict[int, set[str]] = collections.defaultdict(set)
    found: list[tuple[str, str, int]] = []
    line, base = code.co_firstlineno, ""
    for instruction in dis.get_instructions(code):
        line = _line_of(instruction) or line
        argval = instruction.argval
        named = [n for n in (argval if isinstance(argval, tuple) else (argval,)) if _is_name(n)]
        operation = instruction.opname
        if operation.startswith("LOAD_"):
            mentions[line].update(named)
            if operation in ("LOAD_ATTR", "LOAD_METHOD") and named[0] in _MUTATING:
                found.append(("items", "", line))
        elif operation in _KINDS and not _is_of_the_call(operation, base, code, named):
            found.append((_KINDS[operation], named[0] if named else "", line))
        if operation != "CACHE":
            base = named[-1] if named else ""
    facts.sites = [
        Site(kind, name, filename, line, frozenset(mentions[line])) for kind, name, line in found
    ]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            nested = _facts_of(constant, filename)
            facts.sites += nested.sites
            facts.names |= nested.names
    return facts


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _line_of(instruction: Any) -> int | None:
    """Its line where it starts one; Python 3.13 says it in another attribute."""
    line = getattr(instruction, "line_number", instruction.starts_line)
    return line if isinstance(line, int) and not isinstance(line, bool) else None


def _is_of_the_call(operation: str, base: str, code: types.CodeType, named: list[str]) -> bool:
    """Whether it changes nothing that outlives the call: ``ctx``, a variable of its own."""
    if operation in ("STORE_ATTR", "DELETE_ATTR"):
        return base == "ctx"
    return operation.endswith("_DEREF") and named[0] not in code.co_freevars


def _is_users(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] not in _NOT_USER


def _methods_of(owner: Any) -> dict[str, types.FunctionType]:
    """Methods that the user wrote, of a class or of the class of an object."""
    kind: Any = owner if isinstance(owner, type) else type(owner)
    return _methods_of_class(kind)


@functools.lru_cache(maxsize=1024)
def _methods_of_class(cls: Any) -> dict[str, types.FunctionType]:
    methods = {}
    for base in reversed(cls.__mro__):
        for name, value in base.__dict__.items():
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)
            if isinstance(value, types.FunctionType):
                if _is_users(value.__globals__.get("__name__")):
                    methods[name] = value
    return methods


class Reachable:
    """The functions that may run, and the objects that they can name.

    Attributes:
        functions, objects: by their ids.
        containers: with the name by which the code knows each.
    """

    def __init__(self, functions: Iterable[Any], values: Iterable[Any]) -> None:
        self.functions: dict[int, types.FunctionType] = {}
        self.objects: dict[int, Any] = {}
        self.containers: dict[int, tuple[Any, str]] = {}
        self._names: set[str] = set()
        self._sites: list[Site] = []
        self._passed: dict[int, Any] = {}
        for value in (*functions, *values):
            self._meet(value, type(value).__name__)
        size = -1
        for _ in range(_ROUNDS):
            if size == len(self._names) + len(self.objects) + len(self.functions):
                break
            size = len(self._names) + len(self.objects) + len(self.functions)
            for owner in list(self.objects.values()):
                self._look_into(owner)

    def mentions(self, names: frozenset[str]) -> bool:
        """Whether the code loads one of these names."""
        return not self._names.isdisjoint(names)

    def has_sites(self) -> bool:
        return bool(self._sites) or not _SETS_ANY.isdisjoint(self._names)

    @functools.cached_property
    def _stored(self) -> dict[str, set[str]]:
        stored: dict[str, set[str]] = collections.defaultdict(set)
        for site in self._sites:
            stored[site.kind].add(site.name)
        return stored

    def names_of(self, kind: str) -> set[str]:
        return self._stored[kind]

    def stored_attributes(self, owner: Any) -> set[str]:
        if _SETS_ANY.isdisjoint(self._names):
            return self.names_of("attribute")
        own = {n for n in owner.__dict__ if not (n.startswith("__") or n in _MODULE_STATE)}
        return self.names_of("attribute") | own

    def site_of(self, name: str, of_items: bool) -> Site:
        """The likeliest instruction to have changed what goes by ``name``."""
        kinds = ("items",) if of_items else ("attribute", "global", "variable")
        candidates = [s for s in self._sites if s.kind in kinds]
        wanted = [s for s in candidates if name in s.mentions] if of_items else []
        wanted += [s for s in self._sites if s.name == name]
        if wanted or candidates or self._sites:
            return (wanted or candidates or self._sites)[0]
        code = next(iter(self.functions.values())).__code__
        return Site("", "", code.co_filename, code.co_firstlineno)

    def _meet(self, value: Any, name: str) -> None:
        if isinstance(value, (torch.Tensor, str, int, float)) or value is None:
            return
        if isinstance(value, types.FunctionType):
            self._follow(value)
        elif isinstance(value, (types.MethodType, staticmethod, classmethod)):
            self._meet(value.__func__, name)
            self._meet(getattr(value, "__self__", None), name)
        elif isinstance(value, functools.partial):
            self._meet_all((value.func, *value.args, *value.keywords.values()), name)
        elif isinstance(value, tuple):
            self._meet_all(value, name)
        elif isinstance(value, _CONTAINERS):
            if id(value) not in self.containers:
                self.containers[id(value)] = (value, name)
                self._meet_all(value.values() if isinstance(value, dict) else value, name)
        elif id(value) not in self.objects and _is_object_of_user(value):
            if len(self.objects) < _MOST_OBJECTS:
                self.objects[id(value)] = value
                if isinstance(value, torch.nn.Module):
                    self._meet_module(value)

    def _meet_all(self, values: Iterable[Any], name: str) -> None:
        if id(values) not in self._passed:
            self._passed[id(values)] = values
            for value in list(values)[:_MOST_OBJECTS]:
                self._meet(value, name)

    def _meet_module(self, module: torch.nn.Module) -> None:
        self._meet(_methods_of(module).get("forward"), "")
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self._meet_all(tuple(hooks.values()), "")
        for name, child in module._modules.items():
            self._meet(child, name)

    def _follow(self, function: types.FunctionType) -> None:
        if id(function) in self.functions:
            return
        self.functions[id(function)] = function
        code, namespace = function.__code__, function.__globals__
        for name, cell in zip(code.co_freevars, function.__closure__ or ()):
            try:
                self._meet(cell.cell_contents, name)
            except ValueError:
                continue
        if not _is_users(namespace.get("__name__")):
            return
        facts = _facts_of(code, code.co_filename)
        self._sites += facts.sites
        self._names |= facts.names
        for name in facts.names:
            if name in namespace:
                self._meet(namespace[name], name)

    def _look_into(self, owner: Any) -> None:
        """Meet the attributes and methods of an object that the code names."""
        for name in self._names & owner.__dict__.keys():
            if name not in _MODULE_STATE and not isinstance(owner, type):
                self._meet(owner.__dict__[name], name)
        for user_class in _user_classes(owner):
            for name in self._names & user_class.__dict__.keys():
                self._meet(user_class.__dict__[name], name)
        if not isinstance(owner, types.ModuleType):
            methods = _methods_of(owner)
            for name in self._names & methods.keys() | methods.keys() & {"__call__"}:
                self._meet(methods[name], name)


def _user_classes(owner: Any) -> Iterator[type]:
    for cls in (owner if isinstance(owner, type) else type(owner)).__mro__:
        if _is_users(cls.__module__):
            yield cls


def _is_object_of_user(value: Any) -> bool:
    if isinstance(value, (torch.nn.Module, types.SimpleNamespace)):
        return True
    if isinstance(value, types.ModuleType):
        return _is_users(value.__name__)
    if not hasattr(value, "__dict__"):
        return False
    return _is_users(getattr(value if isinstance(value, type) else type(value), "__module__", None))
