"""Functions of real packages, as a user of the package meets them.

A case is one function that imports the package and gives ``(module, arguments)``;
it is called anew, on the same seed, for every program that is compared::

    @case("entmax")
    def entmax15():
        from entmax import entmax15

        return Layer(lambda x: entmax15(x, dim=-1)), (tensor(2, 5),)
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.fx.experimental.proxy_tensor as proxy_tensor
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the table; each argument of :func:`case` is one of these fields."""

    name: str
    package: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    #: Operators that the graph must hold; None: as many as eager has calls that record.
    calls: int | None = None
    #: Front end, or ``"*"`` for the others: what the error of hops says, by name.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The same where torch fails on code outside of any Function: what its own error says.
    torch_cannot: dict[str, str] = dataclasses.field(default_factory=dict)
    #: The largest constant whose values torch is told to follow; it follows single numbers.
    constants: int = 1
    #: Why ``torch.export.save`` refuses the program with or without hops.
    unsaveable: str | None = None
    #: Buffers that the forward replaces by assigning another tensor.  torch.export sees that
    #: where the module is the root and the shape stays; make_fx never does.
    assigned: tuple[str, ...] = ()
    #: The module runs in train mode.
    train: bool = True
    #: Fields that ``test_function_parity.run`` looks at.
    double: bool = False
    raises: str | None = None

    @contextlib.contextmanager
    def following_constants(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in (fake_tensor, proxy_tensor):
                stack.enter_context(
                    mock.patch.object(module, "CONSTANT_NUMEL_LIMIT", self.constants)
                )
            yield


CASES: dict[str, Case] = {}


def case(package: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build.__name__, package, build, **options)
        return build

    return register


def fresh(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module of a case and its arguments, always the same."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, args = CASES[name].build()
    return module.train(CASES[name].train), args


class Layer(nn.Module):
    """A linear layer before and an activation of a package after it."""

    def __init__(self, activation: Callable[[Any], Any], width: int = 5, **modules: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = activation
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        return self.activation(self.linear(x))


def tensor(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape or (3, 5), requires_grad=grad)


# ---------------------------------------------------------------------------------------- entmax


def _entmax(name: str, **options: Any) -> Any:
    import entmax

    return Layer(lambda x: getattr(entmax, name)(x, **options)), (tensor(),)


@case("entmax")
def entmax_sparsemax():
    return _entmax("sparsemax", dim=-1)


@case("entmax")
def entmax_entmax15():
    return _entmax("entmax15", dim=-1)


@case("entmax", refused={"*": "Entmax15Function looks at the values"})
def entmax_entmax15_top_k():
    return _entmax("entmax15", dim=-1, k=3)


@case("entmax")
def entmax_bisect():
    return _entmax("entmax_bisect", alpha=1.3, dim=-1)


@case("entmax")
def entmax_learned_alpha():
    from entmax import entmax_bisect

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.tensor([[1.3], [1.5], [1.7]]))

        def forward(self, x):
            return entmax_bisect(x, alpha=self.alpha, dim=-1)

    return Model(), (tensor(),)


@case("entmax")
def entmax_normmax():
    return _entmax("normmax_bisect", alpha=2, dim=-1)


@case("entmax")
def entmax_budget():
    return _entmax("budget_bisect", budget=2, dim=-1)


class _Loss(nn.Module):
    def __init__(self, loss: nn.Module, width: int = 5, classes: int = 5) -> None:
        super().__init__()
        self.linear = nn.Linear(width, classes)
        self.loss = loss

    def forward(self, x, target):
        return self.loss(self.linear(x), target)


def _entmax_loss(name: str, **options: Any) -> Any:
    import entmax

    return _Loss(getattr(entmax, name)(**options)), (tensor(), torch.tensor([0, 3, 1]))


@case("entmax")
def entmax_sparsemax_loss():
    return _entmax_loss("SparsemaxLoss")


@case("entmax")
def entmax_entmax15_loss():
    return _entmax_loss("Entmax15Loss")


@case("entmax")
def entmax_bisect_loss():
    return _entmax_loss("EntmaxBisectLoss", alpha=1.4)


# --------------------------------------------------------------------------------------- snntorch


def _leaky(surrogate: Any) -> Any:
    import snntorch

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 4)
            self.neuron = snntorch.Leaky(beta=0.9, spike_grad=surrogate, learn_beta=True)

        def forward(self, x):
            membrane = torch.zeros(x.shape[1], 4)
            spikes = []
            for step in x:
                spike, membrane = self.neuron(self.linear(step), membrane)
                spikes.append(spike)
            return torch.stack(spikes), membrane

    return Model(), (tensor(3, 2, 5) * 2,)


def _surrogate(name: str, *args: Any, **options: Any) -> Any:
    from snntorch import surrogate

    return _leaky(getattr(surrogate, name)(*args, **options))


@case("snntorch", assigned=("neuron.mem",))
def snntorch_fast_sigmoid():
    return _surrogate("fast_sigmoid", slope=25)


@case("snntorch", assigned=("neuron.mem",))
def snntorch_atan():
    return _surrogate("atan")


@case("snntorch", assigned=("neuron.mem",))
def snntorch_straight_through():
    return _surrogate("straight_through_estimator")


@case("snntorch", assigned=("neuron.mem",))
def snntorch_triangular():
    return _surrogate("triangular")


@case("snntorch", assigned=("neuron.mem",))
def snntorch_sigmoid():
    return _surrogate("sigmoid", slope=5)


@case("snntorch", assigned=("neuron.mem",))
def snntorch_spike_rate_escape():
    return _surrogate("spike_rate_escape")


@case("snntorch", assigned=("neuron.mem",))
def snntorch_stochastic_spike():
    return _surrogate("SSO", mean=0, variance=0.5)


@case("snntorch", assigned=("neuron.mem",))
def snntorch_sparse_fast_sigmoid():
    return _surrogate("SFS")


@case("snntorch", assigned=("neuron.mem",))
def snntorch_custom_surrogate():
    def gradient(x, grad, spikes):
        return grad * torch.sigmoid(x) + spikes

    return _surrogate("custom_surrogate", gradient)


@case("snntorch", assigned=("neuron.mem",))
def snntorch_heaviside():
    from snntorch import surrogate

    return _leaky(surrogate.heaviside())


@case(
    "snntorch",
    refused={
        # It reads the value of torch.ones(1), which a fake tensor does not have.
        "nonstrict": "StateQuant looks at the values",
        "strict": "StateQuant looks at the values",
        "make_fx_fake": "StateQuant looks at the values",
    },
)
def snntorch_state_quant():
    from snntorch.functional import quant

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.quant = quant.state_quant(num_bits=4, uniform=True, threshold=1.0)

        def forward(self, x):
            return self.quant(self.linear(x))

    return Model(), (tensor(),)


@case("snntorch", refused={"*": "FirstSpike.backward looks at the values"})
def snntorch_temporal_loss():
    from snntorch import functional, surrogate

    neuron = _leaky(surrogate.fast_sigmoid())[0]
    loss = functional.mse_temporal_loss(target_is_time=True)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = neuron

        def forward(self, x):
            return loss(self.neuron(x)[0], torch.tensor([[0.0, 1.0, 2.0, 1.0]] * 2))

    return Model(), (tensor(3, 2, 5) * 2,)


# ------------------------------------------------------------------------------------------ norse


class _Cell(nn.Module):
    """The first state is given: the one that norse makes itself looks at values."""

    def __init__(self, cell: nn.Module, state: Any) -> None:
        super().__init__()
        self.cell = cell
        self.state = state

    def forward(self, x):
        state, out = self.state(*(torch.zeros(2, 4) for _ in self.state._fields)), []
        for step in x:
            z, state = self.cell(step, state)
            out.append(z)
        return torch.stack(out)


def _norse(method: str) -> Any:
    import norse.torch as norse
    from norse.torch.functional.lif import LIFState

    parameters = norse.LIFParameters(method=method, alpha=100.0)
    # Without autapses the cell hooks its parameter, and files keep no hooks.
    cell = norse.LIFRecurrentCell(5, 4, p=parameters, autapses=True)
    return _Cell(cell, LIFState), (tensor(3, 2, 5) * 40,)


@case("norse")
def norse_superspike():
    return _norse("super")


@case("norse")
def norse_tanh():
    return _norse("tanh")


@case("norse")
def norse_triangle():
    return _norse("triangle")


@case("norse")
def norse_circ():
    return _norse("circ")


@case("norse")
def norse_heavi_erfc():
    return _norse("heavi_erfc")


def _without_validation() -> None:
    """A distribution looks at the values of its parameters unless told not to."""
    torch.distributions.Distribution.set_default_validate_args(False)


@case("norse")
def norse_logistic():
    from norse.torch.functional.threshold import logistic_fn

    _without_validation()

    return Layer(lambda x: logistic_fn(x, 1.0)), (tensor(),)


@case("norse")
def norse_circ_dist():
    from norse.torch.functional.threshold import circ_dist_fn

    _without_validation()

    return Layer(lambda x: circ_dist_fn(x, 0.3)), (tensor(),)


@case("norse")
def norse_lif_adjoint():
    from norse.torch.functional.adjoint.lif_adjoint import lif_adjoint_step
    from norse.torch.functional.lif import LIFState

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_weights = nn.Parameter(torch.randn(4, 5))
            self.recurrent_weights = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            state = LIFState(*(torch.zeros(2, 4) for _ in range(3)))
            out = []
            for step in x:
                z, state = lif_adjoint_step(step, state, self.input_weights, self.recurrent_weights)
                out.append(z)
            return torch.stack(out), state.v

    return Model(), (tensor(3, 2, 5) * 40,)


@case("norse")
def norse_lif_feed_forward_adjoint():
    from norse.torch.functional.adjoint.lif_adjoint import lif_feed_forward_adjoint_step
    from norse.torch.functional.lif import LIFFeedForwardState

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 4)

        def forward(self, x):
            state = LIFFeedForwardState(torch.zeros(2, 4), torch.zeros(2, 4))
            out = []
            for step in x:
                z, state = lif_feed_forward_adjoint_step(self.linear(step), state)
                out.append(z)
            return torch.stack(out), state.v

    return Model(), (tensor(3, 2, 5) * 40,)


