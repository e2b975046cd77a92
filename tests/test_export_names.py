"""Names in an exported program are those of the same model without Function or checkpoint."""

import io

import pytest
import torch
from models import assert_same, gradients
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from hops._export_names import without_wrappers

X = (torch.randn(3, 4),)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x)).relu()


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(4, 2)
        self.head.weight.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def wrapped_blocks():
    model = Stack()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def nested_wrappers():
    model = Stack()
    for block in model.layers:
        block.linear = checkpoint_wrapper(block.linear)
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    return model


def wrapped_model():
    return checkpoint_wrapper(Stack())


WRAPPED = {f.__name__: f for f in (wrapped_blocks, nested_wrappers, wrapped_model)}


def names(program):
    """Every name that a user of the program can see, modules aside."""
    signature = program.graph_signature
    # A user input of a wrapper is named after its *args.
    state = {(s.arg.name, s.target, s.kind) for s in signature.input_specs if s.target}
    placeholders = {n.name for n in program.graph.find_nodes(op="placeholder")}
    return {
        "state": state,
        "missing": {name for name, _, _ in state} - placeholders,
        "mutated": sorted(signature.buffers_to_mutate.values()),
        "state_dict": list(program.state_dict),
        "parameters": [name for name, _ in program.named_parameters()],
        "buffers": sorted(name for name, _ in program.module().named_buffers()),
        "modules": sorted({entry.fqn for entry in program.module_call_graph}),
    }


def modules_of(graph_module):
    """Module path and class of every operation, bodies included."""
    found = set()
    for module in graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.op == "call_function":
                found.update(node.meta.get("nn_module_stack", {}).values())
    return found


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_checkpoint_wrapper_is_in_no_name(name, strict):
    plain = torch.export.export(Stack(), X, strict=strict)
    program = torch.export.export(WRAPPED[name](), X, strict=strict)
    assert names(program) == names(plain)
    program.validate()
    classes = {path: kind for path, kind in modules_of(program.graph_module) if path}
    assert classes == {path: kind for path, kind in modules_of(plain.graph_module) if path}


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
@pytest.mark.parametrize("name", WRAPPED)
def test_a_program_of_wrapped_modules_trains_as_eager(name, strict):
    model = WRAPPED[name]()
    program = torch.export.export(model, X, strict=strict)
    stored = io.BytesIO()
    torch.export.save(program, stored)
    stored.seek(0)
    module = program.module()
    got, loaded = gradients(module, *X), gradients(torch.export.load(stored).module(), *X)
    eager = WRAPPED[name]()
    output, by_name = gradients(eager, *X)
    want = output, {without_wrappers(key): grad for key, grad in by_name.items()}
    assert_same(got, want)
    assert_same(loaded, want)
    buffers = dict(module.named_buffers())
    for key, buffer in eager.named_buffers():
        torch.testing.assert_close(buffers[without_wrappers(key)], buffer)


def test_preserved_call_signatures_of_wrapped_modules_stay():
    from torch.export.unflatten import unflatten

    plain, program = (
        torch.export.export(m, X, strict=False, preserve_module_call_signature=path)
        for m, path in ((Stack(), ("layers.0",)), (wrapped_blocks(), ("layers.0",)))
    )
    for p in (plain, program):
        assert [e.fqn for e in p.module_call_graph if e.signature] == ["", "layers.0"]
    torch.testing.assert_close(unflatten(program).eval()(*X), unflatten(plain).eval()(*X))
