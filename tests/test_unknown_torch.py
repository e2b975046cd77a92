"""A torch newer than any that hops knows: accepted, and what it lacks is named by one warning."""

import pytest
from fresh import run

SEE = """
import warnings, torch
torch.__version__ = "2.99.0.dev0"
from torch.fx.experimental import proxy_tensor
from torch._functorch.autograd_function import autograd_function_apply as function
from torch._higher_order_ops.wrap import tag_activation_checkpoint as region

def see():
    tables = [dict(t) for o in (function, region)
              for t in (o.py_kernels, o.python_key_table, o.functorch_table, o._dispatch_cache)]
    return [tables, type(function), type(region), set(torch.fx.node._side_effectful_functions),
            vars(proxy_tensor._MakefxTracer).get("_trace_inner"),
            vars(proxy_tensor.PreDispatchTorchFunctionMode)["__torch_function__"]]

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Model(torch.nn.Module):
    def forward(self, x):
        return Double.apply(x)

def captured(**options):
    program = torch.export.export(Model(), (torch.ones(2, requires_grad=True),), **options)
    return any(n.target is function for n in program.graph.nodes)

def import_hops():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        import hops
    return hops, [str(w.message) for w in told if issubclass(w.category, hops.HopsWarning)]
"""


def test_an_unknown_version_that_has_everything_is_not_warned_of():
    run(
        SEE
        + """
hops, told = import_hops()
assert told == []
assert captured(strict=False)
"""
    )


#: What all of hops is built on: the first is found missing while hops is imported, the second
#: would be missed in the middle of a capture, the third when the table of sites is carried out.
@pytest.mark.parametrize(
    "owner, name",
    [
        ("torch._C", "_AutoDispatchBelowAutograd"),
        ("torch._C", "_current_graph_task_id"),
        ("proxy_tensor._MakefxTracer", "_trace_inner"),
    ],
)
def test_without_something_essential_nothing_is_patched(owner, name):
    printed = run(
        SEE
        + f"""
delattr({owner}, "{name}")
before = see()
hops, told = import_hops()
assert see() == before
assert len(told) == 1 and "2.99.0.dev0" in told[0] and "{name}" in told[0], told
assert "othing is patched" in told[0]
hops.uninstall()
assert see() == before
import torch._dynamo
assert see()[:3] == before[:3]
from hops.__main__ import main
main(["doctor"])
"""
    )
    assert name in printed


def test_the_api_says_what_is_missing():
    run(
        SEE
        + """
del torch._C._AutoDispatchBelowAutograd
hops, told = import_hops()
for call in (hops.function_parts, hops.saved_for_backward, hops.run_decompositions):
    try:
        call(None)
    except hops.CaptureError as error:
        assert "_AutoDispatchBelowAutograd" in str(error) and "2.99.0.dev0" in str(error)
    else:
        raise AssertionError("no error")
"""
    )


def test_a_site_that_fails_is_left_off_whole_and_the_others_are_patched():
    """Of the site's many changes, one in the middle is not possible."""
    printed = run(
        SEE
        + """
import torch._dynamo
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.trace_rules import get_mod_inlinelist

def see_dynamo():
    return [vars(TorchHigherOrderOperatorVariable)["make"],
            vars(AutogradFunctionVariable)["call_apply"],
            vars(OutputGraph)["call_user_compiler"], vars(SideEffects).get("store_attr"),
            vars(SideEffects).get("mutation"), list(InstructionTranslator.dispatch_table),
            set(get_mod_inlinelist())]

del SideEffects.mutation
before = see_dynamo()
hops, told = import_hops()
assert len(told) == 1 and "SideEffects.mutation does not exist" in told[0], told
assert "torch._dynamo: " in told[0] and "the others are patched" in told[0]
assert see_dynamo() == before
assert captured(strict=False)
from hops import _doctor
print(_doctor.report())
"""
    )
    assert "left off" in printed and "SideEffects.mutation does not exist" in printed


def test_what_is_missing_in_a_module_imported_later_is_told_then():
    run(
        SEE
        + """
hops, told = import_hops()
assert told == []
import torch.export.exported_program  # before the module that the site waits for
import sys
assert "torch._export.passes.replace_autocast_with_hop_pass" not in sys.modules
from hops import _sites

import importlib.abc
class Removing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torch._export.passes.replace_autocast_with_hop_pass":
            return None
        sys.meta_path.remove(self)
        import importlib.util
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            del module.node_inline_
        spec.loader.exec_module = exec_module
        return spec
from importlib.machinery import PathFinder
sys.meta_path.insert(sys.meta_path.index(PathFinder), Removing())
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import torch._export.passes.replace_autocast_with_hop_pass as module
told = [str(w.message) for w in told if issubclass(w.category, hops.HopsWarning)]
assert len(told) == 1 and "node_inline_ does not exist" in told[0], told
from torch.fx.passes import utils  # noqa
assert not hasattr(module.nodes_first, "__wrapped__")
"""
    )
