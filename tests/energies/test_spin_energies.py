"""The mean-field free energy of coupled spins: values by hand, bounds, descent, equilibria."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.solves import accepted_energies
from implicit_attn import DEQ, ActivationStep, GradientStep
from implicit_attn.energies import (
    Couplings,
    IdentityLagrangian,
    IsingLagrangian,
    Lagrangian,
    Site,
    SiteDistribution,
    SiteLagrangian,
    SoftmaxLagrangian,
    SphericalLagrangian,
    SpinInteraction,
    VectorSpin,
)
from solvers import Implicit, Tolerance

SITES, DIM = 4, 3
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
        self.log_scale = nn.Parameter(torch.linspace(-0.4, 0.2, DIM))

    def covariance(self, h: Tensor, V: Tensor) -> Tensor:
        return torch.linalg.inv(torch.diag((-2 * self.log_scale).exp()) - V)

    def mean(self, h: Tensor, V: Tensor) -> Tensor:
        return (self.covariance(h, V) @ h.unsqueeze(-1)).squeeze(-1)

    def log_partition(self, h: Tensor, V: Tensor) -> Tensor:
        return 0.5 * (h * self.mean(h, V)).sum(-1)


def couplings(scale: float = 0.8, sites: int = SITES, dim: int = DIM) -> Couplings:
    torch.manual_seed(0)
    return Couplings(sites, dim, scale=scale).double()


def pair(batch: int = 3, sites: int = SITES, dim: int = DIM) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    z, x = torch.randn(2, batch, sites, dim, generator=generator, dtype=torch.float64)
    return z, x


def quadratic_part(spin: VectorSpin, m: Tensor, x: Tensor) -> Tensor:
    pull = 0.5 * torch.einsum("nia,ijab,njb->n", m, spin.couplings.weight, m)
    return -pull - (x * m).sum((1, 2))


@pytest.mark.parametrize("name", ["ising", "potts"])
def test_it_is_energy_minus_entropy(name: str) -> None:
    """Of independent sites with the means m; Ising is the default."""
    spin = VectorSpin(couplings(), None if name == "ising" else SITE[name])
    h, x = pair()
    m = spin.mean(h)
    shares = torch.stack([(1 + m) / 2, (1 - m) / 2]) if name == "ising" else m[None]
    entropy = -(shares * shares.log()).sum((0, 2, 3))
    torch.testing.assert_close(spin(h, x), quadratic_part(spin, m, x) - entropy)


@pytest.mark.parametrize("name", ["ising", "potts"])
def test_never_below_the_exact_free_energy(name: str) -> None:
    """Gibbs and Bogoliubov: ``E(h) >= -log Z`` of the interacting spins, by enumeration, at any h,
    and the equilibrium comes closer than the independent spins it starts from."""
    spin = VectorSpin(couplings(1.5), SITE[name])
    h, x = pair()
    one = torch.tensor(
        list(itertools.product([1.0, -1.0], repeat=DIM))
        if name == "ising"
        else torch.eye(3).tolist(),
        dtype=torch.float64,
    )
    rows = itertools.product(range(len(one)), repeat=SITES)
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
    spin = VectorSpin(couplings(), SITE[name])
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
    spin = VectorSpin(couplings(), SITE[name])
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
    assert isinstance(site, SiteDistribution) and Site is SiteDistribution
    spin = VectorSpin(couplings(0.5), site)
    assert isinstance(spin.lagrangian, SiteLagrangian)
    names = [name for name, _ in spin.named_parameters()]
    assert "lagrangian.site.log_scale" in names
    layer = DEQ(ActivationStep(spin.interaction, spin.lagrangian), **EXACT)
    assert any("log_scale" in name for name, _ in layer.named_parameters())
    _, x = pair()
    m = spin.mean(layer(x))
    precision = torch.diag((-2 * site.log_scale).exp().repeat(SITES)) - spin.couplings.matrix
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
        (VectorSpin, [couplings(), "ising"], TypeError, "site must be a Lagrangian or have"),
        (VectorSpin, [couplings(), IsingLagrangian], TypeError, "site must be a Lagrangian or"),
        (SiteLagrangian, [GaussianSpin], TypeError, "site must be a Lagrangian or have"),
    ],
)
def test_bad_arguments(cls: Any, arguments: list[Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        cls(*arguments)


def test_bad_inputs() -> None:
    spin, (h, x) = VectorSpin(couplings()), pair()
    for energy in (spin, spin.interaction):
        with pytest.raises(ValueError, match=re.escape("z must have 4 sites (N)")):
            energy(h[:, :3], x[:, :3])
        with pytest.raises(ValueError, match="v must be like z"):
            energy.hvp(h, h[:, :3], x)
    with pytest.raises(ValueError, match="VectorSpin: x must have the shape of z"):
        spin(h, x[:, :3])
