"""Checks of a call of the two operators, and of the calls that a file holds.

A call is checked once: what passed is noted on the class of its first body
(fx makes a class for each GraphModule), and the next call with the same bodies
and keywords compares with that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hops._torch import CHECKPOINT_KEYWORDS, DETERMINISM_CHECKS
from hops.errors import OperatorCallError

#: Keywords of ``autograd_function_apply`` in ATen form, in the order of a node.
FUNCTION_KEYWORDS = (
    "name",
    "num_outputs",
    "num_inputs",
    "non_differentiable_idx",
    "dirty_idx",
    "saved_for_backward_idx",
    "materialize_grads",
    "needs_input_grad",
    "once_differentiable",
    "no_backward",
)
_KNOWN_TO_FUNCTIONS = frozenset(FUNCTION_KEYWORDS) | {"args_tensor_mask"}
_OTHER_BACKWARD = re.compile(r"bwd_without_(\d+(?:_\d+)*)", re.ASCII)

#: The keyword ``form`` marks a region in ATen form.  Stock torch does not know it
#: and stops; it would run the region otherwise, and from 2.13 draw other random
#: numbers in recompute than in forward, without a word.
FORM = 1

#: How a region holds its policy.
POLICY_KEYWORDS = ("policy", "policy_name", "allow_cache_entry_mutation")

REGION_KEYWORDS = frozenset(CHECKPOINT_KEYWORDS) | {
    "early_stop",
    "preserve_rng_state",
    "respect_saved_tensors_hooks",
    "form",
    *POLICY_KEYWORDS,
}

_RECORD = "_hops_checked_call"


def is_checked(body: Any, backward: Any, num_operands: int, options: dict[str, Any]) -> bool:
    """Whether this very call has passed before, for bodies that were not recompiled since."""
    kind = type(body)
    record = getattr(kind, _RECORD, None)
    return record is not None and record == (
        kind.forward,
        getattr(type(backward), "forward", None),
        num_operands,
        options,
    )


def _note(body: Any, backward: Any, num_operands: int, options: dict[str, Any]) -> None:
    kind = type(body)
    backward_code = getattr(type(backward), "forward", None)
    setattr(kind, _RECORD, (kind.forward, backward_code, num_operands, dict(options)))


class _Check:
    """The checks of one call; each failure names the call."""

    def __init__(self, call: str, options: dict[str, Any]) -> None:
        self.call = call
        self.options = options

    def fail(self, message: str) -> OperatorCallError:
        return OperatorCallError(f"{self.call}: {message}")

    def body(self, label: str, body: Any) -> None:
        if not isinstance(body, fx.GraphModule):
            raise self.fail(
                f"{label} must be a torch.fx.GraphModule, got {type(body).__name__}. Trace the "
                "callable first, for example with torch.fx.experimental.proxy_tensor.make_fx."
            )

    def count(self, key: str, low: int, high: int, of_what: str) -> int:
        value = self.options[key]
        if type(value) is not int:
            raise self.fail(f"{key} must be an int, got {_shown(value)}")
        if not low <= value <= high:
            raise self.fail(f"{key}={value} does not fit: there are {high} {of_what}")
        return value

    def positions(self, key: str, size: int, of_what: str) -> None:
        value = self.options.get(key, ())
        if not isinstance(value, (list, tuple)) or any(type(i) is not int for i in value):
            raise self.fail(f"{key} must be a list of ints, got {_shown(value)}")
        if len(set(value)) != len(value):
            raise self.fail(f"{key}={_shown(list(value))} names a position twice")
        for position in value:
            if not 0 <= position < size:
                raise self.fail(f"{key} names position {position}, but there are {size} {of_what}")

    def flags(self, key: str, size: int | None = None) -> None:
        value = self.options.get(key, ())
        if not isinstance(value, (list, tuple)) or any(type(v) is not bool for v in value):
            raise self.fail(f"{key} must be a list of bools, got {_shown(value)}")
        if size is not None and key in self.options and len(value) != size:
            raise self.fail(f"{key} has {len(value)} entries, expected {size}")

    def one_of(self, key: str, *allowed: Any) -> None:
        if key in self.options:
            value = self.options[key]
            if not any(type(value) is type(a) and value == a for a in allowed):
                raise self.fail(
                    f"{key} must be {' or '.join(map(repr, allowed))}, got {_shown(value)}"
                )


def _shown(value: Any) -> str:
    """A value in an error message: its text, escaped and cut."""
    text = ascii(value) if isinstance(value, (str, int, float, list, tuple)) else ""
    text = text or f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _placeholders(body: fx.GraphModule) -> int:
    return len(body.graph.find_nodes(op="placeholder"))


def check_function_call(
    fwd: Any, bwd: Any, operands: Sequence[Any], options: dict[str, Any]
) -> None:
    """Check a call of ``autograd_function_apply``, in ATen form or one of Dynamo's.

    Raises:
        OperatorCallError: says what does not fit.
    """
    check = _Check(_call_name(options.get("name", "")), options)
    others = {k: v for k, v in options.items() if k.startswith("bwd_without_")}
    for label, body in [("fwd", fwd), ("bwd", bwd), *others.items()]:
        check.body(label, body)
    unknown = sorted(options.keys() - _KNOWN_TO_FUNCTIONS - others.keys())
    if unknown:
        raise check.fail(
            f"unknown keyword {_shown(unknown[0])}; known are "
            f"{', '.join(sorted(_KNOWN_TO_FUNCTIONS))} and bwd_without_*"
        )
    expected = _placeholders(fwd)
    given = len(operands) + ("args_tensor_mask" in options)
    if expected != given:
        raise check.fail(f"the forward body takes {expected} operands, got {given}")
    if "num_outputs" in options:
        _check_aten_function(check, fwd, {"bwd": bwd, **others}, len(operands))
    elif others:
        raise check.fail(f"keyword {min(others)} needs num_outputs")
    else:
        check.flags("args_tensor_mask")
    _note(fwd, bwd, len(operands), options)


def _call_name(name: Any) -> str:
    if not isinstance(name, str) or not name.isprintable():
        raise OperatorCallError(
            "autograd_function_apply: name must be the module-qualified name of a Function, "
            f"got {_shown(name)}"
        )
    return f"autograd_function_apply({name})"


def _check_aten_function(
    check: _Check, fwd: fx.GraphModule, backwards: dict[str, Any], num_operands: int
) -> None:
    if "args_tensor_mask" in check.options:
        raise check.fail("num_outputs and args_tensor_mask are keywords of different forms")
    values = _flat_output(check, "fwd", fwd)
    num_outputs = check.count("num_outputs", 0, len(values), "values that fwd gives")
    num_inputs = num_operands
    if "num_inputs" in check.options:
        num_inputs = check.count("num_inputs", 0, num_operands, "operands")
    for label, body in backwards.items():
        _check_backward(check, label, body, values, num_outputs)
        _check_gradients(check, label, body, num_inputs, num_operands)
    check.positions("non_differentiable_idx", num_outputs, "outputs")
    check.positions("dirty_idx", num_outputs, "outputs")
    check.positions("saved_for_backward_idx", len(values) - num_outputs, "saved values")
    check.flags("needs_input_grad", num_inputs)
    check.one_of("materialize_grads", True, False)
    check.one_of("once_differentiable", True)
    check.one_of("no_backward", True)
    _check_other_backwards(check, backwards, num_outputs)


def _flat_output(check: _Check, label: str, body: fx.GraphModule) -> Sequence[Any]:
    outputs = body.graph.find_nodes(op="output")
    values = outputs[0].args[0] if outputs else None
    if not isinstance(values, (tuple, list)):
        raise check.fail(f"{label} must give a tuple of values")
    if any(isinstance(v, (tuple, list, dict)) for v in values):
        raise check.fail(f"{label} must give a flat tuple, not a nested one")
    return values


def _check_backward(
    check: _Check, label: str, body: Any, values: Sequence[Any], num_outputs: int
) -> None:
    """A backward takes a gradient for each output that is a tensor, then the saved values."""
    kinds = [_kind(value) for value in values[:num_outputs]]
    fewest = kinds.count("tensor") + len(values) - num_outputs
    most = fewest + kinds.count("unknown")
    taken = _placeholders(body)
    if not fewest <= taken <= most:
        raise check.fail(
            f"{label} takes {taken} values, but fwd gives {fewest} (one gradient for each "
            "output that is a tensor, then the saved values)"
        )


def _kind(value: Any) -> str:
    if not isinstance(value, fx.Node):
        return "constant"
    example = value.meta.get("val")
    if example is None:
        return "unknown"
    return "tensor" if isinstance(example, torch.Tensor) else "number"


def _check_gradients(
    check: _Check, label: str, body: Any, num_inputs: int, num_operands: int
) -> None:
    given = len(_flat_output(check, label, body))
    if not num_inputs <= given <= num_operands:
        raise check.fail(
            f"{label} gives {given} gradients for {num_inputs} inputs among {num_operands} operands"
        )


def _check_other_backwards(check: _Check, backwards: dict[str, Any], num_outputs: int) -> None:
    for label in backwards:
        if label == "bwd":
            continue
        if check.options.get("materialize_grads", True):
            raise check.fail(f"keyword {_shown(label)} needs materialize_grads=False")
        match = _OTHER_BACKWARD.fullmatch(label)
        missing = [int(i) for i in match[1].split("_")] if match else []
        if missing != sorted(set(missing)) or not missing or missing[-1] >= num_outputs:
            raise check.fail(
                f"keyword {_shown(label)} does not name some of the {num_outputs} outputs, as "
                "bwd_without_0_1 does"
            )


def check_region_call(body: Any, operands: Sequence[Any], options: dict[str, Any]) -> None:
    """Check a call of ``tag_activation_checkpoint``.

    Raises:
        OperatorCallError: says what does not fit.
    """
    check = _Check("tag_activation_checkpoint", options)
    check.body("the body", body)
    unknown = sorted(options.keys() - REGION_KEYWORDS)
    if unknown:
        raise check.fail(
            f"unknown keyword {_shown(unknown[0])}; known are {', '.join(sorted(REGION_KEYWORDS))}"
        )
    expected = _placeholders(body)
    if expected != len(operands):
        raise check.fail(f"the body takes {expected} operands, got {len(operands)}")
    if "form" in options:
        _check_aten_region(check, body)
    _note(body, None, len(operands), options)


def _check_aten_region(check: _Check, body: fx.GraphModule) -> None:
    if check.options["form"] != FORM or type(check.options["form"]) is not int:
        raise check.fail(
            f"form is {_shown(check.options['form'])}, this version of hops knows {FORM}; the "
            "region is damaged or from a newer version"
        )
    _flat_output(check, "the body", body)
    check.one_of("use_reentrant", True, False, None)
    for key in ("preserve_rng_state", "debug", "early_stop", "respect_saved_tensors_hooks"):
        check.one_of(key, True, False)
    check.one_of("determinism_check", *DETERMINISM_CHECKS)
    policy = check.options.get("policy", [])
    if not isinstance(policy, (list, tuple)) or any(not isinstance(p, str) for p in policy):
        raise check.fail(f"policy must be a list of texts, got {_shown(policy)}")
    name = check.options.get("policy_name", "")
    if not isinstance(name, str) or not name.isprintable():
        raise check.fail(f"policy_name must be the text of a policy, got {_shown(name)}")
    check.one_of("allow_cache_entry_mutation", True, False)
