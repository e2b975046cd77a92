"""Policies of ``hops.policies`` in code that Dynamo reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.builder import SourcelessBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.lists import TupleVariable

from hops.policies import Policy


def known_context_fn(tx: Any, variable: Any) -> Any:
    """A policy of ``hops.policies`` as a function, which is all that stock Dynamo takes."""
    variable = variable.realize()
    if not isinstance(getattr(variable, "value", None), Policy):
        return variable
    return UserFunctionVariable(_policy_value(tx, variable).context_fn)


def _policy_value(tx: Any, variable: Any) -> Policy:
    """The policy that a variable stands for; one that the traced code makes is made again."""
    if variable.source is not None:
        install_guard(variable.source.make_guard(GuardBuilder.ID_MATCH))
        return variable.value
    kind = type(variable.value)
    fields = {
        field.name: _policy_field(tx, _attribute(tx, variable, field.name))
        for field in dataclasses.fields(kind)
    }
    return kind(**fields)


def _attribute(tx: Any, variable: Any, name: str) -> Any:
    # As the traced code would; the method by which variables answer was renamed after 2.13.
    builtin = SourcelessBuilder.create(tx, getattr)
    return builtin.call_function(tx, [variable, ConstantVariable.create(name)], {})


def _policy_field(tx: Any, variable: Any) -> Any:
    variable = variable.realize()
    if isinstance(variable, TupleVariable):
        return tuple(_policy_field(tx, item) for item in variable.items)
    if isinstance(getattr(variable, "value", None), Policy):
        return _policy_value(tx, variable)
    return variable.as_python_constant()
