"""What Functions, modules and checkpoint are to the rest of Python: the same as without hops."""

import copy
import gc
import inspect
import io
import pickle

import torch
from no_harm import refusal, shown, shows
from no_harm_eager import Scale, fresh, leaf, step
from torch.autograd import Function
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
)


@shows
def what_a_class_is():
    yield Scale.__mro__, type(Scale).__mro__, issubclass(Scale, Function), callable(Scale.apply)
    yield refusal(lambda: inspect.signature(Scale.apply)), inspect.signature(Scale.forward)
    yield inspect.signature(Scale.backward), Scale.forward.__doc__, Scale.__qualname__
    yield inspect.signature(checkpoint), checkpoint.__module__, checkpoint.__qualname__
    yield inspect.signature(checkpoint_sequential), Scale._backward_cls.__mro__
    yield sorted(vars(Scale)), sorted(vars(Function)), sorted(dir(Scale))
    yield Scale.apply == Scale.apply, type(Scale.apply).__name__, Scale.apply.__qualname__
    yield Scale.apply.__doc__, Scale.apply.__self__ is Scale, hasattr(Scale.apply, "__wrapped__")
    yield inspect.getsource(Scale), [c.__name__ for c in Function.__subclasses__()][:5]

    class Sub(Scale):
        @classmethod
        def apply(cls, *args):
            return super().apply(*args) + 1

    yield Sub.apply(leaf(2, 3), leaf(3)), isinstance(Scale, type(Function)), issubclass(Sub, Scale)


@shows
def what_dynamo_is_told_outside_of_a_trace():
    from torch._dynamo import trace_rules

    for function in (checkpoint, checkpoint_sequential, torch.manual_seed, Scale.forward):
        yield trace_rules.check(function, is_inlined_call=True), trace_rules.check(function)


@shows
def copies_and_pickles():
    module, x = fresh()
    wanted = step(module, x)
    x.grad = None
    yield wanted
    for again in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        through_file(module),
    ):
        again.zero_grad()
        yield again.function is Scale, step(again, x)
        x.grad = None
    yield pickle.loads(pickle.dumps(Scale)) is Scale, copy.deepcopy(Scale) is Scale
    yield refusal(lambda: pickle.loads(pickle.dumps(Scale.apply))(x, x[0]))
    yield pickle.loads(pickle.dumps(checkpoint)) is checkpoint
    yield copy.copy(module).function is Scale, refusal(lambda: copy.deepcopy(Scale.apply)(x, x[0]))


def through_file(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@shows
def scripted_and_traced():
    module, x = fresh()
    module.eval()
    traced = torch.jit.trace(lambda v: Scale.apply(v, v[0]) + 1, (x,), check_trace=False)
    yield str(traced.graph), traced(x)
    yield refusal(lambda: torch.jit.trace(module, (x,), check_trace=False)(x))
    yield refusal(lambda: torch.jit.script(module))

    class Ignoring(torch.nn.Module):
        @torch.jit.ignore
        def outside(self, x: torch.Tensor) -> torch.Tensor:
            return Scale.apply(x, x[0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outside(x) + 1

    scripted = torch.jit.script(Ignoring())
    yield scripted.code, torch.autograd.grad(scripted(x).sum(), x)


@shows
def distributed_data_parallel():
    if not torch.distributed.is_available():
        return
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
            module, x = fresh()
            parallel = torch.nn.parallel.DistributedDataParallel(module, **options)
            yield step(parallel, x), step(parallel, x)
    finally:
        # The last owner of the group has to be Python: it lets the group's threads end, while the
        # reducer of a DistributedDataParallel would wait for them with the interpreter locked.
        parallel = None
        gc.collect()
        torch.distributed.destroy_process_group()


@shows
def modes():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    module, x = fresh()
    for mode in (Functions, Operations):
        with mode():
            yield step(module, x)
        yield seen
    with torch.no_grad():
        yield module.eval()(x)
    with torch.inference_mode():
        yield module(x)
    meta = copy.deepcopy(module).to("meta")
    yield meta(torch.empty(2, 3, device="meta")).shape


if __name__ == "__main__":
    print(shown())
