"""Coupled spins: Lagrangians, couplings, mean-field energy; bare attention, its laws, learning and step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.solves import accepted_energies
from cases.spin_models import couplings as random_couplings
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import (
    BareAttention,
    Couplings,
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    Quadratic,
    ReLULagrangian,
    RMSNormLagrangian,
    SiteLagrangian,
    SoftmaxLagrangian,
    SphericalLagrangian,
    SpinInteraction,
    VectorSpin,
)
from implicit_attn.energies.spins import zero_sum
from implicit_attn.updates import BareAttentionStep
from solvers import Implicit, IsingSite, PottsSite, Site, Tolerance, TorusSite

LAGRANGIANS = [
    IdentityLagrangian(),
    ReLULagrangian(),
    SoftmaxLagrangian(),
    RMSNormLagrangian(),
    RMSNormLagrangian(epsilon=1e-6),
    LayerNormLagrangian(),
    LayerNormLagrangian(epsilon=1e-6),
    IsingLagrangian(),
    SphericalLagrangian(),
]


@pytest.mark.parametrize("lagrangian", LAGRANGIANS, ids=str)
def test_activation_and_hessian_are_the_derivatives(lagrangian: Lagrangian) -> None:
    tokens = torch.randn(12, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens[0] = 0.0  # states may start there
    for token in tokens:
        leaf = token[None].clone().requires_grad_()
        (slope,) = torch.autograd.grad(lagrangian(leaf).sum(), leaf, create_graph=True)
        torch.testing.assert_close(lagrangian.activation(token[None]), slope)
        hessian = torch.autograd.functional.hessian(lagrangian.token_value, token)
        rows = torch.stack([lagrangian.hessian_product(token, e) for e in torch.eye(6).double()])
        torch.testing.assert_close(rows, hessian, rtol=1e-9, atol=1e-9)
        assert torch.linalg.eigvalsh(rows).min() >= -1e-9


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SITES, DIM = 5, 3
each_symmetry = pytest.mark.parametrize("tied", [True, False])


def make(tied: bool = True, **options: Any) -> Couplings:
    torch.manual_seed(0)
    return Couplings(SITES, DIM, symmetric_sites=tied, **options).double()


def state(batch: int = 4, seed: int = 1) -> Tensor:
    return torch.randn(batch, SITES, DIM, generator=seeded(seed), dtype=torch.float64)


@each_symmetry
@pytest.mark.parametrize("bound", [None, 0.4])
def test_symmetries_are_exact_and_the_field_sums_over_the_others(
    tied: bool, bound: float | None
) -> None:
    """Also after training; reading the matrix copies nothing."""
    couplings, z = make(tied, bound=bound), state()
    optimizer = torch.optim.Adam(couplings.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        (couplings(state(seed=seed)) - 1.0).square().sum().backward()
        optimizer.step()
    weight = couplings.weight
    assert all(bool((weight[i, i] == 0).all()) for i in range(SITES))
    assert torch.equal(weight, weight.permute(1, 0, 3, 2)) == tied
    expected = torch.einsum("ijab,njb->nia", weight, z)
    torch.testing.assert_close(couplings(z), expected, rtol=1e-13, atol=1e-13)
    matrix = weight.permute(0, 2, 1, 3).reshape(SITES * DIM, SITES * DIM)
    assert torch.equal(couplings.matrix, matrix) and weight.transpose(1, 2).is_contiguous()
    blocks = torch.stack([torch.stack([b.norm() for b in row]) for row in weight])
    torch.testing.assert_close(couplings.site_norms(), blocks)


def test_masked_sites_neither_pull_nor_feel() -> None:
    couplings, z = make(), state()
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5, [True] * 5])
    field = couplings(z.masked_fill(~mask.unsqueeze(-1), float("nan")), mask=mask)
    assert (field[~mask] == 0).all()
    keep = mask[1]
    part = torch.einsum("ijab,jb->ia", couplings.weight[keep][:, keep], z[1, keep])
    torch.testing.assert_close(field[1, keep], part, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(field[0], couplings(z)[0], rtol=1e-13, atol=1e-13)


@each_symmetry
def test_bound_caps_the_spectral_norm_and_nothing_else(tied: bool) -> None:
    couplings = make(tied, bound=0.4)
    free = couplings.free.detach().clone()
    for factor in (1.0, 100.0, 1e-3, 0.0):
        with torch.no_grad():
            couplings.free.copy_(factor * free)
        unbounded = make(tied)
        unbounded.load_state_dict({"parametrizations.weight.original": couplings.free.detach()})
        norm = torch.linalg.matrix_norm(unbounded.matrix, ord=2).item()
        found = torch.linalg.matrix_norm(couplings.matrix, ord=2).item()
        assert found == pytest.approx(min(norm, 0.4), rel=1e-10)
        scale = min(1.0, 0.4 / norm) if norm else 1.0
        torch.testing.assert_close(couplings.weight, scale * unbounded.weight)
    couplings(state()).sum().backward()  # at J = 0
    assert couplings.free.grad is not None and couplings.free.grad.isfinite().all()


@pytest.mark.parametrize("place", [(1, 1, 0, 0), (0, 1, 0, 0)])
def test_set_weights_must_have_the_symmetries(place: tuple[int, ...]) -> None:
    couplings = make()
    weight = couplings.weight.detach().clone()
    couplings.weight = weight
    weight[place] += 1.0
    with pytest.raises(ValueError, match="weight"):
        couplings.weight = weight
    assert not torch.equal(couplings.weight, weight)


def test_the_gauge_has_zero_sums_and_is_kept() -> None:
    gauged = zero_sum(random_couplings(5, 3, 1.0, seeded(0)).transpose(2, 3))
    torch.testing.assert_close(gauged.sum(2), torch.zeros(5, 5, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gauged, gauged.permute(1, 0, 3, 2))
    torch.testing.assert_close(zero_sum(gauged), gauged)


SPINS, COMPONENTS = 4, 3
SITE: dict[str, Lagrangian] = {
    "ising": IsingLagrangian(),
    "sphere": SphericalLagrangian(),
    "potts": SoftmaxLagrangian(),
    "gaussian": IdentityLagrangian(),
}
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-12),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-12)),
    "max_steps": 1000,
    "on_failure": "raise",
}
each_site = pytest.mark.parametrize("name", SITE)


class GaussianSpin(Site):
    """``N(0, s^2)`` in every component, s learned; mean and covariance come by autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.linspace(-0.4, 0.2, COMPONENTS))

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return 0.5 * ((2 * self.log_scale).exp() * field.square()).sum(-1)


