"""Mean-field theories: exact answers, derivatives, free energies; O(d) spins at their saddle point."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from cases.spin_models import (
    as_matrix,
    couplings,
    enumerate_moments,
    fields,
    generator,
    ising_states,
    symmetric,
)
from solvers import (
    GaussianSite,
    Implicit,
    IsingSite,
    PottsSite,
    Site,
    Solution,
    SolveError,
    SolveWarning,
    SphericalSite,
    Status,
    Tolerance,
    adaptive_tap,
    spherical_saddle,
)

F64 = torch.float64
SITES: dict[str, tuple[Site, int]] = {
    "ising": (IsingSite(), 1),
    "potts": (PottsSite(), 3),
    "sphere": (SphericalSite(), 3),
    "gaussian": (GaussianSite(0.5 * torch.eye(2, dtype=F64)), 2),
    "gaussian each": (GaussianSite(torch.diag_embed(torch.rand(4, 2, dtype=F64) + 0.1)), 2),
    "saddle point": (SphericalSite(large_dimension=True), 4),
}
PROPER = pytest.mark.parametrize("name", ["ising", "potts", "sphere", "gaussian"])


def relative_error(mean: Tensor, exact: Tensor) -> float:
    return ((mean.flatten() - exact).norm() / exact.norm()).item()


# --- exact answers -----------------------------------------------------------------------------------


def test_gaussian_sites_are_solved_exactly() -> None:
    sites, dim, random = 12, 4, generator(0)
    half = torch.randn(sites, dim, dim, generator=random, dtype=F64)
    sigma = half @ half.mT / dim + 0.3 * torch.eye(dim, dtype=F64)
    blocks = couplings(sites, dim, 0.02, random)
    x = fields(6, sites, dim, random, 1.0)
    precision = torch.block_diag(*torch.linalg.inv(sigma)) - as_matrix(blocks)
    assert torch.linalg.eigvalsh(precision)[0] > 0
    covariance = torch.linalg.inv(precision)
    solution = adaptive_tap(blocks, x, site=GaussianSite(sigma), response=True, log_partition=True)
    assert solution.converged.all()
    value, flat = solution.value, x.flatten(1)
    log_z = (flat @ covariance * flat).sum(1) - torch.logdet(precision) - torch.logdet(sigma).sum()
    torch.testing.assert_close(value.log_partition, log_z / 2, rtol=1e-10, atol=0)
    torch.testing.assert_close(value.mean.flatten(1), flat @ covariance, rtol=0, atol=1e-9)
    whole = value.response.reshape(6, sites * dim, sites * dim)
    torch.testing.assert_close(whole, covariance.expand_as(whole), rtol=0, atol=1e-9)
    for i in range(sites):
        own = covariance[dim * i : dim * (i + 1), dim * i : dim * (i + 1)]
        torch.testing.assert_close(value.covariance[3, i], own, rtol=0, atol=1e-9)


# Largest ratio of the median errors. Where every J_ij is N(0, s^2/N) and s = 1, adaptive TAP itself
# stands at 0.11 of the naive error (300 models).
@pytest.mark.parametrize(("strength", "bound"), [(0.5, 0.1), (1.0, 0.15)])
def test_ising_against_enumeration(strength: float, bound: float) -> None:
    sites, random, states = 10, generator(1), ising_states(10)
    errors: dict[str, list[float]] = {"adaptive": [], "naive": []}
    for _ in range(20):
        blocks, x = couplings(sites, 1, strength / sites**0.5, random), fields(1, sites, 1, random)
        exact, _ = enumerate_moments(states, blocks, x[0])
        options: dict[str, Any] = {"tolerance": 1e-8, "on_failure": "ignore"}
        for order, found in errors.items():
            solution = adaptive_tap(blocks, x, site=IsingSite(), order=order, **options)
            if order == "adaptive":
                assert solution.converged.all()
                assert_consistent(solution, blocks, x, IsingSite())
            found.append(relative_error(solution.value.mean, exact))
    median = {order: torch.tensor(found).median().item() for order, found in errors.items()}
    assert median["adaptive"] <= bound * median["naive"]


def assert_consistent(solution: Solution, blocks: Tensor, x: Tensor, site: Site) -> None:
    """The TAP equations at the solution, by dense inverses."""
    mean, covariance, variance, *_ = solution.value
    pull = torch.einsum("ijab,sjb->sia", blocks, mean)
    h = x + pull - torch.einsum("siab,sib->sia", variance, mean)
    torch.testing.assert_close(mean, site.mean(h, variance), rtol=1e-6, atol=1e-7)
    precision = torch.diag_embed((variance + torch.linalg.inv(covariance)).flatten(1))
    precision = precision - as_matrix(blocks)
    assert (torch.linalg.eigvalsh(precision)[:, 0] > 0).all()
    own = torch.linalg.inv(precision).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(own, covariance.flatten(1), rtol=1e-5, atol=1e-7)


# --- batches, masks, options -------------------------------------------------------------------------


@PROPER
def test_a_sample_gets_what_its_unmasked_sites_get_alone(name: str) -> None:
    (site, dim), random = SITES[name], generator(6)
    blocks, x = couplings(5, dim, 0.4 / dim**0.5, random), fields(4, 5, dim, random)
    x[0] *= 8  # the variances differ from sample to sample
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[3, [1, 4]] = False
    options: dict[str, Any] = {"site": site, "response": True, "log_partition": True}
    together = adaptive_tap(blocks, x, mask=mask, **options)
    value = together.value
    for i in range(4):
        kept = torch.nonzero(mask[i]).flatten()
        alone = adaptive_tap(blocks[kept][:, kept], x[i : i + 1, kept], **options)
        for whole, single in zip(value[:3], alone.value[:3], strict=True):
            torch.testing.assert_close(whole[i, kept], single[0], rtol=1e-8, atol=1e-9)
            assert not whole[i, ~mask[i]].any()
        inside = value.response[i][kept][:, :, kept]
        torch.testing.assert_close(inside, alone.value.response[0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(value.log_partition[i], alone.value.log_partition[0])
        # The history of the solver is shorter for fewer sites.
        assert (together.evaluations[i] - alone.evaluations[0]).abs() <= 2
    if not isinstance(site, GaussianSite) and dim > 1:
        assert (value.cavity_variance[0] - value.cavity_variance[1]).abs().max() > 1e-3


# --- statuses ------------------------------------------------------------------------------------------


def test_a_model_that_does_not_exist_is_indefinite() -> None:
    """Gaussian sites whose coupled distribution cannot be normalised."""
    random, site = generator(12), GaussianSite(torch.eye(2, dtype=F64))
    blocks, x = couplings(4, 2, 2.0, random), fields(3, 4, 2, random)
    with pytest.warns(SolveWarning, match="INDEFINITE"):
        solution = adaptive_tap(blocks, x, site=site, response=True)
    assert (solution.status == Status.INDEFINITE).all()
    assert torch.isinf(solution.residual).all() and not solution.value.mean.any()
    assert all(torch.isfinite(t).all() for t in solution.value if t is not None)
    with pytest.raises(SolveError) as caught:
        adaptive_tap(blocks, x, site=site, on_failure="raise")
    assert (caught.value.solution.status == Status.INDEFINITE).all()


class Exponential(Site):
    """``rho(S) = exp(-S)`` on S > 0: it exists for fields below 1 (V left out)."""

    def log_partition(self, field: Tensor, variance: Tensor) -> Tensor:
        return -torch.log1p(-field).sum(-1)


def test_one_bad_sample_leaves_the_gradients_of_the_others_alone() -> None:
    random = generator(13)
    blocks = couplings(4, 1, 0.05, random).requires_grad_()
    x = fields(3, 4, 1, random, 0.2)
    x[1, 2] = 1.5
    site = Exponential()
    solution = adaptive_tap(blocks, x, site=site, on_failure="ignore")
    assert solution.status.tolist() == [Status.CONVERGED, Status.INDEFINITE, Status.CONVERGED]
    (got,) = torch.autograd.grad(solution.value.mean[[0, 2]].square().sum(), blocks)
    alone = adaptive_tap(blocks, x[[0, 2]], site=site)
    (wanted,) = torch.autograd.grad(alone.value.mean.square().sum(), blocks)
    torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-10)


def test_a_singular_block_gives_a_status() -> None:
    """Couplings beyond the precision of float32, for which ``I + Q_ii C_i`` is singular after rounding."""
    blocks = couplings(4, 3, 1e12, generator(0)).float()
    x = fields(24, 4, 3, generator(1)).float().requires_grad_()
    solution = adaptive_tap(blocks, x, site=PottsSite(), max_steps=20, on_failure="ignore")
    assert (solution.status == Status.INDEFINITE).all()
    (slope,) = torch.autograd.grad(solution.value.mean.square().sum(), x)
    assert solution.value.mean.isfinite().all() and not slope.any()


# --- errors -----------------------------------------------------------------------------------------


def with_one(value: float, *place: int) -> Tensor:
    blocks = torch.zeros(3, 3, 2, 2, dtype=F64)
    blocks[place] = value
    return blocks


GOOD = torch.zeros(3, 3, 2, 2, dtype=F64)
X = torch.zeros(2, 3, 2, dtype=F64)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"couplings": with_one(1.0, 0, 2, 0, 1)}, ValueError, r"1.0 between couplings\[0, 2\]"),
    ({"couplings": with_one(0.5, 1, 1)}, ValueError, r"couplings\[1, 1\].*got 0.5"),
    ({"couplings": GOOD / 0}, ValueError, "couplings"),
    ({"couplings": GOOD.float()}, TypeError, "couplings"),
    ({"field": X / 0}, ValueError, "field"),
    ({"site": 3}, TypeError, "site"),
    ({"mask": torch.ones(2, 3)}, TypeError, "mask"),
    ({"damping": 0.0}, ValueError, "damping"),
    ({"order": "third"}, ValueError, "order"),
    ({"inverse_temperature": 0}, ValueError, "inverse_temperature"),
    ({"inverse_temperature": torch.tensor([0.1, 1.0])}, TypeError, "inverse_temperature|tolist"),
    ({"start": torch.zeros(2, 3, 2)}, TypeError, "start"),
    ({"response": 1}, TypeError, "response"),
]  # fmt: skip
K = torch.zeros(3, 3, dtype=F64)
BAD_SADDLES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"couplings": K[:2]}, ValueError, "couplings"),
    ({"couplings": K + torch.eye(3)}, ValueError, "couplings"),
    ({"couplings": (K + 1).triu(1)}, ValueError, "couplings"),
]


@pytest.mark.parametrize(("change", "error", "words"), [*BAD, *BAD_SADDLES])
def test_errors_name_the_argument(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: Any = {"couplings": GOOD, "field": X, "site": PottsSite()} | change
    with pytest.raises(error, match=words):
        if arguments["couplings"].dim() == 2:
            spherical_saddle(arguments["couplings"], arguments["field"])
        else:
            adaptive_tap(**arguments)


# how far the means of a sample lie outside, (B,)
OUTSIDE: dict[str, tuple[Site, int, Callable[[Tensor], Tensor]]] = {
    "ising": (IsingSite(), 1, lambda m: m.abs().amax((1, 2)) - 1),
    "potts": (PottsSite(), 3, lambda m: torch.maximum(-m, m - 1).amax((1, 2))),
    "sphere": (SphericalSite(), 3, lambda m: m.norm(dim=-1).amax(1) - 3**0.5),
}


@pytest.mark.defect("D6")
@pytest.mark.parametrize("name", OUTSIDE)
def test_unconverged_means_stay_in_the_domain(name: str) -> None:
    site, dim, outside = OUTSIDE[name]
    unconverged = 0
    for strength in (1.0, 4.0):
        random = generator(1)
        blocks = couplings(20, dim, strength / (20 * dim) ** 0.5, random)
        x = fields(8, 20, dim, random, 1.0)
        solution = adaptive_tap(
            blocks, x, site=site, adjoint=None, max_steps=3, on_failure="ignore"
        )
        unconverged += int((~solution.converged).sum())
        assert (outside(solution.value.mean) <= 1e-12).all()
    assert unconverged


TIGHT: dict[str, Any] = {"tolerance": 1e-12, "adjoint": Implicit(tolerance=1e-12)}
ALL: dict[str, Any] = {"response": True, "log_partition": True}
MASK = torch.tensor([[True, True, False], [True, True, True]])
CASES: dict[str, tuple[Site, int, dict[str, Any]]] = {
    "ising": (IsingSite(), 1, {}),
    "sphere": (SphericalSite(), 2, {}),
    # The saddle point is no distribution: its log Z belongs to its mean up to O(1/d) alone.
    "saddle point": (SphericalSite(large_dimension=True), 2, {"log_partition": False}),
    "naive": (IsingSite(), 1, {"order": "naive"}),
    "second, masked": (SphericalSite(), 2, {"order": "second", "mask": MASK}),
    "potts, masked": (PottsSite(), 2, {"mask": MASK}),
}


def probe(outputs: tuple[Tensor, ...]) -> Tensor:
    """One smooth number that depends on everything."""
    total = outputs[0].new_zeros(())
    for output in outputs:
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        total = total + (weight * output).sum() + (weight * output).square().sum()
    return total


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name: str) -> None:
    (site, dim, options), random = CASES[name], generator(0)
    raw = couplings(3, dim, 0.5 / dim, random).requires_grad_()
    x = fields(2, 3, dim, random).requires_grad_()

    def solve(raw: Tensor, x: Tensor) -> Tensor:
        chosen = ALL | TIGHT | options
        value = adaptive_tap(symmetric(raw), x, site=site, **chosen).value
        return probe(tuple(t for t in value if t is not None))

    assert gradcheck(solve, (raw, x), fast_mode=True)
    assert gradgradcheck(solve, (raw, x), fast_mode=True, atol=1e-4)


SHARP: dict[str, Any] = {"tolerance": 1e-13, "max_steps": 400}
MASK_FREE_ENERGY = torch.tensor([[True, True, False, True], [True] * 4])


def model(dim: int, scale: float = 0.3, sites: int = 4) -> tuple[Tensor, Tensor]:
    random = generator(3)
    blocks = couplings(sites, dim, scale / dim**0.5, random)
    return blocks, fields(2, sites, dim, random)


@pytest.mark.parametrize(("name", "order"), [
    *((name, "adaptive") for name in SITES if name != "gaussian"),
    ("potts", "naive"), ("potts", "second"),
])  # fmt: skip
def test_the_slope_of_log_z_is_the_mean(name: str, order: str) -> None:
    site, dim = SITES[name]
    options = SHARP | {
        "site": site,
        "order": order,
        "mask": MASK_FREE_ENERGY,
        "log_partition": True,
    }
    blocks, x = model(dim)
    x.requires_grad_()
    solution = adaptive_tap(blocks, x, **options)
    value = solution.value
    (slope,) = torch.autograd.grad(value.log_partition.sum(), x)
    torch.testing.assert_close(slope, value.mean, rtol=0, atol=1e-10)
    adjoint = solution.adjoint.solution
    assert adjoint is None or not adjoint.evaluations.any()
    if name == "saddle point" and order != "naive":
        return  # no distribution: only up to O(1/d)
    step, along = 1e-4, fields(2, 4, dim, generator(8), 1.0)
    there, back = (
        adaptive_tap(blocks, x.detach() + by, **options).value.log_partition
        for by in (step * along, -step * along)
    )
    wanted = (slope * along).flatten(1).sum(1)
    torch.testing.assert_close((there - back) / (2 * step), wanted, rtol=1e-6, atol=1e-8)


def test_second_order_is_plefkas_expansion() -> None:
    """Ising sites: ``m = tanh(theta)`` with the reaction term, and the free energy of their V = 0 fields."""
    blocks, x = model(1, 0.5)
    value = adaptive_tap(blocks, x, site=IsingSite(), order="second", log_partition=True).value
    m, j = value.mean[..., 0], blocks[..., 0, 0]
    theta = x[..., 0] + m @ j - m * ((1 - m**2) @ j**2)
    torch.testing.assert_close(m, theta.tanh(), rtol=0, atol=1e-9)
    own = theta.cosh().log() - theta * m + x[..., 0] * m
    pairs = ((1 - m**2) @ j**2 * (1 - m**2)).sum(1) / 4 + (m @ j * m).sum(1) / 2
    torch.testing.assert_close(value.log_partition, own.sum(1) + pairs, rtol=0, atol=1e-9)


# --- warm starts, clamped sites, annealing ---------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"), [("potts", "adaptive"), ("potts", "second"), ("gaussian", "naive")]
)
def test_clamped_sites_act_as_fields(name: str, order: str) -> None:
    site, dim = SITES[name]
    blocks, x = model(dim)
    values, one = (
        torch.full((2, 4, dim), torch.nan, dtype=F64),
        torch.eye(max(dim, 2), dtype=F64)[0],
    )
    held, kept = [1, 3], torch.tensor([0, 2])
    values[:, held] = one[:dim]
    clamped = torch.tensor([[False, True, False, True]] * 2)
    options: dict[str, Any] = {"site": site, "order": order, "log_partition": True}
    got = adaptive_tap(blocks, x, given=(values, clamped), response=True, **options, **SHARP).value
    pull = torch.einsum("ijab,sjb->sia", blocks[kept][:, held], values[:, held])
    rest = adaptive_tap(blocks[kept][:, kept], x[:, kept] + pull, **options, **SHARP).value
    torch.testing.assert_close(got.mean[:, kept], rest.mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(got.mean[:, held], values[:, held])
    assert not got.covariance[:, held].any() and not got.response[:, held].any()
    energy = (x * values)[:, held].sum((1, 2)) + one[:dim] @ blocks[1, 3] @ one[:dim]
    torch.testing.assert_close(got.log_partition, rest.log_partition + energy, rtol=0, atol=1e-9)


# --- O(d) spins at their saddle point ----------------------------------------------------------------


def scalar_couplings(
    sites: int, strength: float, seed: int = 0, batch: int | None = None
) -> Tensor:
    """Symmetric N(0, s^2 / N), zero diagonal; (N, N) or (batch, N, N)."""
    shape = (sites, sites) if batch is None else (batch, sites, sites)
    drawn = torch.randn(*shape, generator=generator(seed), dtype=F64).triu(1)
    return strength / math.sqrt(sites) * (drawn + drawn.mT)


def freed(raw: Tensor) -> Tensor:
    """Couplings from free entries."""
    return (raw + raw.mT) / 2 * (1 - torch.eye(raw.shape[-1], dtype=raw.dtype))


MODELS = pytest.mark.parametrize("per_site", [True, False])


@MODELS
@pytest.mark.parametrize(("strength", "size"), [(2.0, 0.0), (20.0, 30.0)])
def test_constraints_hold_and_phi_is_a_minimum(
    strength: float, size: float, per_site: bool
) -> None:
    k = scalar_couplings(6, strength, batch=3)
    x = fields(3, 6, 5, generator(1), size)
    solution = spherical_saddle(k, x, per_site=per_site)
    assert solution.converged.all() and (solution.residual <= 1e-10).all()
    point = solution.value
    lengths = point.response.diagonal(dim1=1, dim2=2) + point.mean.square().sum(2) / 5
    lengths = lengths if per_site else lengths.mean(1, keepdim=True)
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-9)
    matrix = torch.diag_embed(point.multiplier.expand(3, 6)) - k
    assert (torch.linalg.eigvalsh(matrix) > 0).all()
    torch.testing.assert_close(matrix @ point.response, torch.eye(6, dtype=F64).expand(3, 6, 6))
    torch.testing.assert_close(point.response @ x, point.mean)


def phi(multiplier: Tensor, k: Tensor, x: Tensor) -> Tensor:
    """The function as it is written, (B,)."""
    sites, dim = x.shape[1:]
    matrix = torch.diag_embed(multiplier.expand(len(x), sites)) - k
    size = multiplier.expand(len(x), sites).sum(1) - torch.logdet(matrix) - sites
    return dim / 2 * size + (x * torch.linalg.solve(matrix, x)).sum((1, 2)) / 2


@MODELS
def test_derivatives_of_the_free_energy_are_the_moments(per_site: bool) -> None:
    k = scalar_couplings(5, 0.8).requires_grad_()
    x = fields(2, 5, 4, generator(1), 1.0).requires_grad_()
    solution = spherical_saddle(k, x, per_site=per_site, tolerance=1e-13).value
    torch.testing.assert_close(solution.log_partition, phi(solution.multiplier, k, x))
    of_x, of_k = torch.autograd.grad(solution.log_partition.sum(), (x, k))
    torch.testing.assert_close(of_x, solution.mean, rtol=0, atol=1e-10)
    products = solution.mean @ solution.mean.mT + 4 * solution.response
    torch.testing.assert_close(2 * of_k, freed(products.sum(0)), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("batch", "per_site"), [(None, True), (2, False)])
def test_derivatives_of_the_saddle(batch: int | None, per_site: bool) -> None:
    raw = scalar_couplings(3, 1.0, batch=batch).requires_grad_()
    x = fields(2, 3, 2, generator(1), 1.0).requires_grad_()
    mask = torch.tensor([[True, True, True], [True, False, True]])

    def solve(raw: Tensor, x: Tensor) -> Tensor:
        found = spherical_saddle(freed(raw), x, per_site=per_site, mask=mask, tolerance=1e-13)
        return torch.stack([part.square().sum() for part in found.value]).sum()

    assert gradcheck(solve, (raw, x), fast_mode=True)
    assert gradgradcheck(solve, (raw, x), fast_mode=True)


@MODELS
def test_each_sample_gets_what_it_gets_alone_and_masked_sites_are_not_there(per_site: bool) -> None:
    k = scalar_couplings(5, 1.0, batch=3)
    x = fields(3, 5, 4, generator(1), 1.0)
    x[1] *= 50.0
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 4 + [True]])
    solution = spherical_saddle(k, x, mask=mask, per_site=per_site)
    assert solution.converged.all()
    together = solution.value
    for row in range(3):
        kept = torch.nonzero(mask[row]).flatten()
        own = k[row][kept][:, kept]
        alone = spherical_saddle(own, x[row : row + 1, kept], per_site=per_site).value
        multiplier = together.multiplier[row, kept] if per_site else together.multiplier[row]
        torch.testing.assert_close(multiplier, alone.multiplier[0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(together.mean[row, kept], alone.mean[0], rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(
            together.log_partition[row], alone.log_partition[0], rtol=1e-8, atol=1e-9
        )
        part = together.response[row][kept][:, kept]
        torch.testing.assert_close(part, alone.response[0], rtol=1e-8, atol=1e-9)
        assert not together.mean[row, ~mask[row]].any()
        assert not together.response[row, ~mask[row]].any()


def test_an_exhausted_budget_is_reported() -> None:
    k, x = scalar_couplings(6, 2.0), fields(2, 6, 4, generator(1), 1.0)
    found = spherical_saddle(k, x, max_steps=2, on_failure="ignore")
    assert (found.status == Status.MAX_STEPS).all() and (found.evaluations == 2).all()
    assert (found.residual > 1e-10).all()
    with pytest.raises(SolveError):
        spherical_saddle(k, x, max_steps=2, on_failure="raise")
    beyond = spherical_saddle(k, x, tolerance=Tolerance(0.0, 1e-30), on_failure="ignore")
    assert (beyond.status == Status.STALLED).all() and (beyond.residual < 1e-12).all()


@pytest.mark.parametrize("order", ["second", "adaptive"])
def test_annealing_ends_at_the_last_temperature_and_counts_all(order: str) -> None:
    blocks, x = model(3, 0.5)
    options: dict[str, Any] = {"site": PottsSite(), "order": order, "log_partition": True}
    x.requires_grad_()
    wanted = adaptive_tap(2.0 * blocks, 2.0 * x, **options, **SHARP)
    got = adaptive_tap(blocks, x, inverse_temperature=(0.5, 1.0, 2.0), **options, **SHARP)
    hot = adaptive_tap(blocks, x, inverse_temperature=0.5, **options, **SHARP)
    for first, second in zip(got.value, wanted.value, strict=True):
        if first is not None:
            torch.testing.assert_close(first, second, rtol=0, atol=1e-9)
    (slope,) = torch.autograd.grad(got.value.log_partition.sum(), x)
    torch.testing.assert_close(slope, 2 * got.value.mean, rtol=0, atol=1e-9)
    assert (got.evaluations > wanted.evaluations).all()
    assert (got.evaluations > hot.evaluations).all()
