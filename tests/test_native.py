"""Where torch has a rule or a front end of its own, ours steps back.  A stub stands for such a torch."""

import pytest
from fresh import run

#: A torch whose operators have rules of their own, as `register` says.
STUB = """
import torch
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._functorch.autograd_function import autograd_function_apply as function
from torch._higher_order_ops.wrap import tag_activation_checkpoint as region
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

def theirs(*args, **kwargs):
    raise RuntimeError("the rule of this torch")

def table(operator):
    tables = (operator.py_kernels, operator.python_key_table, operator.functorch_table)
    return {key: rule for table in tables for key, rule in table.items()}

def register(operator, key):
    operator.python_key_table.pop(key, None)
    operator.py_impl(key)(theirs)
"""

KEYS = (
    "DispatchKey.Autograd",
    "DispatchKey.CompositeExplicitAutograd",
    "FakeTensorMode",
    "TransformType.Vmap",
)


@pytest.mark.parametrize("key", [*KEYS, "ProxyTorchDispatchMode"])
def test_a_rule_of_torchs_own_stays_and_the_others_are_ours(key):
    run(
        STUB
        + f"""
register(function, {key})
before, stock = table(function), type(function)
import hops
from dispatch_rules import TABLE
now = table(function)
assert now[{key}] is theirs
for other in ({", ".join((*KEYS, "ProxyTorchDispatchMode"))},):
    if other is not {key}:
        assert now[other] is TABLE["autograd_function_apply"][other], other
assert type(function) is not stock
hops.uninstall()
assert table(function) == before and type(function) is stock
"""
    )


def test_a_native_rule_for_autograd_is_also_what_a_plain_call_reaches():
    run(
        STUB
        + """
register(region, DispatchKey.Autograd)
import hops
body = torch.fx.symbolic_trace(lambda x: (x.sin(),))
try:
    region(body, torch.ones(2, requires_grad=True), use_reentrant=False)
except RuntimeError as error:
    assert "the rule of this torch" in str(error)
else:
    raise AssertionError("our rule ran")
"""
    )


def test_stocks_rule_for_tracing_a_region_is_no_native_rule():
    """It puts the body into the graph as it is, and takes a selective policy for granted."""
    run(
        """
        import torch
        from torch._higher_order_ops.wrap import tag_activation_checkpoint as region
        from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
        import hops
        from dispatch_rules import TABLE
        ours = TABLE["tag_activation_checkpoint"][ProxyTorchDispatchMode]
        assert region.python_key_table[ProxyTorchDispatchMode] is ours
        """
    )


def test_a_native_operator_keeps_its_class_and_a_native_front_end_makes_our_hooks_needless():
    printed = run(
        STUB
        + """
from torch.fx.experimental import proxy_tensor

register(function, DispatchKey.Autograd)
register(function, ProxyTorchDispatchMode)
stock, trace_inner = type(function), proxy_tensor._MakefxTracer._trace_inner

def capturing(self, f, *args):
    # Stands for a tracer that writes the operator by itself.
    graph = trace_inner(self, f, *args)
    if self.pre_dispatch:
        with graph.graph.inserting_before():
            graph.graph.call_function(function)
    return graph

proxy_tensor._MakefxTracer._trace_inner = capturing
import hops
from hops import _capture_hooks
assert type(function) is stock
assert _capture_hooks.native_hooks == {"Function"}
meta = type(torch.autograd.Function)
seen = []
from torch.utils.checkpoint import checkpoint

def call(x):
    seen.append("__getattribute__" in vars(meta))
    return checkpoint(torch.sin, x, use_reentrant=False)

graph = proxy_tensor.make_fx(call, pre_dispatch=True)(torch.ones(2, requires_grad=True))
assert seen == [False], seen
assert any(n.target is region for n in graph.graph.nodes)  # regions are still ours to catch
from hops import _doctor
print(_doctor.report())
hops.uninstall()
assert proxy_tensor._MakefxTracer._trace_inner is capturing
assert _capture_hooks.native_hooks == set()
"""
    )
    assert "native: capture of each Function" in printed
    assert "native: rule for ProxyTorchDispatchMode" in printed


def test_without_a_native_operator_no_front_end_is_looked_for():
    """Looking means to capture something, which costs time at import."""
    run(
        """
        from torch.fx.experimental import proxy_tensor
        def refuse(*args):
            raise AssertionError("captured something during import")
        proxy_tensor._MakefxTracer._trace_inner = refuse
        import hops
        assert proxy_tensor._MakefxTracer._trace_inner is not refuse
        """
    )
