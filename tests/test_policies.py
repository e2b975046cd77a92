"""``hops.policies`` and ``hops.checkpoint_name``: values that say what a region keeps."""

import copy
import functools
import io
import pickle

import pytest
import torch
from models import assert_same, gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from version_differences import needs

import hops
from hops.policies import (
    both_of,
    from_text,
    save_everything,
    save_matmuls,
    save_matmuls_without_batch_dims,
    save_names,
    save_nothing,
    save_ops,
)

SIZE = 16
MATRIX = SIZE * SIZE * 4

ALL = [
    save_everything,
    save_nothing,
    save_matmuls,
    save_matmuls_without_batch_dims,
    save_ops("aten.sin", "aten.addmm.default"),
    save_names("scores"),
    both_of(save_names("hidden"), save_ops(torch.ops.aten.tanh)),
]
FRONT_ENDS = ["nonstrict", "strict", "make_fx"]


class Model(torch.nn.Module):
    """A region with named values, a product with weights and one of two batches."""

    def __init__(self, context_fn):
        super().__init__()
        self.first = torch.nn.Linear(SIZE, SIZE)
        self.second = torch.nn.Linear(SIZE, SIZE)
        self.context_fn = context_fn

    def forward(self, x):
        def region(h):
            hidden = hops.checkpoint_name(self.first(h), "hidden").sin()
            batch = hidden.view(4, 4, SIZE)
            scores = hops.checkpoint_name(torch.bmm(batch, batch.mT), "scores")
            return self.second((scores @ batch).view(SIZE, SIZE)).tanh()

        return checkpoint(region, x.cos(), use_reentrant=False, context_fn=self.context_fn).sum()


def build(policy):
    torch.manual_seed(0)
    return Model(policy), torch.randn(SIZE, SIZE, requires_grad=True)


