"""Every energy class with every option, for tests that must hold for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from implicit_attn.energies import (
    BareAttention,
    BiSoftmaxAttention,
    ConditionalAttention,
    Couplings,
    DataTerm,
    DenseAssociative,
    EffectiveRBM,
    Energy,
    EquilibriumEnergy,
    Field,
    FunctionEnergy,
    GatedFeedForward,
    GELUFeedForward,
    Hopfield,
    HyperSETEnergy,
    IsingLagrangian,
    Lagrangian,
    LinearAttention,
    NetworkEnergy,
    Quadratic,
    QueryEnergy,
    ReLUFeedForward,
    RMSNorm,
    ScoreAttention,
    SoftmaxAttention,
    SoftmaxFeedForward,
    SoftmaxLagrangian,
    SphericalLagrangian,
    SpinInteraction,
    VectorSpin,
)
from implicit_attn.energies.feedforward import MemoryEnergy
from solvers import SphericalSite


class EnergyCase(NamedTuple):
    """A row of the table: every test of values, derivatives, masks and precisions runs on it."""

    id: str
    factory: Callable[[int], Energy]  # features d -> energy of tokens (B, N, d), random weights
    needs_x: bool  # x like z
    placed: bool = False  # its parameters belong to the tokens' places, of which there are COUNT


NORMS = {"soft": RMSNorm(epsilon=1.0), "tiny": RMSNorm(epsilon=1e-6), "none": None}
MEMORIES, COUNT = 12, 5
Row = tuple[str, Callable[..., Energy], dict[str, Any]]


def _made(cls: Callable[..., Energy], second: Any, options: dict[str, Any], dim: int) -> Energy:
    """``cls(dim, second, **options)``, away from parameters that are equal or zero at first."""
    options = dict(options)
    if options.pop("context", False):
        options["context_dim"] = dim
    energy = cls(dim, options.pop("heads", second), **options)
    with torch.no_grad():
        for name, parameter in energy.named_parameters():
            if parameter.dim() == 1 or "gate" in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape))
            if isinstance(energy, ConditionalAttention) and name == "query.weight":
                parameter.mul_(10.0)  # away from the uniform attention at the start
    return energy


def _patterns(cls: Callable[..., Energy], options: dict[str, Any], dim: int) -> Energy:
    return cls(torch.randn(5, dim) / dim**0.25, **options)


def _machine(hidden: Any, units: tuple[int, ...], options: dict[str, Any], dim: int) -> Energy:
    """Weights so small that the fields of random tokens stay where every law has its moments."""
    bias = torch.randn(dim) if options.get("learnable") else None
    return EffectiveRBM(0.05 * torch.randn(*units, dim), hidden, bias=bias, **options)


def _spins(site: Lagrangian, options: dict[str, Any], dim: int) -> Energy:
    return VectorSpin(Couplings(COUNT, dim, **options), site)


def _bare_features(dim: int) -> Energy:
    return BareAttention(COUNT, 3, features=torch.randn(3, dim) / dim**0.5, symmetric_sites=True)


def _double_well(z: Tensor, *, mask: Tensor | None = None) -> Tensor:
    if mask is not None:
        z = torch.where(mask.unsqueeze(-1), z, 0.0)
    return (0.25 * z**4 - 0.5 * z**2).flatten(1).sum(1)


class _Mixing(torch.nn.Module):
    """A network of tokens that mixes the visible ones by their mean, and takes the input."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.state, self.input = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)

    def forward(self, z: Tensor, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            z, x = (t.masked_fill(~mask.unsqueeze(-1), 0.0) for t in (z, x))
        return torch.tanh(self.state(z) + self.input(x) + z.sum(1, keepdim=True))


def _composition(dim: int) -> Energy:
    attention = BiSoftmaxAttention(dim, heads=2).weighted(0.4, maximum=2.0)
    return attention + 0.3 * ReLUFeedForward(dim, MEMORIES) + Quadratic()


def _hyperset(options: dict[str, Any], dim: int) -> Energy:
    return HyperSETEnergy(dim, 2, MEMORIES, feedforward="gelu", **options)


def _equilibrium(memory: Callable[..., MemoryEnergy], causal: bool, dim: int) -> Energy:
    hidden = memory(dim, MEMORIES, context_dim=dim, norm=None, bound=0.6)
    return EquilibriumEnergy(ConditionalAttention(dim, 2, causal=causal), hidden)


ELASTIC, CROSS, UNEQUAL = {"energy": "elastic"}, {"cross": True}, {"beta": (0.3, 1.2)}
TRAINED: dict[str, Any] = {"learned_beta": True, "bias": True}
HARD: dict[str, Any] = {"beta": 0.8, "norm": NORMS["tiny"], "head_dim": 3, "bound": 0.7}
BARE: dict[str, Any] = {"norm": None}
ELU: dict[str, Any] = {"feature_map": "elu"}
# Each with the soft norm and four heads, and without norm and one head.
ATTENTIONS: list[Row] = [
    ("bisoftmax", BiSoftmaxAttention, {}),
    ("bisoftmax-causal", BiSoftmaxAttention, {"causal": True}),
    ("sigmoid", ScoreAttention, {}),
    ("linear", LinearAttention, {}),
    ("linear-elu", LinearAttention, ELU),
    ("softmax-inner", SoftmaxAttention, {}),
    ("softmax-elastic", SoftmaxAttention, ELASTIC),
    ("softmax-causal", SoftmaxAttention, {"causal": True}),
    ("softmax-cross", SoftmaxAttention, CROSS),
    ("softmax-cross-elastic", SoftmaxAttention, {**CROSS, **ELASTIC}),
]
# With two heads; all feature maps: tests/energies/test_every_energy.py.
HEADS: list[Row] = [
    ("bisoftmax-tiny-bound", BiSoftmaxAttention, HARD),
    ("softmax-cross-tiny-bound", SoftmaxAttention, {**HARD, **CROSS}),
    ("bisoftmax-context", BiSoftmaxAttention, {"context": True}),
    ("linear-elu-trained", LinearAttention, {**ELU, **TRAINED}),
    ("score-relu-context", ScoreAttention, {"score": "relu", "context": True, **UNEQUAL}),
    ("softmax-context", SoftmaxAttention, {"context": True}),
    ("bisoftmax-others", BiSoftmaxAttention, {"exclude_self": True, **UNEQUAL}),
    ("softmax-others", SoftmaxAttention, {"exclude_self": True, "bias": True}),
    ("softmax-elastic-trained", SoftmaxAttention, {**BARE, **ELASTIC, **TRAINED}),
    ("softmax-cross-trained", SoftmaxAttention, {**CROSS, **BARE, **TRAINED}),
    ("softmax-cross-elastic-trained", SoftmaxAttention, {**CROSS, **ELASTIC, **TRAINED}),
    ("queries-cross", QueryEnergy, {"beta": (0.4, 2)}),
    ("conditional", ConditionalAttention, {}),
    ("conditional-causal", ConditionalAttention, {"causal": True}),
    ("conditional-betas", ConditionalAttention, UNEQUAL),
    ("conditional-trained", ConditionalAttention, {"learned_beta": True, "score_norm": None}),
    ("conditional-head", ConditionalAttention, {"heads": 1, "norm": NORMS["tiny"]}),
]
FEEDFORWARDS: list[Row] = [
    ("relu-soft", ReLUFeedForward, {}),
    ("relu-none", ReLUFeedForward, BARE),
    ("relu-tiny", ReLUFeedForward, {"bound": 0.7, "norm": NORMS["tiny"]}),
    ("gelu-soft", GELUFeedForward, {}),
    ("gelu-none", GELUFeedForward, BARE),
    ("softmax-ff-soft", SoftmaxFeedForward, {}),
    ("softmax-ff-none", SoftmaxFeedForward, BARE),
    ("gated-gelu-soft", GatedFeedForward, {}),
    ("gated-gelu-none", GatedFeedForward, BARE),
    ("gated-relu-none", GatedFeedForward, {"activation": "relu", **BARE}),
    ("relu-tiny-context", ReLUFeedForward, {"context": True, "bound": 0.7, "norm": NORMS["tiny"]}),
    ("relu-soft-gates", ReLUFeedForward, {"context": True, "gates": True}),
    ("gated-gelu-none-gates", GatedFeedForward, {"context": True, "gates": True, **BARE}),
]
MEMORY: list[Row] = [
    ("hopfield", Hopfield, {}),
    ("hopfield-learnable", Hopfield, {"learnable": True}),
    ("hopfield-cold", Hopfield, {"beta": 3.0}),
    ("dense-2", DenseAssociative, {"power": 2}),
    ("dense-3", DenseAssociative, {}),
    ("dense-exp", DenseAssociative, {"power": "exp"}),
]
LAWS: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = [
    ("normal", (6,), {"learnable": True, "visible": "normal"}),
    ("poisson", (6,), {}),
    ("ising", (6,), {"learnable": True, "visible": "ising"}),
    ("binary", (6,), {"visible": "normal"}),
    ("exponential", (6,), {"learnable": True, "visible": "normal"}),
    ("laplace", (6,), {"visible": "normal"}),
    ("one-hot", (2, 3), {"visible": "normal"}),
    ("constant", (6,), {}),
]
SITES: list[tuple[str, Lagrangian, dict[str, Any]]] = [
    ("ising", IsingLagrangian(), {}),
    ("ising-bound", IsingLagrangian(), {"scale": 3.0, "bound": 0.7}),
    ("sphere", SphericalLagrangian(), {}),
    ("potts", SoftmaxLagrangian(), {}),
]
SEEING = ("context", "cross", "gates", "conditional", "equilibrium")


def _cases() -> list[EnergyCase]:
    made: dict[str, Callable[[int], Energy]] = {
        "composition": _composition,
        "hyperset-context": partial(_hyperset, {"context": True}),
        "equilibrium-relu": partial(_equilibrium, ReLUFeedForward, False),
        "equilibrium-gelu": partial(_equilibrium, GELUFeedForward, False),
        "equilibrium-causal": partial(_equilibrium, ReLUFeedForward, True),
        "rbm-sphere": partial(_machine, SphericalSite(), (2, 3), {"visible": "normal"}),
    }
    for name, cls, options in ATTENTIONS:
        for norm, heads in (("soft", 4), ("none", 1)):
            made[f"{name}-{norm}-{heads}"] = partial(
                _made, cls, heads, {"norm": NORMS[norm], **options}
            )
    made |= {name: partial(_made, cls, 2, options) for name, cls, options in HEADS}
    made |= {name: partial(_made, cls, MEMORIES, options) for name, cls, options in FEEDFORWARDS}
    made |= {name: partial(_patterns, cls, options) for name, cls, options in MEMORY}
    made |= {f"rbm-{law}": partial(_machine, law, units, options) for law, units, options in LAWS}
    simple: list[tuple[str, Callable[[int], Energy], bool, bool]] = [
        ("quadratic", lambda dim: Quadratic(), False, False),
        ("quadratic-input", lambda dim: Quadratic(), True, False),
        ("field", lambda dim: Field(), True, False),
        ("data", lambda dim: DataTerm(), True, False),
        ("network", lambda dim: NetworkEnergy(_Mixing(dim)), True, False),
        ("function", lambda dim: FunctionEnergy(_double_well), False, False),
        ("spins", lambda dim: SpinInteraction(Couplings(COUNT, dim)), False, True),
        ("bare", lambda dim: BareAttention(COUNT, dim, lam=1.5), False, True),
        ("bare-features", _bare_features, False, True),
    ]
    simple += [(f"spins-{n}", partial(_spins, site, o), True, True) for n, site, o in SITES]
    seeing = {name for name in made if any(part in name for part in SEEING)} | {"composition"}
    return [
        *(EnergyCase(*row) for row in simple),
        *(EnergyCase(name, factory, name in seeing) for name, factory in made.items()),
    ]


ENERGIES = _cases()
DIM = 8

each_energy = pytest.mark.parametrize("case", ENERGIES, ids=[case.id for case in ENERGIES])


FAMILIES = """
quadratic-input field function composition hyperset-context hopfield-learnable dense-2 queries-cross
spins bare spins-ising rbm-ising rbm-one-hot bisoftmax-soft-4 bisoftmax-causal-soft-4 bisoftmax-others
sigmoid-soft-4 score-relu-context linear-elu-soft-4 softmax-inner-none-1 softmax-elastic-trained
softmax-cross-trained conditional equilibrium-relu bisoftmax-context relu-soft-gates gelu-none
softmax-ff-soft gated-gelu-none
""".split()  # noqa: SIM905


def few_energies(*ids: str) -> pytest.MarkDecorator:
    """The cases of these ids."""
    chosen = {case.id: case for case in ENERGIES}
    return pytest.mark.parametrize("case", [chosen[i] for i in ids], ids=ids)


each_family = few_energies(*FAMILIES)


def build(case: EnergyCase, dim: int = DIM, dtype: torch.dtype = torch.float64) -> Energy:
    """The case's energy with seeded weights."""
    torch.manual_seed(7)
    return case.factory(dim).to(dtype)


def tokens(
    case: EnergyCase, batch: int = 3, count: int = COUNT, dim: int = DIM, seed: int = 0
) -> tuple[Tensor, Tensor | None]:
    """A seeded state (B, N, d) and the input that the case needs, float64."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(batch, count, dim, generator=generator, dtype=torch.float64)
    x = torch.randn(batch, count, dim, generator=generator, dtype=torch.float64)
    return z, x if case.needs_x else None


def keep_places(energy: Energy, keep: Tensor) -> Energy:
    """A copy of a ``placed`` energy that has only the places in ``keep`` (N,)."""
    energy = copy.deepcopy(energy)
    couplings = energy.couplings
    assert isinstance(couplings, Couplings)
    weight = couplings.weight.detach()[keep][:, keep]
    fewer = Couplings(len(weight), couplings.dim, symmetric_sites=couplings.symmetric_sites).to(
        weight.dtype
    )
    fewer.weight = weight
    energy.couplings = fewer
    return energy


def masks(batch: int = 3, count: int = COUNT) -> dict[str, Tensor | None]:
    """No mask, one with holes, and one where all tokens of the first sample are masked."""
    generator = torch.Generator().manual_seed(1)
    holes = torch.rand(batch, count, generator=generator) < 0.6
    holes[:, 0] = True
    holes[0, 1] = False
    empty = holes.clone()
    empty[0] = False
    return {"no-mask": None, "holes": holes, "empty-sample": empty}


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Norm of the difference by the norm of the reference (1 where that is 0)."""
    scale = reference.double().norm().item() or 1.0
    return (value.double() - reference.double()).norm().item() / scale