@case("norse")
def norse_lsnn_adjoint():
    from norse.torch.functional.adjoint.lsnn_adjoint import lsnn_adjoint_step
    from norse.torch.functional.lsnn import LSNNState

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_weights = nn.Parameter(torch.randn(4, 5))
            self.recurrent_weights = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            state = LSNNState(*(torch.zeros(2, 4) for _ in range(4)))
            out = []
            for step in x:
                z, state = lsnn_adjoint_step(
                    step, state, self.input_weights, self.recurrent_weights
                )
                out.append(z)
            return torch.stack(out), state.v

    return Model(), (tensor(3, 2, 5) * 40,)


# -------------------------------------------------------------------------- efficientnet-pytorch


@case("efficientnet_pytorch")
def efficientnet_swish():
    from efficientnet_pytorch.utils import MemoryEfficientSwish

    return Layer(MemoryEfficientSwish()), (tensor(),)


# ------------------------------------------------------------------------------------------- e3nn


@case("e3nn")
def e3nn_soft_unit_step():
    from e3nn.math import soft_unit_step

    return Layer(soft_unit_step), (tensor(),)


# ------------------------------------------------------------------------------------------ memcnn


class _Coupling(nn.Module):
    def __init__(self, wrapper: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.wrapper = wrapper

    def forward(self, x):
        return self.wrapper(self.first(x))


def _memcnn(kind: str, **options: Any) -> Any:
    import memcnn

    def half():
        return nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    if kind == "additive":
        coupling = memcnn.AdditiveCoupling(half(), half(), split_dim=1)
    else:
        coupling = memcnn.AffineCoupling(half(), half(), split_dim=1)
    return _Coupling(memcnn.InvertibleModuleWrapper(coupling, **options)), (tensor(2, 6),)


@case("memcnn")
def memcnn_additive_keeps_input():
    return _memcnn("additive", keep_input=True, keep_input_inverse=True)


@case("memcnn")
def memcnn_affine_keeps_input():
    return _memcnn("affine", keep_input=True, keep_input_inverse=True)


@case("memcnn")
def memcnn_additive_frees_input():
    return _memcnn("additive")


# ------------------------------------------------------------------------------------ torchdiffeq


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, t, y):
        return self.net(y) * t.cos()


