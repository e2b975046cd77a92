"""The selective policy of a checkpointed region, as its captured body keeps it."""

from __future__ import annotations

from typing import Any

from torch import fx

from hops.tag_activation_checkpoint import CONTEXT_FN


def context_fn_of(body: fx.GraphModule) -> Any:
    """The ``context_fn`` of a region, or None for a region without a policy."""
    return body.meta.get(CONTEXT_FN)
