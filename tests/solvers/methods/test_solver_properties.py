"""Properties that hold for any shape, any batch, any unit (hypothesis)."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases.solves import SOLVERS
from solvers import Anderson, Descent, Implicit, fixed_point

SETTINGS = settings(max_examples=15, deadline=None, derandomize=True)
NAMES = st.sampled_from(["forward", "anderson", "anderson_1", "broyden", "gradient_auto", "newton"])
SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3)


def contraction(
    shape: list[int], batch: int, seed: int
) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """``z -> 0.6 tanh(roll(z)) * a + b``, per sample, on states (batch, *shape)."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.rand(batch, *shape, generator=generator, dtype=torch.float64) * 2 - 1

    def f(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        flat = z.reshape(z.shape[0], -1).roll(1, 1).reshape(z.shape)
        return 0.6 * torch.tanh(flat) * a + b + 1

    return f, draw(), (draw(), draw())


def solve(f: Any, z0: Tensor, args: tuple[Tensor, ...], name: str, **options: Any) -> Any:
    return fixed_point(f, z0, args, solver=SOLVERS[name], tolerance=1e-9, max_steps=150,
                       **options)  # fmt: skip


@SETTINGS
@given(SHAPES, st.integers(1, 9), st.integers(0, 100), NAMES)
def test_any_shape_is_solved(shape: list[int], batch: int, seed: int, name: str) -> None:
    f, z0, args = contraction(shape, batch, seed)
    solution = solve(f, z0, args, name, adjoint=None)
    assert solution.value.shape == z0.shape
    for field in ("status", "residual", "residual_norm", "steps", "evaluations"):
        assert getattr(solution, field).shape == (batch,)
    torch.testing.assert_close(f(solution.value, *args), solution.value, rtol=1e-8, atol=1e-8)


@SETTINGS
@given(SHAPES, st.integers(2, 20), st.integers(0, 100), NAMES, st.randoms(use_true_random=False))
def test_any_part_of_a_batch_in_any_order(
    shape: list[int], batch: int, seed: int, name: str, random: Any
) -> None:
    f, z0, args = contraction(shape, batch, seed)
    index = torch.tensor(random.sample(range(batch), random.randint(1, batch)))
    whole = solve(f, z0, args, name, adjoint=None)
    part = solve(f, z0[index], tuple(t[index] for t in args), name, adjoint=None)
    assert part.evaluations.tolist() == whole.evaluations[index].tolist()
    torch.testing.assert_close(part.value, whole.value[index], rtol=1e-8, atol=1e-10)


@SETTINGS
@given(SHAPES, st.integers(1, 5), st.integers(0, 100))
def test_the_gradient_of_any_shape(shape: list[int], batch: int, seed: int) -> None:
    """The adjoint identity ``<g, dz> = <gradient, db>`` along a random direction."""
    f, z0, (a, b) = contraction(shape, batch, seed)
    b.requires_grad_()
    tight: dict[str, Any] = {"tolerance": 1e-13, "max_steps": 200, "on_failure": "ignore"}
    solution = fixed_point(f, z0, (a, b), adjoint=Implicit(tolerance=1e-12), **tight)
    (gradient,) = torch.autograd.grad(solution.value.sum(), b)
    direction = torch.ones_like(z0)
    ends = [
        fixed_point(
            f, z0, (a, b.detach() + sign * 1e-5 * direction), adjoint=None, **tight
        ).value.sum()
        for sign in (1, -1)
    ]
    torch.testing.assert_close(
        (ends[0] - ends[1]) / 2e-5, (gradient * direction).sum(), rtol=1e-6, atol=1e-7
    )


@SETTINGS
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 100), st.floats(0.05, 1.5))
def test_any_bounded_energy_descends(batch: int, dim: int, seed: int, step: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(batch, dim, dim, generator=generator, dtype=torch.float64)

    def energy(z: Tensor, matrix: Tensor) -> Tensor:
        return torch.einsum("bij,bj->bi", matrix, z).cos().sum(1) + 0.5 * (z - 1).square().sum(1)

    z0 = torch.randn(batch, dim, generator=generator, dtype=torch.float64)
    for solver in (None, Anderson()):
        solution = fixed_point(
            Descent(energy, step), z0, (matrix,), solver=solver, record=True, adjoint=None,
            max_steps=400, tolerance=1e-6,
        )  # fmt: skip
        trace = solution.trace
        assert trace is not None
        assert trace.energy is not None
        assert trace.accepted is not None
        for sample in range(batch):
            energies = trace.energy[sample][trace.accepted[sample]]
            assert (energies[1:] <= energies[:-1] + 2e-15 * energies[:-1].abs()).all()
        assert bool(solution.converged.all())


@SETTINGS
@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 100), NAMES)
def test_padding_is_free(batch: int, tokens: int, seed: int, name: str) -> None:
    """Masked tokens change neither the answer nor the cost of the others."""
    _, z0, args = contraction([tokens, 3], batch, seed)

    def tokenwise(z: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return 0.6 * torch.tanh(z.roll(1, 2)) * a + b + 1

    mask = torch.ones(batch, tokens, dtype=torch.bool)
    mask[:, tokens - 1] = False
    short = solve(tokenwise, z0[:, :-1], tuple(t[:, :-1] for t in args), name, adjoint=None)
    padded = solve(tokenwise, z0, args, name, adjoint=None, mask=mask)
    torch.testing.assert_close(padded.value[:, :-1], short.value, rtol=1e-7, atol=1e-9)
    assert torch.equal(padded.value[:, -1], z0[:, -1])