class _Solver(nn.Module):
    """The times are written in the model: the solver looks at their values."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.field = _Field()
        self.options = options

    def forward(self, y):
        from torchdiffeq import odeint_adjoint

        t = torch.tensor([0.0, 0.3, 1.0])
        return odeint_adjoint(self.field, y, t, **self.options)


# The solver looks at the times before, in and after its Function.  They are the same in every
# run, and torch can follow the values of a constant; but Dynamo follows none.
_TIMES = {"strict": "Data-dependent branching"}


@case("torchdiffeq", constants=8, torch_cannot=_TIMES)
def torchdiffeq_adjoint_rk4():
    return _Solver(method="rk4"), (tensor(2, 3),)


@case("torchdiffeq", constants=8, torch_cannot=_TIMES)
def torchdiffeq_adjoint_euler():
    return _Solver(method="euler"), (tensor(2, 3),)


@case("torchdiffeq", constants=8, torch_cannot=_TIMES)
def torchdiffeq_adjoint_midpoint():
    return _Solver(method="midpoint"), (tensor(2, 3),)


@case(
    "torchdiffeq",
    torch_cannot={
        "nonstrict": "Could not guard on data-dependent expression",
        "make_fx": "trying to get value out of a tracing tensor",
        "make_fx_fake": "Could not guard on data-dependent expression",
        **_TIMES,
    },
)
def torchdiffeq_adjoint_with_times_that_torch_does_not_follow():
    return _Solver(method="euler"), (tensor(2, 3),)


# The size of a step follows from the state.
@case(
    "torchdiffeq",
    constants=8,
    refused={"*": "OdeintAdjointMethod looks at the values"},
    torch_cannot=_TIMES,
)
def torchdiffeq_adjoint_adaptive():
    return _Solver(method="dopri5"), (tensor(2, 3),)


# --------------------------------------------------------------------------------------- brevitas


def _ste(name: str, *extra: Any, width: int = 5) -> Any:
    """A straight-through operation; the package's own Functions, not its compiled ones."""
    from brevitas.ops import autograd_ste_ops

    function = getattr(autograd_ste_ops, name)
    return Layer(lambda x: function.apply(x, *extra), width), (tensor(3, width),)


