"""Capture PyTorch training graphs without losing what the user wrote.

``import hops`` makes calls of ``torch.autograd.Function`` and regions of
``torch.utils.checkpoint`` first-class operators of every pre-dispatch graph.
"""

from hops import _patches, policies
from hops._decompose import run_decompositions
from hops._names import checkpoint_name
from hops._parts import CheckpointParts, FunctionParts, checkpoint_parts, function_parts
from hops._patches import install, uninstall
from hops._saved import SavedForBackward, SavedTensor, saved_for_backward
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
    "checkpoint_name",
    "checkpoint_parts",
    "function_parts",
    "install",
    "policies",
    "run_decompositions",
    "saved_for_backward",
    "uninstall",
]

_patches.install()
