"""What captured code may not do, refused under the name of the Function or region.

Used while a body is recorded; see ``hops._subgraph.Recording``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from hops._effect_sites import Reachable
from hops._random_state import refuse_moved_state, refuse_seeded_generator
from hops._subgraph import Recording, recording_on_this_thread
from hops._torch import FakeTensor, is_data_dependence
from hops.errors import CaptureError


@contextmanager
def running_as_a_graph(name: str, code: Reachable) -> Iterator[None]:
    """Name the code that is recorded where it does what a graph cannot: its control flow
    depends on the values of tensors, or it sets the state of a random number generator.

    Args:
        code: what runs.
    """
    try:
        yield
        recording = recording_on_this_thread()
        if recording is not None:
            refuse_moved_state(recording, ended=True)
            refuse_seeded_generator(recording, code)
    except CaptureError:
        raise
    except Exception as error:
        if not is_data_dependence(error):
            raise
        raise CaptureError(
            f"hops: {name} looks at the values of its tensors, which a graph cannot follow: "
            f"{error}\nWrite the choice with tensor operations (torch.where, torch.cond), or "
            "make it outside of the captured code."
        ) from error


HOOKS_BEFORE = "_hops_saved_tensors_hooks_before"


def refuse_saved_tensors_hooks(recording: Recording) -> None:
    """Refuse a Function in captured code that has entered hooks on saved tensors: a graph does
    not hold them.  Those of a region around it, or from before the capture, are no matter.

    Raises:
        CaptureError: names the Function.
    """
    around = recording_on_this_thread()
    before = around.saved_tensors_hooks if around else getattr(recording.tracer, HOOKS_BEFORE)
    if recording.saved_tensors_hooks not in (None, before):
        raise CaptureError(
            f"hops: {recording.name} is applied under torch.autograd.graph.saved_tensors_hooks "
            "(save_on_cpu is one), which a graph does not hold: its replay would save the tensors "
            "themselves. Enter the hooks around the calls of the captured program, or do their "
            "work in the Function's forward and backward."
        )


def refusing_to_accumulate(run_engine: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd.backward`` in captured code fills the ``grad`` of tensors that a
    graph knows nothing of, if they are not of the code's own making."""

    def _engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        recording = recording_on_this_thread()
        if recording is not None and kwargs.get("accumulate_grad"):
            for leaf in args[3] if len(args) > 3 and args[3] else _leaves(outputs):
                if not recording.made(leaf):
                    raise CaptureError(
                        f"hops: {recording.name} calls backward() on a loss that depends on a "
                        f"parameter or input of shape {tuple(leaf.shape)}. That adds to its .grad, "
                        "which a graph does not hold. Call torch.autograd.grad instead, and "
                        "return the gradients from the backward of an autograd.Function that "
                        "takes these tensors as arguments."
                    )
        return run_engine(outputs, *args, **kwargs)

    return _engine_run_backward


def _leaves(outputs: Any) -> Iterator[torch.Tensor]:
    """The leaves that a backward from these outputs would reach."""
    seen: set[Any] = set()
    waiting = []
    for output in outputs:
        if output.grad_fn is not None:
            waiting.append(output.grad_fn)
        elif output.requires_grad:
            yield output
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [parent for parent, _ in node.next_functions]


_READS = (torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist)


def refuse_read_of_values(function: Any, args: tuple[Any, ...]) -> None:
    """Refuse that captured code hands a real tensor of the trace to code outside of torch:
    what comes back would be a constant of the graph.  (Fake tensors have no values.)

    Args:
        function: a torch function that is about to run on ``args``.
    """
    if function not in _READS or isinstance(args[0], FakeTensor):
        return
    recording = recording_on_this_thread()
    if recording is None:
        return
    slot = recording.tracer.tensor_tracker.get(args[0])
    if slot is not None and not _is_constant(slot.proxy.node):
        raise CaptureError(
            f"hops: {recording.name} looks at the values of its tensors by "
            f"Tensor.{function.__name__}, which a graph cannot follow. Write it with tensor "
            "operations, or wrap it in torch.library.custom_op."
        )


def _is_constant(node: fx.Node) -> bool:
    """Whether a value is the same in every run: ``torch.ones(3)`` and what comes of it."""
    seen, waiting = {node}, [node]
    while waiting:
        operation = waiting[-1].target
        if not isinstance(operation, torch._ops.OpOverload):
            return False
        if torch.Tag.nondeterministic_seeded in operation.tags:
            return False
        sources = [source for source in waiting.pop().all_input_nodes if source not in seen]
        seen.update(sources)
        waiting += sources
    return True
