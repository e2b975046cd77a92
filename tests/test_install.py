"""The patch goes in whatever came first, beside other tools' patches, and comes out without a trace."""

import pytest
from fresh import run

#: A Function and a region whose gradients tell whether they were captured.
MODEL = """
import torch
from torch.utils.checkpoint import checkpoint

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2

class Model(torch.nn.Module):
    def forward(self, x):
        import torch.utils.checkpoint as module
        return module.checkpoint(lambda v: Double.apply(v).sin(), x, use_reentrant=False)

def targets(graph_module):
    modules = [m for m in graph_module.modules() if isinstance(m, torch.fx.GraphModule)]
    return {getattr(n.target, "__name__", "") for m in modules for n in m.graph.nodes}

def check(strict=False):
    x = torch.ones(2, requires_grad=True)
    program = torch.export.export(Model(), (x,), strict=strict)
    found = targets(program.graph_module)
    assert {"autograd_function_apply", "tag_activation_checkpoint"} <= found, found
    program.module()(x).sum().backward()
    assert torch.allclose(x.grad, 2 * torch.cos(torch.ones(2))), x.grad
"""

OTHERS = {
    "checkpoint wrapped": """
import functools
stock = torch.utils.checkpoint.checkpoint
@functools.wraps(stock)
def wrapper(*args, **kwargs):
    calls.append(1)
    return stock(*args, **kwargs)
torch.utils.checkpoint.checkpoint = wrapper
""",
    "checkpoint wrapped by an object that does not say what it wraps": """
class Wrapper:
    def __init__(self, call):
        self.hidden = call
    def __get__(self, instance, owner):
        return self
    def __call__(self, *args, **kwargs):
        calls.append(1)
        return self.hidden(*args, **kwargs)
torch.utils.checkpoint.checkpoint = Wrapper(torch.utils.checkpoint.checkpoint)
""",
    "apply wrapped by a descriptor": """
class Apply:
    def __init__(self, stock):
        self.stock = stock
    def __get__(self, instance, owner):
        bound = self.stock.__get__(instance, owner)
        def apply(*args, **kwargs):
            calls.append(1)
            return bound(*args, **kwargs)
        return apply
for owner in torch.autograd.Function.__mro__:
    if "apply" in vars(owner) and owner is torch.autograd.Function:
        torch.autograd.Function.apply = Apply(vars(owner)["apply"])
        break
else:
    native = super(torch.autograd.Function, Double).apply.__func__ if hasattr(
        super(torch.autograd.Function, Double).apply, "__func__") else None
    base = torch.autograd.Function.__mro__[1]
    class Native:
        def __get__(self, instance, owner):
            return super(torch.autograd.Function, owner).apply
    torch.autograd.Function.apply = Apply(Native())
""",
    "look-ups of the metaclass": """
meta = type(torch.autograd.Function)
def __getattribute__(cls, name):
    calls.append(1)
    return type.__getattribute__(cls, name)
meta.__getattribute__ = __getattribute__
""",
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tool", OTHERS)
def test_beside_a_tool_that_has_patched(tool, when):
    """Its patch is called, seen by the doctor, and in place after hops is gone."""
    imports = "import hops\n"
    printed = run(
        MODEL
        + "calls = []\n"
        + (OTHERS[tool] + imports if when == "before" else imports + OTHERS[tool])
        + """
theirs = (torch.utils.checkpoint.checkpoint, vars(torch.autograd.Function).get("apply"),
          vars(type(torch.autograd.Function)).get("__getattribute__"))
check()
assert calls
from hops import _doctor
print(_doctor.report())
hops.uninstall()
assert theirs == (torch.utils.checkpoint.checkpoint, vars(torch.autograd.Function).get("apply"),
                  vars(type(torch.autograd.Function)).get("__getattribute__"))
"""
    )
    last_rows = printed[printed.index("while a capture runs") :]
    assert "no      yes" in last_rows


def test_a_capture_inside_another_torch_function_mode():
    run(
        MODEL
        + """
from torch.overrides import TorchFunctionMode
import hops
class Counting(TorchFunctionMode):
    seen = 0
    def __torch_function__(self, func, types, args=(), kwargs=None):
        Counting.seen += 1
        return func(*args, **(kwargs or {}))
with Counting():
    check()
assert Counting.seen
"""
    )


#: Wraps every function of the modules that it is told of, as tools that check types do.
IMPORT_HOOK = """
import functools, importlib.machinery, importlib.util, sys, types
class Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        super().exec_module(module)
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType) and value.__module__ == module.__name__:
                setattr(module, name, checked(value))
def checked(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name not in claimed:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_beside_an_import_hook_that_claims_modules_that_we_wait_for(when):
    hook = 'claimed = {"torch._functorch.aot_autograd", "torch.export._trace"}\n'
    hook += "sys.meta_path.insert(0, Hook())\n"
    run(
        IMPORT_HOOK
        + (hook + "import hops\n" if when == "before" else "import hops\n" + hook)
        + MODEL
        + """
check()
import torch._functorch.aot_autograd as aot
import torch.export._trace as trace
import this  # an import after theirs, if theirs did not ask us
assert "hops" in trace._export_for_training.__code__.co_filename, trace._export_for_training
assert "hops" in aot._aot_export_function.__code__.co_filename
"""
    )


STOCK = (
    MODEL
    + """
from torch.fx.experimental.proxy_tensor import make_fx
import sys

def compiled():
    texts = []
    def backend(gm, inputs):
        texts.append(gm.print_readable(print_output=False))
        return gm
    torch._dynamo.reset()
    torch.compile(Model(), backend=backend)(torch.ones(2, requires_grad=True))
    return texts

def captures():
    x = torch.ones(2, requires_grad=True)
    results = [make_fx(Model(), pre_dispatch=True)(x).code]
    for strict in (False, True):
        try:
            program = torch.export.export(Model(), (x,), strict=strict)
        except Exception as error:
            results.append(type(error).__name__)
        else:
            results.append([m.code for m in program.graph_module.modules()
                            if isinstance(m, torch.fx.GraphModule)])
    return [*results, compiled()]
"""
)


def test_captures_are_stocks_before_between_and_after():
    run(
        STOCK
        + """
before = captures()
import hops
assert captures()[:3] != before[:3]
assert captures()[3] == before[3]  # what a backend of torch.compile sees is stock's
hops.uninstall()
assert captures() == before
hops.install()
hops.install()
check(), check(strict=True)
hops.uninstall()
assert captures() == before
"""
    )


def test_every_change_is_taken_back_and_a_later_patch_of_somebody_else_stays():
    run(
        MODEL
        + """
import warnings, hops
from hops._patches import installation
installation.import_modules()
changes = [c for state in installation.states for c in state.changes.made]
assert len(changes) > 30 and all(c.holds() for c in changes)
from torch.fx.experimental import proxy_tensor
from torch._dynamo.output_graph import OutputGraph
hops.uninstall()
assert all(c.read() is c.before or c.before is None for c in changes)
assert not any(c.holds() for c in changes)

hops.install()
ours = OutputGraph.call_user_compiler
def theirs(*args, **kwargs):
    return ours(*args, **kwargs)
OutputGraph.call_user_compiler = theirs
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    hops.uninstall()
assert OutputGraph.call_user_compiler is theirs
(warning,) = [w for w in told if issubclass(w.category, hops.HopsWarning)]
assert "OutputGraph.call_user_compiler cannot be given back" in str(warning.message)
"""
    )


def test_hops_disable_changes_nothing_at_all():
    run(
        STOCK
        + """
before = captures()
import hops
hops.install()
from hops._patches import installation
installation.import_modules()
assert not any(state.changes.made for state in installation.states)
assert captures() == before
""",
        environment={"HOPS_DISABLE": "1"},
    )


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_captures_in_a_process_pool(method, tmp_path):
    """Forked while another thread is in the middle of a capture, too: its hooks and its lock
    do not reach the child."""
    program = tmp_path / "program.py"
    program.write_text(
        MODEL
        + f"""
import multiprocessing, threading
import hops
from hops import _capture_hooks

inside, leave = threading.Event(), threading.Event()


def hold():
    # By hand: torch's own state of a trace is not fork's to take along.
    from hops._threads import capture_on_this_thread
    with capture_on_this_thread(), _capture_hooks.capture_hooks():
        inside.set()
        leave.wait(60)

def work(number):
    assert not _capture_hooks.capture_hooks._active
    assert "__getattribute__" not in vars(type(torch.autograd.Function))
    torch.set_num_threads(1)
    check()
    return number

if __name__ == "__main__":
    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait(60)
    context = multiprocessing.get_context("{method}")
    with context.Pool(2) as pool:
        assert pool.map_async(work, range(3)).get(120) == [0, 1, 2]
    leave.set()
    thread.join()
    check()
"""
    )
    run(f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')")
