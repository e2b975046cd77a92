"""`python -m benchmarks` runs every benchmark of hops and prints medians and ratios.

Variants that are compared take turns within one run, and a ratio is the median of the ratios of
neighbouring samples.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import hops
from benchmarks import _cases as cases
from benchmarks._timing import Samples, Surrounding, Variant, interleave, stock_torch
from hops._demo_measure import bytes_for_backward
from hops._demo_report import format_table, print_section, progress

OPERATOR = torch.ops.higher_order.autograd_function_apply
ROOT = Path(__file__).resolve().parents[1]
FRONT_ENDS = {"non-strict": False, "strict": True}
# Strict capture takes four times as long, so it gets the depth of the goal and one more.
DEPTHS = {"non-strict": (6, 12, 24, 48), "strict": (6, 24)}


class Result(NamedTuple):
    """One line of the report."""

    what: str
    baseline: str
    ours: str
    ratio: str
    goal: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks and print one table; return 0, whatever the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="samples of each variant (default: 5)"
    )
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {rounds} rounds")
    results = [*fresh_processes(rounds), *replay(rounds), *captures(rounds), *memory()]
    print_section("medians; ratio is hops over the baseline")
    print(format_table(["what", "baseline", "hops", "ratio", "goal"], results))
    return 0


def fresh_processes(rounds: int) -> list[Result]:
    """Import time, and eager calls with and without hops, each in processes of their own."""
    runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with progress("import and eager calls, in fresh processes"):
        fresh_process("with", samples=1)
        for turn in range(rounds):
            for side in sorted(runs, reverse=turn % 2 == 0):
                runs[side].append(fresh_process(side))
    columns = {
        name: Samples({side: [run[name] for run in runs[side]] for side in runs})
        for name in runs["with"][0]
    }
    imports, baseline = columns.pop("import hops"), columns.pop("import torch")
    added = imports.median("with")
    return [
        Result(
            "import hops after import torch",
            _ms(baseline.median("with")),
            _ms(added),
            "-",
            _goal(added * 1e3, 50),
        ),
        *(_eager_result(name, samples) for name, samples in columns.items()),
    ]


def _eager_result(name: str, samples: Samples) -> Result:
    # No difference is wanted; the twentieth is what two processes that run the same code differ by.
    return _result(
        f"eager {name}", samples, "with", "without", _goal(samples.ratio("with", "without"), 1.05)
    )


def fresh_process(side: str, samples: int = 15) -> dict[str, float]:
    """Run `benchmarks._fresh_process`, `with` or `without` hops; return its seconds by name."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # An installed package has its bytecode; compiling it would be most of what is measured.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks._fresh_process", side, str(samples)]
    return json.loads(
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    )


def replay(rounds: int) -> list[Result]:
    """The captured operator, and torch's own, against `Foo.apply`."""
    x = cases.chain_input()
    results = []
    for calls in (1, 32):
        runs = replay_variants(calls)
        with progress(f"replay of {calls} Function calls"):
            forward = _replay_samples(runs, lambda module: module(x), rounds, calls)
            both = _replay_samples(
                runs, lambda module: cases.forward_backward(module, x), rounds, calls
            )
        for what, samples in (
            (f"{calls} x apply, forward", forward),
            (f"{calls} x apply, forward + backward", both),
        ):
            # The goal is the operator's: export adds its input checks, and look-ups of bodies.
            goal = _goal(samples.ratio("operator", "eager"), 1.5)
            results.append(_result(f"the operator, {what}", samples, "operator", "eager", goal))
            results.append(_result(f"ep.module(), {what}", samples, "hops", "eager", "-"))
            results.append(_result(f"torch's operator, {what}", samples, "stock", "eager", "-"))
    return results


def replay_variants(calls: int) -> dict[str, nn.Module]:
    """The same chain of Function calls: eager, captured, and as stock Dynamo's graph."""
    chain, x = cases.Chain(calls), cases.chain_input()
    program = torch.export.export(chain, (x,), strict=False)
    return {
        "eager": chain,
        "operator": _OperatorChain(program.graph_module, calls),
        "hops": program.module(),
        "stock": stock_graph(chain, x),
    }


