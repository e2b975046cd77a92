"""Small questions to Dynamo's variables, with one answer on every torch."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable


def kind_of(variable: Any) -> Any:
    try:
        return variable.python_type()
    except NotImplementedError:
        return None


def items_of(variable: Any) -> Any:
    """The items of a container; a tuple of torch 2.9 on may hold them one level down."""
    inner = getattr(variable, "_tuple_vt", None)
    return attribute_or_none(variable if inner is None else inner, "items")


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


def attribute(tx: Any, variable: Any, path: str) -> Any:
    """The variable at a path of attributes, as the traced code would get it."""
    get = VariableTracker.build(tx, getattr)
    for name in path.split("."):
        name_variable = ConstantVariable.create(name)
        variable = get.call_function(tx, [variable, name_variable], {})
        variable = variable.realize()
    return variable
