"""Timing on a noisy machine: variants take turns, and ratios are taken within a turn."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import hops

Surrounding = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Variant:
    """Something to time, and a context that surrounds each sample without being timed."""

    run: Callable[[], object]
    surrounding: Surrounding = nullcontext


@dataclass(frozen=True)
class Samples:
    """Seconds for one call, one sample a round; samples of one round were taken in a row."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        """Median seconds of one call of the variant `name`."""
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, baseline: str) -> float:
        """Median over the rounds of the ratio of `name` to `baseline`."""
        pairs = zip(self.seconds[name], self.seconds[baseline], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def interleave(variants: Mapping[str, Variant], rounds: int, calls: int) -> Samples:
    """Time each variant once a round, `calls` calls a sample, after a round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 1):
        names = list(variants) if turn % 2 else list(variants)[::-1]
        for name in names:
            sample = _sample(variants[name], calls)
            if turn:
                seconds[name].append(sample)
    return Samples(seconds)


@contextlib.contextmanager
def stock_torch() -> Iterator[None]:
    """Take the patch of hops away for the duration of a with block."""
    hops.uninstall()
    try:
        yield
    finally:
        hops.install()


def _sample(variant: Variant, calls: int) -> float:
    with variant.surrounding():
        gc.collect()
        start = time.perf_counter()
        for _ in range(calls):
            variant.run()
        return (time.perf_counter() - start) / calls
