"""Whether Dynamo is asked for the graph of a whole model, on this thread.

``dynamo_graph_capture_for_export`` looks to Dynamo like a compilation with
``fullgraph=True``; the difference is that its graph is run without guards.
Nothing here imports Dynamo, whose own import may be going on.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


class _Capture(threading.local):
    active = False


_capture = _Capture()


def whole_capture_is_active() -> bool:
    return _capture.active


def noting_captures(fullgraph_capture: Callable[..., Any]) -> Callable[..., Any]:
    """``torch._dynamo.functional_export.fullgraph_capture``, known about while it runs."""

    @functools.wraps(fullgraph_capture)
    def noted(*args: Any, **kwargs: Any) -> Any:
        before, _capture.active = _capture.active, True
        try:
            return fullgraph_capture(*args, **kwargs)
        finally:
            _capture.active = before

    return noted
