"""Every operator has a rule under every key, and refuses what it has no rule for."""

import pytest
import torch
from torch._C import DispatchKey
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, make_fx
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

import hops
from dispatch_rules import TABLE
from hops._torch import FUNCTIONALIZE

OPERATORS = ("autograd_function_apply", "tag_activation_checkpoint")
KEYS = (
    DispatchKey.Autograd,
    DispatchKey.CompositeExplicitAutograd,
    ProxyTorchDispatchMode,
    FakeTensorMode,
    FUNCTIONALIZE,
    _CachingTorchDispatchMode,
    _CachedTorchDispatchMode,
    TransformType.Grad,
    TransformType.Jvp,
    TransformType.Vmap,
)


@pytest.mark.parametrize("key", KEYS, ids=lambda k: getattr(k, "name", None) or k.__name__)
@pytest.mark.parametrize("name", OPERATORS)
def test_each_operator_has_a_rule_under_each_key(name, key):
    assert callable(TABLE[name][key])
    operator = getattr(torch.ops.higher_order, name)
    if isinstance(key, DispatchKey):
        assert operator.py_kernels[key] is TABLE[name][key]
    elif isinstance(key, TransformType):
        assert operator.functorch_table[key] is TABLE[name][key]
    elif key is not FUNCTIONALIZE:
        assert operator.python_key_table[key] is TABLE[name][key]


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_is_the_projects_and_still_of_the_stock_class(name):
    from torch._functorch.autograd_function import AutogradFunctionApply
    from torch._higher_order_ops.wrap import TagActivationCheckpoint

    operator = getattr(torch.ops.higher_order, name)
    stock = AutogradFunctionApply if name == "autograd_function_apply" else TagActivationCheckpoint
    assert isinstance(operator, stock)
    assert type(operator).__module__.startswith("hops.")


def identity_body(count=1):
    def body(*values):
        return tuple(v * 1 for v in values)

    return make_fx(body)(*[torch.ones(2)] * count)


class Unknown(torch.utils._python_dispatch.TorchDispatchMode):
    pass


@pytest.mark.parametrize("name", OPERATORS)
def test_a_mode_without_a_rule_is_refused_by_name(name):
    operator = getattr(torch.ops.higher_order, name)
    bodies = [identity_body()] * (2 if name == "autograd_function_apply" else 1)
    options = {"num_outputs": 1} if name == "autograd_function_apply" else {}
    with torch.inference_mode():
        x = torch.ones(2)
        with Unknown(), pytest.raises(NotImplementedError, match=f"{name}.*Unknown"):
            operator(*bodies, x, **options)


def test_bodies_that_are_not_graph_modules_are_refused():
    function = torch.ops.higher_order.autograd_function_apply
    with pytest.raises(hops.OperatorCallError, match="fwd must be a torch.fx.GraphModule"):
        function(lambda x: (x,), identity_body(), torch.ones(2), num_outputs=1)
    region = torch.ops.higher_order.tag_activation_checkpoint
    with pytest.raises(hops.OperatorCallError, match="body must be a torch.fx.GraphModule"):
        region(lambda x: (x,), torch.ones(2))


def test_a_wrong_number_of_operands_is_refused():
    function = torch.ops.higher_order.autograd_function_apply
    with pytest.raises(hops.OperatorCallError, match="takes 1 operands, got 2"):
        function(identity_body(), identity_body(), torch.ones(2), torch.ones(2), num_outputs=1)
    region = torch.ops.higher_order.tag_activation_checkpoint
    with pytest.raises(hops.OperatorCallError, match="takes 1 operands, got 0"):
        region(identity_body())


def test_unknown_keywords_are_refused():
    function = torch.ops.higher_order.autograd_function_apply
    with pytest.raises(hops.OperatorCallError, match="unknown keyword 'num_output'"):
        function(identity_body(), identity_body(), torch.ones(2), num_output=1)
    region = torch.ops.higher_order.tag_activation_checkpoint
    with pytest.raises(hops.OperatorCallError, match="unknown keyword 'reentrant'"):
        region(identity_body(), torch.ones(2), reentrant=True)
