"""What Dynamo does with calls of the two operators, and with Functions under export.

Dynamo is imported here, and this module is imported with Dynamo only: hops
itself does not pay for it.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import symbolic_convert, trace_rules
from torch._dynamo.exc import Unsupported
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.functions import UserFunctionVariable, UserMethodVariable
from torch._dynamo.variables.higher_order_ops import (
    CheckpointHigherOrderVariable,
    TorchHigherOrderOperatorVariable,
)
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from hops import _dynamo_classes, _dynamo_compile
from hops._capture_function import function_name
from hops._changes import Changes
from hops._dynamo_errors import naming
from hops._dynamo_functions import capture_by_running, installed_name
from hops._dynamo_modules import separate_shared_modules
from hops._dynamo_policies import known_context_fn
from hops._dynamo_regions import MARKS, fold_regions, trace_region
from hops._policy import region_name
from hops._torch import (
    functions_with_effects,
    is_data_dependence,
    python_apply,
    stock_autograd_function_apply,
    stock_tag_activation_checkpoint,
    torch_checkpoint,
    unbacked_symbols_bound,
)
from hops._whole_capture import whole_capture_is_active

#: Where Dynamo's graph keeps its copies of captured bodies, by the ids of those.
_COPIES = "_hops_copies"


class CapturedFunctionVariable(TorchHigherOrderOperatorVariable):
    """A call of ``autograd_function_apply`` in code that Dynamo reads.

    Such code is a graph that was captured already: its bodies go into the new
    graph as they are.
    """

    _HOP_NAME = "autograd_function_apply"
    _ALLOW_FALLBACK_TO_EAGER = True

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return _call_captured(tx, self.value, list(args), dict(kwargs))


class CapturedCheckpointVariable(CheckpointHigherOrderVariable):
    """A call of ``tag_activation_checkpoint``: a captured one keeps its body as it
    is; the user's own ``checkpoint(f, ...)`` is traced in place under export, and by
    stock Dynamo otherwise."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        if not args and "function" in kwargs:
            kwargs = dict(kwargs)
            args = [kwargs.pop("function")]
        if "form" in kwargs:
            if _graph_module(tx, args[0]) is not None:
                return _call_captured(tx, self.value, list(args), dict(kwargs))
        if "context_fn" in kwargs:
            kwargs = {**kwargs, "context_fn": known_context_fn(tx, kwargs["context_fn"])}
        if tx.output.export:
            return trace_region(tx, self, list(args), dict(kwargs))
        return super().call_function(tx, args, kwargs)


def _graph_module(tx: Any, variable: Any) -> fx.GraphModule | None:
    variable = variable.realize()
    value = getattr(variable, "value", None)
    if value is None and getattr(variable, "module_key", None) is not None:
        value = tx.output.get_submodule(variable.module_key)
    return value if isinstance(value, fx.GraphModule) else None


def _call_captured(tx: Any, operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    arguments = [_as_proxy_and_value(tx, a) for a in args]
    keywords = {k: _as_proxy_and_value(tx, v) for k, v in kwargs.items()}
    with _leaving_data_dependence(arguments[0][1], kwargs, tx.output.fake_mode):
        example = operator(
            *[value for _, value in arguments], **{k: v for k, (_, v) in keywords.items()}
        )
    proxy = tx.output.create_proxy(
        "call_function",
        operator,
        args=tuple(p for p, _ in arguments),
        kwargs={k: p for k, (p, _) in keywords.items()},
    )
    return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=example)


@contextmanager
def _leaving_data_dependence(body: Any, keywords: dict[str, Any], mode: Any) -> Iterator[None]:
    """Run a body on fake tensors; one that makes sizes out of the values of tensors leaves the
    graph, unless Dynamo is set to capture these and need not check them."""
    checks = getattr(mode.shape_env, "deferred_runtime_asserts", {})
    before = set(checks)
    try:
        with enable_python_dispatcher(), mode, unbacked_symbols_bound(mode):
            yield
        error = None
    except Exception as raised:
        if not is_data_dependence(raised):
            raise
        error = raised
    if error is not None or checks.keys() - before:
        name = keywords["name"].as_python_constant() if "name" in keywords else region_name(body)
        raise Unsupported(
            f"hops: {name} has sizes that depend on the values of its tensors, which this "
            f"compilation does not capture ({error or 'they are checked'}). It leaves the graph "
            "and runs as it is."
        ) from error


def _as_proxy_and_value(tx: Any, variable: Any) -> tuple[Any, Any]:
    """An argument as it goes into the graph, and as it goes into the fake run."""
    body = _graph_module(tx, variable)
    if body is not None:
        body = _own_body(tx.output, body)
        name = installed_name(tx, body)
        return tx.output.create_proxy("get_attr", name, (), {}), body
    proxy = variable.as_proxy()
    if isinstance(proxy, fx.Proxy):
        return proxy, proxy.node.meta["example_value"]
    return proxy, proxy