@case("brevitas")
def brevitas_round():
    return _ste("RoundSteFn")


@case("brevitas")
def brevitas_ceil():
    return _ste("CeilSteFn")


@case("brevitas")
def brevitas_floor():
    return _ste("FloorSteFn")


@case("brevitas")
def brevitas_round_to_zero():
    return _ste("RoundToZeroSteFn")


@case("brevitas")
def brevitas_dpu_round():
    return _ste("DPURoundSteFn")


@case("brevitas")
def brevitas_binary_sign():
    return _ste("BinarySignSteFn")


@case("brevitas")
def brevitas_ternary_sign():
    return _ste("TernarySignSteFn")


@case("brevitas")
def brevitas_abs_binary_sign():
    return _ste("AbsBinarySignGradFn")


@case("brevitas")
def brevitas_scalar_clamp():
    return _ste("ScalarClampSteFn", -0.5, 0.5)


@case("brevitas")
def brevitas_scalar_clamp_min():
    return _ste("ScalarClampMinSteFn", -0.5)


@case("brevitas")
def brevitas_tensor_clamp():
    return _ste("TensorClampSteFn", torch.tensor(-0.5), torch.tensor(0.5))


@case("brevitas")
def brevitas_tensor_clamp_in_place():
    from brevitas.ops.autograd_ste_ops import InplaceTensorClampSteFn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.register_buffer("low", torch.tensor(-0.5))
            self.register_buffer("high", torch.tensor(0.5))

        def forward(self, x):
            return InplaceTensorClampSteFn.apply(self.linear(x), self.low, self.high) * 2

    return Model(), (tensor(),)


@case("brevitas")
def brevitas_quant_linear():
    import brevitas.nn as qnn

    return qnn.QuantLinear(5, 4, bias=True, weight_bit_width=4), (tensor(),)


