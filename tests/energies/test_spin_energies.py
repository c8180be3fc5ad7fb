"""Lagrangians, couplings, and the mean-field energy of coupled vector spins."""

from __future__ import annotations

import copy
import itertools
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.solves import accepted_energies
from cases.spin_models import couplings as random_couplings
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import (
    Couplings,
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    LayerNormLagrangian,
    ReLULagrangian,
    RMSNormLagrangian,
    SiteDistribution,
    SiteLagrangian,
    SoftmaxLagrangian,
    SphericalLagrangian,
    SpinInteraction,
    VectorSpin,
)
from implicit_attn.energies.spins import binary_size, zero_sum
from solvers import Implicit, Tolerance

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
SQRT51 = 51**0.5  # s of the sphere at |z|^2 = 25, d = 2
each = pytest.mark.parametrize("lagrangian", LAGRANGIANS, ids=str)


@pytest.fixture
def z() -> Tensor:
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@each
def test_activation_is_the_gradient(lagrangian: Lagrangian, z: Tensor) -> None:
    z = z.requires_grad_()
    value = lagrangian(z)
    assert value.shape == (3,)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    torch.testing.assert_close(lagrangian.activation(z), gradient, rtol=1e-9, atol=1e-9)


@each
def test_hessian_is_exact_symmetric_and_positive_semidefinite(
    lagrangian: Lagrangian, z: Tensor
) -> None:
    for token in z.flatten(0, 1):
        jacobian = torch.autograd.functional.jacobian(lagrangian.activation, token)
        assert isinstance(jacobian, Tensor)
        rows = torch.stack([lagrangian.hessian_product(token, e) for e in torch.eye(6).double()])
        torch.testing.assert_close(rows, jacobian, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(jacobian, jacobian.T)
        assert torch.linalg.eigvalsh(jacobian).min() >= -1e-9


@each
def test_second_derivatives_of_the_value_at_exactly_zero(lagrangian: Lagrangian) -> None:
    """What a loss of the gradient of an energy differentiates, from a state or weights of zeros."""
    z = torch.zeros(1, 6, dtype=torch.float64, requires_grad=True)
    v = torch.arange(1.0, 7.0, dtype=torch.float64).unsqueeze(0)
    (slope,) = torch.autograd.grad(lagrangian.token_value(z).sum(), z, create_graph=True)
    (product,) = torch.autograd.grad((slope * v).sum(), z)
    torch.testing.assert_close(product, lagrangian.hessian_product(z.detach(), v))


@each
def test_masked_tokens_do_not_count(lagrangian: Lagrangian, z: Tensor) -> None:
    mask = torch.tensor([[True, False, True, True], [False] * 4, [True] * 4])
    value = lagrangian(z, mask=mask)
    garbage = z.masked_fill(~mask.unsqueeze(-1), float("nan"))
    assert torch.equal(lagrangian(garbage, mask=mask), value)
    assert value[1] == 0
    torch.testing.assert_close(value[:1], lagrangian(z[:1, mask[0]]))
    torch.testing.assert_close(value[2:], lagrangian(z[2:]))


def test_values_and_activations_by_hand() -> None:
    z = torch.tensor([[[3.0, -4.0]]], dtype=torch.float64)
    cases: list[tuple[Lagrangian, float, list[float]]] = [
        (IdentityLagrangian(), 12.5, [3.0, -4.0]),
        (ReLULagrangian(), 4.5, [3.0, 0.0]),
        (SoftmaxLagrangian(), 3.0009114664537737, [0.9990889488055994, 0.0009110511944006454]),
        (RMSNormLagrangian(epsilon=1.0), 2 * 13.5**0.5, [3 / 13.5**0.5, -4 / 13.5**0.5]),
        (LayerNormLagrangian(epsilon=3.75), 8.0, [3.5 / 4, -3.5 / 4]),
        (
            IsingLagrangian(),
            math.log(4 * math.cosh(3) * math.cosh(4)),
            [math.tanh(3), -math.tanh(4)],
        ),
        (
            SphericalLagrangian(),
            SQRT51 - 1 - math.log((1 + SQRT51) / 2),
            [6 / (1 + SQRT51), -8 / (1 + SQRT51)],
        ),
    ]
    for lagrangian, value, activation in cases:
        assert lagrangian(z).item() == pytest.approx(value, rel=1e-12)
        assert lagrangian.activation(z).flatten().tolist() == pytest.approx(activation, rel=1e-12)


@each
def test_half_precision_is_that_of_wide_numbers(lagrangian: Lagrangian, z: Tensor) -> None:
    half, wide = z.bfloat16(), z.bfloat16().double()
    assert lagrangian.activation(half).dtype == torch.bfloat16
    found, expected = lagrangian.activation(half).double(), lagrangian.activation(wide)
    torch.testing.assert_close(found, expected, rtol=0.03, atol=0.03)
    torch.testing.assert_close(lagrangian(half).double(), lagrangian(wide), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("sites", "dim", "tied"), [(2, 1, True), (4, 2, True), (4, 2, False)])
@pytest.mark.parametrize("bound", [10.0, 0.1])
def test_bounded_couplings_have_second_derivatives(
    sites: int, dim: int, tied: bool, bound: float
) -> None:
    """Of two sites the eigenvalues of J are opposite, in its Gram matrix equal."""
    torch.manual_seed(1)
    couplings = Couplings(sites, dim, symmetric_sites=tied, bound=bound).double()
    parameters, weight = list(couplings.parameters()), couplings.weight
    loss = weight.square().sum() + weight.pow(3).sum()
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    loss = torch.stack([g.square().sum() for g in gradients]).sum()
    second = torch.autograd.grad(loss, parameters)
    assert all(bool(each.isfinite().all()) for each in second)


SITES, DIM = 5, 3
BOUNDS = [None, 0.4]
each_symmetry = pytest.mark.parametrize("tied", [True, False])


def make(tied: bool = True, **options: Any) -> Couplings:
    torch.manual_seed(0)
    return Couplings(SITES, DIM, symmetric_sites=tied, **options).double()


def state(batch: int = 4, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, SITES, DIM, generator=generator, dtype=torch.float64)


def has_symmetries(weight: Tensor, tied: bool) -> bool:
    """Zero diagonal blocks, and exactly the symmetries asked for."""
    empty = all(bool((weight[i, i] == 0).all()) for i in range(len(weight)))
    sites = torch.equal(weight, weight.permute(1, 0, 3, 2))
    return empty and sites == tied


@each_symmetry
@pytest.mark.parametrize("bound", BOUNDS)
def test_symmetries_are_exact_also_after_training(tied: bool, bound: float | None) -> None:
    couplings = make(tied, bound=bound)
    assert has_symmetries(couplings.weight, tied)
    optimizer = torch.optim.Adam(couplings.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        (couplings(state(seed=seed)) - 1.0).square().sum().backward()
        optimizer.step()
    assert has_symmetries(couplings.weight, tied)


@each_symmetry
def test_only_free_entries_are_parameters(tied: bool) -> None:
    couplings = make(tied)
    pairs = SITES * (SITES - 1) // (2 if tied else 1)
    count = pairs * DIM * DIM
    (parameter,) = couplings.parameters()
    assert parameter is couplings.free
    assert parameter.numel() == count
    # Every free entry moves J in a direction of its own.
    jacobian = torch.autograd.functional.jacobian(
        couplings.parametrizations["weight"][0],  # type: ignore[index]
        parameter.detach(),
    )
    assert isinstance(jacobian, Tensor)
    assert torch.linalg.matrix_rank(jacobian.reshape(SITES**2 * DIM**2, count)) == count


@each_symmetry
@pytest.mark.parametrize("bound", BOUNDS)
def test_field_is_the_sum_over_the_other_sites(tied: bool, bound: float | None) -> None:
    couplings, z = make(tied, bound=bound), state()
    expected = torch.einsum("ijab,njb->nia", couplings.weight, z)
    torch.testing.assert_close(couplings(z), expected, rtol=1e-13, atol=1e-13)
    matrix = couplings.weight.permute(0, 2, 1, 3).reshape(SITES * DIM, SITES * DIM)
    assert torch.equal(couplings.matrix, matrix)
    # The matrix is the memory of the weight, so that reading it copies nothing.
    assert couplings.weight.transpose(1, 2).is_contiguous()
    blocks = torch.stack([torch.stack([b.norm() for b in row]) for row in couplings.weight])
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
def test_weights_can_be_set_and_copied(tied: bool) -> None:
    source, target = make(tied), make(tied)
    with torch.no_grad():
        source.free.normal_()
    before = target.free
    target.weight = source.weight
    assert target.free is before  # optimisers keep their parameter
    assert torch.equal(target.weight, source.weight)
    target.reset_parameters()
    target.load_state_dict(source.state_dict())
    assert list(source.state_dict()) == ["parametrizations.weight.original"]
    twin = copy.deepcopy(source)
    with torch.no_grad():
        source.free.zero_()
    assert (source.weight == 0).all()
    assert torch.equal(twin.weight, target.weight) and (twin.weight != 0).any()


@pytest.mark.parametrize("tied", [True, False])
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


def test_one_site_couples_to_nobody() -> None:
    couplings = Couplings(1, 4, bound=1.0)
    assert couplings.free.numel() == 0
    assert (couplings(torch.ones(2, 1, 4)) == 0).all()


def _weight(change: str) -> Tensor:
    weight = make().weight.detach().clone()
    if change == "diagonal":
        weight[1, 1, 0, 0] = 1.0
    elif change == "sites":
        weight[0, 1, 0, 0] += 1.0
    elif change == "nan":
        weight[0, 1] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("diagonal", "weight must have zero blocks J_ii, got deviations up to 1"),
        ("sites", "weight must have J_ij^ab = J_ji^ba, got deviations up to 1"),
    ],
)
def test_set_weights_must_have_the_symmetries(change: str, message: str) -> None:
    couplings = make()
    before = couplings.weight.detach().clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        couplings.weight = _weight(change)
    assert torch.equal(couplings.weight, before)
    couplings.weight = _weight("nothing")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be finite and > 0, got 0.0"),
        ({"bound": float("inf")}, ValueError, "bound must be finite and > 0, got inf"),
    ],
)
def test_bad_couplings(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        arguments: dict[str, Any] = {"sites": 4, "dim": 3} | options
        Couplings(**arguments)


@pytest.mark.parametrize(
    ("z", "kind", "message"),
    [
        (torch.zeros(2, 4, 3), ValueError, "z must have 5 sites (N), got shape (2, 4, 3)"),
        (torch.zeros(2, 5, 4), ValueError, "z must have 3 features (d)"),
        (torch.zeros(5, 3), ValueError, "z must have the shape (B, N, d), got (5, 3)"),
        (torch.zeros(2, 5, 3, dtype=torch.long), TypeError, "z must be of a floating dtype"),
    ],
)
def test_bad_states(z: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        Couplings(SITES, DIM)(z)


def couplings(seed: int = 0) -> torch.Tensor:
    return random_couplings(5, 3, 1.0, torch.Generator().manual_seed(seed))


def test_the_gauge_has_zero_sums_and_is_kept() -> None:
    gauged = zero_sum(couplings() + couplings(1).transpose(2, 3))
    torch.testing.assert_close(gauged.sum(2), torch.zeros(5, 5, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gauged, gauged.permute(1, 0, 3, 2))
    torch.testing.assert_close(zero_sum(gauged), gauged)


def test_directions_are_averaged() -> None:
    single = torch.zeros(2, 2, 2, 2)
    single[0, 1] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert torch.equal(zero_sum(single)[0, 1], 0.5 * single[0, 1])
    assert torch.equal(zero_sum(single)[1, 0], 0.5 * single[0, 1])


@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-30, 2e38, 0.0])
def test_dividing_by_the_size_rounds_nothing(scale: float) -> None:
    scaled = couplings().float() / couplings().abs().max() * scale
    size = binary_size(scaled)
    assert torch.equal(scaled / size * size, scaled)
    assert scale == 0 or 1 <= float((scaled / size).abs().max()) < 2


def test_wrong_couplings() -> None:
    with pytest.raises(TypeError, match="couplings must be a floating"):
        zero_sum(torch.zeros(3, 3, 2, 2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(N, N, d, d\)"):
        zero_sum(torch.zeros(3, 2, 2, 2))
    with pytest.raises(ValueError, match="finite"):
        zero_sum(torch.full((2, 2, 2, 2), float("inf")))


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


class GaussianSpin(nn.Module):
    """A site as the adaptive TAP solvers take it: ``N(0, s^2)`` in every component, s learned."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.linspace(-0.4, 0.2, COMPONENTS))

    def covariance(self, h: Tensor, V: Tensor) -> Tensor:
        return torch.linalg.inv(torch.diag((-2 * self.log_scale).exp()) - V)

    def mean(self, h: Tensor, V: Tensor) -> Tensor:
        return (self.covariance(h, V) @ h.unsqueeze(-1)).squeeze(-1)

    def log_partition(self, h: Tensor, V: Tensor) -> Tensor:
        return 0.5 * (h * self.mean(h, V)).sum(-1)


def coupled(scale: float = 0.8, sites: int = SPINS, dim: int = COMPONENTS) -> Couplings:
    torch.manual_seed(0)
    return Couplings(sites, dim, scale=scale).double()


def pair(batch: int = 3, sites: int = SPINS, dim: int = COMPONENTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, batch, sites, dim, generator=generator, dtype=torch.float64)
    return z, x


def quadratic_part(spin: VectorSpin, m: Tensor, x: Tensor) -> Tensor:
    pull = 0.5 * torch.einsum("nia,ijab,njb->n", m, spin.couplings.weight, m)
    return -pull - (x * m).sum((1, 2))


@pytest.mark.parametrize("name", ["ising", "potts"])
def test_it_is_energy_minus_entropy(name: str) -> None:
    """Of independent sites with the means m; Ising is the default."""
    spin = VectorSpin(coupled(), None if name == "ising" else SITE[name])
    h, x = pair()
    m = spin.mean(h)
    shares = torch.stack([(1 + m) / 2, (1 - m) / 2]) if name == "ising" else m[None]
    entropy = -(shares * shares.log()).sum((0, 2, 3))
    torch.testing.assert_close(spin(h, x), quadratic_part(spin, m, x) - entropy)


@pytest.mark.parametrize("name", ["ising", "potts"])
def test_never_below_the_exact_free_energy(name: str) -> None:
    """Gibbs and Bogoliubov: ``E(h) >= -log Z`` of the interacting spins, by enumeration, at any h,
    and the equilibrium comes closer than the independent spins it starts from."""
    spin = VectorSpin(coupled(1.5), SITE[name])
    h, x = pair()
    one = torch.tensor(
        list(itertools.product([1.0, -1.0], repeat=COMPONENTS))
        if name == "ising"
        else torch.eye(3).tolist(),
        dtype=torch.float64,
    )
    rows = itertools.product(range(len(one)), repeat=SPINS)
    states = one[torch.tensor(list(rows))]
    pull = 0.5 * torch.einsum("sia,ijab,sjb->s", states, spin.couplings.weight.detach(), states)
    exact = -(pull + torch.einsum("sia,nia->ns", states, x)).logsumexp(-1)
    for scale in (0.0, 0.3, 1.0, 3.0):
        assert (spin(scale * h, x) > exact).all()
    layer = DEQ(ActivationStep(spin.interaction, spin.lagrangian), **EXACT)
    with torch.no_grad():
        found = spin(layer(x), x)
        assert (found > exact).all()
        assert (found < spin(x, x)).all()
        assert ((found - exact) < 0.7 * (spin(x, x) - exact)).all()


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


@each_site
@pytest.mark.parametrize("form", ["gradient", "activation"])
def test_equilibrium_is_the_naive_mean_field(name: str, form: str) -> None:
    """``h = x + J m(h)``, and the energy falls all the way."""
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
    trace = solution.trace
    assert trace is not None and trace.energy is not None
    energy = accepted_energies(trace)
    rises = energy[:, 1:] - energy[:, :-1]
    assert (rises <= 9 * torch.finfo(energy.dtype).eps * energy[:, :-1].abs()).all()
    assert (energy[:, -1] < energy[:, 0]).all()


def test_strong_couplings_order_the_spins_and_are_found() -> None:
    """Ferromagnet far below its transition: two stable states, each reached from its own side."""
    ferromagnet = Couplings(6, 1).double()
    ferromagnet.weight = 0.5 * (1 - torch.eye(6, dtype=torch.float64))[..., None, None]
    layer = DEQ(ActivationStep(SpinInteraction(ferromagnet), IsingLagrangian()), **EXACT)
    x = torch.full((2, 6, 1), 0.01, dtype=torch.float64)
    with torch.no_grad():
        h = layer.solve(x, z0=torch.tensor([1.0, -1.0]).double()[:, None, None].expand(2, 6, 1))
    m = h.value.tanh()
    torch.testing.assert_close(h.value, x + 2.5 * m, rtol=1e-9, atol=1e-9)
    assert (m[0] > 0.95).all() and (m[1] < -0.95).all()


def test_any_site_of_the_solvers_is_a_lagrangian() -> None:
    """Gaussian spins with learned variances: ``m = (S^-1 - J)^-1 x``, gradients to the variances."""
    site = GaussianSpin().double()
    assert isinstance(site, SiteDistribution)
    spin = VectorSpin(coupled(0.5), site)
    assert isinstance(spin.lagrangian, SiteLagrangian)
    names = [name for name, _ in spin.named_parameters()]
    assert "lagrangian.site.log_scale" in names
    layer = DEQ(ActivationStep(spin.interaction, spin.lagrangian), **EXACT)
    assert any("log_scale" in name for name, _ in layer.named_parameters())
    _, x = pair()
    m = spin.mean(layer(x))
    precision = torch.diag((-2 * site.log_scale).exp().repeat(SPINS)) - spin.couplings.matrix
    expected = torch.linalg.solve_ex(precision, x.flatten(1).T)[0].T
    torch.testing.assert_close(m.flatten(1), expected, rtol=1e-9, atol=1e-9)
    loss, reference = m.pow(3).sum(), expected.pow(3).sum()
    parameters = [site.log_scale, spin.couplings.free]
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.testing.assert_close(
        found, torch.autograd.grad(reference, parameters), rtol=1e-8, atol=1e-9
    )


@pytest.mark.parametrize(
    ("cls", "arguments", "kind", "message"),
    [
        (VectorSpin, [torch.zeros(2, 2, 1, 1)], TypeError, "couplings must be Couplings, got"),
        (
            SpinInteraction,
            [Couplings(3, 2, symmetric_sites=False)],
            ValueError,
            "couplings must have symmetric_sites=True to have an energy, got False",
        ),
        (VectorSpin, [coupled(), "ising"], TypeError, "site must be a Lagrangian or have"),
        (VectorSpin, [coupled(), IsingLagrangian], TypeError, "site must be a Lagrangian or"),
        (SiteLagrangian, [GaussianSpin], TypeError, "site must be a Lagrangian or have"),
    ],
)
def test_bad_spins(cls: Any, arguments: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        cls(*arguments)


def test_bad_inputs() -> None:
    spin, (h, x) = VectorSpin(coupled()), pair()
    for energy in (spin, spin.interaction):
        with pytest.raises(ValueError, match=re.escape("z must have 4 sites (N)")):
            energy(h[:, :3], x[:, :3])
        with pytest.raises(ValueError, match="v must be like z"):
            energy.hvp(h, h[:, :3], x)
    with pytest.raises(ValueError, match="VectorSpin: x must have the shape of z"):
        spin(h, x[:, :3])
