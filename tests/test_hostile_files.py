"""A damaged or hostile file: an error that says what is wrong, and nothing of it is run."""

import copy
import io
import json
import os
import random
import subprocess
import sys
import textwrap
import traceback
import zipfile

import pytest
import torch
from models import BothModel, RichModel, assert_same, gradients
from version_differences import needs

import hops


class File:
    """A saved program, taken apart so that parts of it can be exchanged."""

    def __init__(self, model, x):
        buffer = io.BytesIO()
        torch.export.save(torch.export.export(model, (x,), strict=False), buffer)
        self.bytes = buffer.getvalue()
        with zipfile.ZipFile(buffer) as archive:
            self.members = {n: archive.read(n) for n in archive.namelist()}
        endings = ("models/model.json", "serialized_exported_program.json")
        (self.program,) = [n for n in self.members if n.endswith(endings)]
        self.json = json.loads(self.members[self.program])

    def load(self, edited):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self.members.items():
                is_program = name == self.program
                archive.writestr(name, json.dumps(edited) if is_program else content)
        buffer.seek(0)
        return torch.export.load(buffer).module()


@pytest.fixture(scope="module")
def example():
    torch.manual_seed(0)
    model, x = RichModel(), torch.randn(2, 3)
    return File(model, x), x, gradients(model, x)


def calls(graph, name=None):
    """The nodes of the two operators in a file, bodies included."""
    for node in graph["nodes"]:
        if name is None and "higher_order" in node["target"] or node["target"].endswith(f".{name}"):
            yield node
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from calls(argument["arg"]["as_graph"]["graph"], name)


FUNCTION, REGION = "autograd_function_apply", "tag_activation_checkpoint"


def keyword(node, name):
    (found,) = [a for a in node["inputs"] if a["name"] == name]
    return found


def with_keyword(name, value, operator=FUNCTION, at=0):
    """An edit of one keyword of the first call that has it; None drops the keyword."""

    def edit(program):
        nodes = calls(program["graph_module"]["graph"], operator)
        node = [n for n in nodes if any(a["name"] == name for a in n["inputs"])][at]
        if value is None:
            node["inputs"].remove(keyword(node, name))
        else:
            keyword(node, name)["arg"] = value

    return edit


def added(name, value, operator=FUNCTION):
    def edit(program):
        node = next(calls(program["graph_module"]["graph"], operator))
        given = {"name": name, "arg": value, "kind": 2}
        node["inputs"].append({k: given[k] for k in node["inputs"][0]})

    return edit


def renamed_keyword(name, new, operator=FUNCTION):
    def edit(program):
        nodes = calls(program["graph_module"]["graph"], operator)
        node = next(n for n in nodes if any(a["name"] == name for a in n["inputs"]))
        keyword(node, name)["name"] = new

    return edit


def body_named(new, position=0):
    def edit(program):
        node = next(calls(program["graph_module"]["graph"], FUNCTION))
        node["inputs"][position]["arg"]["as_graph"]["name"] = new

    return edit


def without_argument(position, operator=FUNCTION):
    def edit(program):
        next(calls(program["graph_module"]["graph"], operator))["inputs"].pop(position)

    return edit


def bodies_swapped(program):
    node = next(calls(program["graph_module"]["graph"], FUNCTION))
    first, second = (node["inputs"][i]["arg"]["as_graph"] for i in (0, 1))
    first["graph"], second["graph"] = second["graph"], first["graph"]


def body_output_dropped(program):
    node = next(calls(program["graph_module"]["graph"], FUNCTION))
    node["inputs"][0]["arg"]["as_graph"]["graph"]["outputs"].pop()


INT, STRING, INTS = "as_int", "as_string", "as_ints"


def num_outputs_one_more(program):
    with_keyword("num_outputs", {INT: 2})(program)
    with_keyword("saved_for_backward_idx", {INTS: [0]})(program)


