"""The bridge to torchdeq, both ways, and the counter of its evaluations."""

from __future__ import annotations

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
from solvers.torchdeq_bridge import OPTIONS, TorchDEQ, register

NAMES = ["anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter"]


@pytest.mark.parametrize("name", NAMES[:3])
def test_their_solvers_behind_our_entry(name: str) -> None:
    problem = make("mgh_broyden_banded")
    counter = Counter(Plain(problem), problem.batch)
    solution = fixed_point(
        counter, problem.z0, (*problem.args, counter.index), tolerance=1e-6,
        solver=TorchDEQ(name), max_steps=200, adjoint=None,
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
    fixed_point(f, z0, (weight, x), solver=TorchDEQ(), adjoint=solvers.Phantom(2))


def test_options_of_their_solvers() -> None:
    options = {"m": 3, "lam": 1e-8}
    assert solve(make("kepler"), TorchDEQ("anderson", options)).converged.all()
    assert options == {"m": 3, "lam": 1e-8}
    with pytest.raises(ValueError, match="anderson"):
        TorchDEQ("anderson", {"memory": 3})
    with pytest.raises(ValueError, match="name"):
        TorchDEQ("andersen")
    with pytest.raises(ValueError, match="record"):
        solve(make("kepler"), TorchDEQ("anderson"), record=True)
    assert set(OPTIONS) == set(NAMES)
    problem = make("energy_quadratic_10")
    with pytest.raises(ValueError, match="energy"):  # they have no safeguard
        fixed_point(Plain(problem), problem.z0, problem.args, energy=problem.energy,
                    solver=TorchDEQ("anderson"), adjoint=None)  # fmt: skip


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


def test_a_registered_solver_refuses_what_it_does_not_know() -> None:
    register("ours_for_a_test")
    call = get_solver("ours_for_a_test")
    z0 = torch.zeros(2, 3)
    with pytest.raises(TypeError, match="max_itr"):
        call(lambda z: 0.5 * z + 1, z0, max_itr=3)
    with pytest.raises(ValueError, match="stop_mode"):
        call(lambda z: 0.5 * z + 1, z0, stop_mode="absolute")
    with pytest.raises(TypeError, match="solver"):
        register("ours_for_a_test", "anderson")  # type: ignore[arg-type]
    with pytest.warns(solvers.SolveWarning):
        call(lambda z: 0.9 * z + 1, z0, max_iter=2)


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
@pytest.mark.parametrize("name", ["anderson", "broyden", "fixed_point_iter"])
def test_half_precision_is_solved(name: str) -> None:
    dtype = torch.float16
    b = torch.linspace(0.1, 1, 12).reshape(3, 4).to(dtype)
    solution = fixed_point(
        lambda z, b: 0.5 * z + b, 0 * b, (b,), solver=TorchDEQ(name), tolerance=2e-2
    )
    assert solution.converged.all()
    assert solution.value.dtype == dtype
    torch.testing.assert_close(solution.value.float(), 2 * b.float(), rtol=4e-2, atol=1e-2)


@pytest.mark.defect("D4")
def test_a_singular_system_ends_nothing_but_its_sample() -> None:
    """Without regularisation a sample that has come to rest makes the system of torchdeq singular."""
    b = torch.tensor([[1.0, 2.0], [0.0, 0.0], [1.0, 1.0]])
    solver = TorchDEQ("anderson", {"lam": 0.0})
    solution = fixed_point(
        lambda z, b: 0.9 * torch.tanh(z.roll(1, 1)) + b, 0 * b, (b,), solver=solver, max_steps=60
    )
    assert solution.converged.all()
    growing = fixed_point(lambda z: z + 1, b - 40, solver=solver, max_steps=60, on_failure="ignore")
    assert (growing.status == Status.STALLED).all()
