"""Functions of torch whose code leads elsewhere for a time, by whatever name they were imported."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


class ExchangedCode:
    """One function, and the code that stands in for its own while it is hooked.

    Args:
        function: the function itself, not a wrapper around it.
        parameters: those of the code that stands in, as Python writes them.
        lines: the body of that code, which finds no global names of hops.

    Attributes:
        original: a function that does what ``function`` did before it was hooked.
    """

    def __init__(self, function: Any, parameters: str, lines: list[str]) -> None:
        self._function = function
        name = function.__name__
        source = "\n    ".join([f"def {name}({parameters}):", *lines])
        namespace: dict[str, Any] = {}
        exec(compile(source, __file__, "exec"), namespace)
        self._entry = namespace[name].__code__
        self.original = types.FunctionType(
            function.__code__, function.__globals__, name, function.__defaults__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__

    def is_hooked(self) -> bool:
        return self._function.__code__ is self._entry

    def hook(self) -> Callable[[], None]:
        """Let the code stand in from now on; gives what takes that back."""
        before = self._function.__code__
        self.original.__code__ = before
        self._function.__code__ = self._entry
        return lambda: setattr(self._function, "__code__", before)
