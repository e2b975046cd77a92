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
    if _is_imported(name):
        action()
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.stop


def _is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself; it lets the others find the module and adds the action.

    Another import hook may have found the module without asking; that is noticed at the
    next import of anything.
    """

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action
        self._asking = False

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            if _is_imported(self.name):
                self._act()
            return None
        if self._asking:  # by another finder of ours that waits for the same module
            return None
        spec = self._found_by_others(path, target)
        if spec is not None and spec.loader is not None:
            self._add_action(spec.loader)
        return spec

    def _act(self) -> None:
        if self in sys.meta_path:
            self.stop()
            self.action()

    def _found_by_others(self, path: Any, target: Any) -> Any:
        """What the other finders find, among them other people's import hooks."""
        self._asking = True
        try:
            for finder in list(sys.meta_path):
                find_spec = getattr(finder, "find_spec", None)
                spec = None if find_spec is None else find_spec(self.name, path, target)
                if spec is not None:
                    return spec
            return None
        finally:
            self._asking = False

    def _add_action(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_and_act(module: ModuleType) -> None:
            try:
                exec_module(module)
            finally:
                if vars(loader).get("exec_module") is exec_and_act:
                    del loader.exec_module
            self._act()

        loader.exec_module = exec_and_act
