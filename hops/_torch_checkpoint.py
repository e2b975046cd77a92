"""What differs between torch versions in ``torch.utils.checkpoint``: a part of :mod:`hops._torch`,
which the rest of the code imports it from."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint


def torchs_own(module: ModuleType, name: str) -> Any:
    """The function that ``module`` defines as ``name``, whatever was put in its place since.

    torch decorates some, and other tools patch them, with wrappers that need not tell what
    they wrap; but the function itself lives on as long as a wrapper calls it.
    """
    function = getattr(module, name)
    while not _is_defined_in(function, module, name):
        if not hasattr(function, "__wrapped__"):
            return _surviving(module, name) or _never_called
        function = function.__wrapped__
    return function


def _never_called(function: Any, *args: Any, use_reentrant: Any = None, **kwargs: Any) -> Any:
    """Stands for a function of torch's that another tool replaced and nothing holds any more."""
    raise NotImplementedError("this function of torch is gone")


def _is_defined_in(function: Any, module: ModuleType, name: str) -> bool:
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_name == name
        and not code.co_freevars
        and function.__globals__ is vars(module)
    )


def _surviving(module: ModuleType, name: str) -> Any:
    for candidate in gc.get_referrers(vars(module)):
        if isinstance(candidate, FunctionType) and _is_defined_in(candidate, module, name):
            return candidate
    return None


#: Keyword arguments of ``torch.utils.checkpoint.checkpoint`` itself, with the
#: default of each; everything else goes to the checkpointed function.
#: ``early_stop`` came with torch 2.9, ``respect_saved_tensors_hooks`` with 2.14.
CHECKPOINT_KEYWORDS: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(
        torchs_own(torch_checkpoint, "checkpoint")
    ).parameters.items()
    if parameter.kind is inspect.Parameter.KEYWORD_ONLY
}
CHECKPOINT_KEYWORDS.setdefault("preserve_rng_state", True)


#: The function that runs a region, however ``checkpoint`` was called.  From torch 2.14
#: on that is ``_checkpoint_impl(function, args, kwargs, *, ...)``, to which the curried
#: form ``checkpoint(use_reentrant=False)(function)`` goes directly.
checkpoint_takes_tuples = hasattr(torch_checkpoint, "_checkpoint_impl")
checkpoint_function = torchs_own(
    torch_checkpoint, "_checkpoint_impl" if checkpoint_takes_tuples else "checkpoint"
)
#: What ``determinism_check`` may be.
DETERMINISM_CHECKS: tuple[str, ...] = tuple(
    getattr(torch_checkpoint, "_allowed_determinism_checks_to_fns", ("default", "none"))
)

#: The dispatch modes by which ``torch.utils.checkpoint`` carries out a
#: selective policy: (forward, recompute).
selective_checkpoint_modes = (
    torch_checkpoint._CachingTorchDispatchMode,
    torch_checkpoint._CachedTorchDispatchMode,
)


@contextmanager
def selective_modes_pass_other_operators() -> Iterator[None]:
    """Let these modes ask their policy about ``cond``, ``while_loop`` and their like too, each as
    one operation; without, such an operator in a region that is compiled is an error.  An older
    torch has no such switch."""
    switch = "supports_higher_order_operators"
    with ExitStack() as stack:
        for mode in selective_checkpoint_modes:
            if not getattr(mode, switch, True):
                if switch in vars(mode):
                    stack.callback(setattr, mode, switch, False)
                else:
                    stack.callback(delattr, mode, switch)
                setattr(mode, switch, True)
        yield


#: Operations that a selective policy is not asked about.
sac_ignored_operations = torch_checkpoint.SAC_IGNORED_OPS


def sac_context(is_recompute: bool, output: Any) -> Any:
    """What a policy is told about a call; torch itself gives ``op_output`` from 2.10 on."""
    context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=is_recompute)
    context.op_output = output
    return context


def cache_earlier_output(
    mode_reference: Any, operation: Any, index: int, output: torch.Tensor
) -> bool:
    """Let a selective region take ``output`` for the ``index``-th call of an operation that
    it was to recompute.  False where this torch or this region cannot (before 2.10 the
    mode keeps no such table; from 2.14 a region may hand what it keeps to the user's hooks).
    """
    mode = mode_reference()
    placed = getattr(mode, "storage", {}).get(operation)
    recomputed = getattr(torch_checkpoint, "_RECOMPUTE", None)
    if not isinstance(placed, dict) or recomputed is None:
        return False
    if placed.get(index) is not recomputed or getattr(mode, "respect_saved_tensors_hooks", False):
        return False
    placed[index] = torch_checkpoint._VersionWrapper(output)
    return True
