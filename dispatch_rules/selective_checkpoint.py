"""The dispatch modes of selective checkpointing: a policy sees the operations of a
body one by one, as it sees those of the user's own code in eager."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dispatch_rules import fake_tensor_mode
from hops._torch import selective_checkpoint_modes

RULES = {
    "autograd_function_apply": dict.fromkeys(
        selective_checkpoint_modes, fake_tensor_mode.autograd_function_apply
    ),
    "tag_activation_checkpoint": dict.fromkeys(
        selective_checkpoint_modes, fake_tensor_mode.tag_activation_checkpoint
    ),
}


@contextmanager
def passing_other_operators() -> Iterator[None]:
    """Let the modes ask their policy about ``cond``, ``while_loop`` and their like too, each as
    one operation; without, such an operator in a region that is compiled is an error."""
    with ExitStack() as stack:
        for mode in selective_checkpoint_modes:
            if hasattr(mode, _PASSES):
                stack.callback(setattr, mode, _PASSES, getattr(mode, _PASSES))
                setattr(mode, _PASSES, True)
        yield


_PASSES = "supports_higher_order_operators"
