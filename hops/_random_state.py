"""Captured code that sets the state of a random number generator, refused by name.

A Function that recomputes its forward with the dropout mask of before reads the state
(``torch.get_rng_state``) and sets it again in backward.  A graph has no
operation for either, so its replay would draw other numbers than eager.

[Note: states and places]
What counts is whether numbers are drawn while the state is not the one that a
replay has at that place.  A state that was read is known by its place: the
body that was recorded, and how many random operations it held.  Setting it at that
very place changes nothing (``torch.random.fork_rng`` around no random operation);
setting it anywhere else, or a seed, moves the state until it is set back.
"""

from __future__ import annotations

import inspect
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._subgraph import Recording, recording_on_this_thread
from hops.errors import CaptureError

_PLACE = "_hops_place_in_a_capture"
_state = threading.local()

#: What reads a state, what sets one, and what sets a seed.
_READS = (torch.random.get_rng_state, torch.cuda.random.get_rng_state)
_SETS = (torch.random.set_rng_state, torch.cuda.random.set_rng_state)
_SEEDS = (torch.random.manual_seed, torch.random.seed)


@contextmanager
def own_random_states() -> Iterator[None]:
    """Reading and setting states here is hops' own doing."""
    before, _state.own = getattr(_state, "own", False), True
    try:
        yield
    finally:
        _state.own = before


def hook_random_states() -> Callable[[], None]:
    """Watch the functions that read and set states; gives what takes that back.

    Their code is exchanged, so that it holds for any name that they were imported by.
    """
    undo = [_exchange(function, _noting_place) for function in _READS]
    undo += [_exchange(function, _setting_state) for function in _SETS]
    undo += [_exchange(function, _setting_seed) for function in _SEEDS]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def _exchange(function: Any, around: Callable[..., Any]) -> Callable[[], None]:
    function = inspect.unwrap(function)  # out of what keeps Dynamo away
    before = function.__code__
    original = types.FunctionType(
        before,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    _entries[before.co_name, before.co_filename] = (around, original)
    source = (
        f"def {before.co_name}(*args, **kwargs):\n"
        "    from hops._random_state import entered\n"
        f"    return entered({(before.co_name, before.co_filename)!r}, args, kwargs)\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), namespace)
    function.__code__ = namespace[before.co_name].__code__
    return lambda: setattr(function, "__code__", before)


_entries: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}


def entered(key: tuple[str, str], args: Any, kwargs: Any) -> Any:
    """Called in place of the function while any thread captures."""
    around, original = _entries[key]
    recording = None if getattr(_state, "own", False) else recording_on_this_thread()
    if recording is None:
        return original(*args, **kwargs)
    return around(recording, original, args, kwargs)


def _noting_place(recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
    state = original(*args, **kwargs)
    setattr(state, _PLACE, _place(recording))
    return state


def _setting_state(recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
    states = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor)]
    _move(recording, getattr(states[0], _PLACE, None) if states else None)
    return original(*args, **kwargs)


def _setting_seed(recording: Recording, original: Any, args: Any, kwargs: Any) -> Any:
    _move(recording, None)
    return original(*args, **kwargs)


def _move(recording: Recording, place: Any) -> None:
    refuse_moved_state(recording)
    here = _place(recording)
    recording.random_state_set_at = None if place == here else here


def refuse_moved_state(recording: Recording, *, ended: bool = False) -> None:
    """Refuse that numbers were drawn after the state had been moved, and that a body ends so.

    Raises:
        CaptureError: names the Function or region.
    """
    moved_at = recording.random_state_set_at
    if moved_at is None or (not ended and moved_at == _place(recording)):
        return
    raise CaptureError(
        f"hops: {recording.name} sets the state of the random number generator (by "
        "torch.set_rng_state, torch.manual_seed or torch.random.fork_rng), which a graph does not "
        "hold: its replay would draw other numbers than eager. Draw the numbers once and save "
        "them for backward, or let torch.utils.checkpoint recompute; hops keeps its random state."
    )


def _place(recording: Recording) -> tuple[Any, int]:
    return recording, sum(map(_draws, _graphs(recording)))


def _graphs(recording: Recording) -> Iterator[fx.Graph]:
    yield recording.graph
    for node in recording.graph.find_nodes(op="get_attr"):
        body = getattr(recording.tracer.root, str(node.target), None)
        if isinstance(body, fx.GraphModule):
            yield from (m.graph for m in body.modules() if isinstance(m, fx.GraphModule))


def _draws(graph: fx.Graph) -> int:
    return sum(
        isinstance(node.target, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded in node.target.tags
        for node in graph.nodes
    )
