"""Every energy class with every option, for tests that must hold for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies import (
    BareAttention,
    BiSoftmaxAttention,
    ClassicalHopfield,
    ConditionalAttention,
    Couplings,
    DenseAssociative,
    EffectiveRBM,
    Energy,
    EquilibriumEnergy,
    Field,
    FunctionEnergy,
    GatedFeedForward,
    GatedLinearAttention,
    GELUFeedForward,
    HeadwiseEnergy,
    Hopfield,
    HyperSETEnergy,
    IsingLagrangian,
    Lagrangian,
    LinearAttention,
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


def _attention(cls: Callable[..., Energy], dim: int, heads: int, **options: Any) -> Energy:
    return cls(dim, heads=heads, **options)


def _heads(cls: Callable[..., Energy], dim: int, context: bool = False, **options: Any) -> Energy:
    """Two heads, an input of the state's width, and parameters that start at zero away from there."""
    if context:
        options["context_dim"] = dim
    energy = cls(dim, heads=2, **options)
    for parameter in energy.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)
    return energy


def _feedforward(cls: Callable[..., Energy], dim: int, **options: Any) -> Energy:
    return cls(dim, MEMORIES, **options)


def _contextual(cls: Callable[..., Energy], dim: int, **options: Any) -> Energy:
    """Hidden biases, gates of x and the memories' own biases, which are zero at first, drawn."""
    energy = cls(dim, MEMORIES, **options)
    with torch.no_grad():
        for name, parameter in energy.named_parameters():
            if not name.startswith("projection"):
                parameter.copy_(0.5 * torch.randn(parameter.shape))
    return energy


def _with_context(cls: Callable[..., Energy], dim: int, **options: Any) -> Energy:
    return _contextual(cls, dim, context_dim=dim, **options)


def _patterns(cls: Callable[..., Energy], dim: int, **options: Any) -> Energy:
    return cls(torch.randn(5, dim) / dim**0.25, **options)


def _classical(dim: int) -> Energy:
    return ClassicalHopfield(torch.randn(5, dim) / dim**0.5, bias=torch.randn(dim), learnable=True)


def _machine(hidden: Any, dim: int, units: tuple[int, ...] = (6,), **options: Any) -> Energy:
    """Weights so small that the fields of random tokens stay where every law has its moments."""
    bias = torch.randn(dim) if options.get("learnable") else None
    return EffectiveRBM(0.05 * torch.randn(*units, dim), hidden, bias=bias, **options)


def _spins(site: Lagrangian, dim: int, **options: Any) -> Energy:
    return VectorSpin(Couplings(COUNT, dim, **options), site)


def _bare_features(dim: int) -> Energy:
    return BareAttention(COUNT, 3, features=torch.randn(3, dim) / dim**0.5, symmetric_sites=True)


def _double_well(z: Tensor, *, mask: Tensor | None = None) -> Tensor:
    if mask is not None:
        z = torch.where(mask.unsqueeze(-1), z, 0.0)
    return (0.25 * z**4 - 0.5 * z**2).flatten(1).sum(1)


def _composition(dim: int) -> Energy:
    attention = BiSoftmaxAttention(dim, heads=2).weighted(0.4, maximum=2.0)
    return attention + 0.3 * ReLUFeedForward(dim, MEMORIES) + Quadratic()


def _hyperset(dim: int, **options: Any) -> Energy:
    return HyperSETEnergy(dim, 2, MEMORIES, feedforward="gelu", **options)


