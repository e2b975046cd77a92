"""The programs of which ``tests/files`` keeps files, and what writes them.

``PYTHONPATH=. python tests/file_models.py`` adds the files of the torch that it runs on.
Those that are there stay: they stand for what users have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models import BothModel, CheckpointModel, FunctionModel, RichModel

import hops
from hops.policies import save_matmuls

FILES = Path(__file__).parent / "files"


class NamedPolicyModel(torch.nn.Module):
    """A region with a policy of hops, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.first.weight.requires_grad_(False)

    def forward(self, x):
        def region(h):
            return self.second(self.first(h).sin()).tanh()

        checkpoint = torch.utils.checkpoint.checkpoint
        return checkpoint(region, x, use_reentrant=False, context_fn=save_matmuls)


@dataclasses.dataclass(frozen=True)
class Program:
    """A model of which there is a file for each torch.

    Attributes:
        model: what builds it.
        strict: how it is exported.
        dynamic: whether the size of the batch is a symbol.
    """

    model: Callable[[], torch.nn.Module]
    strict: bool = False
    dynamic: bool = False

    def export(self) -> torch.export.ExportedProgram:
        torch.manual_seed(0)
        shapes: Any = ({0: torch.export.Dim("batch", min=2, max=64)},) if self.dynamic else None
        model, x = self.model(), rows(4)
        return torch.export.export(model, (x,), strict=self.strict, dynamic_shapes=shapes)


PROGRAMS = {
    "function": Program(FunctionModel),
    "region": Program(CheckpointModel),
    "nested": Program(BothModel),
    "nested_strict": Program(BothModel, strict=True),
    "nested_dynamic": Program(BothModel, dynamic=True),
    "selective": Program(RichModel),
    "named_policy": Program(NamedPolicyModel),
}


def without_paths(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Without stack traces, which tell where on the machine of the writer the sources are."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)
    return program


def rows(number: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * number).reshape(number, 3)


def write() -> None:
    directory = FILES / torch.__version__.partition("+")[0]
    directory.mkdir(parents=True, exist_ok=True)
    for name, program in PROGRAMS.items():
        file = directory / f"{name}.pt2"
        if not file.exists():
            torch.export.save(without_paths(program.export()), file)
            print(f"hops {hops.__version__} on torch {torch.__version__} wrote {file}")


if __name__ == "__main__":
    write()
