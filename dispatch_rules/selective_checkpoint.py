"""The dispatch modes of selective checkpointing: a policy sees the operations of a
body one by one, as it sees those of the user's own code in eager."""

from __future__ import annotations

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