def _cases() -> list[EnergyCase]:
    cases = [
        EnergyCase("quadratic", lambda dim: Quadratic(), False),
        EnergyCase("quadratic-input", lambda dim: Quadratic(), True),
        EnergyCase("field", lambda dim: Field(), True),
        EnergyCase("function", lambda dim: FunctionEnergy(_double_well), False),
        EnergyCase("composition", _composition, True),
        EnergyCase("hyperset", _hyperset, True),
        EnergyCase("hyperset-linear", partial(_hyperset, attention="linear"), True),
        EnergyCase("hopfield", partial(_patterns, Hopfield), False),
        EnergyCase("hopfield-learnable", partial(_patterns, Hopfield, learnable=True), False),
        EnergyCase("hopfield-cold", partial(_patterns, Hopfield, beta=3.0), False),
        EnergyCase("dense-2", partial(_patterns, DenseAssociative, power=2), False),
        EnergyCase("dense-3", partial(_patterns, DenseAssociative), False),
        EnergyCase("dense-exp", partial(_patterns, DenseAssociative, power="exp"), False),
        EnergyCase("classical", _classical, False),
        EnergyCase("headwise", lambda dim: HeadwiseEnergy(_patterns(Hopfield, dim // 2), 2), False),
        EnergyCase("queries-cross", partial(_attention, QueryEnergy, heads=2, beta=(0.4, 2)), True),
        EnergyCase("spins", lambda dim: SpinInteraction(Couplings(COUNT, dim)), False, True),
    ]
    cases += [
        EnergyCase("bare", lambda dim: BareAttention(COUNT, dim, lam=1.5), False, True),
        EnergyCase("bare-features", _bare_features, False, True),
    ]
    sites: list[tuple[str, Lagrangian, dict[str, Any]]] = [
        ("ising", IsingLagrangian(), {}),
        ("ising-bound", IsingLagrangian(), {"scale": 3.0, "bound": 0.7}),
        ("sphere", SphericalLagrangian(), {}),
        ("potts", SoftmaxLagrangian(), {}),
    ]
    for name, site, options in sites:
        cases.append(EnergyCase(f"spins-{name}", partial(_spins, site, **options), True, True))
    laws: list[tuple[str, Any, dict[str, Any]]] = [
        ("normal", "normal", {"learnable": True, "visible": "normal"}),
        ("poisson", "poisson", {}),
        ("ising", "ising", {"learnable": True, "visible": "ising"}),
        ("binary", "binary", {"visible": "normal"}),
        ("exponential", "exponential", {"learnable": True, "visible": "normal"}),
        ("laplace", "laplace", {"visible": "normal"}),
        ("one-hot", "one-hot", {"units": (2, 3), "visible": "normal"}),
        ("constant", "constant", {}),
        ("sphere", SphericalSite(), {"units": (2, 3), "visible": "normal"}),
    ]
    for name, law, options in laws:
        cases.append(EnergyCase(f"rbm-{name}", partial(_machine, law, **options), False))
    attentions: list[tuple[str, Callable[..., Energy], dict[str, Any], bool]] = [
        ("bisoftmax", BiSoftmaxAttention, {}, False),
        ("bisoftmax-causal", BiSoftmaxAttention, {"causal": True}, False),
        ("sigmoid", ScoreAttention, {}, False),
        ("linear", LinearAttention, {}, False),
        ("linear-relu", LinearAttention, {"feature_map": "relu"}, False),
        ("linear-elu", LinearAttention, {"feature_map": "elu"}, False),
        ("softmax-inner", SoftmaxAttention, {}, False),
        ("softmax-elastic", SoftmaxAttention, {"energy": "elastic"}, False),
        ("softmax-causal", SoftmaxAttention, {"causal": True}, False),
        ("softmax-cross", SoftmaxAttention, {"cross": True}, True),
        ("softmax-cross-elastic", SoftmaxAttention, {"cross": True, "energy": "elastic"}, True),
    ]
    feedforwards: list[tuple[str, Callable[..., Energy], dict[str, Any]]] = [
        ("relu", ReLUFeedForward, {}),
        ("gelu", GELUFeedForward, {}),
        ("softmax-ff", SoftmaxFeedForward, {}),
        ("gated-gelu", GatedFeedForward, {}),
        ("gated-relu", GatedFeedForward, {"activation": "relu"}),
    ]
    cases += _heads_cases()
    for label, cls, options, needs_x in attentions:
        for name, heads in (("soft", 4), ("none", 1)):
            factory = partial(_attention, cls, heads=heads, norm=NORMS[name], **options)
            cases.append(EnergyCase(f"{label}-{name}-{heads}", factory, needs_x))
        if label in ("bisoftmax", "softmax-elastic", "softmax-cross"):
            hard = {"beta": 0.8, "norm": NORMS["tiny"], "head_dim": 3, "bound": 0.7, **options}
            factory = partial(_attention, cls, heads=2, **hard)
            cases.append(EnergyCase(f"{label}-tiny-bound", factory, needs_x))
    for label, cls, options in feedforwards:
        for name in ("soft", "none"):
            factory = partial(_feedforward, cls, norm=NORMS[name], **options)
            cases.append(EnergyCase(f"{label}-{name}", factory, False))
    return cases + _inside() + _linear() + _memories_that_see_the_input()


def _conditional(dim: int, heads: int = 2, **options: Any) -> Energy:
    energy = ConditionalAttention(dim, heads, **options)
    with torch.no_grad():  # away from the uniform attention at the start, and from zero biases
        energy.query.weight *= 10.0
        for bias in (energy.query_bias, energy.key_bias, energy.value_bias):
            bias.normal_()
    return energy


def _equilibrium(dim: int, memory: Callable[..., MemoryEnergy], **options: Any) -> Energy:
    hidden = memory(dim, MEMORIES, context_dim=dim, norm=None, bound=0.6)
    return EquilibriumEnergy(ConditionalAttention(dim, 2, **options), hidden)


def _inside() -> list[EnergyCase]:
    """Energies that see the input inside attention and hidden units."""
    rows: list[tuple[str, dict[str, Any]]] = [
        ("conditional", {}),
        ("conditional-causal", {"causal": True}),
        ("conditional-others", {"exclude_self": True, "beta": (0.3, 1.2)}),
        ("conditional-trained", {"learned_beta": True, "score_norm": None, "curvature": 0.9}),
        ("conditional-head", {"heads": 1, "norm": NORMS["tiny"], "head_dim": 3}),
    ]
    cases = [EnergyCase(name, partial(_conditional, **options), True) for name, options in rows]
    for name, memory in (("relu", ReLUFeedForward), ("gelu", GELUFeedForward)):
        cases.append(EnergyCase(f"equilibrium-{name}", partial(_equilibrium, memory=memory), True))
    causal = partial(_equilibrium, memory=ReLUFeedForward, causal=True)
    return [*cases, EnergyCase("equilibrium-causal", causal, True)]


def _linear() -> list[EnergyCase]:
    """Linear attention among frozen keys; causal keys are tokens of the same places."""
    elu = {"feature_map": "elu"}
    rows: list[tuple[str, dict[str, Any]]] = [
        ("gated-cross-none", {"norm": NORMS["none"]}),
        ("gated-cross-keys", {"gate": "keys", "feature_map": "relu", "learned_beta": True}),
        ("gated-cross-normalised", {"normalised": True, "gate": "keys", **elu}),
        ("gated-causal", {"causal": True, "gate": "decay", "beta": (0.3, 1.2), **elu}),
        ("gated-causal-normalised", {"causal": True, "normalised": True, "gate": "decay", **elu}),
    ]
    each = partial(_attention, GatedLinearAttention, heads=2)
    return [EnergyCase(name, partial(each, **options), True) for name, options in rows]


def _memories_that_see_the_input() -> list[EnergyCase]:
    tiny, none = {"norm": NORMS["tiny"]}, {"norm": None}
    rows: list[tuple[str, Callable[..., Energy], dict[str, Any]]] = [
        ("relu-tiny-context", ReLUFeedForward, {"bound": 0.7, **tiny}),
        ("relu-none-context", ReLUFeedForward, none),
        ("relu-soft-gates", ReLUFeedForward, {"gates": True}),
        ("gelu-soft-gates", GELUFeedForward, {"gates": True}),
        ("softmax-ff-none-context", SoftmaxFeedForward, none),
        ("gated-gelu-none-gates", GatedFeedForward, {"gates": True, **none}),
    ]
    alone: list[tuple[str, Callable[..., Energy], dict[str, Any]]] = [
        ("relu-tiny", ReLUFeedForward, {"bound": 0.7, **tiny}),
        ("gated-sigmoid", GatedFeedForward, {"activation": "sigmoid"}),
        ("gelu-none-bias", GELUFeedForward, {"bias": True, **none}),
    ]
    return [
        EnergyCase("hyperset-context", partial(_hyperset, context=True), True),
        *(EnergyCase(n, partial(_contextual, cls, **o), False) for n, cls, o in alone),
        *(EnergyCase(n, partial(_with_context, cls, **o), True) for n, cls, o in rows),
    ]


def _heads_cases() -> list[EnergyCase]:
    """What attention energies may have besides tokens: an input, biases, temperatures, pairs."""
    elastic, unequal = {"energy": "elastic"}, {"beta": (0.3, 1.2)}
    trained = {"learned_beta": True, "bias": True}
    rows: list[tuple[str, Callable[..., Energy], dict[str, Any]]] = [
        ("bisoftmax-context", BiSoftmaxAttention, {"context": True}),
        ("sigmoid-context", ScoreAttention, {"context": True, **unequal}),
        ("linear-context", LinearAttention, {"context": True, "norm": None, **unequal}),
        ("linear-elu-trained", LinearAttention, {"feature_map": "elu", **trained}),
        ("score-relu-context", ScoreAttention, {"score": "relu", "context": True, **unequal}),
        ("score-squared", ScoreAttention, {"score": "sigmoid-squared", "norm": None, **trained}),
        ("softmax-context", SoftmaxAttention, {"context": True}),
        ("softmax-elastic-context", SoftmaxAttention, {"context": True, **elastic, **unequal}),
        ("bisoftmax-others", BiSoftmaxAttention, {"exclude_self": True, **unequal}),
        ("bisoftmax-trained", BiSoftmaxAttention, {"norm": None, **trained}),
        ("sigmoid-trained", ScoreAttention, trained),
        ("softmax-others", SoftmaxAttention, {"exclude_self": True, "bias": True}),
        ("softmax-elastic-trained", SoftmaxAttention, {"norm": None, **elastic, **trained}),
        ("softmax-cross-trained", SoftmaxAttention, {"cross": True, "norm": None, **trained}),
        ("softmax-cross-elastic-trained", SoftmaxAttention, {"cross": True, **elastic, **trained}),
    ]
    # The derivatives of all feature maps: tests/energies/test_feature_maps.py.
    rows += [
        (f"linear-{name}", LinearAttention, {"feature_map": name}) for name in ("tanh", "silu")
    ]
    cases = [
        EnergyCase(name, partial(_heads, cls, **options), "context" in name or "cross" in name)
        for name, cls, options in rows
    ]
    return cases


ENERGIES = _cases()
DIM = 8

each_energy = pytest.mark.parametrize("case", ENERGIES, ids=[case.id for case in ENERGIES])


FAMILIES = """
quadratic-input field function composition hyperset-context hopfield-learnable dense-2 classical headwise
queries-cross spins bare spins-ising rbm-ising rbm-one-hot bisoftmax-soft-4 bisoftmax-causal-soft-4
bisoftmax-others sigmoid-soft-4 score-relu-context linear-elu-soft-4 softmax-inner-none-1
softmax-elastic-trained softmax-cross-trained conditional equilibrium-relu gated-causal
gated-cross-normalised bisoftmax-context relu-soft-gates gelu-none softmax-ff-soft gated-gelu-none
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
    fewer = Couplings(
        len(weight),
        couplings.dim,
        symmetric_sites=couplings.symmetric_sites,
    ).to(weight.dtype)
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
