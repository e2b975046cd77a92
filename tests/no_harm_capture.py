"""What ``torch.compile`` and captures of other models show: the same with hops as without.

Here are models that stock torch captures right; what it captures wrong is what hops changes.
"""

import functools

import torch
from no_harm import refusal, shown, shows
from no_harm_eager import Net, OwnRule, Scale, Sine, fresh, leaf, step
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import aot_autograd
from torch._functorch.aot_autograd import aot_function, aot_module
from torch._functorch.partitioners import (
    default_partition,
    min_cut_rematerialization_partition,
)
from torch.autograd import Function
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Saves(Function):
    """Attributes, an input that gets no gradient, a gradient that is asked for."""

    @staticmethod
    def forward(ctx, x, power, weight):
        ctx.power = power
        ctx.save_for_backward(x, weight)
        return x**power, x * weight

    @staticmethod
    def backward(ctx, first, second):
        x, weight = ctx.saved_tensors
        return first * ctx.power + second * weight, None, (second * x).sum(0)


def save_products(ctx, operation, *args, **kwargs):
    kept = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = functools.partial(create_selective_checkpoint_contexts, save_products)


class Backend:
    """Keeps the text of every graph that it gets, as ``backend`` of ``torch.compile``."""

    def __init__(self, backend=None):
        self.texts, self.backend = [], backend

    def __call__(self, graph, inputs):
        self.texts.append(graph.print_readable(print_output=False))
        self.texts.append(str(graph.graph))
        for module in graph.modules():
            if isinstance(module, torch.fx.GraphModule):
                self.texts += [str(self.told(node)) for node in module.graph.nodes]
        if self.backend is None:
            return graph.forward
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

    def told(self, node):
        """What the graph says of a node beside its arguments."""
        value = node.meta.get("example_value")
        kinds = [
            (tuple(v.shape), v.dtype, v.requires_grad) if isinstance(v, torch.Tensor) else type(v)
            for v in (value if isinstance(value, (tuple, list)) else (value,))
        ]
        return node.name, sorted(node.meta), kinds, node.meta.get("nn_module_stack")


