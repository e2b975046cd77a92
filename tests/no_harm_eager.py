"""What eager programs with Functions and checkpoints show: the same with hops as without."""

import threading
import warnings

import torch
from no_harm import refusal, shown, shows
from torch.autograd import Function, gradcheck
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)


class Scale(Function):
    @staticmethod
    def forward(ctx, x, weight):
        """Multiplies."""
        ctx.save_for_backward(x, weight)
        ctx.rows = x.shape[0]
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * x * ctx.rows).sum(0)


class Sine(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x.sin() * factor, x.cos()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]
        ctx.save_for_backward(inputs[0], output[1])
        ctx.save_for_forward(inputs[0], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        x, cosine = ctx.saved_tensors
        return gradient * cosine * ctx.factor, None

    @staticmethod
    def jvp(ctx, tangent, _):
        return tangent * ctx.saved_tensors[1] * ctx.factor, None


class OwnRule(Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 3

    @staticmethod
    def vmap(info, in_dims, x):
        return OwnRule.apply(x) + info.batch_size, in_dims[0]


class Once(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 2


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(3)
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        return x, x.detach() + 1

    @staticmethod
    def backward(ctx, first, second):
        return None if first is None else first * 5


class Wrong(Function):
    """Fails in its backward."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


class Net(torch.nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.weight = torch.nn.Parameter(torch.full((3,), 0.7))
        self.function = Scale
        self.reentrant = reentrant

    def region(self, h, scale=1.0):
        return torch.dropout(self.second(h).relu() * scale, 0.5, self.training)

    def forward(self, x):
        h = self.function.apply(self.first(x), self.weight)
        h = checkpoint(self.region, h, use_reentrant=self.reentrant, **self.keywords())
        return Scale.apply(h, self.weight).tanh()

    def keywords(self):
        return {} if self.reentrant else {"scale": 2.0}


def fresh(**options):
    torch.manual_seed(0)
    return Net(**options), torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()


def leaf(*shape):
    torch.manual_seed(1)
    return torch.randn(shape).requires_grad_()


def step(module, x):
    torch.manual_seed(2)
    module(x).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


# -------------------------------------------------------------------------------- training


@shows
def trained():
    for reentrant in (False, True):
        module, x = fresh(reentrant=reentrant)
        optimizer = torch.optim.Adam(module.parameters())
        for _ in range(3):
            yield step(module, x)
            optimizer.step()


@shows
def trained_in_threads():
    results = [None] * 3

    def work(number):
        module, x = Net(), torch.ones(number + 1, 3, requires_grad=True)
        module.load_state_dict(weights)
        module.eval()
        results[number] = step(module, x)

    weights = fresh()[0].state_dict()
    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    yield results


@shows
def mixed_precision():
    module, x = fresh()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield step(module, x)

    class Cast(Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx, gradient):
            return gradient * 3

    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield Cast.apply(torch.ones(2, dtype=torch.bfloat16, requires_grad=True))


@shows
def sequences_and_policies():
    module = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(4)])
    for p in module.parameters():
        torch.nn.init.constant_(p, 0.1)
    x = leaf(2, 3)
    checkpoint_sequential(module, 2, x, use_reentrant=False).sum().backward()
    yield x.grad
    asked = []

    def policy(ctx, operation, *args, **kwargs):
        asked.append((str(operation), ctx.is_recompute))
        return CheckpointPolicy.MUST_SAVE if len(asked) == 1 else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    out = checkpoint(lambda v: (v @ v.t()).sin(), x, use_reentrant=False, context_fn=contexts)
    out.sum().backward()
    yield x.grad, asked
    early = checkpoint(lambda v: v.sin().exp(), x, use_reentrant=False, determinism_check="none")
    yield torch.autograd.grad(early.sum(), x), checkpoint(lambda v: v + 1, x, use_reentrant=True)


# ------------------------------------------------------------------- derivatives of all kinds


@shows
def transforms():
    x, batch = leaf(3).detach(), leaf(4, 3).detach()
    loss = lambda v: Sine.apply(v, 2.0)[0].exp().sum()
    yield vmap(lambda v: Sine.apply(v, 2.0))(batch)
    yield grad(loss)(x), vmap(grad(loss))(batch), grad(lambda v: grad(loss)(v).sum())(x)
    yield jvp(loss, (x,), (x,)), jacrev(lambda v: Sine.apply(v, 2.0)[0])(x)
    yield jacfwd(lambda v: Sine.apply(v, 2.0)[0])(x), vjp(loss, x)[1](torch.ones(()))
    yield vmap(OwnRule.apply)(batch), vmap(OwnRule.apply, in_dims=1, out_dims=1)(batch)
    yield grad(lambda v: OwnRule.apply(v).sum())(x)
    yield vmap(vmap(lambda v: Sine.apply(v, 2.0)[0]))(batch.reshape(2, 2, 3))


@shows
def transforms_that_fail():
    x = leaf(3, 3).detach()
    yield refusal(lambda: grad(lambda v: Scale.apply(v, v[0]).sum())(x))
    yield refusal(lambda: vmap(lambda v: Scale.apply(v, v))(x))

    class NoRule(Sine):
        generate_vmap_rule = False

    yield refusal(lambda: vmap(lambda v: NoRule.apply(v, 2.0))(x))
    yield refusal(lambda: vmap(lambda v: checkpoint(torch.sin, v, use_reentrant=False))(x))
    yield refusal(lambda: grad(lambda v: checkpoint(torch.sin, v, use_reentrant=False).sum())(x))


@shows
def derivatives_of_a_module():
    module, x = fresh()
    module.eval()
    parameters = dict(module.named_parameters())
    yield functional_call(module, parameters, (x,))
    yield torch.autograd.functional.jacobian(lambda v: OwnRule.apply(v), x)
    yield torch.autograd.functional.hessian(lambda v: OwnRule.apply(v).sum(), x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), torch.ones_like(x))
        yield torch.autograd.forward_ad.unpack_dual(Sine.apply(dual, 2.0)[0]).tangent


@shows
def derivatives_twice():
    x, weight = leaf(2, 3), leaf(3)
    (first,) = torch.autograd.grad(Scale.apply(x, weight).exp().sum(), x, create_graph=True)
    yield first, torch.autograd.grad(first.sum(), (x, weight))
    region = lambda v: Scale.apply(v, weight).sin()
    out = checkpoint(region, x, use_reentrant=False)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    yield first, torch.autograd.grad(first.sum(), (x, weight))
    (first,) = torch.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    yield first.grad_fn, refusal(lambda: first.sum().backward())
    double = x.detach().double().requires_grad_()
    yield gradcheck(lambda v: Sine.apply(v, 2.0)[0], (double,))
    yield refusal(lambda: gradcheck(lambda v: Scale.apply(v, v.detach()), (double,)))


# ------------------------------------------------------------------------- the graph of autograd


@shows
def nodes_of_autograd():
    x, weight = leaf(2, 3), leaf(3)
    out = Scale.apply(x, weight)
    node = out.grad_fn
    yield type(node).__name__, node.name(), node.rows, node.needs_input_grad
    yield [n.name() for n, _ in node.next_functions], node.saved_tensors
    yield type(node).__mro__, isinstance(node, FunctionCtx), node.metadata
    yield refusal(lambda: len(node._raw_saved_tensors)), refusal(lambda: node._input_metadata)
    out.sum().backward()
    yield refusal(lambda: node.saved_tensors)
    region = checkpoint(lambda v: Scale.apply(v, weight).sin(), x, use_reentrant=False)
    yield region.grad_fn.name(), region.grad_fn.next_functions[0][0].saved_tensors
    # Torch 2.9 has lost the name of this one.
    node = checkpoint(lambda v: v + 1, x, use_reentrant=True).grad_fn
    yield type(node).__name__, refusal(node.name)


@shows
def dirty_inputs_and_absent_gradients():
    x = leaf(2, 3)
    y = x * 1
    first, second = Dirty.apply(y)
    yield first is y, y.grad_fn.name(), y._version, second.requires_grad
    second.sum().backward(retain_graph=True)
    yield x.grad
    first.sum().backward()
    yield x.grad, refusal(lambda: Dirty.apply(x))


@shows
def hooks():
    x, weight = leaf(2, 3), leaf(3)
    told = []
    for build in (
        lambda: Scale.apply(x, weight),
        lambda: checkpoint(lambda v: Scale.apply(v, weight), x, use_reentrant=False),
        lambda: checkpoint(lambda v: Scale.apply(v, weight), x, use_reentrant=True),
    ):
        out = build()
        out.register_hook(lambda g: (told.append("tensor"), g * 2)[1])
        out.retain_grad()
        out.grad_fn.register_prehook(lambda g: told.append("before"))
        out.grad_fn.register_hook(lambda i, o: told.append(("after", len(i), len(o))))
        x.grad = None
        out.exp().sum().backward()
        yield x.grad, out.grad, told


@shows
def hooks_of_modules():
    module, x = fresh()
    told = []
    module.register_full_backward_hook(lambda m, i, o: told.append(("backward", i, o)))
    module.register_forward_hook(lambda m, i, o: told.append("forward"))
    module.second.register_forward_pre_hook(lambda m, i: told.append("second"))
    module.weight.register_post_accumulate_grad_hook(lambda p: told.append("accumulated"))
    yield step(module, x), told


@shows
def hooks_of_saved_tensors():
    module, x = fresh()
    told = []

    def pack(tensor):
        told.append(("pack", tuple(tensor.shape)))
        return tensor

    def unpack(tensor):
        told.append(("unpack", tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield step(module, x), told
    with torch.autograd.graph.save_on_cpu():
        yield step(module, x)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        yield refusal(lambda: checkpoint(torch.sin, x, use_reentrant=False))
        yield Scale.apply(x, module.weight)


@shows
def anomaly_mode():
    x = leaf(2, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly(check_nan=True):
            yield refusal(lambda: Wrong.apply(x).sum().backward())
            yield refusal(lambda: (Scale.apply(x, x[0]) * float("nan")).sum().backward())
            module, x = fresh()
            yield step(module, x)
    yield [str(w.message) for w in told]


@shows
def errors():
    x = leaf(2, 3)
    yield refusal(lambda: Wrong.apply(x).sum().backward())
    yield refusal(lambda: Scale()), refusal(lambda: Scale.apply())
    yield refusal(lambda: Scale.apply(x)), refusal(lambda: Function.apply(x))
    yield refusal(lambda: checkpoint(torch.sin, x, unknown=1, use_reentrant=False))
    yield refusal(lambda: checkpoint(torch.sin, x, use_reentrant=True, early=1))
    yield refusal(lambda: checkpoint(torch.sin, x, use_reentrant=True, context_fn=print))
    count = []

    def another(v):
        count.append(1)
        return v.sin() if len(count) == 1 else v.sin().cos().exp() @ v.t()

    out = checkpoint(another, x, use_reentrant=False)
    yield refusal(lambda: out.sum().backward())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        yield refusal(lambda: checkpoint(torch.sin, x))
        yield refusal(lambda: checkpoint(torch.sin, torch.ones(2), use_reentrant=True))
    yield [str(w.message) for w in told]


if __name__ == "__main__":
    print(shown())
