"""What the demo and the benchmarks measure: calls, gradients, memory that waits for backward."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import hops

CHECKPOINT = "checkpoint"


class Call(NamedTuple):
    """One Function or checkpoint call: the callee, and path and class of the calling module."""

    callee: str
    path: str
    owner: str

    def __str__(self) -> str:
        return f"{self.callee} in {self.path} ({self.owner})"


@dataclass(frozen=True)
class Step:
    """Loss and gradients (None stays None) of one forward and backward.

    A gradient's key holds every name of its parameter, more than one when weights are tied.
    """

    loss: float
    gradients: dict[tuple[str, ...], Tensor | None]


def eager_calls(
    model: nn.Module, function: type[torch.autograd.Function], inputs: Sequence[Any]
) -> Counter[Call]:
    """Count the calls of `function` and of checkpoint in an eager forward of `model`."""
    calls: Counter[Call] = Counter()
    forward = function.forward
    name = f"{function.__module__}.{function.__qualname__}"
    with _current_module(model) as current, contextlib.ExitStack() as patches:

        def counted(callee: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                calls[Call(callee, *current[-1])] += 1
                return original(*args, **kwargs)

            return call

        patches.enter_context(
            mock.patch.object(function, "forward", staticmethod(counted(name, forward)))
        )
        for module in model.modules():
            # Where transformers keeps the checkpoint function that a layer calls.
            original = getattr(module, "_gradient_checkpointing_func", None)
            if original is not None:
                wrapped = counted(CHECKPOINT, original)
                patches.enter_context(
                    mock.patch.object(module, "_gradient_checkpointing_func", wrapped)
                )
        model(*inputs)
    return calls


def captured_calls(module: fx.GraphModule) -> Counter[Call]:
    """Count the operators of `hops` in a captured graph and in all its subgraphs."""
    return Counter(_call(node) for node in operator_nodes(module))


def operator_nodes(module: fx.GraphModule) -> Iterator[fx.Node]:
    """Yield every node of either operator, in execution order; backward bodies are not entered."""
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if is_function(node):
            yield node
            yield from operator_nodes(hops.function_parts(node).forward)
        elif is_checkpoint(node):
            yield node
            yield from operator_nodes(hops.checkpoint_parts(node).body)
        else:
            for subgraph in _subgraphs(module, node):
                yield from operator_nodes(subgraph)


def is_function(node: fx.Node) -> bool:
    """Whether `node` calls `autograd_function_apply`."""
    return node.target is torch.ops.higher_order.autograd_function_apply


def is_checkpoint(node: fx.Node) -> bool:
    """Whether `node` calls `tag_activation_checkpoint`."""
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def run_step(module: nn.Module, inputs: Sequence[Any], seed: int = 0) -> Step:
    """Run forward and backward once under `seed`; leave no gradient behind.

    Args:
        module: returns a scalar loss.
        inputs: its positional arguments.
        seed: of the default generator, so that dropout draws the same masks on every run.
    """
    module.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss = module(*inputs)
    loss.backward()
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    gradients = {tuple(names[p]): None if p.grad is None else p.grad.clone() for p in names}
    module.zero_grad(set_to_none=True)
    return Step(loss.item(), gradients)


def gradient_difference(step: Step, reference: Step) -> float:
    """Largest difference of any gradient entry, over the largest gradient entry of `reference`.

    Infinite when the parameters differ, or when one side has None where the other has a tensor. Of
    the names of a tied parameter one is enough: strict export keeps only one.
    """
    actual = {name: value for names, value in step.gradients.items() for name in names}
    known = {name for names in reference.gradients for name in names}
    if not actual.keys() <= known:
        return float("inf")
    differences, scale = [0.0], 0.0
    for names, expected in reference.gradients.items():
        found = [actual[name] for name in names if name in actual]
        differences += [_difference(value, expected) for value in found] or [float("inf")]
        if expected is not None:
            scale = max(scale, expected.abs().max().item())
    return max(differences) / (scale or 1.0)


def _difference(actual: Tensor | None, expected: Tensor | None) -> float:
    if actual is None or expected is None:
        return 0.0 if actual is expected else float("inf")
    return (actual - expected).abs().max().item()


def bytes_for_backward(module: nn.Module, inputs: Sequence[Any], seed: int = 0) -> int:
    """Bytes that a forward leaves alive for its backward.

    Counts every storage created during the forward and still alive after it, once. So it sees what
    autograd saves and what a checkpoint keeps through a closure, and nothing of parameters, buffers
    or inputs.
    """
    torch.manual_seed(seed)
    owned = [*module.parameters(), *module.buffers(), *(x for x in inputs if isinstance(x, Tensor))]
    with _CreatedStorages(owned) as created:
        output = module(*inputs)
    gc.collect()
    total = created.bytes_alive()
    del output
    return total


class _CreatedStorages(TorchDispatchMode):
    """Remembers, weakly, every storage that an operator returns and that none of `owned` has."""

    def __init__(self, owned: Sequence[Tensor]) -> None:
        super().__init__()
        self._owned = {_reference(tensor).cdata for tensor in owned}
        self._created: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(output):
            if isinstance(tensor, Tensor):
                reference = _reference(tensor)
                if reference.cdata not in self._owned:
                    # The weak reference keeps its address taken: no later storage has the same key.
                    self._created.setdefault(
                        reference.cdata, (reference, tensor.untyped_storage().nbytes())
                    )
        return output

    def bytes_alive(self) -> int:
        return sum(size for reference, size in self._created.values() if not reference.expired())


def _reference(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


@contextlib.contextmanager
def _current_module(model: nn.Module) -> Iterator[list[tuple[str, str]]]:
    """Keep, in a list, path and class of the modules whose forward is running, innermost last."""
    paths = {module: (name, type(module).__name__) for name, module in model.named_modules()}
    stack: list[tuple[str, str]] = []
    enter = register_module_forward_pre_hook(lambda module, args: stack.append(paths[module]))
    leave = register_module_forward_hook(lambda module, args, output: stack.pop() and None)
    try:
        yield stack
    finally:
        enter.remove()
        leave.remove()


def _call(node: fx.Node) -> Call:
    callee = CHECKPOINT if is_checkpoint(node) else hops.function_parts(node).name
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return Call(callee, "", "")
    path, owner = list(stack.values())[-1]
    owner = owner if isinstance(owner, str) else owner.__qualname__
    return Call(callee, path, owner.rpartition(".")[2])


def _subgraphs(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    for operand in node.all_input_nodes:
        if operand.op == "get_attr":
            value: Any = module
            for attribute in str(operand.target).split("."):
                value = getattr(value, attribute)
            if isinstance(value, fx.GraphModule):
                yield value
