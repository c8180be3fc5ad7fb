"""Random energies of every class under every solver: the energy falls, and the end says what it is."""

from __future__ import annotations

import pytest
import torch

import solvers
from cases.energies import EnergyCase, build, each_family, tokens
from cases.solves import accepted_energies
from implicit_attn import DEQ, GradientStep
from implicit_attn.energies import Quadratic
from solvers import Solution, Tolerance

RTOL, BUDGET, WEIGHT = 1e-5, 150, 0.1
METHODS: dict[str, solvers.Solver] = {
    "lbfgs": solvers.LBFGS(),
    "anderson": solvers.Anderson(),
    "broyden": solvers.Broyden(),
    "gradient_auto": solvers.GradientDescent("auto"),
    "newton": solvers.Newton(),
    "forward": solvers.Forward(),
}
# No minimum: these outgrow the quadratic.
UNBOUNDED = ("dense-2", "gated-gelu-none")


def solve(case: EnergyCase, solver: solvers.Solver) -> tuple[Solution, GradientStep]:
    step = GradientStep(WEIGHT * build(case) + Quadratic())
    z, x = tokens(case)
    layer = DEQ(step, solver=solver, tolerance=Tolerance(RTOL), max_steps=BUDGET)
    x = z if x is None else x
    with torch.no_grad():
        return layer.solve(x, z0=z, record=True, on_failure="ignore"), step


@each_family
@pytest.mark.parametrize("method", list(METHODS))
def test_energies_fall_and_the_end_is_honest(case: EnergyCase, method: str) -> None:
    solution, step = solve(case, METHODS[method])
    z, x = tokens(case)
    assert solution.value.isfinite().all()
    assert (solution.evaluations <= BUDGET).all()
    with torch.no_grad():
        fz = step(solution.value, z if x is None else x)
    relative = (fz - solution.value).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)
    torch.testing.assert_close(solution.residual, relative, rtol=1e-6, atol=1e-12)
    assert torch.equal(solution.converged, solution.residual <= RTOL)
    trace = solution.trace
    assert trace is not None and trace.energy is not None
    energy = accepted_energies(trace)
    rises = energy[:, 1:] - energy[:, :-1]
    # 8 rounding errors are what the safeguard allows, one more is the comparison's own.
    assert (rises <= 9 * torch.finfo(energy.dtype).eps * energy[:, :-1].abs()).all()


@each_family
def test_the_default_finds_every_smooth_minimum(case: EnergyCase) -> None:
    if case.id in UNBOUNDED:
        pytest.skip("not bounded below")
    solution, _ = solve(case, METHODS["lbfgs"])
    assert solution.converged.all(), solution.summary()
