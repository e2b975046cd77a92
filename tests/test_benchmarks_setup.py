"""The benchmarks compare like with like. Nothing is timed here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import __main__ as benchmarks
from benchmarks import _cases as cases
from benchmarks._timing import Variant, interleave
from hops._demo_measure import captured_calls, run_step


def test_wrapped_and_plain_transformers_compute_the_same():
    x = cases.transformer_input()
    wrapped = run_step(cases.wrapped_transformer(2), (x,))
    plain = run_step(cases.plain_transformer(2), (x,))
    assert wrapped.loss == plain.loss
    torch.testing.assert_close(wrapped.gradients, plain.gradients)


@pytest.mark.parametrize("variant", ["operator", "hops", "stock"])
def test_replayed_chains_compute_what_eager_does(variant):
    variants = benchmarks.replay_variants(3)
    x = cases.chain_input()
    torch.testing.assert_close(variants[variant](x), variants["eager"](x))
    expected = cases.forward_backward(variants["eager"], x)
    torch.testing.assert_close(cases.forward_backward(variants[variant], x), expected)


def test_the_captured_chain_holds_one_operator_a_call():
    module = benchmarks.replay_variants(3)["hops"]
    assert captured_calls(module).total() == 3


@pytest.mark.parametrize("strict", [False, True])
def test_capture_variants_capture(strict):
    variants = benchmarks.capture_variants(2, strict)
    calls = {}
    for name, variant in variants.items():
        with variant.surrounding():
            program = variant.run()
        calls[name] = captured_calls(program.graph_module).total()
    assert calls == {"hops": 4, "stock": 0}


def test_memory_rows_cover_every_front_end():
    rows = benchmarks.memory(depth=2)
    assert len(rows) == 1 + len(benchmarks.FRONT_ENDS)


@pytest.mark.parametrize("side", ["with", "without"])
def test_a_fresh_process_reports_every_figure(side):
    seconds = benchmarks.fresh_process(side, samples=1)
    assert len(seconds) == 6
    assert all(value >= 0 for value in seconds.values())


def test_interleave_takes_one_sample_a_round_and_warms_up():
    ran = {"a": 0, "b": 0}

    def count(name):
        ran[name] += 1

    variants = {name: Variant(lambda name=name: count(name)) for name in ran}
    samples = interleave(variants, rounds=3, calls=2)
    assert ran == {"a": 8, "b": 8}
    assert {name: len(values) for name, values in samples.seconds.items()} == {"a": 3, "b": 3}
