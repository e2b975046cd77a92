"""Turning the two stock operators into the project's, rule by rule.

[Note: what is native]
A torch that has a rule of its own keeps it, and an operator that torch both
runs and traces by rules of its own keeps its class as well.  A rule counts
as torch's own if torch registered it before us, with one exception: the rule by
which stock torch traces ``tag_activation_checkpoint`` puts the body into the graph
as it is, which is not ATen (2.9), or takes a selective policy for granted, and
fails on every other region (2.13 on).
"""

from __future__ import annotations

import dis
from types import CodeType, ModuleType
from typing import Any

from dispatch_rules import TABLE
from hops._changes import Change, Changes
from hops._torch import (
    FUNCTIONALIZE,
    DispatchKey,
    FunctionalTensorMode,
    ProxyTorchDispatchMode,
)
from hops.tag_activation_checkpoint import CONTEXT_FN

_TABLES = ("py_kernels", "python_key_table", "functorch_table", "_dispatch_cache")


def native_keys(operator: Any) -> set[Any]:
    """The keys of the rule table under which torch has a rule of its own."""
    found = {key for key in TABLE[operator.__name__] if _registered(operator, key) is not None}
    code = getattr(_registered(operator, ProxyTorchDispatchMode), "__code__", None)
    if code is not None and (_leaves_the_body_as_it_is(code) or _takes_a_policy_for_granted(code)):
        found.discard(ProxyTorchDispatchMode)
    return found


def is_native(operator: Any) -> bool:
    """Whether torch runs and traces the operator by rules of its own."""
    return {DispatchKey.Autograd, ProxyTorchDispatchMode} <= native_keys(operator)


def _registered(operator: Any, key: Any) -> Any:
    if key is FUNCTIONALIZE:
        key = FunctionalTensorMode
    for table in (operator.py_kernels, operator.python_key_table, operator.functorch_table):
        if key in table:
            return table[key]
    return None


def _leaves_the_body_as_it_is(code: CodeType) -> bool:
    """Whether a rule for tracing registers a body without having traced it."""
    names = set(code.co_names)
    return "register_module" in names and not {"make_fx", "reenter_make_fx"} & names


def _takes_a_policy_for_granted(code: CodeType) -> bool:
    """Whether a rule subscripts the metadata of a body by the policy's key, unasked."""
    if CONTEXT_FN not in code.co_consts or "get" in code.co_names:
        return False
    return all(instruction.opname != "CONTAINS_OP" for instruction in dis.get_instructions(code))


def own_operator(
    changes: Changes, instance: Any, module: ModuleType, own_class: type
) -> str | None:
    """Turn a stock operator into the project's, on the very same object.

    Whoever holds the operator — Dynamo, a set of known operators inside torch,
    a user — keeps holding the right one, and isinstance checks on the stock
    class stay true.

    Args:
        module: the operator's, ``hops.autograd_function_apply`` or the other one.

    Returns:
        The reason to change nothing, where all of it is native.
    """
    native = native_keys(instance)
    changes.native += [f"rule for {_key_name(key)}" for key in native]
    rules = {key: rule for key, rule in TABLE[instance.__name__].items() if key not in native}
    if is_native(instance):
        if not rules:
            return "torch has every rule of it"
    else:
        _exchange_class(changes, instance, own_class)
    if DispatchKey.Autograd in native:
        # The way around dispatch ends in our rule.
        changes.attribute(module, "_plain_rule", lambda rule: None)
    _exchange_rules(changes, instance, rules)
    return None


def _exchange_class(changes: Changes, instance: Any, own_class: type) -> None:
    stock, cacheable = type(instance), instance._cacheable
    instance.__class__ = own_class

    def restore() -> None:
        instance.__class__ = stock
        instance._cacheable = cacheable

    changes.undo_with(restore)
    name = f"class of {instance.__name__}"
    changes.watch(Change(name, stock, own_class, lambda: type(instance)))


def _exchange_rules(changes: Changes, instance: Any, rules: dict[Any, Any]) -> None:
    tables = {name: getattr(instance, name) for name in _TABLES}
    fallthrough = instance.non_fallthrough_keys
    before = {name: dict(table) for name, table in tables.items()}
    ours: dict[str, dict[Any, Any]] = {}

    def restore() -> None:
        instance.non_fallthrough_keys = fallthrough
        instance._dispatch_cache.clear()
        for name, content in before.items():
            # A rule that somebody added later, for a mode of his own, stays.
            for key in set(ours.get(name, tables[name])) - set(content):
                tables[name].pop(key, None)
            tables[name].update(content)

    changes.undo_with(restore)
    for key, rule in rules.items():
        if key is FUNCTIONALIZE:
            instance.py_functionalize_impl(rule)
        else:
            for table in tables.values():
                table.pop(key, None)
            instance.py_impl(key)(rule)
    instance._dispatch_cache.clear()
    ours.update({name: dict(table) for name, table in tables.items()})
    for name in _TABLES:
        for key, rule in ours[name].items():
            if before[name].get(key) is not rule:
                _watch_rule(changes, instance, name, key, before[name].get(key), rule)


def _key_name(key: Any) -> str:
    return getattr(key, "__name__", None) or str(key)


def _watch_rule(
    changes: Changes, instance: Any, table: str, key: Any, before: Any, rule: Any
) -> None:
    shown = f"rule of {instance.__name__} for {_key_name(key)}"
    changes.watch(Change(shown, before, rule, lambda: getattr(instance, table).get(key)))