class _OperatorChain(nn.Module):
    """The captured operator called as often as the chain calls the Function, with no graph."""

    def __init__(self, graph: torch.fx.GraphModule, calls: int) -> None:
        super().__init__()
        self.calls = calls
        node = next(n for n in graph.graph.nodes if n.target is OPERATOR)
        parts = hops.function_parts(node)
        self.operator = partial(OPERATOR, parts.forward, parts.backward, **node.kwargs)

    def forward(self, x: Tensor) -> Tensor:
        operator = self.operator
        for _ in range(self.calls):
            x = operator(x)[0]
        return x


def stock_graph(module: nn.Module, x: Tensor) -> nn.Module:
    """The graph that torch.compile gives its back end without hops: torch's own operators."""
    graphs: list[nn.Module] = []

    def keep(graph: nn.Module, example_inputs: Sequence[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    with stock_torch(), _clean_dynamo():
        torch.compile(module, backend=keep, fullgraph=True)(x)
    return _TensorOutput(*graphs)


class _TensorOutput(nn.Module):
    """Dynamo's graphs return a tuple of one."""

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def forward(self, x: Tensor) -> Tensor:
        return self.graph(x)[0]


def _replay_samples(
    modules: dict[str, nn.Module], run: Callable[[nn.Module], object], rounds: int, calls: int
) -> Samples:
    contexts: dict[str, Surrounding] = {
        "eager": nullcontext,
        "operator": nullcontext,
        "hops": nullcontext,
        "stock": stock_torch,
    }
    variants = {name: Variant(partial(run, modules[name]), contexts[name]) for name in modules}
    return interleave(variants, 3 * rounds, 320 // calls)


def captures(rounds: int) -> list[Result]:
    """Capture of blocks with checkpoint and Function, against stock capture without them."""
    results = []
    for front_end, strict in FRONT_ENDS.items():
        for depth in DEPTHS[front_end]:
            with progress(f"{front_end} capture of {depth} blocks"):
                samples = interleave(capture_variants(depth, strict), rounds, calls=1)
            goal = _goal(samples.ratio("hops", "stock"), 1.2) if depth == 24 else "-"
            per_block = f"{samples.median('hops') / depth * 1e3:.1f} ms a block"
            row = _result(f"{front_end} capture, {depth} blocks", samples, "hops", "stock", goal)
            results.append(row._replace(ours=f"{row.ours} ({per_block})"))
    return results


def capture_variants(depth: int, strict: bool) -> dict[str, Variant]:
    """Capture with hops of the wrapped transformer, and without hops of the plain one."""
    x = cases.transformer_input()
    wrapped, plain = cases.wrapped_transformer(depth), cases.plain_transformer(depth)
    return {
        "hops": Variant(lambda: torch.export.export(wrapped, (x,), strict=strict), _clean_dynamo),
        "stock": Variant(lambda: torch.export.export(plain, (x,), strict=strict), _clean_stock),
    }


def memory(depth: int = 24) -> list[Result]:
    """Bytes that wait for backward: the captured transformer against eager's checkpoint."""
    x = cases.transformer_input()
    model = cases.wrapped_transformer(depth)
    eager = bytes_for_backward(model, (x,))
    unchecked = bytes_for_backward(cases.plain_transformer(depth), (x,))
    results = [_bytes_result("eager without checkpoint", unchecked, eager)]
    for front_end, strict in FRONT_ENDS.items():
        kept = bytes_for_backward(torch.export.export(model, (x,), strict=strict).module(), (x,))
        row = _bytes_result(f"{front_end} capture", kept, eager)
        results.append(row._replace(goal=_goal(kept / eager, 1.01)))
    return results


@contextlib.contextmanager
def _clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield


@contextlib.contextmanager
def _clean_stock() -> Iterator[None]:
    with stock_torch(), _clean_dynamo():
        yield


def _result(what: str, samples: Samples, ours: str, baseline: str, goal: str) -> Result:
    ratio = f"{samples.ratio(ours, baseline):.2f}"
    return Result(what, _ms(samples.median(baseline)), _ms(samples.median(ours)), ratio, goal)


def _bytes_result(what: str, kept: int, eager: int) -> Result:
    return Result(
        f"bytes for backward, {what}", f"{eager:,}", f"{kept:,}", f"{kept / eager:.3f}", "-"
    )


def _goal(figure: float, limit: float) -> str:
    return f"<= {limit:g} {'met' if figure <= limit else 'MISSED'}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


if __name__ == "__main__":
    sys.exit(main())