@case("brevitas")
def brevitas_quant_conv():
    import brevitas.nn as qnn

    return qnn.QuantConv2d(2, 3, 3, weight_bit_width=4), (tensor(1, 2, 6, 6),)


@case("brevitas")
def brevitas_binary_weights():
    import brevitas.nn as qnn
    from brevitas.quant.binary import SignedBinaryWeightPerTensorConst

    return qnn.QuantLinear(5, 4, bias=False, weight_quant=SignedBinaryWeightPerTensorConst), (
        tensor(),
    )


# ----------------------------------------------------------------------------------- transformers


@case("transformers")
def transformers_bitnet_online():
    from transformers.integrations.bitnet import AutoBitLinear

    return AutoBitLinear(5, 4, online_quant=True), (tensor(),)


@case("transformers")
def transformers_bitnet_offline_with_norm():
    from transformers.integrations.bitnet import AutoBitLinear

    return AutoBitLinear(5, 4, online_quant=False, use_rms_norm=True), (tensor(),)


@case(
    "transformers",
    assigned=("quant.weight_integer", "quant.bias_integer", "quant.fc_scaling_factor"),
)
def transformers_ibert_linear():
    from transformers.models.ibert.quant_modules import QuantLinear

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.quant = QuantLinear(5, 4, per_channel=True, quant_mode=True)
            nn.init.normal_(self.quant.weight)

        def forward(self, x):
            return self.quant(x, torch.tensor([0.1]))[0]

    return Model(), (tensor(),)


@case("transformers")
def transformers_ibert_gelu():
    from transformers.models.ibert.quant_modules import IntGELU

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.gelu = IntGELU(quant_mode=True)

        def forward(self, x):
            return self.gelu(self.linear(x), torch.tensor([0.1]))[0]

    return Model(), (tensor(),)


@case("transformers")
def transformers_ibert_round():
    from transformers.models.ibert.quant_modules import round_ste

    return Layer(round_ste.apply), (tensor(),)


@case("transformers", refused={"*": "FixedPointMul looks at the values"})
def transformers_ibert_fixed_point():
    from transformers.models.ibert.quant_modules import FixedPointMul

    scale = torch.tensor([0.1])
    return Layer(lambda x: FixedPointMul.apply(x[None], scale, 8, scale * 2)), (tensor(),)


@case("transformers")
def transformers_bloom_gelu():
    from transformers.models.bloom.modeling_bloom import BloomGelu

    return Layer(BloomGelu()), (tensor(),)


@case("transformers")
def transformers_recurrent_gemma_sqrt():
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative

    return Layer(lambda x: SqrtBoundDerivative.apply(x * x)), (tensor(),)


@case("transformers")
def transformers_sew_d_softmax():
    from transformers.models.sew_d.modeling_sew_d import XSoftmax

    mask = torch.tensor([[1, 1, 0, 1, 1]])
    return Layer(lambda x: XSoftmax.apply(x, mask, -1)), (tensor(),)


@case("transformers")
def transformers_sew_d_dropout():
    from transformers.models.sew_d.modeling_sew_d import StableDropout

    return Layer(StableDropout(0.4)), (tensor(),)


@case("transformers")
def transformers_phimoe_multiplier():
    from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            scores = self.linear(x)
            multiplier, chosen = scores.max(-1, keepdim=True)
            gates = torch.softmax(scores, dim=-1)
            return PhimoeMultiplier.apply(
                scores, multiplier, chosen, gates, torch.ones_like(multiplier)
            )

    return Model(), (tensor(),)


@case("transformers")
def transformers_yoso_cumulation():
    from transformers.models.yoso.modeling_yoso import YosoCumulation

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(5, 15)

        def forward(self, x):
            query, key, value = self.project(x).chunk(3, dim=-1)
            query, key = (nn.functional.normalize(t, dim=-1) * 0.9 for t in (query, key))
            mask = torch.ones(x.shape[:2])
            return YosoCumulation.apply(mask, mask, query, key, value, {"hash_code_len": 4})

    return Model(), (tensor(2, 3, 5),)