REFUSED = {
    "num_outputs too large": (with_keyword("num_outputs", {INT: 99}), "num_outputs=99"),
    "num_outputs negative": (with_keyword("num_outputs", {INT: -1}), "num_outputs=-1"),
    "num_outputs one more": (num_outputs_one_more, "node has 1 outputs, its body gives 2"),
    "num_outputs zero": (with_keyword("num_outputs", {INT: 0}), "1 outputs.*gives 0|position 1"),
    "num_outputs a text": (
        with_keyword("num_outputs", {STRING: "1"}),
        "num_outputs must be an int",
    ),
    "num_outputs missing": (with_keyword("num_outputs", None), "'num_outputs' is missing"),
    "num_inputs too large": (with_keyword("num_inputs", {INT: 5}), "num_inputs=5"),
    "num_inputs negative": (with_keyword("num_inputs", {INT: -2}), "num_inputs=-2"),
    "num_inputs missing": (with_keyword("num_inputs", None), "'num_inputs' is missing"),
    "name missing": (with_keyword("name", None), "'name' is missing"),
    "name a number": (with_keyword("name", {INT: 3}), "name must be"),
    "name of two lines": (with_keyword("name", {STRING: "a\nimport os"}), "name must be"),
    "name with a null": (with_keyword("name", {STRING: "a\0b"}), "name must be"),
    "saved out of range": (
        with_keyword("saved_for_backward_idx", {INTS: [0, 7]}),
        "names position 7",
    ),
    "saved negative": (with_keyword("saved_for_backward_idx", {INTS: [-1]}), "names position -1"),
    "saved twice": (with_keyword("saved_for_backward_idx", {INTS: [1, 1]}), "a position twice"),
    "saved a number": (with_keyword("saved_for_backward_idx", {INT: 1}), "list of ints"),
    "dirty out of range": (added("dirty_idx", {INTS: [4]}), "names position 4"),
    "marks out of range": (added("non_differentiable_idx", {INTS: [1]}), "names position 1"),
    "materialize a text": (with_keyword("materialize_grads", {STRING: "no"}), "materialize_grads"),
    "materialize missing": (with_keyword("materialize_grads", None), "needs materialize_grads"),
    "needs grad too short": (
        with_keyword("needs_input_grad", {"as_bools": [True]}),
        "needs_input_grad has 1 entries, expected 2",
    ),
    "no_backward false": (added("no_backward", {"as_bool": False}), "no_backward must be True"),
    "other backward garbage": (
        renamed_keyword("bwd_without_0", "bwd_without_x"),
        "does not name some of the 2 outputs",
    ),
    "other backward too large": (
        renamed_keyword("bwd_without_0", "bwd_without_9"),
        "does not name some of the 2 outputs",
    ),
    "unknown keyword": (added("num_output", {INT: 1}), "unknown keyword"),
    "mask of the other form": (added("args_tensor_mask", {"as_bools": [True]}), "takes|different"),
    "bodies of one name": (body_named("bwd_body_0"), "two different bodies"),
    "bodies exchanged": (bodies_swapped, "takes 3 operands, got 2"),
    "a body gives too little": (body_output_dropped, "takes 3 values, but fwd gives 2"),
    "an operand missing": (without_argument(2), "takes 2 operands, got 1"),
    "a body missing": (without_argument(1), "must be a torch.fx.GraphModule"),
    "region: form of a later version": (with_keyword("form", {INT: 2}, REGION), "newer version"),
    "region: form missing": (with_keyword("form", None, REGION), "'form' is missing"),
    "region: check unknown": (
        with_keyword("determinism_check", {STRING: "os.system"}, REGION),
        "determinism_check must be 'default' or 'none'",
    ),
    "region: debug a text": (with_keyword("debug", {STRING: "x"}, REGION), "debug must be"),
    "region: reentrant a number": (
        with_keyword("use_reentrant", {INT: 1}, REGION),
        "use_reentrant",
    ),
    "region: policy a number": (with_keyword("policy", {INT: 1}, REGION), "policy must be a list"),
    "region: operand missing": (without_argument(1, REGION), "takes 2 operands, got 1"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_by_name(example, kind):
    file, _, _ = example
    edit, message = REFUSED[kind]
    edited = copy.deepcopy(file.json)
    edit(edited)
    with pytest.raises(hops.OperatorCallError, match=message) as refusal:
        file.load(edited)
    assert "of the file: " in str(refusal.value) or "of the name" in str(refusal.value)


CODE = "x=1); open({path!r}, 'w').close(); (y"


@pytest.mark.parametrize(
    "what",
    [
        "keyword",
        pytest.param("node", marks=needs("node_names_in_files")),
        "output",
        "body",
        "input",
    ],
)
def test_a_name_that_is_code_is_refused(example, what, tmp_path):
    """fx writes names as they are into the code that it runs."""
    file, x, _ = example
    code = CODE.format(path=str(tmp_path / "ran"))
    edited = copy.deepcopy(file.json)
    node = next(calls(edited["graph_module"]["graph"], FUNCTION))
    body = node["inputs"][0]["arg"]["as_graph"]
    if what == "keyword":
        added(code, {INT: 1})(edited)
    elif what == "node":
        node["name"] = code
    elif what == "body":
        body["name"] = code
    else:
        old = body["graph"]["inputs"][0]["as_tensor"]["name"]
        new = code
        if what == "output":
            old = body["graph"]["nodes"][0]["outputs"][0]["as_tensor"]["name"]
        node["inputs"][0]["arg"] = json.loads(
            json.dumps(node["inputs"][0]["arg"]).replace(json.dumps(old), json.dumps(new))
        )
    with pytest.raises(hops.OperatorCallError, match="not a name that torch.export writes"):
        gradients(file.load(edited), x)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "decisions",
    [["aten.sin.default 0 RUN_THIS"], ["os.system"], ["\n"]],
)
def test_an_unknown_policy_is_refused(example, decisions):
    file, x, _ = example
    edited = copy.deepcopy(file.json)
    with_keyword("policy", {"as_strings": decisions}, REGION)(edited)
    with pytest.raises((hops.OperatorCallError, hops.ReplayError), match="policy"):
        gradients(file.load(edited), x)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/tmp/x.so", "{0.__class__}", "%s%n", "os.system", "a b", "é.ü"]
)
def test_a_name_is_text_whatever_it_looks_like(example, name):
    file, x, want = example
    edited = copy.deepcopy(file.json)
    for node in calls(edited["graph_module"]["graph"], FUNCTION):
        keyword(node, "name")["arg"] = {STRING: name}
    assert_same(gradients(file.load(edited), x), want)