def coupled(scale: float = 0.8, sites: int = SPINS, dim: int = COMPONENTS) -> Couplings:
    torch.manual_seed(0)
    return Couplings(sites, dim, scale=scale).double()


def pair(batch: int = 3, sites: int = SPINS, dim: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    z, x = torch.randn(2, batch, sites, dim, generator=seeded(1), dtype=torch.float64)
    return z, x


@pytest.mark.parametrize("name", ["ising", "potts"])
def test_it_is_energy_minus_entropy(name: str) -> None:
    """Of independent sites with the means m; Ising is the default."""
    spin = VectorSpin(coupled(), None if name == "ising" else SITE[name])
    h, x = pair()
    m = spin.mean(h)
    shares = torch.stack([(1 + m) / 2, (1 - m) / 2]) if name == "ising" else m[None]
    entropy = -(shares * shares.log()).sum((0, 2, 3))
    pull = 0.5 * torch.einsum("nia,ijab,njb->n", m, spin.couplings.weight, m)
    torch.testing.assert_close(spin(h, x), -pull - (x * m).sum((1, 2)) - entropy)


@each_site
def test_it_is_the_energy_that_the_associative_memory_monitors(name: str) -> None:
    spin = VectorSpin(coupled(), SITE[name])
    update = ActivationStep(spin.interaction, spin.lagrangian)
    h, x = pair()
    mask = torch.tensor([[True] * 4, [True, False, True, True], [False] * 4])
    for given in (None, mask):
        moved, value, slope = update.joint(h, x, mask=given)
        expected = spin.value_and_grad(h, x, mask=given)
        torch.testing.assert_close((value, slope), expected, rtol=1e-12, atol=1e-12)
        plain = x + spin.couplings(spin.mean(h), mask=given)
        if given is not None:
            plain = torch.where(given.unsqueeze(-1), plain, h)
        torch.testing.assert_close(moved, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("ising", "gradient"),
        ("sphere", "activation"),
        ("potts", "gradient"),
        ("potts", "activation"),
    ],
)
def test_equilibrium_is_the_naive_mean_field(name: str, form: str) -> None:
    """``h = x + J m(h)``, and the energy falls."""
    spin = VectorSpin(coupled(), SITE[name])
    step = ActivationStep(spin.interaction, spin.lagrangian)
    layer = DEQ(GradientStep(spin) if form == "gradient" else step, **EXACT)
    _, x = pair()
    with torch.no_grad():
        solution = layer.solve(x, record=True)
        h = solution.value
        field = x + spin.couplings(spin.mean(h))
        if form == "gradient" and name == "potts":  # m does not see a shift of all components
            h, field = spin.mean(h), spin.mean(field)
        torch.testing.assert_close(h, field, rtol=1e-9, atol=1e-9)
    energy = accepted_energies(solution.trace)  # type: ignore[arg-type]
    assert (energy[:, -1] < energy[:, 0]).all()


