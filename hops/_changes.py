"""Changes to torch that are made together and taken back together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """Something of torch that was exchanged: an attribute, or an entry of a table.

    Attributes:
        name: the attribute, with its owner; or the entry, with its table.
        before: what was there.
        ours: what was put there.
        read: gives what is there now.
    """

    name: str
    before: Any
    ours: Any
    read: Callable[[], Any]

    def holds(self) -> bool:
        """Whether nobody has exchanged it since."""
        return self.read() is self.ours


class Changes:
    """The changes of one site, in the order in which they were made.

    A site whose patch fails halfway is taken back as far as it got
    (``hops._sites``), so that nothing of it stays.
    """

    def __init__(self) -> None:
        self.made: list[Change] = []
        #: Names of what others have exchanged since, which was not taken back.
        self.covered: list[str] = []
        #: What torch has by itself, which was left as it is.
        self.native: list[str] = []
        self._undo = ExitStack()

    def attribute(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Exchange the attribute that ``owner`` itself defines for ``wrap`` of it.

        Raises:
            AttributeError: there is none; its message says where.
        """
        shown = f"{_shown(owner)}.{name}"
        if name not in vars(owner):
            raise AttributeError(f"{shown} does not exist")
        before = vars(owner)[name]
        ours = wrap(before)
        setattr(owner, name, ours)
        change = Change(shown, before, ours, lambda: vars(owner).get(name, _ABSENT))
        self._note(change, lambda: setattr(owner, name, before))

    def entry(self, table: Any, key: Any, value: Any, shown: str) -> None:
        """Put ``value`` at ``key`` of a dict or list, of which errors and reports speak as
        ``shown``."""
        known = isinstance(table, list) or key in table
        before = table[key] if known else _ABSENT

        def read() -> Any:
            return table[key] if isinstance(table, list) or key in table else _ABSENT

        def restore() -> None:
            if before is _ABSENT:
                del table[key]
            else:
                table[key] = before

        table[key] = value
        self._note(Change(shown, before, value, read), restore)

    def members(self, of: set[Any], added: Iterable[Any]) -> None:
        """Add to a set what is not there."""
        new = set(added) - of
        of |= new
        self._undo.callback(of.difference_update, new)

    def undo_with(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the changes are taken back."""
        self._undo.callback(callback)

    def watch(self, change: Change) -> None:
        """Report on a change that is made and taken back by other means."""
        self.made.append(change)

    def take_back(self) -> None:
        """Put back what was there before, last change first.

        What others have exchanged since stays theirs: putting torch's own there would
        undo their change.
        """
        self._undo.close()
        self.made.clear()

    def _note(self, change: Change, restore: Callable[[], None]) -> None:
        def restore_if_ours() -> None:
            if change.holds():
                restore()
            else:
                self.covered.append(change.name)

        self.made.append(change)
        self._undo.callback(restore_if_ours)


def _shown(owner: Any) -> str:
    module = getattr(owner, "__module__", None)
    name = getattr(owner, "__qualname__", None) or owner.__name__
    return f"{module}.{name}" if module else str(name)


def is_absent(value: Any) -> bool:
    """Whether a change's ``before`` or present value is nothing at all."""
    return value is _ABSENT