@pytest.mark.parametrize("name", ["", "a.b", "forward", "../x", "a\nb", "__class__", "x"])
def test_a_body_of_a_hostile_name_runs_as_a_body_or_is_an_error(example, name):
    file, x, want = example
    edited = copy.deepcopy(file.json)
    body_named(name)(edited)
    outcome(file, edited, x, want)


def test_a_truncated_file_is_an_error(example):
    file, _, _ = example
    for part in range(1, 20):
        with pytest.raises(Exception):  # noqa: B017 - torch's reader, one of several errors
            torch.export.load(io.BytesIO(file.bytes[: len(file.bytes) * part // 20]))


def outcome(file, edited, x, want, same=True):
    """Load and train: the right result, torch's own refusal at load, or one of ours."""
    try:
        module = file.load(edited)
    except Exception as error:
        blamed = traceback.extract_tb(error.__traceback__)[-1].filename
        ours = f"{os.sep}hops{os.sep}" in blamed or "dispatch_rules" in blamed
        assert isinstance(error, hops.OperatorCallError) or not ours, repr(error)
        return "refused at load"
    try:
        got = gradients(module, x)
    except (hops.OperatorCallError, hops.ReplayError):
        return "refused when run"
    if same:
        assert_same(got, want)
    return "run"


GARBAGE = (
    {INT: 0}, {INT: 1}, {INT: -1}, {INT: 2}, {INT: 10**12}, {STRING: ""}, {STRING: "../x"},
    {STRING: "{x}\n%s"}, {INTS: []}, {INTS: [0]}, {INTS: [1, 0]}, {INTS: [-3]}, {INTS: [10**12]},
    {"as_bool": True}, {"as_bool": False}, {"as_bools": [True, False]}, {"as_none": True},
    {"as_float": 0.5}, {"as_strings": ["x", "os.system('x')"]}, {"as_tensor": {"name": "x"}},
    {"as_tensor": {"name": "nowhere"}}, {"as_tensors": [{"name": "x"}]}, {"as_scalar_type": 7},
    {"as_strange": 1}, {},
)  # fmt: skip

#: A file may say these otherwise and be a sound program of another meaning: which
#: values are checked against later writes, how a region is run.
MEANINGFUL = {
    "non_differentiable_idx", "dirty_idx", "saved_for_backward_idx", "once_differentiable",
    "no_backward", "needs_input_grad", "materialize_grads", "preserve_rng_state", "policy",
    "num_inputs",
}  # fmt: skip


def mutate(program, choice):
    """One random change of a call; whether the result must stay the same if it runs."""
    node = choice.choice(list(calls(program["graph_module"]["graph"])))
    keywords = [a for a in node["inputs"] if a["name"]]
    argument = choice.choice(keywords)
    kind = choice.randrange(6)
    if kind <= 2:
        argument["arg"] = copy.deepcopy(choice.choice(GARBAGE))
    elif kind == 3:
        argument["name"] = choice.choice(["bwd_without_0", "num_outputs", "x y", "", "form"])
    elif kind == 4:
        node["inputs"].remove(argument)
    else:
        node["outputs"] = choice.choice([node["outputs"] * 2, node["outputs"][1:], []])
    return argument["name"] not in MEANINGFUL and not argument["name"].startswith("bwd_without")


def test_mutated_files_never_run_wrong_or_crash_inside(example):
    file, x, want = example
    seen = set()
    for seed in range(int(os.environ.get("HOPS_FUZZ", 60))):
        choice = random.Random(seed)
        edited = copy.deepcopy(file.json)
        same = mutate(edited, choice)
        try:
            seen.add(outcome(file, edited, x, want, same))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert "refused at load" in seen


WATCHED = """
import builtins, os, pickle, subprocess, sys
import torch, torch._inductor, torch._dynamo
import hops
module = torch.export.load({path!r}).module()
from torch.export import load
before = set(sys.modules)
OF_TORCH = ("torch", "functorch", "numpy", "sympy")  # 2.6 imports functorch when it loads
watched = []
def hook(event, args):
    if event in ("os.system", "subprocess.Popen", "pickle.find_class", "socket.connect"):
        watched.append((event, args))
sys.addaudithook(hook)
module = load({path!r}).module()
module(torch.ones(2, 3)).sum().backward()
imported = {{m for m in set(sys.modules) - before if not m.startswith(OF_TORCH)}}
found = [a for e, a in watched if e != "pickle.find_class"]
named = [a for e, a in watched if e == "pickle.find_class" and not a[0].startswith(("torch", "collections"))]
assert not found and not named, watched
assert "models" not in sys.modules and "test_hostile_files" not in sys.modules
assert not imported, imported
"""


def test_loading_imports_and_runs_nothing_that_the_file_names(example, tmp_path):
    path = tmp_path / "program.pt2"
    path.write_bytes(example[0].bytes)
    program = textwrap.dedent(WATCHED.format(path=str(path)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_call_is_checked_once_and_again_after_an_edit():
    from hops import _validation

    ep = torch.export.export(BothModel(), (torch.randn(2, 3),), strict=False)
    module = ep.module()
    module(torch.randn(2, 3))
    (body,) = [m for n, m in module.named_modules() if n == "fwd_body_0"]
    record = getattr(type(body), _validation._RECORD)
    module(torch.randn(2, 3))
    assert getattr(type(body), _validation._RECORD) is record
    placeholder = body.graph.find_nodes(op="placeholder")[-1]
    with body.graph.inserting_after(placeholder):
        body.graph.placeholder("extra")
    body.recompile()
    with pytest.raises(hops.OperatorCallError, match="takes 3 operands, got 2"):
        module(torch.randn(2, 3))