def compiled(call, *args, backend=None, **options):
    """Graphs, outputs and gradients of a function under ``torch.compile``."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    keeping = Backend(backend)
    out = torch.compile(call, backend=keeping, **options)(*args)
    outputs = out if isinstance(out, tuple) else (out,)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    leaves += getattr(call, "parameters", list)()
    gradients = torch.autograd.grad(
        sum(o.sum() for o in outputs if o.requires_grad), leaves, allow_unused=True
    )
    # Without the names of nodes of autograd: hops runs a Function in such a graph by its name.
    return keeping.texts, [(o.detach(), o.requires_grad) for o in outputs], gradients


# ---------------------------------------------------------------------------- torch.compile


@shows
def functions_in_graphs_of_dynamo():
    x, weight = leaf(2, 3), leaf(3)
    yield compiled(lambda v, w: Scale.apply(v.sin(), w).cos(), x, weight, fullgraph=True)
    yield compiled(lambda v, w: Saves.apply(v, 3, w), x, weight, fullgraph=True)
    yield compiled(lambda v: Sine.apply(v, 2.0)[0] + 1, x)
    yield compiled(lambda v: OwnRule.apply(OwnRule.apply(v)), x, fullgraph=True, dynamic=True)
    yield compiled(lambda v, w: Scale.apply(v, w) @ v.t(), x, weight, backend="aot_eager")


@shows
def regions_in_graphs_of_dynamo():
    x, weight = leaf(2, 3), leaf(3)
    region = lambda v: Scale.apply(v.sin(), weight).cos()
    for options in (
        {"use_reentrant": False},
        {"use_reentrant": False, "preserve_rng_state": False},
        {"use_reentrant": True},
    ):
        call = lambda v, options=options: checkpoint(region, v, **options) + 1
        yield refusal(lambda call=call: compiled(call, x, fullgraph=True))
        yield refusal(lambda call=call: compiled(call, x, backend="aot_eager"))
    nested = lambda v: checkpoint(region, v.exp(), use_reentrant=False)
    yield refusal(lambda: compiled(lambda v: checkpoint(nested, v, use_reentrant=False), x))
    chain = torch.nn.Sequential(*[torch.nn.Tanh() for _ in range(4)])
    yield refusal(lambda: compiled(lambda v: checkpoint_sequential(chain, 2, v, False), x))


@shows
def selective_regions_in_graphs_of_dynamo():
    x, weight = leaf(3, 3), leaf(3, 3)

    def call(v, w):
        region = lambda a: torch.sin(a @ w).exp() @ w
        return checkpoint(region, v, use_reentrant=False, context_fn=SELECTIVE)

    yield refusal(lambda: compiled(call, x, weight, fullgraph=True))
    yield refusal(lambda: compiled(call, x, weight, backend="aot_eager"))
    yield refusal(lambda: compiled(call, x, weight, backend="aot_eager_decomp_partition"))


@shows
def a_module_in_graphs_of_dynamo():
    for backend in (None, "aot_eager", "aot_eager_decomp_partition"):
        module, x = fresh()
        yield compiled(module.eval(), x, backend=backend)
        # With dropout and without a partitioner, stock draws another mask in the recompute.
        if backend is not None:
            yield compiled(module.train(), x, backend=backend)


@shows
def trained_under_compile():
    module, x = fresh()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model = torch.compile(module, backend=counter)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        yield step(model, x)
        optimizer.step()
    yield counter.frame_count, counter.op_count
    yield [text for graph in counter.graphs for text in (graph.code, str(graph.graph))]


class Breaks(Function):
    @staticmethod
    def forward(ctx, x):
        torch._dynamo.graph_break()
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


@shows
def breaks_and_refusals_of_dynamo():
    x = leaf(2, 3)
    calls = {
        "break in forward": lambda v: Breaks.apply(v.sin()).cos(),
        "break in a region": lambda v: checkpoint(Breaks.apply, v, use_reentrant=False),
        "a print": lambda v: (print(end=""), Scale.apply(v, v[0]))[1],
        "data": lambda v: Scale.apply(v, v[0]) if v.sum() > 0 else v.sin(),
    }
    for name, call in calls.items():
        yield name, compiled(call, x)
        failure = refusal(lambda call=call: compiled(call, x, fullgraph=True))
        yield failure.partition("\n")[0]
    torch._dynamo.reset()
    explained = torch._dynamo.explain(calls["a print"])(x)
    yield explained.graph_count, explained.graph_break_count, [g.code for g in explained.graphs]


@shows
def transforms_under_compile():
    x = leaf(2, 3).detach()
    weight = leaf(3)
    calls = (
        lambda v, w: vmap(lambda a: torch.sin(a) * w)(v),
        lambda v, w: (grad(lambda a: (a * w.detach()).exp().sum())(v) * w,),
        lambda v, w: (torch.func.jvp(torch.sin, (v,), (v,))[1] * w,),
        lambda v, w: torch.cond(v.sum() > 0, torch.sin, torch.cos, (v,)) * w,
    )
    for call in calls:
        yield compiled(call, x, weight)


# ------------------------------------------------------------ other tracers, other models


class Tupled(Net):
    def forward(self, x):
        return (super().forward(x).sum(),)


@shows
def joint_graphs():
    texts = []

    def keep(graph, inputs):
        texts.append(graph.code)
        texts.append(
            [
                (n.name, str(n.meta.get("recompute")), n.meta.get("partitioner_tag"))
                for n in graph.graph.nodes
            ]
        )
        return graph

    for partition in (default_partition, min_cut_rematerialization_partition):
        x, weight = leaf(2, 3), leaf(3)
        call = lambda v, w: checkpoint(Scale.apply, v.sin(), w, use_reentrant=False).cos()
        for function in (call, lambda v, w: Scale.apply(v, w).exp()):
            traced = aot_function(function, keep, keep, partition_fn=partition)
            out = traced(x, weight)
            yield texts, torch.autograd.grad(out.sum(), (x, weight))
    module, x = fresh()
    traced = aot_module(module.eval(), keep, keep)
    yield step(traced, x), texts
    module = Tupled().eval()
    for trace_joint in (False, True):
        graph, signature = aot_autograd.aot_export_module(
            module, [x.detach()], trace_joint=trace_joint, output_loss_index=0
        )
        yield graph.code, signature


@shows
def graphs_made_after_dispatch():
    x, weight = leaf(2, 3), leaf(3)

    def trained(v, w):
        out = checkpoint(lambda a: Scale.apply(a, w).sin(), v, use_reentrant=False)
        return torch.autograd.grad(out.sum(), (v, w))

    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(trained, tracing_mode=mode)(x, weight)
        yield graph.code, graph(x, weight)
    yield make_fx(lambda v: vmap(OwnRule.apply)(v))(x.detach()).code
    symbolic = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()))
    yield symbolic.code


class Plain(torch.nn.Module):
    """Neither Functions nor regions, but all that our changes to torch.export look at."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, scale):
        with torch.no_grad():
            mean = x.mean(0)
            with torch.enable_grad():
                y = self.layers(x) - mean
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ y.t()
            with torch.no_grad():
                z = z + 1
        self.count.add_(1)
        y = torch.cond(x.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (y,))
        return {"y": torch.dropout(y, 0.5, self.training) * scale, "z": (z, x * self.frozen)}


@shows
def exports_of_other_models():
    x = torch.linspace(-1, 1, 12).reshape(4, 3)
    for strict in (False, True):
        for train in (False, True):
            torch.manual_seed(0)
            program = torch.export.export(Plain().train(train), (x, 2.0), strict=strict)
            yield str(program), program.graph_signature, sorted(program.state_dict)
            yield [sorted(node.meta) for node in program.graph.nodes]
            yield refusal(lambda p=program: p.run_decompositions().graph_module.code)
            torch.manual_seed(4)
            out = program.module()(x, 2.0)
            yield out["y"], out["z"]


@shows
def exports_with_symbols_and_refusals():
    x = torch.ones(4, 3)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)

    class Reshapes(torch.nn.Module):
        def forward(self, x):
            return x.reshape(-1, 1).sum(1), x.shape[0] * 2

    class Looks(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    for strict in (False, True):
        yield torch.export.export(Reshapes(), (x,), dynamic_shapes=shapes, strict=strict)
        failure = refusal(lambda strict=strict: torch.export.export(Looks(), (x,), strict=strict))
        yield failure.partition("\n")[0]
    yield make_fx(Plain().eval(), pre_dispatch=True)(x, 2.0).code


if __name__ == "__main__":
    print(shown())
