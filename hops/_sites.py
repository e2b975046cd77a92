"""Installing the table of patched sites: each of them wholly or not at all.

A site names what it changes (:class:`Site`); :class:`Installation` carries a
table of them out, knows what became of each, and takes it back.  A torch that
lacks what a site needs is told of by one warning.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hops._changes import Changes
from hops._import_hook import after_import
from hops.errors import HopsWarning


@dataclass(frozen=True)
class Site:
    """One place of torch that is changed.

    Attributes:
        where: its name in torch.
        why: the torch behaviour that forces the change.
        patch: makes the changes.  Where this torch has no need of them, it makes none and
            gives the reason.
        module: the site belongs to this module of torch, which is heavy: it is patched when
            somebody has imported it.
        core: without this site no other is of use: if it fails, nothing is patched.
    """

    where: str
    why: str
    patch: Callable[[Changes], str | None]
    module: str = ""
    core: bool = False


@dataclass
class State:
    """What became of a site.

    Attributes:
        status: ``not installed``, ``patched``, ``native`` (torch has no need of it),
            ``waiting`` (for the import of its module), ``absent`` (there is no such module)
            or ``left off`` (it failed).
        detail: the reason of ``native``, ``absent`` and ``left off``.
        changes: what was changed.
    """

    status: str = "not installed"
    detail: str = ""
    changes: Changes = field(default_factory=Changes)


class Installation:
    """A table of sites, and what became of each."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.states = [State() for _ in sites]
        self.active = False
        self._lock = threading.RLock()
        self._stop_waiting: list[Callable[[], None]] = []
        self._installing = False
        self._failed: list[Site] = []

    def install(self) -> None:
        """Patch every site; doing it twice is doing it once.

        Warns:
            HopsWarning: this torch lacks what some site needs, which is left as it was.  If
                that is a core site, all are.
        """
        with self._lock:
            if self.active:
                return
            self.active = self._installing = True
            try:
                for site, state in zip(self.sites, self.states):
                    self._begin(site, state)
            except BaseException:  # an interrupt
                self.uninstall()
                raise
            finally:
                self._installing = False
            self._tell_failures()

    def uninstall(self) -> None:
        """Give torch back everything that :meth:`install` changed.

        Warns:
            HopsWarning: somebody else has patched a site over ours; it stays as it is.
        """
        with self._lock:
            self.active = False
            while self._stop_waiting:
                self._stop_waiting.pop()()
            covered: list[str] = []
            for number in reversed(range(len(self.sites))):
                changes = self.states[number].changes
                changes.take_back()
                covered += changes.covered
                self.states[number] = State()
            if covered:
                warnings.warn(
                    f"hops: {', '.join(covered)} cannot be given back: other code has patched it "
                    "after hops did, and still calls what hops put there. Undo that first.",
                    HopsWarning,
                    stacklevel=3,
                )

    def import_modules(self) -> None:
        """Import the modules that sites wait for, so that each site shows what becomes of it."""
        for site, state in zip(self.sites, self.states):
            if state.status == "waiting":
                try:
                    importlib.import_module(site.module)
                except ImportError as error:
                    state.status, state.detail = "absent", str(error)

    def _begin(self, site: Site, state: State) -> None:
        if not site.module:
            self._patch(site, state)
            return
        state.status = "waiting"
        self._stop_waiting.append(after_import(site.module, lambda: self._patch(site, state)))

    def _patch(self, site: Site, state: State) -> None:
        try:
            reason = site.patch(state.changes)
        except Exception as error:  # whatever a torch that nobody knows does
            state.changes.take_back()
            state.status, state.detail = "left off", f"{type(error).__name__}: {error}"
            self._failed.append(site)
            if not self._installing:
                self._tell_failures()
            return
        state.status, state.detail = ("patched", "") if reason is None else ("native", reason)

    def _tell_failures(self) -> None:
        """One warning for what failed; if a core site did, all are taken back."""
        failed, self._failed = self._failed, []
        if not failed:
            return
        details = {s.where: t.detail for s, t in zip(self.sites, self.states) if s in failed}
        lost = "; ".join(f"{where} ({detail})" for where, detail in details.items())
        if any(site.core for site in failed):
            self.uninstall()
            for site, state in zip(self.sites, self.states):
                state.status = "left off"
                state.detail = details.get(site.where, f"needs what is missing elsewhere: {lost}")
            outcome = "Nothing is patched, and captures are those of stock torch."
        else:
            outcome = "These sites are as in stock torch, the others are patched."
        warnings.warn(
            f"hops: torch {torch.__version__} lacks what hops changes in it: {lost}. {outcome} "
            "`python -m hops doctor` tells what each site is for.",
            HopsWarning,
            stacklevel=4,
        )
