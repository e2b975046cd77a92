"""The main job on a real model: capture, compare with eager, save, reload, train.

`python -m hops demo --model llama` builds a small network of Hugging Face `transformers` from a
config, turns its gradient checkpointing on, fake-quantises its weights with a
`torch.autograd.Function`, and shows that what `torch.export` captures is what eager runs. It exits
with status 1 when any comparison fails.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import hops
from hops import _demo_measure as measure
from hops import _demo_models as models
from hops._demo_report import Comparisons, format_table, print_section, progress
from hops._demo_train import BATCHES, LOSSES, train

GRADIENT_TOLERANCE = 1e-5  # of the largest gradient entry; replay runs the very ops that eager runs
LOSS_TOLERANCE = 1e-4  # relative, over all training steps
BYTES_TOLERANCE = 1.01  # of what eager keeps with checkpointing

Inputs = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """One way to capture the model."""

    strict: bool
    use_reentrant: bool | None  # None: without checkpoint

    @property
    def label(self) -> str:
        """Name of the setting in tables and file names."""
        kind = {None: "nocheckpoint", False: "plain", True: "reentrant"}[self.use_reentrant]
        return f"{'strict' if self.strict else 'nonstrict'}-{kind}"


SETTINGS = [
    Setting(strict, use_reentrant) for use_reentrant in (False, True) for strict in (False, True)
]
STOCK_SETTINGS = [*(Setting(strict, None) for strict in (False, True)), *SETTINGS]


@dataclass(frozen=True)
class Capture:
    """A captured program, and how long the capture took."""

    setting: Setting
    program: torch.export.ExportedProgram
    seconds: float


@dataclass(frozen=True)
class Reference:
    """What eager does under one checkpoint setting."""

    calls: Counter[measure.Call]
    step: measure.Step
    kept: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo from command-line `arguments`; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hops demo", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", choices=list(models.NETWORKS), default="llama")
    parser.add_argument("--steps", type=int, default=20, help="training steps (default: 20)")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("transformers") is None:
        print(
            "the demo needs the package transformers: pip install 'torch-hops[demo]'",
            file=sys.stderr,
        )
        return 2
    return run(options.model, options.steps)


def run(name: str, steps: int = 20, size: models.Size = models.SMALL) -> int:
    """Run the demo on the model called `name`; return 0 if every comparison holds, else 1."""
    comparisons = Comparisons()
    print(f"model {name}, {size.layers} layers of width {size.width}, torch {torch.__version__}")
    with progress("build the model"):
        model = models.build(name, size)
    data = models.batches(name, size, count=4)
    references = _eager_references(model, data[0])
    captures = _capture_all(model, data[0], comparisons)
    _show_calls(references, captures, comparisons)
    _show_steps(model, data[0], references, captures, comparisons)
    _show_training(model, data, steps, captures, comparisons)
    return comparisons.exit_status()


def _eager_references(model: models.TrainingLoss, inputs: Inputs) -> dict[bool | None, Reference]:
    print_section("eager")
    references = {}
    for use_reentrant in (None, False, True):
        with progress(f"forward and backward, {_checkpoint_words(use_reentrant)}"):
            models.set_checkpointing(model, use_reentrant)
            references[use_reentrant] = Reference(
                measure.eager_calls(model, models.FakeQuantize, inputs),
                measure.run_step(model, inputs),
                measure.bytes_for_backward(model, inputs),
            )
    return references


def _capture_all(
    model: models.TrainingLoss, inputs: Inputs, comparisons: Comparisons
) -> list[Capture]:
    print_section("capture")
    captures = []
    for setting in SETTINGS:
        models.set_checkpointing(model, setting.use_reentrant)
        try:
            with progress(f"torch.export.export, {setting.label}"):
                captures.append(_capture(model, inputs, setting))
        except Exception as error:
            traceback.print_exc()
            comparisons.check(f"{setting.label} captures", False, _first_line(error))
    return captures


def _capture(model: models.TrainingLoss, inputs: Inputs, setting: Setting) -> Capture:
    start = time.perf_counter()
    with warnings.catch_warnings():
        # transformers sets a context variable in forward, which Dynamo reports; it is harmless.
        warnings.filterwarnings("ignore", message="While compiling, we found certain side effects")
        program = torch.export.export(model, inputs, strict=setting.strict)
    return Capture(setting, program, time.perf_counter() - start)


def _show_calls(
    references: dict[bool | None, Reference], captures: Sequence[Capture], comparisons: Comparisons
) -> None:
    print_section(
        "regions and Functions: calls that eager makes, operators that each capture holds"
    )
    found = {
        capture.setting: measure.captured_calls(capture.program.graph_module)
        for capture in captures
    }
    expected = references[False].calls
    every_call = dict.fromkeys([*expected, *(call for calls in found.values() for call in calls)])
    columns = [expected, *found.values()]
    rows = [
        [
            call.callee.rpartition(".")[2],
            call.path,
            call.owner,
            *(str(calls[call]) for calls in columns),
        ]
        for call in every_call
    ]
    totals = ["all", "", "", *(str(calls.total()) for calls in columns)]
    header = [
        "called",
        "module",
        "class",
        "eager",
        *(capture.setting.label for capture in captures),
    ]
    print(format_table(header, [*rows, totals]))
    for capture in captures:
        label, calls = capture.setting.label, references[capture.setting.use_reentrant].calls
        difference = _call_difference(found[capture.setting], calls)
        comparisons.check(f"{label}: calls found", not difference, difference)
        comparisons.check(f"{label}: use_reentrant is kept", _reentrant_kept(capture))


def _reentrant_kept(capture: Capture) -> bool:
    regions = filter(measure.is_checkpoint, measure.operator_nodes(capture.program.graph_module))
    return all(
        hops.checkpoint_parts(n).options["use_reentrant"] == capture.setting.use_reentrant
        for n in regions
    )


def _show_steps(
    model: models.TrainingLoss,
    inputs: Inputs,
    references: dict[bool | None, Reference],
    captures: Sequence[Capture],
    comparisons: Comparisons,
) -> None:
    print_section("one training step against eager, dropout on")
    rows = [_eager_row(use_reentrant, references) for use_reentrant in (None, False, True)]
    for capture in captures:
        reference = references[capture.setting.use_reentrant]
        rows.append(_captured_row(capture, inputs, reference, comparisons))
    rows += [
        _stock_row(model, inputs, setting, references[setting.use_reentrant])
        for setting in STOCK_SETTINGS
    ]
    header = [
        "run",
        "loss",
        "largest gradient difference",
        "bytes for backward",
        "capture s",
        "error",
    ]
    print(format_table(header, rows))


def _eager_row(use_reentrant: bool | None, references: dict[bool | None, Reference]) -> list[str]:
    reference = references[use_reentrant]
    difference = measure.gradient_difference(reference.step, references[None].step)
    return _row(
        f"eager, {_checkpoint_words(use_reentrant)}", reference.step, difference, reference.kept
    )


def _captured_row(
    capture: Capture, inputs: Inputs, reference: Reference, comparisons: Comparisons
) -> list[str]:
    label = capture.setting.label
    try:
        step, kept = _replay(capture, inputs)
    except Exception as error:
        traceback.print_exc()
        comparisons.check(f"{label}: replay", False, _first_line(error))
        return _error_row(f"hops, {label}", error)
    difference = measure.gradient_difference(step, reference.step)
    comparisons.check(
        f"{label}: loss", step.loss == reference.step.loss, f"{step.loss} for {reference.step.loss}"
    )
    comparisons.check(
        f"{label}: gradients", difference <= GRADIENT_TOLERANCE, f"differ by {difference:.1e}"
    )
    limit = BYTES_TOLERANCE * reference.kept
    comparisons.check(
        f"{label}: bytes for backward", kept <= limit, f"{kept:,} for {reference.kept:,}"
    )
    return _row(f"hops, {label}", step, difference, kept, capture.seconds)


def _stock_row(
    model: models.TrainingLoss, inputs: Inputs, setting: Setting, reference: Reference
) -> list[str]:
    """What the same export gives without hops: shown, not compared."""
    title = f"stock, {setting.label}"
    models.set_checkpointing(model, setting.use_reentrant)
    with _stock_torch():
        try:
            capture = _capture(model, inputs, setting)
            step, kept = _replay(capture, inputs)
        except Exception as error:
            return _error_row(title, error)
    return _row(
        title, step, measure.gradient_difference(step, reference.step), kept, capture.seconds
    )


def _replay(capture: Capture, inputs: Inputs) -> tuple[measure.Step, int]:
    module = capture.program.module()
    return measure.run_step(module, inputs), measure.bytes_for_backward(module, inputs)


def _row(
    title: str, step: measure.Step, difference: float, kept: int, seconds: float | None = None
) -> list[str]:
    gradients = "None for some" if difference == float("inf") else f"{difference:.1e}"
    return [
        title,
        f"{step.loss:.6f}",
        gradients,
        f"{kept:,}",
        "-" if seconds is None else f"{seconds:.1f}",
        "",
    ]


def _error_row(title: str, error: Exception) -> list[str]:
    return [title, "-", "-", "-", "-", f"{type(error).__name__}: {_first_line(error)}"[:60]]


def _show_training(
    model: models.TrainingLoss,
    data: Sequence[Inputs],
    steps: int,
    captures: Sequence[Capture],
    comparisons: Comparisons,
) -> None:
    print_section(f"save, reload in a new process, train {steps} steps beside eager")
    models.set_checkpointing(model, False)
    with progress(f"eager: train {steps} steps"):
        eager = train(copy.deepcopy(model), data, steps)
    reloaded = _train_reloaded(captures, data, steps)
    header = ["step", "eager", *reloaded]
    columns = [eager, *reloaded.values()]
    print(
        format_table(
            header,
            [[str(i + 1), *(f"{losses[i]:.6f}" for losses in columns)] for i in range(steps)],
        )
    )
    for label, losses in reloaded.items():
        difference = max(abs(a - b) / abs(b) for a, b in zip(losses, eager, strict=True))
        comparisons.check(
            f"{label}: losses after reload",
            difference <= LOSS_TOLERANCE,
            f"differ by {difference:.1e}",
        )
    comparisons.check(
        "every capture was reloaded and trained", len(reloaded) == len(SETTINGS), f"{len(reloaded)}"
    )


def _train_reloaded(
    captures: Sequence[Capture], data: Sequence[Inputs], steps: int
) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(list(data), folder / BATCHES)
        for capture in captures:
            with progress(f"save {capture.setting.label}"):
                torch.export.save(capture.program, folder / f"{capture.setting.label}.pt2")
        command = [sys.executable, "-m", "hops._demo_train", str(folder), str(steps)]
        status = subprocess.run(command, env=_environment()).returncode
        return json.loads((folder / LOSSES).read_text()) if status == 0 else {}


def _environment() -> dict[str, str]:
    """This process's environment, in which a child finds the same `hops`."""
    package = str(Path(hops.__file__).resolve().parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")]),
    }


@contextlib.contextmanager
def _stock_torch() -> Iterator[None]:
    hops.uninstall()
    try:
        yield
    finally:
        hops.install()


def _checkpoint_words(use_reentrant: bool | None) -> str:
    return "no checkpoint" if use_reentrant is None else f"checkpoint use_reentrant={use_reentrant}"


def _call_difference(found: Counter[measure.Call], expected: Counter[measure.Call]) -> str:
    """Say which calls are in only one of the two; empty when they are equal."""
    sides = {"lacks": expected - found, "has but eager has not": found - expected}
    return "; ".join(
        f"{words} {calls.total()}, first {next(iter(calls))}"
        for words, calls in sides.items()
        if calls
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
