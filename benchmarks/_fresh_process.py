"""Times imports and ordinary eager calls in this process, which imports hops only when told to.

Usage: `python -m benchmarks._fresh_process with|without SAMPLES`; prints seconds by name as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def measure(with_hops: bool, samples: int) -> dict[str, float]:
    """Import torch, then hops if `with_hops`, then time eager calls; return the seconds of each.

    The import figures mean something only in a process that has imported neither.
    """
    start = time.perf_counter()
    import torch

    torch_done = time.perf_counter()
    if with_hops:
        import hops  # noqa: F401

    hops_done = time.perf_counter()
    torch.set_num_threads(1)
    return {
        "import torch": torch_done - start,
        "import hops": hops_done - torch_done,
        **_eager_calls(samples),
    }


def _eager_calls(samples: int) -> dict[str, float]:
    from benchmarks import _cases as cases

    x = cases.chain_input()

    def region(y: Any) -> Any:
        return cases.checkpointed(cases.function_swish, y)

    return {
        "Function.apply": _fastest(lambda: cases.Swish.apply(x), samples),
        "Function.apply and backward": _fastest(
            lambda: cases.forward_backward(cases.function_swish, x), samples
        ),
        "checkpoint": _fastest(lambda: region(x), samples),
        "checkpoint and backward": _fastest(lambda: cases.forward_backward(region, x), samples),
    }


def _fastest(run: Callable[[], object], samples: int, calls: int = 200) -> float:
    """Seconds of a call in the fastest sample: other work on the machine can only add to it."""
    seconds = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        seconds.append((time.perf_counter() - start) / calls)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1] == "with", int(sys.argv[2]))))
