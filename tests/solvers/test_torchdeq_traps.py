"""The traps that torchdeq 0.1 falls into, numbered as in our notes on it, each with the contrast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchdeq import get_deq
from torchdeq.solver import get_solver

from cases.solves import plain_batch, solve, true_residuals
from cases.torchdeq_oracle import evaluations_to
from problems.zoo import make, rows, scaled
from solvers import Anderson, Forward, Implicit, SolveWarning, Status, Tolerance, fixed_point
from solvers.torchdeq_bridge import TorchDEQ

TIGHT = Tolerance(rtol=1e-12)


def layer_problem() -> tuple[Tensor, Tensor]:
    _, _, (weight, x) = plain_batch(3, 5)
    return weight, x.requires_grad_()


def ours(weight: Tensor, x: Tensor) -> Tensor:
    f, _, _ = plain_batch(1)
    return fixed_point(f, torch.zeros_like(x), (weight, x), tolerance=TIGHT, max_steps=200,
                       adjoint=Implicit(max_steps=200)).value  # fmt: skip


def theirs(weight: Tensor, x: Tensor, **options: Any) -> Tensor:
    f, _, _ = plain_batch(1)
    deq = get_deq(ift=True, f_tol=1e-12, b_tol=1e-12, f_max_iter=300, b_max_iter=300, **options)
    return deq(lambda z: f(z, weight, x), torch.zeros_like(x))[0][0]


def relative_error(mine: Tensor, reference: Tensor) -> float:
    return float((mine - reference).norm() / reference.norm())


def hessian_product(solve: Any, weight: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(solve(weight, x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(gradient.sum(), x)[0]


def test_1_hessian_vector_products() -> None:
    weight, x = layer_problem()
    step = 1e-5
    ends = []
    for sign in (1, -1):
        moved = (x.detach() + sign * step).requires_grad_()
        ends.append(torch.autograd.grad(ours(weight, moved).pow(3).sum(), moved)[0])
    expected = (ends[0] - ends[1]) / (2 * step)
    assert relative_error(hessian_product(ours, weight, x), expected) < 1e-7
    assert relative_error(hessian_product(theirs, weight, x), expected) > 0.05  # and no word of it


def test_1_backward_twice() -> None:
    weight, x = layer_problem()
    hooked = theirs(weight, x, hook_ift=True).sum()
    first, second = (torch.autograd.grad(hooked, x, retain_graph=True)[0] for _ in range(2))
    assert relative_error(second, first) > 0.05
    loss = ours(weight, x).sum()
    one, other = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert relative_error(one, first) < 1e-8


def test_2_one_transient_nan() -> None:
    problem = make("transient_nan")
    value, _, info = get_solver("anderson")(
        lambda z: problem.f(z, *problem.args), problem.z0, max_iter=60, tol=1e-6, stop_mode="rel"
    )
    assert value[0].isnan().any() or info["rel_lowest"][0] > 1e-3
    assert info["rel_trace"].shape[1] >= 59  # the whole batch ran to the limit
    solution = solve(problem, "anderson", max_steps=60)
    assert solution.counts() == {"CONVERGED": 5}
    assert (solution.evaluations[1:] < 40).all()


def test_2_divergence_has_a_name() -> None:
    problem = make("runaway")
    get_solver("fixed_point_iter")(lambda z: problem.f(z, *problem.args), problem.z0)  # silent
    with pytest.warns(SolveWarning, match="DIVERGED 4 of 4"):
        solution = fixed_point(problem.f, problem.z0, problem.args, solver=Forward(), adjoint=None)
    assert (solution.status == Status.DIVERGED).all()


def test_3_the_ridge_is_relative() -> None:
    problem = make("linear_symmetric_0.98")
    small = scaled(problem, 1e-2)
    own, own_small = (evaluations_to(1e-4, each, "anderson", 1500) for each in (problem, small))
    assert (own_small > 1.5 * own).all()
    counts = [solve(each, "anderson", rtol=1e-4).evaluations for each in (problem, small)]
    assert counts[0].tolist() == counts[1].tolist()
    assert counts[0].sum() < 0.5 * own.sum()


def test_4_a_large_loss_in_single_precision() -> None:
    weight, x = layer_problem()
    weight, x = weight.float(), x.detach().float().requires_grad_()
    f, _, _ = plain_batch(1)
    steps = []
    for scale in (1.0, 1000.0):
        info: list[Any] = []
        deq = get_deq(ift=True, b_max_iter=100)
        value = deq(lambda z: f(z, weight, x), torch.zeros_like(x), backward_writer=info.append)
        (scale * value[0][0].sum()).backward()
        steps.append(float(info[0]["abs_lowest"].max()))
    assert steps[1] > 1e-6  # the default absolute tolerance, never met
    products = []
    for scale in (1.0, 1000.0):
        solution = fixed_point(f, torch.zeros_like(x), (weight, x))
        (scale * solution.value.sum()).backward()
        report = solution.adjoint.solution
        assert report is not None
        assert bool(report.converged.all())
        products.append(report.evaluations.tolist())
    assert products[0] == products[1]


def test_5_neighbours() -> None:
    problem = make("linear_one_hard_sample")
    easy = rows(problem, torch.tensor([0]))

    def first_sample(each: Any) -> tuple[Tensor, int]:
        value, _, info = get_solver("fixed_point_iter")(
            lambda z: each.f(z, *each.args), each.z0, max_iter=300, tol=1e-4, stop_mode="rel"
        )
        return value[0], int(info["nstep"][0])

    assert not torch.equal(first_sample(problem)[0], first_sample(easy)[0])
    assert first_sample(problem)[1] > 3 * first_sample(easy)[1]
    together, alone = (solve(each, "forward", rtol=1e-4) for each in (problem, easy))
    torch.testing.assert_close(together.value[0], alone.value[0], rtol=1e-12, atol=1e-14)
    assert together.evaluations[0] == alone.evaluations[0]


def test_6_short_budgets_and_small_memories() -> None:
    problem = make("linear_symmetric_0.5")
    f = lambda z: problem.f(z, *problem.args)  # noqa: E731
    assert torch.equal(get_solver("anderson")(f, problem.z0, max_iter=2)[0], problem.z0)
    with pytest.raises(IndexError):
        get_solver("anderson")(f, problem.z0, m=1)
    start = true_residuals(problem, problem.z0)[0]
    two = solve(problem, Anderson(), max_steps=2)
    assert (two.residual < 0.7 * start).all()
    one = solve(problem, Anderson(), max_steps=1)
    assert torch.equal(one.value, problem.z0)
    assert (one.status == Status.MAX_STEPS).all()
    assert bool(solve(problem, Anderson(memory=1)).converged.all())


def test_7_residual_and_value() -> None:
    problem = make("linear_symmetric_0.9")
    value, _, info = get_solver("fixed_point_iter")(
        lambda z: problem.f(z, *problem.args), problem.z0, max_iter=30, tol=1e-9, stop_mode="rel"
    )
    relative, _ = true_residuals(problem, value)
    assert (relative < 0.95 * info["rel_lowest"]).all()  # theirs belongs to the point before
    assert (info["rel_trace"][:, 0] == 1e8).all()
    solution = solve(problem, "forward", max_steps=30, record=True)
    relative, _ = true_residuals(problem, solution.value)
    torch.testing.assert_close(solution.residual, relative, rtol=1e-9, atol=0)
    trace = solution.trace
    assert trace is not None
    start, _ = true_residuals(problem, problem.z0)
    torch.testing.assert_close(trace.residual[:, 0], start, rtol=1e-9, atol=0)


def test_8_options() -> None:
    problem = make("linear_symmetric_0.9")
    f = lambda z: problem.f(z, *problem.args)  # noqa: E731
    get_solver("anderson")(f, problem.z0, max_itr=3)  # swallowed
    with pytest.raises(TypeError, match="max_itr"):
        fixed_point(f, problem.z0, max_itr=3)  # type: ignore[call-arg]
    options = {"memory": 3}
    Anderson(**options)  # type: ignore[arg-type]
    assert options == {"memory": 3}


def test_8_evaluation_mode_carries_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3)
    deq = get_deq(ift=True).eval()
    f = lambda z: torch.tanh(0.5 * layer(z) + x)  # noqa: E731
    assert not deq(f, torch.zeros(2, 3))[0][0].requires_grad
    layer.eval()
    value = fixed_point(f, torch.zeros(2, 3), compact=False).value
    assert value.requires_grad


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
