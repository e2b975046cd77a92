"""Names in an exported program: those of the model without its checkpoint wrappers.

``CheckpointWrapper`` holds the module that it wraps as a submodule, and takes
that name out of ``state_dict`` keys and ``named_parameters`` itself, when they
are asked of the wrapper; torch.export asks the model around it, and would show
the wrapper in placeholders, ``state_dict`` keys and module paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import fx

WRAPPED = "_checkpoint_wrapped_module"
_BODY = "_wrap_body_"

# Non-strict export writes the attribute, strict export the way that Dynamo took to it.
_IN_PATH = re.compile(rf"(?:^|\.)(?:__dict__\['_modules'\]\['{WRAPPED}'\]|{WRAPPED})(?=\.|$)")


def without_wrappers(path: str) -> str:
    """A module path, or the name of a parameter or buffer, without checkpoint wrappers."""
    return _IN_PATH.sub("", path).removeprefix(".")


def naming_the_wrapped(export: Callable[..., Any]) -> Callable[..., Any]:
    """An export function whose programs have no wrapper in any name."""

    @wraps(export)
    def _export_for_training(mod: Any, *args: Any, **kwargs: Any) -> Any:
        with _attribute_names(mod):
            program = export(mod, *args, **kwargs)
        wrapped = any(WRAPPED in module.fqn for module in program.module_call_graph)
        if wrapped or any(_shows_a_body(s.arg) for s in program.graph_signature.input_specs):
            _rename(program, _wrapped_classes(mod))
        return program

    return _export_for_training


def _shows_a_body(argument: Any) -> bool:
    """Whether a parameter is named after the body in which a module of it is called, as
    strict export up to 2.8 does."""
    return _BODY in getattr(argument, "name", "")


@contextmanager
def _attribute_names(model: Any) -> Iterator[None]:
    """Let a model that is a wrapper itself name its parameters as it names its buffers:
    non-strict export looks for one under the name that the other has."""
    if WRAPPED not in getattr(model, "_modules", ()):
        yield
        return
    model.__dict__["named_parameters"] = MethodType(torch.nn.Module.named_parameters, model)
    try:
        yield
    finally:
        del model.__dict__["named_parameters"]


def _wrapped_classes(model: Any) -> dict[str, str]:
    """Class of each wrapped module, by its path."""
    return {
        without_wrappers(path): f"{type(module).__module__}.{type(module).__qualname__}"
        for path, module in model.named_modules(remove_duplicate=False)
        if path.endswith(WRAPPED)
    }


def _rename(program: Any, classes: dict[str, str]) -> None:
    for table in (program.state_dict, program.constants):
        renamed = {without_wrappers(name): value for name, value in table.items()}
        table.clear()
        table.update(renamed)
    placeholders = {
        node.name: node for node in program.graph_module.graph.find_nodes(op="placeholder")
    }
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target is not None:
            spec.target = without_wrappers(spec.target)
    _merge_inputs(signature.input_specs, placeholders)
    for spec in signature.input_specs:
        node = placeholders.get(getattr(spec.arg, "name", ""))
        if (
            node is not None
            and spec.target is not None
            and (WRAPPED in node.name or _BODY in node.name)
        ):
            _rename_placeholder(node, spec.target)
    new_names = {before: node.name for before, node in placeholders.items()}
    for spec in (*signature.input_specs, *signature.output_specs):
        name = getattr(spec.arg, "name", None)
        if name in new_names:
            spec.arg.name = new_names[name]
    _rename_modules(program, classes)
    program.graph_module.recompile()


def _merge_inputs(specs: list[Any], placeholders: dict[str, Any]) -> None:
    """One input for each parameter or buffer: torch 2.7 gives one that a region uses a second,
    named after the region."""
    first: dict[str, Any] = {}
    for spec in list(specs):
        node = placeholders.get(getattr(spec.arg, "name", ""))
        if spec.target is None or node is None:
            continue
        known = first.setdefault(spec.target, node)
        if known is not node:
            node.replace_all_uses_with(known)
            node.graph.erase_node(node)
            specs.remove(spec)
            del placeholders[spec.arg.name]


def _rename_placeholder(node: fx.Node, target: str) -> None:
    """``p_layer__checkpoint_wrapped_module_weight`` to ``p_layer_weight``."""
    letter, underscore, _ = node.name.partition("_")
    node._rename(letter + underscore + re.sub(r"\W", "_", target))
    node.target = node.name


def _rename_modules(program: Any, classes: dict[str, str]) -> None:
    _merge_calls(program.module_call_graph)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            stack = node.meta.get("nn_module_stack")
            if stack:
                node.meta["nn_module_stack"] = _stack_without_wrappers(stack, classes)


def _merge_calls(entries: list[Any]) -> None:
    """One entry for a wrapper and what it wraps: the one whose signature is preserved."""
    merged: dict[str, Any] = {}
    for entry in entries:
        entry.fqn = without_wrappers(entry.fqn)
        if entry.fqn not in merged or merged[entry.fqn].signature is None:
            merged[entry.fqn] = entry
    entries[:] = merged.values()


def _stack_without_wrappers(stack: dict[str, Any], classes: dict[str, str]) -> dict[str, Any]:
    """Of a wrapper and what it wraps, which come to have one path, the latter stays."""
    by_path = {}
    for key, (path, kind) in stack.items():
        path = without_wrappers(path)
        by_path[path] = key, classes.get(path, kind)
    return {key: (path, kind) for path, (key, kind) in by_path.items()}
