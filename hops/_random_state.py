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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._effect_sites import Reachable
from hops._exchanged_code import ExchangedCode
from hops._subgraph import Recording, recording_on_this_thread
from hops.errors import CaptureError

_PLACE = "_hops_place_in_a_capture"
_state = threading.local()


@contextmanager
def own_random_states() -> Iterator[None]:
    """Reading and setting states here is hops' own doing."""
    before, _state.own = getattr(_state, "own", False), True
    try:
        yield
    finally:
        _state.own = before


def hook_random_states() -> Callable[[], None]:
    """Watch the functions that read and set states; gives what takes that back."""
    undo = [exchanged.hook() for _, exchanged in _ENTRIES]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def entered(position: int, args: Any, kwargs: Any) -> Any:
    """Called in place of a function while any thread captures."""
    around, exchanged = _ENTRIES[position]
    recording = None if getattr(_state, "own", False) else recording_on_this_thread()
    if recording is None:
        return exchanged.original(*args, **kwargs)
    return around(recording, exchanged.original, args, kwargs)


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


#: By which code makes a generator or moves the state of one.
_GENERATOR_CALLS = frozenset(
    {"Generator", "manual_seed", "seed", "set_state", "clone_state", "graphsafe_set_state"}
)


def refuse_seeded_generator(recording: Recording, code: Reachable) -> None:
    """Refuse code that draws from a generator which it makes or seeds itself: the graph holds
    the generator, which a replay would leave where the replay before it did.

    The methods of generators cannot be watched, so that the code is read for them.

    Raises:
        CaptureError: names the Function or region.
    """
    nodes = (node for graph in _graphs(recording) for node in graph.nodes)
    if code.mentions(_GENERATOR_CALLS) and any(map(_takes_a_generator, nodes)):
        raise CaptureError(
            f"hops: {recording.name} draws from a torch.Generator and makes or seeds one in the "
            "same code, which a graph does not hold: its replay would draw other numbers than "
            "eager. Make and seed the generator outside, and hand it in, or draw the numbers "
            "there."
        )


def _takes_a_generator(node: fx.Node) -> bool:
    # Every operation has it as a keyword.
    return node.kwargs.get("generator") is not None


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


def _exchanged(position: int, function: Any) -> ExchangedCode:
    lines = [
        "from hops._random_state import entered",
        f"return entered({position}, args, kwargs)",
    ]
    # Out of what keeps Dynamo away.
    return ExchangedCode(inspect.unwrap(function), "*args, **kwargs", lines)


#: What is done around a function that reads a state, sets one, or sets a seed.
_WATCHED: tuple[tuple[Callable[..., Any], Any], ...] = (
    (_noting_place, torch.random.get_rng_state),
    (_noting_place, torch.cuda.random.get_rng_state),
    (_setting_state, torch.random.set_rng_state),
    (_setting_state, torch.cuda.random.set_rng_state),
    (_setting_seed, torch.random.manual_seed),
    (_setting_seed, torch.random.seed),
)
_ENTRIES = [(around, _exchanged(i, function)) for i, (around, function) in enumerate(_WATCHED)]
