"""The demo runs, measures what it says, and fails loudly."""

from __future__ import annotations

import importlib.util
import math
import re

import pytest
import torch
from torch import nn

from hops import __main__ as command_line
from hops import _demo_measure as measure
from hops import _demo_models as models
from hops import demo
from hops._demo_report import Comparisons, format_table

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers, the demo's extra, is not installed",
)


#: Each region and Function with its place, each front end with eager and stock, and the steps of
#: training; each stage that may take long says that it has begun.
SHOWN = (
    "called        module",
    "FakeQuantizedWeight",
    *("eager, no checkpoint", "eager, checkpoint use_reentrant=", "hops, nonstrict-plain"),
    *("hops, strict-reentrant", "stock, "),
    *("largest gradient difference", "bytes for backward"),
    *(
        "build the model ... ",
        "forward and backward, checkpoint",
        "torch.export.export, strict-plain",
    ),
    *("eager: train 2 steps ... ", "new process: load strict-plain, train 2 steps ... "),
)


@needs_transformers
@pytest.mark.parametrize("name", list(models.NETWORKS))
def test_every_comparison_holds(name, monkeypatch, capfd):
    monkeypatch.setattr(demo, "STOCK_SETTINGS", demo.STOCK_SETTINGS[:1])
    status = demo.run(name, steps=2, size=models.TINY)
    output = capfd.readouterr()
    assert status == 0, output.out + output.err
    assert "comparisons with eager hold" in output.out
    for shown in SHOWN:
        assert shown in output.out


def test_progress_is_shown_before_the_work_is_done(capfd):
    with demo.progress("something long"):
        assert capfd.readouterr().out.endswith("something long ... ")
    assert re.fullmatch(r"\d+\.\d s\n", capfd.readouterr().out)


@needs_transformers
def test_a_failed_comparison_sets_the_exit_status(monkeypatch, capfd):
    monkeypatch.setattr(demo, "SETTINGS", demo.SETTINGS[:1])
    monkeypatch.setattr(demo, "STOCK_SETTINGS", [])
    monkeypatch.setattr(measure, "gradient_difference", lambda step, reference: 1.0)
    assert demo.run("llama", steps=1, size=models.TINY) == 1
    assert "FAILED: nonstrict-plain: gradients: differ by 1.0e+00" in capfd.readouterr().err


@needs_transformers
@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_eager_calls_counts_every_call_with_its_module(use_reentrant):
    model = models.build("llama", models.TINY)
    models.set_checkpointing(model, use_reentrant)
    calls = measure.eager_calls(
        model, models.FakeQuantize, models.batches("llama", models.TINY, 1)[0]
    )
    per_callee = [
        sum(n for call, n in calls.items() if call.callee == measure.CHECKPOINT),
        calls.total(),
    ]
    regions = 0 if use_reentrant is None else models.TINY.layers
    quantised = 7 * models.TINY.layers + 1
    assert per_callee == [regions, regions + quantised]


def test_bytes_for_backward_counts_each_saved_storage_once():
    class Square(nn.Module):
        def forward(self, x):
            root = x.exp()
            return (root * root.view(-1)).sum()

    x = torch.zeros(10, requires_grad=True)
    saved, loss = 10 * 4, 4
    assert measure.bytes_for_backward(Square(), (x,)) == saved + loss


def test_gradient_difference_tells_none_from_zero():
    with_none = measure.Step(0.0, {("weight",): None})
    with_zeros = measure.Step(0.0, {("weight",): torch.zeros(2)})
    assert math.isinf(measure.gradient_difference(with_none, with_zeros))
    assert measure.gradient_difference(with_none, with_none) == 0.0


def test_gradient_difference_wants_one_name_of_a_tied_parameter():
    tied = measure.Step(0.0, {("first", "second"): torch.ones(2)})
    one_name = measure.Step(0.0, {("second",): torch.ones(2)})
    untied = measure.Step(0.0, {("first",): torch.ones(2), ("second",): torch.zeros(2)})
    renamed = measure.Step(0.0, {("third",): torch.ones(2)})
    assert measure.gradient_difference(one_name, tied) == 0.0
    assert measure.gradient_difference(untied, tied) == 1.0
    assert math.isinf(measure.gradient_difference(renamed, tied))


def test_unknown_model_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown model 'bert': choose from llama, gpt2, vit"):
        models.build("bert")


def test_comparisons_count_and_name_failures(capsys):
    comparisons = Comparisons()
    comparisons.check("loss", True)
    comparisons.check("gradients", False, "differ by 1")
    assert comparisons.exit_status() == 1
    assert "1 of 2 comparisons with eager FAILED" in capsys.readouterr().out


def test_tables_align_figures_to_the_right():
    assert format_table(["name", "n"], [["a", "1"], ["b", "10"]]).splitlines() == [
        "name   n",
        "----  --",
        "a      1",
        "b     10",
    ]


def test_doctor_prints_its_report(capsys):
    assert command_line.main(["doctor"]) == 0
    assert capsys.readouterr().out.strip()
