"""What does not equal eager, or is not captured, on which torch: the one table.

A test that an entry names must fail there (``xfail``, strict), so that the table
holds nothing that has come to work; pytest counts them as ``xfailed``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from version_differences import VERSION


def _numbers(version: str) -> tuple[int, ...]:
    """Major and minor number: as text, 2.10 would come before 2.6."""
    return tuple(map(int, version.split(".")[:2]))


@dataclass(frozen=True)
class Difference:
    """Tests of one case that fail for one reason.

    Attributes:
        case: name of the case, or of the test where it has none.
        reason: why, and what a user sees instead.
        runs: patterns of ``front_end-replay``, or of ``front_end`` for a test without replays.
        since, before: versions of torch between which it holds.
        test: name of the test function.
    """

    case: str
    reason: str
    runs: tuple[str, ...] = ("*",)
    since: str = "2.6"
    before: str = "99"
    test: str = "*"

    def holds_for(self, test: str, case: str, run: str) -> bool:
        return (
            self.case == case
            and fnmatchcase(test, self.test)
            and any(fnmatchcase(run, pattern) for pattern in self.runs)
            and _numbers(self.since) <= VERSION < _numbers(self.before)
        )


DIFFERENCES: tuple[Difference, ...] = (
    Difference(
        "on_what_scan_gives",
        "make_fx on fake tensors fails in scan itself, which compiles its arguments: an error of "
        "torch, with or without a Function",
        runs=("make_fx*",),
    ),
    Difference(
        "a_buffer_assigned_within_forward",
        "make_fx over functional_call loses what is assigned to a buffer, as functional_call does",
        runs=("make_fx-*",),
        test="test_equals_eager",
    ),
    Difference(
        "output_that_nothing_uses",
        "Dynamo leaves out code whose result nothing uses, as it does with any operation",
        runs=("strict-*", "dynamo_export-*"),
    ),
    Difference(
        "test_explicit_generator_gives_the_same_numbers_in_recompute",
        "eager's checkpoint keeps the state of the default generators only: from a generator "
        "that is passed, its recompute draws other numbers too",
    ),
    Difference(
        "backward_outside_of_the_autocast_of_its_forward",
        "strict export of any autocast block asserts the dtypes from before it, with or without "
        "a Function; the program stops at the assertion",
        runs=("strict-*",),
        test="test_equals_eager",
    ),
    Difference(
        "nested_in_a_model_with_no_grad_and_autocast_elsewhere",
        "the same assertion of strict export under autocast",
        runs=("strict-*",),
        test="test_equals_eager",
    ),
    Difference(
        "func_grad",
        "Dynamo's trace of torch.func.grad cannot be traced again before dispatch: an error of "
        "torch; capture with strict=False",
        runs=("strict*", "dynamo_export*"),
    ),
    Difference(
        "mark_dirty_on_a_view_whose_base_is_read_later",
        "sizes are dynamic unless told otherwise in torch._dynamo.export, and the view that "
        "autograd renews after the write would need a size of its base, which is no operand: an "
        "error that names the Function",
        runs=("dynamo_export*",),
    ),
    Difference(
        "a_wrapper_subclass",
        "torch._dynamo.export of a product of two tensors of the subclass is an error of torch",
        runs=("dynamo_export*",),
    ),
    Difference(
        "outputs_of_odd_kinds",
        "refused by name: Dynamo cannot be handed an object of a class that it does not know",
        runs=("strict*", "dynamo_export*"),
    ),
    Difference(
        "outputs_that_the_model_asks_about",
        "Dynamo does not read grad_fn of a tensor in forward: its own error",
        runs=("strict*", "dynamo_export*"),
    ),
    Difference(
        "backward_outside_of_the_autocast_of_its_forward",
        "silently different: Dynamo's graph holds the autocast block around the whole call, and "
        "what stock makes of it runs the backward under the autocast of the forward",
        runs=("dynamo_capture-*",),
    ),
    Difference(
        "a_buffer_assigned_within_forward",
        "silently different, as in stock torch: the lean capture drops assignments to attributes",
        runs=("dynamo_capture-*",),
    ),
    Difference(
        "a_parameter_through_an_outer_closure",
        "the captured module does not list a parameter that only a closure holds, so a trace on "
        "fake tensors meets a real one: an error of torch",
        runs=("dynamo_capture-retrace",),
    ),
    Difference(
        "a_global_tensor",
        "the same of a tensor that only a global holds",
        runs=("dynamo_capture-retrace",),
    ),
)

#: What Dynamo says by itself of models that it does not read as far as the call or after it.
REFUSED_BY_DYNAMO = (
    Difference("a_class_that_is_called", "a class that is called"),
    Difference("a_class_with_a_metaclass", "apply of a class with a metaclass"),
    Difference("a_function_defined_in_forward", "a class in forward"),
    Difference("a_parameter_through_a_closure", "a class in forward"),
    Difference("only_a_captured_parameter_requires_grad", "a class in forward"),
    Difference("an_intermediate_and_a_buffer_through_a_closure", "a class in forward"),
    Difference("a_generic_class", "a class of certain types"),
    Difference("dict_output", "an exception in the model"),
    Difference("mutable_class_state", "an attribute set on a class"),
    Difference("outputs_that_the_model_asks_about", "grad_fn of a tensor"),
)
DIFFERENCES += tuple(
    replace(entry, runs=("dynamo_capture-*",), reason=f"Dynamo's own error: {entry.reason}")
    for entry in REFUSED_BY_DYNAMO
)


def reasons(test: str, case: str, run: str) -> list[str]:
    """Why this run of this case is expected to fail; empty where it is not."""
    return [entry.reason for entry in DIFFERENCES if entry.holds_for(test, case, run)]
