"""What a torch cannot do, so that a test has nothing to look at there: the one table.

A test of such a feature carries ``needs("<name>")``.  Where torch lacks the feature it is skipped,
and the end of the run counts the skipped tests by name.  (Where hops itself gives something else
than eager, a test of ``tests/parity`` must fail: ``tests/parity/expected_differences.py``.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._export.serde import schema
from torch._functorch import aot_autograd

from hops._torch import graph_capture_for_export, top_saved_tensors_hooks

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
PREFIX = "this torch lacks "


@dataclass(frozen=True)
class Feature:
    """Something that some tests need.

    Attributes:
        what: the feature, as a reader of a summary understands it.
        present: whether the running torch has it.
    """

    what: str
    present: bool


FEATURES = {
    "dynamo_graph_capture": Feature(
        "dynamo_graph_capture_for_export",
        graph_capture_for_export() is not None,
    ),
    "joint_with_descriptors": Feature(
        "aot_export_joint_with_descriptors",
        hasattr(aot_autograd, "aot_export_joint_with_descriptors"),
    ),
    "output_kept_afterwards": Feature(
        "a place in a selective region for an output that is kept afterwards",
        hasattr(torch.utils.checkpoint, "_RECOMPUTE"),
    ),
    "compiled_cond_backward": Feature(
        "compiled code with torch.cond and its backward",
        VERSION >= (2, 13),
    ),
    "data_dependent_break": Feature(
        "compiled code that goes on in eager where a size depends on values",
        VERSION >= (2, 13),
    ),
    "break_in_grad_transform": Feature(
        "compiled code that goes on in eager inside torch.func.grad",
        VERSION != (2, 11),
    ),
    "nested_grad_modes": Feature(
        "a pre-dispatch trace of its own with the right switch after a grad mode in another one",
        VERSION >= (2, 9),
    ),
    "saved_tensors_hooks_known": Feature(
        "telling which hooks act on what is saved for backward",
        top_saved_tensors_hooks is not None,
    ),
    "generators_in_traces": Feature(
        "a pre-dispatch trace of an operation that is handed a generator",
        VERSION >= (2, 13),
    ),
    "node_names_in_files": Feature(
        "names of nodes in the files of exported programs",
        "name" in schema.Node.__dataclass_fields__,
    ),
}


def needs(name: str) -> Any:
    """The mark of a test of a feature that not every torch has."""
    feature = FEATURES[name]
    reason = f"{PREFIX}{name}: {feature.what}"
    return pytest.mark.skipif(not feature.present, reason=reason)


def counted(reasons: Iterable[str]) -> list[str]:
    """One line for each feature for want of which tests were skipped."""
    names = Counter(r.partition(PREFIX)[2].partition(":")[0] for r in reasons if PREFIX in r)
    lines = [
        f"{names[name]:5} {name}: {feature.what}"
        for name, feature in FEATURES.items()
        if names[name]
    ]
    head = f"{sum(names.values())} tests skipped for what torch {torch.__version__} lacks"
    return [head, *lines]
