"""On a CUDA card as on the CPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import solvers
from cases.deq import EXACT, LAYERS, gradients, make, relative_error, specification, tokens
from cases.solves import SOLVERS, solve, true_residuals
from implicit_attn import DEQTransformer, EquilibriumBlock, load_pretrained
from implicit_attn.models import BACKBONES, build_model
from problems.zoo import make as problem_named
from solvers import OneStep, Phantom, Status, Unrolled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning:torch"),
]
PLAIN = ("linear_normal_0.9", "linear_one_hard_sample", "tanh_0.9", "relu_symmetric_0.98", "kepler")
ENERGIES = ("energy_quadratic_10", "energy_bisoftmax_0.2_0.2")


@pytest.mark.parametrize("name", ENERGIES + PLAIN)
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers(solver: str, name: str) -> None:
    problem = problem_named(name)
    if SOLVERS[solver].needs_energy and problem.energy is None:
        pytest.skip("needs an energy")
    moved = replace(problem, z0=problem.z0.cuda(), args=tuple(each.cuda() for each in problem.args))
    here, there = solve(problem, solver), solve(moved, solver)
    done = here.converged
    assert torch.equal(there.converged.cpu(), done)
    assert bool((true_residuals(moved, there.value)[0].cpu()[done] < 2e-6).all())
    assert bool((there.evaluations.cpu() <= 2 * here.evaluations + 5)[done].all())


def test_failures_are_reported() -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return z * (1 + x) / 2 + 1 + 0 * x / (2 - x)  # no fixed point for x = 1, NaN for x = 2

    x = torch.tensor([[0.0], [2.0], [1.0], [0.0]], device="cuda")
    found = solvers.fixed_point(f, torch.zeros_like(x), (x,), max_steps=400, on_failure="ignore")
    assert found.status.tolist()[0] == found.status.tolist()[3] == Status.CONVERGED
    assert Status.CONVERGED not in found.status[1:3].tolist()
    with pytest.raises(solvers.SolveError):
        solvers.fixed_point(f, torch.zeros_like(x), (x,), max_steps=400, on_failure="raise")


@pytest.mark.parametrize("name", LAYERS)
def test_recorded_solves(name: str) -> None:
    """``layer.compile()`` records CUDA graphs, which are replayed for other inputs and weights."""
    options: dict[str, Any] = EXACT | {"tolerance": solvers.Tolerance(1e-11)}
    layer, other = make(name, **options).cuda(), make(name, **options).cuda()
    other.compile()
    for seed in range(3):
        x = tokens(seed=seed).cuda()
        found = []
        for each in (layer, other):
            given = x.clone().requires_grad_()
            value = each(given)
            found.append(
                [value, *torch.autograd.grad(value.sin().sum(), [given, *each.parameters()])]
            )
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.9)
        for ours, theirs in zip(*found, strict=True):
            assert relative_error(ours, theirs) <= 1e-6


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("adjoint", [EXACT["adjoint"], Unrolled(), Phantom(3), OneStep()])
def test_layers(name: str, adjoint: Any) -> None:
    layer, x = make(name, **EXACT | {"adjoint": adjoint}), tokens()
    other, y = copy.deepcopy(layer).cuda(), x.cuda().requires_grad_()
    x.requires_grad_()
    one, two = layer(x), other(y)
    assert relative_error(two.cpu(), one) < 1e-9
    given = torch.autograd.grad(one.square().sum(), [x, *layer.parameters()])
    found = torch.autograd.grad(two.square().sum(), [y, *other.parameters()])
    torch.testing.assert_close([g.cpu() for g in found], list(given), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", BACKBONES)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    model, images = build_model(specification(name)).eval(), torch.rand(3, 1, 8, 8)
    here, there = model(images), model.cuda()(images.cuda())
    torch.testing.assert_close(there.cpu(), here, rtol=1e-2, atol=2e-3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("block", [EquilibriumBlock, DEQTransformer])
@pytest.mark.parametrize("how", ["float32", "autocast", "compiled"])
def test_blocks_train(block: type[torch.nn.Module], how: str) -> None:
    torch.manual_seed(0)
    model, x = block(32, 4, 64).eval(), torch.randn(4, 10, 32)
    expected = model(x).square().mean()
    if how == "compiled":
        model.compile()
    with torch.autocast("cuda", torch.bfloat16, enabled=how == "autocast"):
        loss = model.cuda()(x.cuda()).float().square().mean()
    loss.backward()
    torch.testing.assert_close(loss.cpu(), expected, rtol=2e-2, atol=0)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(model).values())


@pytest.mark.parametrize("stop", ["converged", "consistent"])
def test_boards(stop: str) -> None:
    puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    model: Any = load_pretrained("sudoku-solver")
    here, there = (m.solve(puzzle, stop=stop) for m in (model, copy.deepcopy(model).cuda()))
    assert bool(there.consistent.all()) and torch.equal(here.digits, there.digits.cpu())