def _own_body(output: OutputGraph, body: fx.GraphModule) -> fx.GraphModule:
    """A copy of a body for the new graph, one for all calls: Dynamo takes outputs that
    nothing uses out of it, and the program that it reads must not change by that."""
    copies = vars(output).setdefault(_COPIES, {})
    if id(body) not in copies:
        tensors = (*body.parameters(), *body.buffers())
        own = copy.deepcopy(body, {id(tensor): tensor for tensor in tensors})
        _forget_sizes(own)
        copies[id(body)] = (body, own)
    return copies[id(body)][1]


def _forget_sizes(body: fx.GraphModule) -> None:
    """Sizes that depend on values have names in the ShapeEnv of their capture, which Dynamo
    would look up in its own."""
    for module in body.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("unbacked_bindings", None)


def make_variable(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``TorchHigherOrderOperatorVariable.make`` with the two operators known."""

    def make(value: Any, source: Any = None, **kwargs: Any) -> Any:
        if value is stock_autograd_function_apply:
            return CapturedFunctionVariable(value, source, **kwargs)
        if value is stock_tag_activation_checkpoint:
            return CapturedCheckpointVariable(value, source, **kwargs)
        return stock(value, source, **kwargs)

    return make


def call_apply_under_export(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``AutogradFunctionVariable.call_apply``; under export a Function is captured
    by running it, as every other front end does (``hops._dynamo_functions``).

    What ``torch.compile`` hands to a backend stays as stock writes it.
    """

    @functools.wraps(stock)
    def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not tx.output.export:
            return _dynamo_compile.read_call(stock, self, tx, args, kwargs)
        return _run(tx, self.fn_cls, args, kwargs)

    return call_apply


def _run(tx: Any, function: Any, args: Any, kwargs: Any) -> Any:
    with naming(function_name(function)):
        return capture_by_running(tx, function, args, kwargs)


def call_bound_apply_under_export(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``UserMethodVariable.call_function``; under export ``apply`` is a call of the Function,
    also where Dynamo would read the Python inside.

    That is so where a module keeps ``apply`` as an attribute (2.10 and 2.11), and where the
    class of the Function has a metaclass of its own.
    """

    @functools.wraps(stock)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if tx.output.export and self.fn is python_apply:
            owner = self.obj.realize()
            function = owner.fn_cls if isinstance(owner, AutogradFunctionVariable) else owner.value
            return _run(tx, function, args, kwargs)
        return stock(self, tx, args, kwargs)

    return call_function


def call_method_under_export(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``UserDefinedClassVariable.call_method``, likewise where ``apply`` is native (2.14 on)."""

    @functools.wraps(stock)
    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_apply = name == "apply" and issubclass(self.value, torch.autograd.Function)
        if tx.output.export and is_apply:
            return _run(tx, self.value, args, kwargs)
        return stock(self, tx, name, args, kwargs)

    return call_method


def call_class_under_export(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``UserDefinedClassVariable.call_function``, which does not look for a ``__call__`` that a
    metaclass gives a Function."""

    @functools.wraps(stock)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        called = type(self.value).__call__
        is_own = issubclass(self.value, torch.autograd.Function) and isinstance(
            called, types.FunctionType
        )
        if tx.output.export and is_own:
            return UserFunctionVariable(called).call_function(tx, [self, *args], kwargs)
        return stock(self, tx, args, kwargs)

    return call_function


def call_user_compiler(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``OutputGraph.call_user_compiler``, which gets the complete graph."""

    @functools.wraps(stock)
    def call_user_compiler(self: Any, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        if self.export:
            fold_regions(gm)
            separate_shared_modules(gm)
        return stock(self, gm, *args, **kwargs)

    return call_user_compiler


def reading_checkpoint_sequential(stock: Callable[[str], bool]) -> Callable[[str], bool]:
    """``trace_rules.is_torch_inline_allowed``, which also lets an export read what
    ``torch.utils.checkpoint`` defines; ``torch.compile`` leaves that out of the graph."""

    @functools.wraps(stock)
    def is_torch_inline_allowed(filename: str) -> bool:
        if stock(filename):
            return True
        return filename == torch_checkpoint.__file__ and _is_export()

    return is_torch_inline_allowed


def _is_export() -> bool:
    # Outside of any trace, where torch and others may ask too, there is no translator.
    tx = getattr(symbolic_convert.tls, "current_tx", None)
    return whole_capture_is_active() or tx is not None and bool(tx.output.export)


def patch(changes: Changes) -> None:
    changes.attribute(
        TorchHigherOrderOperatorVariable,
        "make",
        lambda _: staticmethod(make_variable(TorchHigherOrderOperatorVariable.make)),
    )
    changes.attribute(AutogradFunctionVariable, "call_apply", call_apply_under_export)
    changes.attribute(UserMethodVariable, "call_function", call_bound_apply_under_export)
    changes.attribute(UserDefinedClassVariable, "call_method", call_method_under_export)
    changes.attribute(UserDefinedClassVariable, "call_function", call_class_under_export)
    changes.attribute(OutputGraph, "call_user_compiler", call_user_compiler)
    changes.members(functions_with_effects(), MARKS)
    _dynamo_compile.patch(changes)
    _dynamo_classes.patch(changes)
    changes.attribute(trace_rules, "is_torch_inline_allowed", reading_checkpoint_sequential)
