"""The bridge to torchdeq, both ways, and the traps that its solvers fall into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq import get_deq
from torchdeq.solver import get_solver
from torchdeq.solver.stat import SolverStat

import solvers
from cases.solves import Counter, Plain, plain_batch, solve, tanh_layer, true_residuals
from cases.torchdeq_oracle import evaluations_to
from problems.zoo import ZooProblem, make, rows, scaled
from solvers import (
    Anderson,
    Broyden,
    Forward,
    GradientDescent,
    Implicit,
    Solver,
    SolveWarning,
    Status,
    Tolerance,
    fixed_point,
)
from solvers.torchdeq_bridge import OPTIONS, TorchDEQ, register

NAMES = ["anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter"]
OURS: list[Solver] = [Anderson(), GradientDescent("auto")]


@pytest.mark.parametrize("problem_name", ["kepler", "mgh_broyden_banded"])
@pytest.mark.parametrize("name", NAMES[:3])
def test_their_solvers_behind_our_entry(name: str, problem_name: str) -> None:
    problem = make(problem_name)
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


@pytest.mark.parametrize("max_steps", [1, 7])
@pytest.mark.parametrize("name", NAMES)
def test_their_solvers_keep_our_cap(name: str, max_steps: int) -> None:
    problem = make("linear_symmetric_0.98")
    counter = Counter(Plain(problem), problem.batch)
    solution = fixed_point(
        counter, problem.z0, (*problem.args, counter.index), solver=TorchDEQ(name),
        max_steps=max_steps, adjoint=None, on_failure="ignore",
    )  # fmt: skip
    assert (counter.seen <= max_steps).all()
    assert (solution.evaluations == max_steps).all()
    assert (solution.status == Status.MAX_STEPS).all()


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
    with pytest.raises(RuntimeError, match="cannot be unrolled"):
        fixed_point(f, z0, (weight, x), solver=TorchDEQ(), adjoint=solvers.Unrolled())
    fixed_point(f, z0, (weight, x), solver=TorchDEQ(), adjoint=solvers.Phantom(2))


def test_options_of_their_solvers() -> None:
    options = {"m": 3, "lam": 1e-8}
    assert solve(make("kepler"), TorchDEQ("anderson", options)).converged.all()
    assert options == {"m": 3, "lam": 1e-8}
    with pytest.raises(
        ValueError, match=r"options of anderson must be among .*'m'.*got \['memory'\]"
    ):
        TorchDEQ("anderson", {"memory": 3})
    with pytest.raises(ValueError, match="name must be a solver known to torchdeq, got 'andersen'"):
        TorchDEQ("andersen")
    with pytest.raises(ValueError, match=r"has a loop of its own, which knows no \['record'\]"):
        solve(make("kepler"), TorchDEQ("anderson"), record=True)
    assert set(OPTIONS) == set(NAMES)
    problem = make("energy_quadratic_10")
    with pytest.raises(ValueError, match="energy"):  # they have no safeguard
        fixed_point(Plain(problem), problem.z0, problem.args, energy=problem.energy,
                    solver=TorchDEQ("anderson"), adjoint=None)  # fmt: skip


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("stop_mode", ["abs", "rel"])
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
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_itr'"):
        call(lambda z: 0.5 * z + 1, z0, max_itr=3)
    with pytest.raises(ValueError, match='stop_mode must be "abs" or "rel", got \'absolute\''):
        call(lambda z: 0.5 * z + 1, z0, stop_mode="absolute")
    with pytest.raises(TypeError, match=r"solver must be a solvers\.Solver, got 'anderson'"):
        register("ours_for_a_test", "anderson")  # type: ignore[arg-type]
    with pytest.warns(solvers.SolveWarning, match="MAX_STEPS 2 of 2"):
        call(lambda z: 0.9 * z + 1, z0, max_iter=2)


@pytest.mark.parametrize("stop", ["abs", "rel"])
@pytest.mark.parametrize("ours", [Anderson(), Broyden()])
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
    for mine, other in zip(ours_gradient, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


TIGHT = Tolerance(rtol=1e-12)


def layer_problem() -> tuple[Tensor, Tensor]:
    _, _, (weight, x) = plain_batch(3, 5)
    return weight, x.requires_grad_()


def ours(weight: Tensor, x: Tensor) -> Tensor:
    options: dict[str, Any] = {"tolerance": TIGHT, "max_steps": 200}
    z0, adjoint = torch.zeros_like(x), Implicit(max_steps=200)
    return fixed_point(tanh_layer, z0, (weight, x), adjoint=adjoint, **options).value


def theirs(weight: Tensor, x: Tensor, **options: Any) -> Tensor:
    deq = get_deq(ift=True, f_tol=1e-12, b_tol=1e-12, f_max_iter=300, b_max_iter=300, **options)
    return deq(lambda z: tanh_layer(z, weight, x), torch.zeros_like(x))[0][0]


def by_torchdeq(problem: ZooProblem, name: str, **options: Any) -> tuple[Tensor, Any]:
    """Value and statistics of a solver of torchdeq."""
    f, options = (lambda z: problem.f(z, *problem.args)), {"stop_mode": "rel"} | options
    value, _, info = get_solver(name)(f, problem.z0, **options)
    return value, info


def relative_error(mine: Tensor, reference: Tensor) -> float:
    return float((mine - reference).norm() / reference.norm())


def hessian_product(solve: Any, weight: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(solve(weight, x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


def test_1_hessian_vector_products() -> None:
    weight, x = layer_problem()
    ends = []
    for step in (1e-5, -1e-5):
        moved = (x.detach() + step).requires_grad_()
        ends.append(torch.autograd.grad(ours(weight, moved).pow(3).sum(), moved)[0])
    expected = (ends[0] - ends[1]) / 2e-5
    assert relative_error(hessian_product(ours, weight, x), expected) < 1e-7
    assert relative_error(hessian_product(theirs, weight, x), expected) > 0.05  # and no word of it


def test_1_backward_twice() -> None:
    weight, x = layer_problem()
    found = []
    for loss in (theirs(weight, x, hook_ift=True).sum(), ours(weight, x).sum()):
        found += [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]
    assert relative_error(found[1], found[0]) > 0.05
    assert torch.equal(found[2], found[3])
    assert relative_error(found[2], found[0]) < 1e-8


def test_2_one_transient_nan() -> None:
    problem = make("transient_nan")
    value, info = by_torchdeq(problem, "anderson", max_iter=60, tol=1e-6)
    assert value[0].isnan().any() or info["rel_lowest"][0] > 1e-3
    assert info["rel_trace"].shape[1] >= 59  # the whole batch ran to the limit
    solution = solve(problem, "anderson", max_steps=60)
    assert solution.counts() == {"CONVERGED": 5}
    assert (solution.evaluations[1:] < 40).all()


def test_2_divergence_has_a_name() -> None:
    problem = make("runaway")
    by_torchdeq(problem, "fixed_point_iter")  # silent
    with pytest.warns(SolveWarning, match="DIVERGED 4 of 4"):
        fixed_point(problem.f, problem.z0, problem.args, solver=Forward(), adjoint=None)


def test_3_the_ridge_is_relative() -> None:
    problem = make("linear_symmetric_0.98")
    pair = (problem, scaled(problem, 1e-2))
    own, own_small = (evaluations_to(1e-4, each, "anderson", 1500) for each in pair)
    assert (own_small > 1.5 * own).all()
    counts = [solve(each, "anderson", rtol=1e-4).evaluations for each in pair]
    assert torch.equal(*counts) and counts[0].sum() < 0.5 * own.sum()


def test_4_a_large_loss_in_single_precision() -> None:
    weight, x = (t.detach().float() for t in layer_problem())
    x.requires_grad_()
    lowest, products = [], []
    for scale in (1.0, 1000.0):
        info: list[Any] = []
        deq = get_deq(ift=True, b_max_iter=100)
        z0 = torch.zeros_like(x)
        value = deq(lambda z: tanh_layer(z, weight, x), z0, backward_writer=info.append)
        (scale * value[0][0].sum()).backward()
        lowest.append(float(info[0]["abs_lowest"].max()))
        solution = fixed_point(tanh_layer, z0, (weight, x))
        (scale * solution.value.sum()).backward()
        report = solution.adjoint.solution
        assert report is not None and bool(report.converged.all())
        products.append(report.evaluations)
    assert lowest[1] > 1e-6  # the default absolute tolerance, never met
    assert torch.equal(*products)


def test_5_neighbours() -> None:
    problem = make("linear_one_hard_sample")
    both = problem, rows(problem, torch.tensor([0]))
    found = [by_torchdeq(each, "fixed_point_iter", max_iter=300, tol=1e-4) for each in both]
    assert not torch.equal(found[0][0][0], found[1][0][0])
    together, alone = (int(info["nstep"][0]) for _, info in found)
    assert together > 3 * alone
    whole, part = (solve(each, "forward", rtol=1e-4) for each in both)
    torch.testing.assert_close(whole.value[0], part.value[0], rtol=1e-12, atol=1e-14)
    assert whole.evaluations[0] == part.evaluations[0]


def test_6_short_budgets_and_small_memories() -> None:
    problem = make("linear_symmetric_0.5")
    assert torch.equal(by_torchdeq(problem, "anderson", max_iter=2)[0], problem.z0)
    with pytest.raises(IndexError):
        by_torchdeq(problem, "anderson", m=1)
    start = true_residuals(problem, problem.z0)[0]
    assert (solve(problem, Anderson(), max_steps=2).residual < 0.7 * start).all()
    assert bool(solve(problem, Anderson(memory=1)).converged.all())


def test_7_residual_and_value() -> None:
    problem = make("linear_symmetric_0.9")
    value, info = by_torchdeq(problem, "fixed_point_iter", max_iter=30, tol=1e-9)
    relative, _ = true_residuals(problem, value)
    assert (relative < 0.95 * info["rel_lowest"]).all()  # theirs belongs to the point before
    assert (info["rel_trace"][:, 0] == 1e8).all()
    solution = solve(problem, "forward", max_steps=30)
    relative, _ = true_residuals(problem, solution.value)
    torch.testing.assert_close(solution.residual, relative, rtol=1e-9, atol=0)


def test_8_options() -> None:
    problem = make("linear_symmetric_0.9")
    by_torchdeq(problem, "anderson", max_itr=3)  # swallowed
    with pytest.raises(TypeError, match="max_itr"):
        fixed_point(problem.f, problem.z0, problem.args, max_itr=3)  # type: ignore[call-arg]


def test_8_evaluation_mode_carries_gradients() -> None:
    torch.manual_seed(0)
    layer, z0 = nn.Linear(3, 3).eval(), torch.zeros(2, 3)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(0.5 * layer(z) + 1)

    assert not get_deq(ift=True).eval()(f, z0)[0][0].requires_grad
    assert fixed_point(f, z0).value.requires_grad


def test_9_padding() -> None:
    """A huge residual of padded tokens keeps torchdeq busy; with a mask it does not exist."""
    x = torch.ones(2, 4, 3, dtype=torch.float64)
    mask = torch.tensor([[True, True, False, False]] * 2)

    def f(z: Tensor, x: Tensor) -> Tensor:
        runaway = z + 0.5 * (z.square() + 1).sqrt()
        return torch.where(mask[:1, :, None], 0.3 * z + x, runaway)

    info = get_solver("anderson")(lambda z: f(z, x), torch.zeros_like(x), stop_mode="rel")[2]
    assert (info["rel_lowest"] > 1e-3).all()
    solution = fixed_point(f, torch.zeros_like(x), (x,), mask=mask, tolerance=1e-8)
    assert bool(solution.converged.all())
    torch.testing.assert_close(solution.value[mask], torch.full((4, 3), 1 / 0.7).double())


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


@pytest.mark.parametrize("name", ["anderson", "broyden", "fixed_point_iter"])
def test_the_reported_residual_is_that_of_the_value(name: str) -> None:
    """Also where the best point came long before the last: the buffers of torchdeq move on."""
    generator = torch.Generator().manual_seed(0)
    matrix = 1.5 * torch.randn(6, 6, generator=generator, dtype=torch.float64)
    z0 = torch.randn(3, 6, generator=generator, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return torch.sin(3 * z @ matrix) + 0.3

    solution = fixed_point(
        f, z0, solver=TorchDEQ(name), max_steps=40, on_failure="ignore", compact=False
    )
    found = f(solution.value)
    relative = (found - solution.value).norm(dim=1) / found.norm(dim=1)
    torch.testing.assert_close(solution.residual, relative, rtol=1e-9, atol=0)


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
