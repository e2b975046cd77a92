"""Small questions to Dynamo's variables, with one answer on every torch."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch._dynamo.output_graph import LazyProxy
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable


def kind_of(variable: Any) -> Any:
    try:
        return variable.python_type()
    except NotImplementedError:
        return None


#: Where a variable of a user's subclass of a container holds the container itself.
_INNER = ("_base_vt", "_dict_vt", "_list_vt", "_set_vt", "_tuple_vt")


def items_of(variable: Any) -> Any:
    """The items of a container; those of a subclass may be held one level down."""
    for name in _INNER:
        inner = getattr(variable, name, None)
        if inner is not None:
            return attribute_or_none(inner, "items")
    return attribute_or_none(variable, "items")


def replace_contents(container: Any, contents: Any) -> None:
    """Give a container other items, past what a subclass of it does about that."""
    kind = next(k for k in CONTAINERS if isinstance(container, k))
    kind.clear(container)
    (getattr(kind, "update", None) or kind.extend)(container, contents)


CONTAINERS: tuple[Any, ...] = (list, collections.OrderedDict, dict, set, collections.deque)


def attribute_or_none(variable: Any, name: str) -> Any:
    """An attribute of a variable; some are computed, and fail where there is nothing."""
    try:
        return getattr(variable, name, None)
    except NotImplementedError:
        return None


def module_of(tx: Any, variable: Any) -> torch.nn.Module | None:
    value = attribute_or_none(variable, "value")
    if value is None and getattr(variable, "module_key", None) is not None:
        value = tx.output.get_submodule(variable.module_key)
    return value if isinstance(value, torch.nn.Module) else None


def proxy_of(variable: Any) -> Any:
    """The proxy of a tensor or symbolic number; that of a number may be made on demand."""
    proxy = variable.as_proxy()
    return proxy() if isinstance(proxy, LazyProxy) else proxy


def attribute(tx: Any, variable: Any, path: str) -> Any:
    """The variable at a path of attributes, as the traced code would get it."""
    get = VariableTracker.build(tx, getattr)
    for name in path.split("."):
        name_variable = ConstantVariable.create(name)
        variable = get.call_function(tx, [variable, name_variable], {})
        variable = variable.realize()
    return variable
