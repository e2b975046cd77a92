"""A file that hops wrote on one torch loads on it and on every newer one, and equals eager.

What torch.export's own format does not allow is refused by torch: a file tells the version of its
format, and one of another major version does not load, whether hops wrote it or not.
"""

import json
import re
import zipfile

import pytest
import torch
from file_models import FILES, PROGRAMS, rows
from models import assert_same, gradients, operators
from torch._export.serde.schema import SCHEMA_VERSION
from torch.utils._python_dispatch import TorchDispatchMode

RECOMPUTABLE = (torch.ops.aten.sin.default, torch.ops.aten.addmm.default)


def numbers(version):
    """2.13.0a0+git0123 comes after 2.12.1."""
    return tuple(int(n) for n in re.match(r"\d+\.\d+\.\d+", version)[0].split("."))


RUNNING = numbers(torch.__version__)
WRITERS = sorted((d.name for d in FILES.iterdir()), key=numbers)
READABLE = [w for w in WRITERS if numbers(w) <= RUNNING]


def format_of(file):
    """The major number of the format of torch.export in a file."""
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(("models/model.json", "serialized_exported_program.json")):
                return json.loads(archive.read(name))["schema_version"]["major"]
    raise AssertionError(f"{file} holds no program")


def recomputed(module, x):
    """How often backward runs what a policy may keep."""
    counts = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts.append(func in RECOMPUTABLE)
            return func(*args, **(kwargs or {}))

    loss = module(x).sum()
    with Count():
        loss.backward()
    return sum(counts)


def test_there_are_files_of_every_program_and_writer():
    assert {"2.9.1", "2.13.0"} <= set(WRITERS)
    for writer in WRITERS:
        assert {f.stem for f in (FILES / writer).iterdir()} == set(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("writer", READABLE)
def test_a_file_of_this_or_an_older_torch(writer, name):
    file = FILES / writer / f"{name}.pt2"
    if format_of(file) != SCHEMA_VERSION[0]:
        with pytest.raises(RuntimeError, match="does not match our current schema"):
            torch.export.load(file)
        return
    loaded = torch.export.load(file)
    assert operators(loaded.graph_module)

    program = PROGRAMS[name]
    eager = program.model()
    eager.load_state_dict(loaded.state_dict)
    module = loaded.module()
    frozen = {n for n, p in eager.named_parameters() if not p.requires_grad}
    assert {n for n, p in module.named_parameters() if not p.requires_grad} == frozen
    for batch in (4, 2, 5) if program.dynamic else (4,):
        assert_same(gradients(module, rows(batch)), gradients(eager, rows(batch)))
    assert recomputed(module, rows(4)) == recomputed(eager, rows(4))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("writer", READABLE)
def test_what_was_loaded_can_be_exported_and_saved_again(writer, name, tmp_path):
    file = FILES / writer / f"{name}.pt2"
    if format_of(file) != SCHEMA_VERSION[0]:
        return  # the test above
    loaded = torch.export.load(file)
    again = torch.export.export(loaded.module(), (rows(4),), strict=False)
    assert operators(again.graph_module) == operators(loaded.graph_module)
    torch.export.save(again, tmp_path / "again.pt2")
    module = torch.export.load(tmp_path / "again.pt2").module()
    assert_same(gradients(module, rows(4)), gradients(loaded.module(), rows(4)))
