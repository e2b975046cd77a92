"""Capture PyTorch training graphs without losing what the user wrote.

``import hops`` makes calls of ``torch.autograd.Function`` and regions of
``torch.utils.checkpoint`` first-class operators of every pre-dispatch graph.
"""

from typing import TYPE_CHECKING

import torch  # noqa: F401  (a missing torch is an ImportError, not a torch that lacks something)

from hops._version import __version__
from hops.errors import CaptureError, HopsWarning, OperatorCallError, ReplayError

__all__ = [
    "CaptureError",
    "CheckpointParts",
    "FunctionParts",
    "HopsWarning",
    "OperatorCallError",
    "ReplayError",
    "SavedForBackward",
    "SavedTensor",
    "__version__",
    "canonicalize",
    "checkpoint_name",
    "checkpoint_parts",
    "function_parts",
    "install",
    "policies",
    "run_decompositions",
    "saved_for_backward",
    "uninstall",
]

try:
    from hops import _probe, policies  # noqa: F401
    from hops._canonical import canonicalize
    from hops._decompose import run_decompositions
    from hops._names import checkpoint_name
    from hops._parts import CheckpointParts, FunctionParts, checkpoint_parts, function_parts
    from hops._patches import install, uninstall
    from hops._saved import SavedForBackward, SavedTensor, saved_for_backward
except (ImportError, AttributeError) as error:
    # A torch in which something is missing that all of hops is built on.
    if TYPE_CHECKING:
        raise
    from hops import _unusable

    globals().update(_unusable.stand_back(error, [n for n in __all__ if n not in globals()]))
else:
    install()