@case("transformers")
def transformers_input_only_gradient():
    from transformers.loss.loss_lsd import _InputOnlyGrad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(5, 5)
            self.second = nn.Linear(5, 5)

        def forward(self, x):
            return _InputOnlyGrad.apply(self.first(x), lambda y: torch.tanh(self.second(y)))

    return Model(), (tensor(),)


# ------------------------------------------------------------------------------------------- peft


@case("peft")
def peft_randlora_unique_base():
    from peft.tuners.randlora.layer import UniqueBaseGrad

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("base", torch.randn(2, 1, 4))
            self.scale = nn.Parameter(torch.randn(2, 3))
            self.gamma = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x @ UniqueBaseGrad.apply(self.base, self.scale, self.gamma)[0].T

    return Model(), (tensor(3, 4),)


@case("peft")
def peft_circular_convolution():
    from peft.tuners.c3a.utils import BlockCircularConvolution

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.randn(2, 3, 4))

        def forward(self, x):
            return BlockCircularConvolution.apply(x, self.kernel)

    return Model(), (tensor(2, 12),)


def _adapted(config: Any) -> nn.Module:
    import peft

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 8)
            self.second = nn.Linear(8, 6)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    model = peft.inject_adapter_in_model(config, Model())
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


# In train mode the layer draws whether it drops itself out: a branch outside of any Function.
@case("peft", train=False)
def peft_loha():
    import peft

    config = peft.LoHaConfig(r=2, alpha=2, target_modules=["first", "second"])
    return _adapted(config), (tensor(3, 6),)


@case("peft")
def peft_randlora():
    import peft

    config = peft.RandLoraConfig(r=2, target_modules=["first", "second"])
    return _adapted(config), (tensor(3, 6),)


@case("peft")
def peft_velora():
    from peft.tuners.lora.velora import VeloraFunction

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 8))
            self.bias = nn.Parameter(torch.randn(3))
            self.register_buffer("embed", nn.functional.normalize(torch.randn(4), dim=0))

        def forward(self, x):
            return VeloraFunction.apply(x, self.weight, self.bias, self.embed, 2, 1.0)

    return Model(), (tensor(2, 8),)


# ----------------------------------------------------------------------------------- bitsandbytes


def _no_fake_weight(error: str) -> dict[str, str]:
    """torch cannot make a fake tensor of the package's class of weights."""
    return {"nonstrict": error, "make_fx_fake": error}


@case("bitsandbytes", torch_cannot=_no_fake_weight("Creating a new Tensor subclass Params4bit"))
def bitsandbytes_4bit():
    import bitsandbytes as bnb

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(64, 64)
            self.quant = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32).to("cpu")

        def forward(self, x):
            return self.quant(self.first(x))

    return Model(), (tensor(2, 64),)


@case("bitsandbytes", torch_cannot=_no_fake_weight("'FakeTensor' object has no attribute 'CB'"))
def bitsandbytes_8bit_training():
    import bitsandbytes as bnb

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.quant = bnb.nn.Linear8bitLt(8, 4, has_fp16_weights=False).to("cpu")

        def forward(self, x):
            return self.quant(self.first(x))

    return Model(), (tensor(2, 8),)


# ------------------------------------------------------------------------ gpytorch, linear_operator


def _kernel(kernel: Any) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = kernel

        def forward(self, x):
            return self.kernel(x).to_dense()

    return Model(), (tensor(4, 2, grad=False),)


# Dynamo does not read the package's classes of lazy kernels.
_LAZY_KERNEL = {"strict": "sort with non-constant keys"}


@case(
    "gpytorch",
    refused={"*": "RBFCovariance looks at the values"},
    torch_cannot=_LAZY_KERNEL,
)
def gpytorch_rbf():
    from gpytorch.kernels import RBFKernel

    return _kernel(RBFKernel())


@case(
    "gpytorch",
    refused={"*": "MaternCovariance looks at the values"},
    torch_cannot=_LAZY_KERNEL,
)
def gpytorch_matern():
    from gpytorch.kernels import MaternKernel

    return _kernel(MaternKernel(nu=1.5))


@case("gpytorch", refused={"*": "LogNormalCDF looks at the values"})
def gpytorch_log_normal_cdf():
    from gpytorch.functions import log_normal_cdf

    return Layer(log_normal_cdf), (tensor(),)


