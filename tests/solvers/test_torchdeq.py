"""The bridge to torchdeq, both ways, and the counter of its evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq import get_deq
from torchdeq.solver import get_solver
from torchdeq.solver.stat import SolverStat

import solvers
from cases.solves import Counter, Plain, plain_batch, solve, true_residuals
from problems.zoo import make
from solvers import Anderson, Broyden, GradientDescent, Implicit, Solver, Status, fixed_point
from solvers.torchdeq_bridge import TorchDEQ, register


@pytest.mark.parametrize("name", ["anderson", "broyden", "fixed_point_iter"])
def test_their_solvers_behind_our_entry(name: str) -> None:
    problem = make("mgh_broyden_banded")
    counter = Counter(Plain(problem), problem.batch)
    solution = fixed_point(
        counter, problem.z0, (*problem.args, counter.index), tolerance=1e-6,
        solver=TorchDEQ(name), max_steps=200, adjoint=None, verify=False,
    )  # fmt: skip
    assert bool(solution.converged.all())
    relative, absolute = true_residuals(problem, solution.value)
    assert (relative <= 1e-6).all()
    torch.testing.assert_close(solution.residual, relative, rtol=1e-9, atol=1e-16)
    torch.testing.assert_close(solution.residual_norm, absolute, rtol=1e-9, atol=1e-16)
    assert (counter.seen == solution.evaluations.max()).all()  # the whole batch, to the end
    assert problem.solution is not None
    torch.testing.assert_close(solution.value, problem.solution, rtol=1e-3, atol=1e-4)


def test_their_failures_are_named() -> None:
    solution = solve(make("nan_from_start"), TorchDEQ("fixed_point_iter"), max_steps=50)
    assert solution.status.tolist() == [0, 0, Status.NONFINITE, 0, 0]
    runaway = solve(make("runaway"), TorchDEQ("anderson"), max_steps=50)
    assert not runaway.converged.any()
    assert (runaway.residual > 0.3).all()


def test_their_solvers_carry_our_gradients() -> None:
    f, z0, (weight, x) = plain_batch(3)
    x.requires_grad_()
    gradients = []
    for solver in (TorchDEQ("anderson", {"lam": 1e-12}), Anderson()):
        solution = fixed_point(f, z0, (weight, x), solver=solver, tolerance=1e-10,
                               max_steps=200, adjoint=Implicit(tolerance=1e-12))  # fmt: skip
        gradients.append(torch.autograd.grad(solution.value.sum(), x)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-7, atol=1e-9)
    with pytest.raises(RuntimeError, match="Implicit"):
        fixed_point(f, z0, (weight, x), solver=TorchDEQ(), adjoint=solvers.Unrolled())


def with_energy() -> object:
    problem = make("energy_quadratic_10")
    return fixed_point(
        problem.f, problem.z0, problem.args, energy=problem.energy, solver=TorchDEQ()
    )


def registered(**options: Any) -> object:
    register("ours_for_a_test")
    return get_solver("ours_for_a_test")(lambda z: 0.5 * z + 1, torch.zeros(2, 3), **options)


@pytest.mark.parametrize(("argument", "call"), [
    ("memory", lambda: TorchDEQ("anderson", {"memory": 3})),
    ("name", lambda: TorchDEQ("andersen")),
    ("record", lambda: solve(make("kepler"), TorchDEQ("anderson"), record=True)),
    ("energy", with_energy),  # they have no safeguard
    ("max_itr", lambda: registered(max_itr=3)),
    ("stop_mode", lambda: registered(stop_mode="absolute")),
    ("solver", lambda: register("ours_for_a_test", "anderson")),  # type: ignore[arg-type]
])  # fmt: skip
def test_a_wrong_argument_is_refused_by_name(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError), match=argument):
        call()


@pytest.mark.parametrize(
    ("ours", "stop_mode"), [(Anderson(), "abs"), (GradientDescent("auto"), "rel")]
)
def test_our_solvers_in_their_registry(ours: Solver, stop_mode: str) -> None:
    register("ours_for_a_test", ours)
    problem = make("tanh_0.9")
    value, states, info = get_solver("ours_for_a_test")(
        lambda z: problem.f(z, *problem.args), problem.z0, max_iter=200, tol=1e-6,
        stop_mode=stop_mode, indexing=[],
    )  # fmt: skip
    relative, absolute = true_residuals(problem, value)
    assert ((relative if stop_mode == "rel" else absolute) <= 1e-6).all()
    assert isinstance(info, SolverStat)
    torch.testing.assert_close(info["abs_lowest"], absolute, rtol=1e-6, atol=1e-16)
    torch.testing.assert_close(info["rel_lowest"], relative, rtol=1e-6, atol=1e-8)
    assert info["abs_trace"].shape == (problem.batch, 1)
    assert (info["status"] == Status.CONVERGED).all()
    assert len(states) == 1
    assert torch.equal(states[0], value)


@pytest.mark.parametrize(("ours", "stop"), [(Anderson(), "abs"), (Broyden(), "rel")])
def test_their_layer_runs_on_our_solvers(ours: Solver, stop: str) -> None:
    """Forward and backward of torchdeq's DEQ by ours, against our implicit gradient."""
    register("ours_for_a_test", ours)
    torch.manual_seed(0)
    layer = nn.Linear(5, 5, dtype=torch.float64)
    x = torch.randn(4, 5, dtype=torch.float64)

    def f(z: Tensor, x: Tensor = x) -> Tensor:
        return torch.tanh(0.5 * layer(z) + x)

    deq = get_deq(
        f_solver="ours_for_a_test", b_solver="ours_for_a_test", ift=True, f_tol=1e-11, b_tol=1e-11,
        f_max_iter=80, b_max_iter=80, f_stop_mode=stop, b_stop_mode=stop,
    )  # fmt: skip
    (value,), info = deq(f, torch.zeros_like(x))[:2]
    theirs = torch.autograd.grad(value.pow(2).sum(), list(layer.parameters()))
    assert float(info["abs_lowest"].max()) <= 1e-9
    solution = fixed_point(f, torch.zeros_like(x), (x,), tolerance=1e-12,
                           adjoint=Implicit(tolerance=1e-12), max_steps=100)  # fmt: skip
    ours_gradient = torch.autograd.grad(solution.value.pow(2).sum(), list(layer.parameters()))
    torch.testing.assert_close(ours_gradient, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.defect("A3")
@pytest.mark.parametrize("name", ["fixed_point_iter", "simple_fixed_point_iter"])
def test_an_overflowed_run_has_not_converged(name: str) -> None:
    z0 = (1 + torch.arange(20) / 10).unsqueeze(1)
    solution = fixed_point(
        lambda z: 3 * z + 1, z0, solver=TorchDEQ(name), max_steps=100, on_failure="ignore"
    )
    assert solution.counts() == {"DIVERGED": 20}
    found = 3 * solution.value + 1
    relative = (found - solution.value).norm(dim=1) / found.norm(dim=1)
    torch.testing.assert_close(solution.residual, relative)


@pytest.mark.defect("D4")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_their_anderson_solves_half_precision_and_singular_systems(dtype: torch.dtype) -> None:
    """Without regularisation a sample that has come to rest makes the system of torchdeq singular."""
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]], dtype=dtype)
    solver = TorchDEQ("anderson", {"lam": 0.0})
    solution = fixed_point(
        lambda z, b: 0.9 * torch.tanh(z.roll(1, 1)) + b, 0 * b, (b,), solver=solver, max_steps=60
    )
    assert solution.converged.all() and solution.value.dtype == dtype
    growing = fixed_point(lambda z: z + 1, b - 40, solver=solver, max_steps=60, on_failure="ignore")
    assert not growing.converged.any()
