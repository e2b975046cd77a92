"""Functions of real packages, as a user of the package meets them.

A case is one function that imports the package and gives ``(module, arguments)``;
it is called anew, on the same seed, for every program that is compared::

    @case("entmax")
    def entmax15():
        from entmax import entmax15

        return Layer(lambda x: entmax15(x, dim=-1)), (tensor(2, 5),)
"""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of the table; each argument of :func:`case` is one of these fields."""

    name: str
    package: str
    build: Callable[[], tuple[nn.Module, tuple[Any, ...]]]
    #: Operators that the graph must hold; None: as many as eager has calls that record.
    calls: int | None = None
    #: Front end, or ``"*"`` for all: what the error says where the capture must be refused.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Front end: why torch itself cannot capture this model, with or without Functions in it.
    torch_cannot: dict[str, str] = dataclasses.field(default_factory=dict)
    #: Why ``torch.export.save`` refuses the program with or without hops.
    unsaveable: str | None = None
    #: Buffers that the forward replaces by assigning another tensor of another shape, which
    #: no front end of torch sees.
    assigned: tuple[str, ...] = ()
    #: Fields that ``test_function_parity.run`` looks at.
    double: bool = False
    raises: str | None = None

    def missing(self) -> bool:
        return importlib.util.find_spec(self.package) is None


CASES: dict[str, Case] = {}


def case(package: str, **options: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(build: Callable[[], Any]) -> Callable[[], Any]:
        CASES[build.__name__] = Case(build.__name__, package, build, **options)
        return build

    return register


def fresh(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """The module of a case in train mode and its arguments, always the same."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module, args = CASES[name].build()
    return module.train(), args


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


@case("entmax")
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
def snntorch_leaky_spike():
    from snntorch.surrogate import LeakySpikeOperator

    return _leaky(lambda x: LeakySpikeOperator.apply(x, 0.1))


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


@case("snntorch")
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


@case("snntorch", assigned=("neuron.neuron.mem",))
def snntorch_temporal_loss():
    from snntorch import functional, surrogate

    neuron = _leaky(surrogate.fast_sigmoid())[0]
    # It looks at the values of its targets, so they are written in the model.
    loss = functional.ce_temporal_loss()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.neuron = neuron

        def forward(self, x):
            return loss(self.neuron(x)[0], torch.tensor([0, 3]))

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


@case("norse")
def norse_logistic():
    from norse.torch.functional.threshold import logistic_fn

    return Layer(lambda x: logistic_fn(x, 1.0)), (tensor(),)


@case("norse")
def norse_circ_dist():
    from norse.torch.functional.threshold import circ_dist_fn

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
                z, state = lif_adjoint_step(
                    step, state, self.input_weights, self.recurrent_weights
                )
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


@case("torchdiffeq")
def torchdiffeq_adjoint_rk4():
    return _Solver(method="rk4"), (tensor(2, 3),)


@case("torchdiffeq")
def torchdiffeq_adjoint_euler():
    return _Solver(method="euler"), (tensor(2, 3),)


@case("torchdiffeq")
def torchdiffeq_adjoint_midpoint():
    return _Solver(method="midpoint"), (tensor(2, 3),)


@case("torchdiffeq")
def torchdiffeq_adjoint_adaptive():
    return _Solver(method="dopri5"), (tensor(2, 3),)