def _given_distance(function: str, *options: Any) -> Any:
    """The Functions of the kernels with a distance that does not look at values."""
    from gpytorch import functions
    from gpytorch.kernels.kernel import dist, sq_dist

    distance = sq_dist if function == "RBFCovariance" else dist
    apply = getattr(functions, function).apply

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lengthscale = nn.Parameter(torch.tensor([[0.7]]))

        def forward(self, x, y):
            return apply(x, y, self.lengthscale, *options, lambda a, b: distance(a, b, False))

    return Model(), (tensor(4, 2, grad=False), tensor(3, 2, grad=False))


@case("gpytorch")
def gpytorch_rbf_of_two_inputs():
    return _given_distance("RBFCovariance")


@case("gpytorch")
def gpytorch_matern_of_two_inputs():
    return _given_distance("MaternCovariance", 2.5)


class _Posterior(nn.Module):
    """Terms of the marginal likelihood of a Gaussian process, and its predictive mean."""

    def __init__(self, term: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.root = nn.Parameter(torch.randn(5, 5))
        self.noise = nn.Parameter(torch.tensor(1.5))
        self.term = term

    def forward(self, right):
        from linear_operator import to_linear_operator

        matrix = self.root @ self.root.T + self.noise * torch.eye(5)
        return self.term(to_linear_operator(matrix), right)


# Dynamo does not find the package's own ``__matmul__``.
@case(
    "linear_operator",
    torch_cannot={"strict": r"torch.matmul\(DenseLinearOperator, Tensor, \) is not implemented"},
)
def linear_operator_matmul():
    return _Posterior(lambda operator, right: operator @ right), (tensor(5, 2),)


@case("linear_operator", refused={"*": "Solve looks at the values"})
def linear_operator_solve():
    return _Posterior(lambda operator, right: operator.solve(right)), (tensor(5, 2),)


@case("linear_operator", refused={"*": "InvQuad looks at the values"})
def linear_operator_inverse_quadratic():
    return _Posterior(lambda operator, right: operator.inv_quad(right)), (tensor(5, 2),)


@case(
    "linear_operator",
    refused={"*": "RootDecomposition looks at the values"},
    torch_cannot={"strict": "does not know how to trace the builtin `_pickle.dumps"},
)
def linear_operator_root_decomposition():
    from linear_operator import settings

    def term(operator, right):
        with settings.max_cholesky_size(1), settings.max_root_decomposition_size(3):
            return operator.root_decomposition().root.to_dense() @ right[:3]

    return _Posterior(term), (tensor(5, 2),)


@case("linear_operator", refused={"*": "SqrtInvMatmul looks at the values"})
def linear_operator_sqrt_inverse_matmul():
    return _Posterior(lambda operator, right: operator.sqrt_inv_matmul(right)), (tensor(5, 2),)


@case(
    "linear_operator",
    refused={
        "*": "InvQuadLogdet looks at the values",
        "strict": r"hand a type that has been changed .*_inv_quad_logdet\.InvQuadLogdet\. .*strict=False",
    },
)
def linear_operator_inv_quad_logdet():
    from linear_operator import settings

    def term(operator, right):
        with settings.max_cholesky_size(1), settings.fast_computations(log_prob=True):
            return operator.inv_quad_logdet(right, logdet=True)

    return _Posterior(term), (tensor(5, 2),)


@case("linear_operator", refused={"*": "PivotedCholesky looks at the values"})
def linear_operator_pivoted_cholesky():
    return _Posterior(lambda operator, right: operator.pivoted_cholesky(rank=2)), (tensor(5, 2),)


@case(
    "linear_operator",
    torch_cannot={"strict": "how to trace the builtin .*sparse_coo_tensor"},
)
def linear_operator_sparse_matmul():
    import linear_operator

    class Model(nn.Module):
        def forward(self, right):
            sparse = torch.sparse_coo_tensor([[0, 1, 2], [1, 0, 4]], [1.0, 2.0, 3.0], (3, 5))
            return linear_operator.dsmm(sparse, right)

    return Model(), (tensor(5, 2),)
