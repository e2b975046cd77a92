"""The demo's training loop, and the process that reloads saved programs and trains them.

Run as a module it needs neither `transformers` nor the model's source: only torch and hops.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import hops  # noqa: F401  registers the operators that the saved programs call
from hops._demo_report import progress

BATCHES = "batches.pt"
LOSSES = "losses.json"


def train(
    module: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], steps: int, seed: int = 0
) -> list[float]:
    """Train `module`, which returns a scalar loss, with AdamW; return the loss of each step.

    Batches are taken in turn. The default generator is seeded once, so equal models draw equal
    dropout masks.
    """
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = module(*batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(folder: Path, steps: int) -> None:
    """Reload and train every program saved in `folder`; write the losses there as JSON."""
    batches = torch.load(folder / BATCHES)
    losses = {}
    for path in sorted(folder.glob("*.pt2")):
        with progress(f"new process: load {path.stem}, train {steps} steps"):
            module = torch.export.load(path).module()
            losses[path.stem] = train(module, batches, steps)
    (folder / LOSSES).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