def make_fx(model, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    state = dict(model.named_parameters())

    def flat(values, x):
        return torch.func.functional_call(model, dict(zip(state, values)), (x,))

    graph = make_fx(flat, pre_dispatch=True)(list(state.values()), x)

    class Traced(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.graph_module = model, graph

        def named_parameters(self, *args, **kwargs):
            return self.model.named_parameters(*args, **kwargs)

        def forward(self, x):
            return self.graph_module(list(self.model.parameters()), x)

    return Traced()


def capture(policy, how):
    model, x = build(policy)
    if how == "make_fx":
        module = make_fx(model, x)
        return module, module.graph_module
    ep = torch.export.export(model, (x,), strict=how == "strict")
    return ep.module(), ep.graph_module


def reloaded(ep):
    buffer = io.BytesIO()
    torch.export.save(ep, buffer)
    buffer.seek(0)
    return torch.export.load(buffer)


def region_node(graph_module):
    (node,) = [n for n in graph_module.graph.nodes if "tag_activation_checkpoint" in n.name]
    return node


class Operations(TorchDispatchMode):
    """The operations that ran, but for views."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returns = func._schema.returns
        if not (returns and returns[0].alias_info):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def kept_and_rerun(module, x):
    """Bytes of the tensors alive between forward and backward, and the operations of backward."""
    from torch.multiprocessing.reductions import StorageWeakRef

    storages = {}

    class Storages(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()
                    storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            return out

    parameters = {p.untyped_storage()._cdata for p in module.parameters()}
    parameters.add(x.untyped_storage()._cdata)
    with Storages():
        loss = module(x)
    kept = sum(
        size for key, (ref, size) in storages.items() if not ref.expired() and key not in parameters
    )
    with Operations() as backward:
        loss.backward()
    return kept, backward.seen


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_policies_are_values(policy):
    assert eval(repr(policy), {"hops": hops}) == policy
    assert from_text(policy.text) == policy
    assert hash(from_text(policy.text)) == hash(policy)
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert copy.deepcopy(policy) == policy
    assert [other for other in ALL if other == policy] == [policy]
    with pytest.raises(AttributeError):
        policy.anything = ()


def test_how_policies_are_made():
    mm = torch.ops.aten.mm
    assert save_ops(mm) == save_ops("aten.mm") == save_ops("aten::mm")
    assert save_ops(mm.default, "aten.bmm") == save_ops("aten.bmm", "aten.mm.default")
    assert save_names("a") | save_names("b") == both_of(save_names("a"), save_names("b"))
    assert both_of(save_nothing, both_of(save_matmuls, save_nothing)) == both_of(
        save_nothing, save_matmuls
    )
    assert both_of(save_matmuls, save_matmuls) == save_matmuls
    with pytest.raises(TypeError, match="expected operations"):
        save_ops(torch.sin)
    with pytest.raises(TypeError, match="names are strings"):
        save_names(1)
    with pytest.raises(ValueError, match="at least one"):
        save_names()
    with pytest.raises(TypeError, match="expected policies"):
        both_of(save_nothing, CheckpointPolicy.MUST_SAVE)


@pytest.mark.parametrize(
    "text",
    [
        "save_the_best",
        "save_names(1)",
        "save_names",
        "__import__('os')",
        "save_matmuls; 1",
        "save_ops(*x)",
        "both_of(save_nothing, 'a')",
        "hops.policies.save_nothing",
    ],
)
def test_only_the_text_of_a_policy_is_read(text):
    with pytest.raises(hops.ReplayError, match="does not know"):
        from_text(text)


def test_what_each_policy_keeps_in_eager():
    kept = {policy: kept_and_rerun(*build(policy)) for policy in ALL}
    nothing = kept_and_rerun(*build(torch.utils.checkpoint.noop_context_fn))
    assert kept[save_nothing] == nothing

    def more(policy):
        return kept[policy][0] - nothing[0]

    def not_rerun(policy):
        again = list(kept[policy][1])
        for operation in nothing[1]:
            if operation in again:
                again.remove(operation)
        assert again == []
        again = list(nothing[1])
        for operation in kept[policy][1]:
            again.remove(operation)
        return sorted(again)

    scores = 4 * 4 * 4 * 4
    bmm = ["aten.bmm.default"]
    addmm = ["aten.addmm.default"]
    assert more(save_names("scores")) == scores
    assert more(save_matmuls_without_batch_dims) == 2 * MATRIX
    assert not_rerun(save_matmuls_without_batch_dims) == addmm + addmm
    assert more(save_matmuls) == 3 * MATRIX + scores
    assert not_rerun(save_matmuls) == sorted(addmm * 2 + bmm * 2)
    assert more(save_everything) > more(save_matmuls)
    assert set(not_rerun(save_everything)) > set(not_rerun(save_matmuls))


@needs("output_kept_afterwards")
def test_what_made_a_named_value_is_not_run_again():
    plain = kept_and_rerun(*build(save_nothing))[1]
    named = kept_and_rerun(*build(save_names("scores", "hidden")))[1]
    for operation in ("aten.bmm.default", "aten.addmm.default"):
        assert named.count(operation) == plain.count(operation) - 1


def test_a_product_with_shared_weights_has_no_batch_dimension():
    def matmul(x, w):
        return torch.bmm(x, w.expand(3, 5, 5)).sin()

    x, w = torch.randn(3, 4, 5, requires_grad=True), torch.randn(5, 5, requires_grad=True)
    for policy, times in ((save_matmuls_without_batch_dims, 2), (save_nothing, 3)):
        out = checkpoint(matmul, x, w, use_reentrant=False, context_fn=policy)
        with Operations() as backward:
            out.sum().backward()
        assert backward.seen.count("aten.bmm.default") == times


@pytest.mark.parametrize("how", FRONT_ENDS)
@pytest.mark.parametrize("policy", ALL, ids=str)
def test_captured_as_eager(policy, how):
    want = gradients(*build(policy))
    module, graph = capture(policy, how)
    _, x = build(policy)
    assert_same(gradients(module, x), want)
    kept, again = kept_and_rerun(*build(policy))
    captured_kept, captured_again = kept_and_rerun(module, x)
    assert captured_kept == kept
    assert sorted(captured_again) == sorted(again)
    node = region_node(graph)
    assert node.kwargs["policy_name"] == policy.text
    assert hops.checkpoint_parts(node).context_fn == policy
    assert policy.text in graph.print_readable(print_output=False)


class MadeInForward(Model):
    """The policy is made by the code that is captured."""

    def __init__(self, context_fn):
        super().__init__(context_fn)
        del self.context_fn

    @property
    def context_fn(self):
        return save_names("hidden", "scores")

    @context_fn.setter
    def context_fn(self, value):
        pass

    @context_fn.deleter
    def context_fn(self):
        pass


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_a_policy_made_inside_of_forward(strict):
    torch.manual_seed(0)
    model, x = MadeInForward(None), torch.randn(SIZE, SIZE, requires_grad=True)
    ep = torch.export.export(model, (x,), strict=strict)
    node = region_node(ep.graph_module)
    assert hops.checkpoint_parts(node).context_fn == save_names("hidden", "scores")
    assert_same(gradients(ep.module(), x), gradients(model, x))


@pytest.mark.parametrize("policy", ALL, ids=str)
def test_from_a_file_as_eager(policy):
    model, x = build(policy)
    ep = reloaded(torch.export.export(model, (x,), strict=False))
    node = region_node(ep.graph_module)
    assert node.kwargs["policy_name"] == policy.text
    assert hops.checkpoint_parts(node).context_fn == policy
    module = ep.module()
    want = gradients(*build(policy))
    assert_same(gradients(module, x), want)
    kept, again = kept_and_rerun(*build(policy))
    loaded_kept, loaded_again = kept_and_rerun(module, x)
    assert loaded_kept == kept
    # A file knows which operation made a named value, on every torch.
    assert len(loaded_again) <= len(again)


def test_an_unknown_policy_in_a_file_is_an_error():
    model, x = build(save_matmuls)
    ep = torch.export.export(model, (x,), strict=False)
    node = region_node(ep.graph_module)
    node.kwargs = {**node.kwargs, "policy_name": "save_the_best"}
    with pytest.raises(hops.ReplayError, match="'save_the_best'.*does not know"):
        reloaded(ep).module()(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_as_eager(backend):
    policy = both_of(save_names("scores"), save_matmuls_without_batch_dims)
    want = gradients(*build(policy))
    for module in (build(policy)[0], capture(policy, "nonstrict")[0]):
        torch._dynamo.reset()
        compiled = torch.compile(module, backend=backend, fullgraph=True)
        got = gradients(compiled, build(policy)[1], parameters=module)
        torch.testing.assert_close(got[0], want[0])
        for name, gradient in got[1].items():
            torch.testing.assert_close(gradient, want[1][name])


class Named(torch.nn.Module):
    def forward(self, x):
        return hops.checkpoint_name(x.sin(), "angle").cos()


@pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])
def test_names_are_in_the_graph_until_it_is_decomposed(strict):
    x = torch.randn(3, requires_grad=True)
    ep = torch.export.export(Named(), (x,), strict=strict)
    for program in (ep, reloaded(ep), torch.export.export(ep.module(), (x,), strict=strict)):
        (node,) = [n for n in program.graph.nodes if "checkpoint_name" in n.name]
        assert node.target is torch.ops.hops.checkpoint_name.default
        assert node.args[1] == "angle"
        torch.testing.assert_close(program.module()(x), Named()(x))
    decomposed = ep.run_decompositions()
    assert "checkpoint_name" not in str(decomposed.graph)
    torch.testing.assert_close(decomposed.module()(x), Named()(x))


def test_a_name_costs_no_memory_and_no_copy():
    x = torch.randn(3, requires_grad=True)
    y = hops.checkpoint_name(x.sin(), "angle")
    assert y.grad_fn.name() == "CheckpointNameBackward"
    z = x.sin()
    named = hops.checkpoint_name(z, "angle")
    assert named.data_ptr() == z.data_ptr() and named.shape == z.shape
    with torch.no_grad():
        assert hops.checkpoint_name(z, "angle").data_ptr() == z.data_ptr()
        named.mul_(2)
    assert z._version == named._version == 1


def test_a_name_is_the_identity_to_every_transform():
    f = functools.partial(hops.checkpoint_name, name="a")
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    square = lambda x: f(x * x) * f(x)
    assert torch.autograd.gradcheck(square, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(square, x)
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(lambda x: square(x).sum())(x), 3 * x * x)
    torch.testing.assert_close(torch.vmap(square)(x), x**3)
    _, tangent = torch.func.jvp(square, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, 3 * x * x)


def test_names_are_checked():
    x = torch.ones(2)
    with pytest.raises(TypeError, match="expected a tensor, got list"):
        hops.checkpoint_name([x], "a")
    with pytest.raises(TypeError, match="must be a string, got int"):
        hops.checkpoint_name(x, 1)
    with pytest.raises(ValueError, match="not be empty"):
        hops.checkpoint_name(x, "")
