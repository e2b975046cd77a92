"""Installing and taking back the patch."""

import copy
import inspect
import os
import subprocess
import sys
from pathlib import Path

import torch
from models import FunctionModel, operators

import hops
from hops import _capture_hooks, _doctor, _patches, _random_state
from hops._torch import aot_entries, checkpoint_function


def snapshot():
    from torch._dynamo.variables.higher_order_ops import TorchHigherOrderOperatorVariable
    from torch._dynamo.variables.misc import AutogradFunctionVariable
    from torch._functorch import aot_autograd
    from torch.fx.experimental.proxy_tensor import _MakefxTracer

    function = torch.ops.higher_order.autograd_function_apply
    region = torch.ops.higher_order.tag_activation_checkpoint
    tables = [
        {k: id(v) for k, v in table.items()}
        for operator in (function, region)
        for table in (operator.py_kernels, operator.python_key_table, operator._dispatch_cache)
    ]
    return (
        type(function),
        type(region),
        function.non_fallthrough_keys,
        copy.copy(tables),
        _MakefxTracer.__dict__["_trace_inner"],
        aot_autograd._aot_export_function,
        [getattr(aot_autograd, name) for name, _ in aot_entries(aot_autograd)],
        TorchHigherOrderOperatorVariable.__dict__["make"],
        AutogradFunctionVariable.__dict__["call_apply"],
        torch.utils.checkpoint.checkpoint,
    )


def export():
    ep = torch.export.export(FunctionModel(), (torch.ones(2, 3),), strict=False)
    return operators(ep.graph_module)


def test_uninstall_gives_torch_back_and_install_takes_it_again():
    installed = snapshot()
    try:
        hops.uninstall()
        stock = snapshot()
        assert export() == []
        hops.install()
        hops.install()
        assert export() == ["autograd_function_apply"]
        hops.uninstall()
        assert snapshot()[:3] == stock[:3] and snapshot()[4:] == stock[4:]
        assert export() == []
    finally:
        hops.install()
    assert [type(x) for x in installed] == [type(x) for x in snapshot()]
    assert export() == ["autograd_function_apply"]


def test_a_fresh_process_gets_back_exactly_what_stock_had():
    program = (
        "import sys; sys.path.insert(0, 'tests'); import torch, torch._dynamo;"
        "from torch._functorch.autograd_function import autograd_function_apply as f;"
        "from torch._higher_order_ops.wrap import tag_activation_checkpoint as r;"
        "see = lambda: [(type(o), o.non_fallthrough_keys, o.py_kernels.copy(),"
        " o.python_key_table.copy(), o.functorch_table.copy()) for o in (f, r)];"
        "before = see(); import hops; assert see() != before; hops.uninstall();"
        "assert see() == before"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_hops_disable_leaves_torch_alone(monkeypatch):
    program = (
        "import torch, hops; from torch._functorch.autograd_function import AutogradFunctionApply;"
        "assert type(torch.ops.higher_order.autograd_function_apply) is AutogradFunctionApply"
    )
    monkeypatch.setenv("HOPS_DISABLE", "1")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_hooked_outside_a_capture():
    meta = type(torch.autograd.Function)
    assert "__getattribute__" not in meta.__dict__
    exchanged = (_capture_hooks._checkpoint, *(entry for _, entry in _random_state._ENTRIES))
    codes = [checkpoint_function.__code__, inspect.unwrap(torch.manual_seed).__code__]
    assert not any(one.is_hooked() for one in exchanged)
    export()
    assert "__getattribute__" not in meta.__dict__
    assert not any(one.is_hooked() for one in exchanged)
    assert [checkpoint_function.__code__, inspect.unwrap(torch.manual_seed).__code__] == codes


def test_doctor_lists_every_site():
    printed = _doctor.report()
    for site in _patches.SITES:
        assert site.where in printed
    assert torch.__version__ in printed


def test_contributing_lists_every_site():
    """One table, made from the code; EXPECTTEST_ACCEPT=1 writes it."""
    path = Path(__file__).parents[1] / "CONTRIBUTING.md"
    rows = [f"| `{site.where}` | {site.why} |" for site in _patches.SITES]
    table = "\n".join(["| site | why |", "|---|---|", *rows]) + "\n"
    begin, end = "<!-- patched sites -->\n", "<!-- end of patched sites -->\n"
    text = path.read_text()
    head, _, rest = text.partition(begin)
    current, _, tail = rest.partition(end)
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        path.write_text(head + begin + table + end + tail)
    else:
        assert current == table
