"""Doing something right after a module has been imported, whenever that is."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Run ``action`` once module ``name`` has been imported: now, if it has been.

    Returns:
        A function that stops waiting.
    """
    if name in sys.modules and not _is_being_imported(sys.modules[name]):
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.stop


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _found_by_others(name: str, path: Any, target: Any) -> Any:
    """What the finders that are left find, among them other people's import hooks."""
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        spec = None if find_spec is None else find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; it lets the others find the module and adds the action."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        self.stop()
        spec = _found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            self._add_action(spec.loader)
        return spec

    def _add_action(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_and_act(module: ModuleType) -> None:
            try:
                exec_module(module)
            except BaseException:
                sys.meta_path.insert(0, self)  # the next attempt is waited for as well
                raise
            finally:
                if vars(loader).get("exec_module") is exec_and_act:
                    del loader.exec_module
            self.action()

        loader.exec_module = exec_and_act