def test_any_site_of_the_solvers_is_a_lagrangian() -> None:
    """Gaussian spins with learned variances, whose energy is ``1/2 h^T (S - S J S) h - x^T S h``."""
    site = GaussianSpin().double()
    spin, (h, x) = VectorSpin(coupled(0.5), site), pair()
    assert isinstance(spin.lagrangian, SiteLagrangian)
    assert "lagrangian.site.log_scale" in dict(spin.named_parameters())
    m = (2 * site.log_scale).exp() * h
    torch.testing.assert_close(spin.mean(h), m)
    free = (0.5 * h - x) * m - 0.5 * m * spin.couplings(m)
    torch.testing.assert_close(spin(h, x), free.sum((1, 2)))
    found = torch.autograd.grad(spin(h, x).sum(), site.log_scale)
    torch.testing.assert_close(found, torch.autograd.grad(free.sum(), site.log_scale))


STATES, LOOSE = torch.zeros(3, SPINS, COMPONENTS).double(), Couplings(3, 2, symmetric_sites=False)
MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (lambda: Couplings(4, 3, scale=0.0), ValueError, "scale"),
    (lambda: coupled()(STATES[:, :3]), ValueError, r"\bz\b"),
    (lambda: coupled()(STATES[..., :2]), ValueError, r"\bz\b"),
    (lambda: coupled()(STATES.long()), TypeError, r"\bz\b"),
    (lambda: zero_sum(torch.zeros(3, 3, 2, 2).long()), TypeError, "couplings"),
    (lambda: zero_sum(torch.full((2, 2, 2, 2), math.inf)), ValueError, "finite"),
    (lambda: VectorSpin(torch.zeros(2, 2, 1, 1)), TypeError, "couplings"),  # type: ignore[arg-type]
    (lambda: SpinInteraction(LOOSE), ValueError, "couplings"),
    (lambda: VectorSpin(coupled(), "ising"), TypeError, "site"),  # type: ignore[arg-type]
    (lambda: SiteLagrangian(GaussianSpin), TypeError, "site"),  # type: ignore[arg-type]
    (lambda: SpinInteraction(coupled()).hvp(STATES, STATES[:1]), ValueError, r"\bv\b"),
    (lambda: VectorSpin(coupled())(STATES, STATES[:, :3]), ValueError, r"\bx\b"),
]


