"""A torch in which something is missing is told of when hops is imported, not in a capture."""

import ast
from pathlib import Path

import pytest

import hops
from hops import _probe

ALIASES = {
    "torch": "torch",
    "fx": "torch.fx",
    "proxy_tensor": "torch.fx.experimental.proxy_tensor",
    "torch_checkpoint": "torch.utils.checkpoint",
}


def imported_with_hops(path):
    """Not what is imported with Dynamo, whose absence that site tells of, and the demo."""
    return not path.name.startswith(("_dynamo", "_demo", "demo"))


def dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in ALIASES:
        return ""
    return ".".join([ALIASES[node.id], *reversed(parts)])


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def names_used_in_functions():
    root = Path(hops.__file__).parent
    found = set()
    for path in [*root.glob("*.py"), *(root.parent / "dispatch_rules").glob("*.py")]:
        if imported_with_hops(path):
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, (ast.FunctionDef, ast.Lambda)):
                    found |= {dotted(n) for n in ast.walk(function) if isinstance(n, ast.Attribute)}
    private = {name for name in found if is_private(name)} - {"torch._dynamo"}  # imports it
    return {n for n in private if not any(o.startswith(n + ".") for o in private)}


def test_every_private_name_of_torch_that_a_function_uses_is_probed():
    assert set(_probe.USED_IN_FUNCTIONS) == names_used_in_functions()


def test_all_that_is_missing_is_named_at_once():
    names = (
        "torch._C._no_such_thing",
        "torch.fx.nothing._like",
        "torch._C._len_torch_dispatch_stack",
    )
    with pytest.raises(
        AttributeError, match=r"torch\._C\._no_such_thing, torch\.fx\.nothing\._like$"
    ):
        _probe.look_up(names)
