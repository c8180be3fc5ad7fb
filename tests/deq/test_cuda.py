"""On a CUDA card as on the CPU: solvers, gradients, layers, models. Skipped where there is no card.

On a card the host does not wait for numbers, so that samples which have ended stay in their batch
(``solvers.core.device``): another path through every loop.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.deq import EXACT, LAYERS, gradients, make, relative_error, specification, tokens
from cases.solves import SOLVERS, multiply, solve, true_residuals
from implicit_attn import DEQTransformer, EquilibriumBlock, load_pretrained
from implicit_attn.models import BACKBONES, build_model
from problems.zoo import make as problem_named
from solvers import CG, GMRES, MINRES, OneStep, Phantom, Status, Unrolled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
]
PLAIN = ("linear_normal_0.9", "linear_one_hard_sample", "tanh_0.9", "relu_symmetric_0.98", "kepler")
ENERGIES = ("energy_quadratic_10", "energy_bisoftmax_0.2_0.2")


def on_card(module: torch.nn.Module) -> Any:
    return copy.deepcopy(module).cuda()


@pytest.mark.parametrize("name", ENERGIES + PLAIN)
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers(solver: str, name: str) -> None:
    problem = problem_named(name)
    if SOLVERS[solver].needs_energy and problem.energy is None:
        pytest.skip("needs an energy")
    moved = replace(problem, z0=problem.z0.cuda(), args=tuple(each.cuda() for each in problem.args))
    here, there = solve(problem, solver), solve(moved, solver)
    assert there.value.is_cuda and there.status.is_cuda
    done = here.converged
    assert torch.equal(there.converged.cpu(), done)
    assert bool((true_residuals(moved, there.value)[0].cpu()[done] < 2e-6).all())
    # A sample of a card may be seen to have ended some steps late, an inner one of Newton's by all steps.
    most = 2 * here.evaluations + 60
    assert bool((there.evaluations.cpu() <= most)[done].all())


def test_failures_are_told() -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(
            x > 1, z + 1, torch.where(x > 0, z.new_tensor(float("nan")), 0.5 * z + 1)
        )

    x = torch.tensor([[0.0], [0.5], [2.0], [0.0]], device="cuda")
    found = solvers.fixed_point(f, torch.zeros_like(x), (x,), max_steps=400, on_failure="ignore")
    assert found.status.tolist()[0] == found.status.tolist()[3] == Status.CONVERGED
    assert Status.CONVERGED not in found.status[1:3].tolist()
    with pytest.raises(solvers.SolveError):
        solvers.fixed_point(f, torch.zeros_like(x), (x,), max_steps=400, on_failure="raise")


@pytest.mark.parametrize("linear", [CG(), MINRES(), GMRES()], ids=str)
def test_linear_solvers(linear: solvers.LinearSolver) -> None:
    generator = torch.Generator().manual_seed(0)
    root, right = (torch.randn(4, 12, n, generator=generator).double().cuda() for n in (12, 1))
    matrix = root @ root.mT + torch.eye(12).to(root)
    found = solvers.solve_linear(
        multiply, right.squeeze(-1), solver=linear, tolerance=1e-10, args=(matrix,)
    )
    assert bool(found.converged.all())
    assert relative_error(found.value, torch.linalg.solve(matrix, right).squeeze(-1)) < 1e-6


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("adjoint", ["implicit", "unrolled", "phantom", "one_step"])
def test_layers(name: str, adjoint: str) -> None:
    kinds: dict[str, Any] = {"implicit": EXACT["adjoint"], "unrolled": Unrolled()}
    kinds |= {"phantom": Phantom(3), "one_step": OneStep()}
    layer, x = make(name, **EXACT | {"adjoint": kinds[adjoint]}), tokens()
    other, y = on_card(layer), x.cuda().requires_grad_()
    x.requires_grad_()
    one, two = layer(x), other(y)
    assert relative_error(two.cpu(), one) < 1e-9
    one.square().sum().backward()
    two.square().sum().backward()
    assert relative_error(y.grad.cpu(), x.grad) < 1e-8
    expected = gradients(layer)
    for parameter, gradient in gradients(other).items():
        torch.testing.assert_close(gradient.cpu(), expected[parameter], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", BACKBONES)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(specification(name)).eval()
    images = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(
        on_card(model)(images.cuda()).cpu(), model(images), rtol=1e-2, atol=2e-3
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("block", [EquilibriumBlock, DEQTransformer])
@pytest.mark.parametrize("how", ["float32", "autocast", "compiled"])
def test_blocks_train(block: type[torch.nn.Module], how: str) -> None:
    torch.manual_seed(0)
    model, x = block(32, 4, 64).cuda(), torch.randn(4, 10, 32, device="cuda")
    if how == "compiled":
        model.compile()
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        loss = model(x).float().square().mean()
    loss.backward()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model).values())


@pytest.mark.parametrize("stop", ["converged", "consistent"])
def test_boards(stop: str) -> None:
    puzzle = ("53..7...." "6..195..." ".98....6." "8...6...3" "4..8.3..1" "7...2...6" ".6....28." "...419..5"
              "....8..79")  # fmt: skip
    model = load_pretrained("sudoku-solver")
    here, there = model.solve(puzzle, stop=stop), on_card(model).solve(puzzle, stop=stop)
    assert bool(there.consistent.all()) and torch.equal(here.digits, there.digits.cpu())