@pytest.mark.parametrize(("call", "error", "message"), MISTAKES)
def test_mistakes(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


F64 = torch.float64
# Tokens that are not masked: all, three, one.
KEEP = torch.tensor([[True] * 4, [True, False, True, True], [False, False, True, False]])


def made(
    sites: int = 4, dim: int = 4, *, size: float = 1.0, seed: int | None = None, **options: Any
) -> BareAttention:
    """With couplings N(0, size^2), drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sites + dim if seed is None else seed)
        energy = BareAttention(sites, dim, **options).double()
        nn.init.normal_(energy.couplings.free, std=size)
    return energy


def on_circles(batch: int, sites: int, dim: int, seed: int = 0) -> Tensor:
    """Tokens (B, N, d) of d / 2 points on unit circles."""
    angles = torch.rand(batch, sites, dim // 2, generator=seeded(seed), dtype=F64) * 2 * math.pi
    return torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)


def features(dim: int, width: int) -> Tensor:
    return torch.randn(dim, width, generator=seeded(9), dtype=F64) / width**0.5


def own_gradients(energy: BareAttention, z: Tensor) -> Tensor:
    """``de_i / dz_i`` for every i."""
    jacobian = torch.autograd.functional.jacobian(lambda s: energy.token_energies(s)[0], z)
    assert isinstance(jacobian, Tensor)
    index = torch.arange(z.shape[1])
    return jacobian[index, 0, index]


@pytest.mark.parametrize("lam", [0.3, 2.0])
@pytest.mark.parametrize("width", [None, 6])
def test_attention_is_minus_the_gradient_of_a_tokens_own_energy(
    lam: float, width: int | None
) -> None:
    energy = made(lam=lam, features=None if width is None else features(4, width))
    z = torch.randn(1, 4, energy.width, generator=seeded(1), dtype=F64)
    torch.testing.assert_close(energy.pull(z)[0], -own_gradients(energy, z), rtol=1e-12, atol=1e-13)
    effective = energy.couplings.weight
    if energy.features is not None:
        effective = energy.features.mT @ effective @ energy.features
    keys = torch.einsum("ijab,njb->nija", effective, z)
    scores = lam * (keys @ z.unsqueeze(-1)).squeeze(-1)
    alpha = scores.masked_fill(torch.eye(4).bool(), -math.inf).softmax(-1)
    mixed = (alpha.unsqueeze(-1) * keys).sum(2)
    torch.testing.assert_close(energy.pull(z), mixed, rtol=1e-12, atol=1e-13)


def test_conditional_densities_integrate_to_one_and_have_their_means() -> None:
    """Two circles a token, on a grid of angles of the token; its neighbours stay as they are."""
    energy = made(3, 4, size=1.5, lam=1.3, site=TorusSite())
    z = on_circles(1, 3, 4)
    angle = torch.arange(60, dtype=F64) * (2 * math.pi / 60)
    first, second = torch.meshgrid(angle, angle, indexing="ij")
    grid = torch.stack([first.cos(), first.sin(), second.cos(), second.sin()], -1).view(-1, 1, 4)
    mixture, spread = energy.conditionals(z), 0.0
    for i in range(3):
        moved = z.expand(len(grid), 3, 4).clone()
        moved[:, i : i + 1] = grid
        density = energy.log_prob(moved)[:, i].exp()
        assert density.mean().item() == pytest.approx(1.0, abs=1e-12)
        mean = (density[:, None] * grid[:, 0]).mean(0)
        torch.testing.assert_close(mixture.mean()[0, i], mean, rtol=1e-10, atol=1e-12)
        spread = max(spread, density.std().item())
    assert spread > 0.5


def test_masked_tokens_neither_speak_nor_have_a_law() -> None:
    energy = made(site=TorusSite())
    z = on_circles(3, 4, 4)
    garbage = z.masked_fill(~KEEP.unsqueeze(-1), torch.nan)
    log_prob = energy.log_prob(garbage, mask=KEEP)
    assert (log_prob[~KEEP] == 0).all()
    short = made(3, 4, site=TorusSite())
    keep = KEEP[1]
    short.couplings.weight = energy.couplings.weight.detach()[keep][:, keep]
    torch.testing.assert_close(log_prob[1, keep], short.log_prob(z[1:2, keep])[0])
    mean = energy.conditionals(garbage, mask=KEEP).mean()
    torch.testing.assert_close(mean[1, keep], short.conditionals(z[1:2, keep]).mean()[0])


def by_autograd(energy: BareAttention, z: Tensor, rule: str, mask: Tensor | None = None) -> Tensor:
    """The gradient of the rule's loss by the free entries of J."""
    terms = -energy.log_prob(z, mask=mask) if rule == "exact" else energy(z, mask=mask).unsqueeze(1)
    return torch.autograd.grad(terms.sum(1).mean(), energy.couplings.free)[0]


@pytest.mark.parametrize(("rule", "symmetric", "width", "masked"), [
    ("exact", False, None, True), ("exact", True, 6, False),
    ("source", False, 6, True), ("source", True, None, False),
])  # fmt: skip
def test_a_local_rule_is_the_gradient_of_its_loss(
    rule: str, symmetric: bool, width: int | None, masked: bool
) -> None:
    given = None if width is None else features(4, width)
    energy = made(lam=1.4, features=given, symmetric_sites=symmetric, site=TorusSite())
    z, mask = on_circles(3, 4, energy.width), KEEP if masked else None
    expected = by_autograd(energy, z, rule, mask)
    gradient = energy.local_gradient(z, rule, mask=mask)
    assert gradient.shape == (4, 4, 4, 4)
    assert gradient[range(4), range(4)].abs().max() == 0
    energy.assign_gradient(gradient)
    assert energy.couplings.free.grad is not None
    torch.testing.assert_close(energy.couplings.free.grad, expected, rtol=1e-10, atol=1e-13)


def test_errors_of_bare_attention() -> None:
    z, energy = on_circles(2, 4, 4), made(site=TorusSite())
    gradient = energy.local_gradient(z)

    rows: list[tuple[Any, type[Exception], str]] = [
        (lambda: BareAttention(4, 4, features=torch.ones(6, 4)), ValueError, "features"),
        (lambda: BareAttention(4, 4, site=TorusSite), TypeError, "site"),  # type: ignore[arg-type]
        (lambda: made()(z[:, :3]), ValueError, r"\bz\b"),
        (lambda: made()(z.float()), TypeError, "dtype"),
        (lambda: made().log_prob(z), ValueError, "site"),
        (lambda: energy.local_gradient(z[:0]), ValueError, r"\bz\b"),
        (lambda: energy.assign_gradient(gradient.float()), TypeError, "gradient"),
        (lambda: BareAttentionStep(Quadratic()), TypeError, "energy"),  # type: ignore[arg-type]
        (lambda: BareAttentionStep(energy, gamma=1.0), ValueError, "gamma"),
        (lambda: BareAttentionStep(energy, circles=3), ValueError, "circles"),
    ]
    for call, error, words in rows:
        with pytest.raises(error, match=words):
            call()


def start(batch: int, sites: int, dim: int, seed: int = 1) -> Tensor:
    z = torch.randn(batch, sites, dim, generator=seeded(seed), dtype=F64)
    return z / z.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("gamma", [0.0, 0.5])
def test_the_step_is_attention_and_a_normalisation(gamma: float) -> None:
    energy, z = made(5, 4), start(3, 5, 4)
    mixed = (1 - gamma) * energy.pull(z) + gamma * z
    step = BareAttentionStep(energy, gamma=gamma, radius=2.0)
    torch.testing.assert_close(step(z), 2 * mixed / mixed.norm(dim=-1, keepdim=True))
    circles = BareAttentionStep(energy, gamma=gamma, radius=2**0.5, circles=2)(z)
    pairs = mixed.unflatten(-1, (2, 2))
    torch.testing.assert_close(circles, (pairs / pairs.norm(dim=-1, keepdim=True)).flatten(-2))
    free = BareAttentionStep(energy, gamma=gamma, radius=None)
    torch.testing.assert_close(free(z), mixed)


@pytest.mark.parametrize(("site", "dim"), [(TorusSite(), 4), (IsingSite(), 1), (PottsSite(), 3)])
def test_draws_have_the_means_of_the_law(site: Any, dim: int) -> None:
    energy, draws = made(3, dim, size=1.2, site=site), 4000
    z = site.sample(torch.zeros(1, 3, dim, dtype=F64), seeded(5))
    mixture = energy.conditionals(z.expand(draws, 3, dim))
    drawn = mixture.sample(seeded(6))
    error = drawn.mean(0) - energy.conditionals(z).mean()[0]
    assert (error.abs() <= 4 * drawn.std(0) / draws**0.5 + 1e-12).all()
    assert drawn.std(0).max() > 0.1
    if dim == 4:
        torch.testing.assert_close(drawn.square().sum(-1), torch.full((draws, 3), 2.0, dtype=F64))
