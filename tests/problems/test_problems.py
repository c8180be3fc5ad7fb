"""The zoo itself: its answers, energies and labels are what it says they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from problems.problem import PLAIN_LIMIT
from problems.zoo import (
    ENERGY,
    LINEAR,
    NONLINEAR,
    PATHOLOGICAL,
    PROBLEMS,
    SOLVABLE,
    ZooProblem,
    make,
    residual_norms,
    rows,
)

WITH_ENERGY = [name for name in PROBLEMS if make(name).energy is not None]
WITHOUT_ANSWER = [name for name in PROBLEMS if make(name).reference is None]


def answer(problem: ZooProblem) -> Tensor:
    solution = problem.solution
    assert solution is not None
    return solution


def points(problem: ZooProblem, seed: int = 1) -> list[Tensor]:
    """The start and two points off it, inside the domain of f (a factor keeps the signs)."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(2, *problem.z0.shape, generator=generator, dtype=torch.float64)
    return [problem.z0, *(problem.z0 * (0.5 + factor) for factor in factors)]


@pytest.mark.parametrize("name", sorted(set(PROBLEMS) - set(WITHOUT_ANSWER)))
def test_solution_is_a_fixed_point(name: str) -> None:
    problem = make(name)
    solution = answer(problem)
    assert solution.shape == problem.z0.shape
    solvable = solution.flatten(1).isfinite().all(1)
    assert bool(solvable.all()) == (problem.expect != "mixed")
    assert solvable.any()
    residual, _ = residual_norms(solution, problem.f(solution, *problem.args))
    norm = solution.flatten(1).norm(dim=1)
    assert (residual <= 1e-9 * norm.clamp_min(1))[solvable].all()
    # a small problem must not pass because it is small
    assert (residual <= 1e-10 * norm)[solvable].all()


@pytest.mark.parametrize("name", WITH_ENERGY)
def test_energy_gradient_is_z_minus_f(name: str) -> None:
    problem = make(name)
    assert problem.energy is not None
    finite = problem.f(problem.z0, *problem.args).flatten(1).isfinite().all(1)
    for z in points(problem):
        z = z.detach().requires_grad_()
        energy = problem.energy(z, *problem.args)
        assert energy.shape == (problem.batch,)
        (gradient,) = torch.autograd.grad(energy.sum(), z)
        expected = z.detach() - problem.f(z, *problem.args).detach()
        scale = expected.norm() if finite.all() else expected[finite].norm()
        torch.testing.assert_close(
            gradient[finite], expected[finite], rtol=1e-9, atol=1e-11 * float(scale)
        )


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    problem = make(name)
    z = points(problem)[1]
    together = problem.f(z, *problem.args)
    assert together.shape == z.shape
    for i in range(problem.batch):
        alone = rows(problem, torch.tensor([i]))
        assert alone.batch == 1
        single = alone.f(z[i : i + 1], *alone.args)
        torch.testing.assert_close(single[0], together[i], rtol=1e-11, atol=0, equal_nan=True)
        if problem.energy is not None and alone.energy is not None:
            energy = problem.energy(z, *problem.args)[i]
            mine = alone.energy(z[i : i + 1], *alone.args)[0]
            torch.testing.assert_close(mine, energy, rtol=1e-10, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_a_seed_makes_one_problem(name: str) -> None:
    first, second, other = make(name), make(name), make(name, seed=1)
    assert torch.equal(first.z0, second.z0)
    for left, right in zip(first.args, second.args, strict=True):
        assert torch.equal(left, right)
        assert left.shape[0] == first.batch
    if name != "h_equation":  # nothing is random there
        drawn = zip((first.z0, *first.args), (other.z0, *other.args), strict=True)
        assert not all(torch.equal(left, right) for left, right in drawn)
    first.z0.zero_()
    assert torch.equal(make(name).z0, second.z0)


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_the_jacobian_is_symmetric_where_it_says_so(name: str) -> None:
    problem = make(name)
    z = points(problem)[2].requires_grad_()
    generator = torch.Generator().manual_seed(2)
    u, v = torch.randn(2, *z.shape, generator=generator, dtype=torch.float64)
    value = problem.f(z, *problem.args)
    if not value.requires_grad:
        pytest.fail("f is not differentiable")
    uj, vj = (torch.autograd.grad(value, z, w, retain_graph=True)[0] for w in (u, v))
    left, right = (uj * v).flatten(1).sum(1), (vj * u).flatten(1).sum(1)
    finite = left.isfinite()
    assert finite.sum() >= problem.batch - 1
    size = (uj.flatten(1).norm(dim=1) * v.flatten(1).norm(dim=1))[finite]
    asymmetry = (left - right)[finite].abs() / size.clamp_min(1e-300)
    assert bool((asymmetry <= 1e-7).all()) == problem.symmetric


@pytest.mark.parametrize("name", list(PROBLEMS))
def test_plain_iteration_converges_where_it_says_so(name: str) -> None:
    problem = make(name)
    z, done = problem.z0, torch.zeros(problem.batch, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(PLAIN_LIMIT):
            fz = problem.f(z, *problem.args)
            residual, reference = residual_norms(z, fz)
            finite = residual.isfinite() & reference.isfinite()
            done |= finite & (residual <= 1e-6 * reference)
            z = fz
            if done.all() or not (finite | done).all():
                break
    assert bool(done.all()) == problem.converges_plain
    if problem.converges_plain and problem.unique:
        distance, norm = residual_norms(z, answer(problem))
        assert (distance <= 1e-2 * norm).all()


def test_groups_and_labels() -> None:
    groups = [LINEAR, NONLINEAR, ENERGY, PATHOLOGICAL]
    assert sorted(name for group in groups for name in group) == sorted(PROBLEMS)
    for name, factory in PROBLEMS.items():
        problem = factory()
        assert problem.name == name
        assert len(problem.source) > 10
        has_answer = problem.expect in ("converges", "hard", "mixed")
        assert (name in WITHOUT_ANSWER) != has_answer
        assert (name in SOLVABLE) == (problem.expect == "converges")
        assert problem.energy is None or problem.symmetric
    assert all(make(name).energy is not None for name in ENERGY)


PUBLISHED = {
    "cos": [0.739085133215161],
    "scipy_F3_tridiagonal": [-2.5, -4.0, -3.5],
    "scipy_F6": [0.0, 1.0],
    "mgh_rosenbrock": [1.0, 1.0],
    "mgh_powell_badly_scaled": [1.098159e-5, 9.106146738],
    "mgh_helical_valley": [1.0, 0.0, 0.0],
    "mgh_brown_almost_linear": [1.0] * 10,
    "mgh_chebyquad": [0.083751, 0.312729, 0.5, 0.687271, 0.916249],
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_roots(name: str) -> None:
    found = answer(make(name))[0]
    expected = torch.tensor(PUBLISHED[name], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
