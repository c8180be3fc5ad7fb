"""Compiled solves by single evaluations: statuses, counts and values of the ordinary loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cases.turns import (
    assert_same,
    assert_same_solution,
    pair,
    sample,
    take_turns,
)
from solvers import Anderson, Forward, Implicit, Status, Tolerance
from solvers.methods import turns

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT: Any = {"tolerance": Tolerance(1e-11), "adjoint": Implicit(tolerance=Tolerance(1e-11))}


@pytest.fixture(autouse=True)
def in_turns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of samples of the solves that were made in turns."""
    take_turns(monkeypatch)
    solves: list[int] = []
    init = turns.Turns.__init__

    def noting(self: Any, start: Tensor, *rest: Any) -> None:
        solves.append(len(start))
        init(self, start, *rest)

    monkeypatch.setattr(turns.Turns, "__init__", noting)
    return solves


def uneven(z: Tensor, x: Tensor) -> Tensor:
    """Samples of large x contract slowly."""
    return torch.sigmoid(x[:, :1]) * 0.97 * torch.tanh(z.roll(1, 1)) + 0.5 * x


SOLVERS = [Anderson(), Anderson(memory=1, damping=0.7), Anderson(memory=20), Forward(0.6)]


@pytest.mark.parametrize("solver", SOLVERS, ids=["plain", "short", "long", "forward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_that_converge_at_different_times(
    solver: Any, dtype: torch.dtype, in_turns: list[int]
) -> None:
    first, second = pair(
        uneven, solver=solver, max_steps=30, tolerance=Tolerance(1e-4), on_failure="ignore"
    )
    x = 2 * sample(7).to(dtype)
    if dtype == torch.float64:
        solution = assert_same_solution(first, second, x)
        assert len(solution.evaluations.unique()) > 1
    else:  # another order of sums may end a sample one evaluation earlier
        with torch.no_grad():
            one, other = first.solve(x), second.solve(x)
        assert (one.evaluations - other.evaluations).abs().max() <= 1
        torch.testing.assert_close(other.value, one.value, rtol=1e-3, atol=1e-3)
    assert in_turns == [7]


@pytest.mark.parametrize("shape", [(1, 6), (5, 1), (1, 1), (2, 3, 2)])
@pytest.mark.parametrize("most", [1, 2, 40])
def test_shapes_and_budgets(shape: tuple[int, ...], most: int) -> None:
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    options: Any = {"max_steps": most, "on_failure": "ignore", "tolerance": Tolerance(1e-9)}
    assert_same_solution(*pair(lambda z, x: 0.9 * z.cos() + x, **options), x)


def test_tolerances_of_each_sample() -> None:
    layers = pair(uneven, max_steps=60)
    for tolerance in (
        Tolerance(torch.tensor([1e-2, 1e-4, 1e-6, 1e-8])),
        Tolerance(1e-3, torch.tensor([1e-1, 1e-3, 1e-6, 0.0], dtype=torch.float64)),
        Tolerance(0.0, 1e-5),
    ):
        assert_same_solution(*layers, sample(), tolerance=tolerance)
    padded = Tolerance(torch.tensor([1e-2, 1e-4, 1e-7]))
    assert_same_solution(*layers, sample(3), tolerance=padded)


def test_what_is_out_of_the_ordinary() -> None:
    """Samples that diverge, are not finite, or end at zero, beside others."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        slope = torch.where(x[:, :1] > 0, 0.5, 3.0)
        return (slope * z + slope.gt(1) * z**3) / x[:, 1:2] + x[:, 2:3]

    x = sample(5)
    x[:, :3] = torch.tensor(
        [[1.0, 1, 1], [-1, 1, 1], [1, 0, 1], [1, 1, 0], [1, torch.inf, 1]], dtype=torch.float64
    )
    x[2, 1] = 0.0
    x[4, 1] = 1e-300
    options: Any = {"solver": Forward(), "max_steps": 40, "on_failure": "ignore"}
    solution = assert_same_solution(*pair(f, **options), x)
    assert len(solution.status.unique()) > 2 and solution.status[0] == Status.CONVERGED
    zero = assert_same_solution(
        *pair(lambda z, x: 0 * z, **options), sample(), tolerance=Tolerance(1e-6, 1e-9)
    )
    assert zero.converged.all()


def test_samples_that_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("solvers.core.loop", "solvers.methods.turns"):
        monkeypatch.setattr(f"{module}.PATIENCE", 10)
    options: Any = {"solver": Forward(), "max_steps": 60, "on_failure": "ignore"}

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.where(x[:, :1] > 0, 2 * x - z, 0.5 * z + x)

    solution = assert_same_solution(*pair(f, init=torch.zeros_like, **options), sample())
    assert set(solution.status.tolist()) == {int(Status.STALLED), int(Status.CONVERGED)}


def test_masks_trees_and_padding(in_turns: list[int]) -> None:
    def f(z: dict[str, Tensor], x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        shown = z["b"] if mask is None else torch.where(mask[:, :, None], z["b"], 0)
        return {"a": 0.3 * z["a"].sin() + shown.sum(1) * 0.1, "b": 0.4 * z["b"].cos() + x}

    def init(x: Tensor) -> dict[str, Tensor]:
        return {"a": x[:, 0], "b": torch.zeros_like(x)}

    layers = pair(f, init=init, tolerance=Tolerance(1e-8))
    for batch in (8, 5, 8):
        x = sample(batch, 12).reshape(batch, 4, 3)
        mask = torch.ones(batch, 4, dtype=torch.bool)
        mask[1:, 3] = mask[2, 0] = False
        for given in (None, mask):
            with torch.no_grad():
                one, other = [layer.solve(x, given) for layer in layers]
            assert torch.equal(other.evaluations, one.evaluations)
            torch.testing.assert_close(other.value, one.value)
    assert in_turns == [8] * 6  # the batch of five is padded


def test_an_output_that_shares_the_state() -> None:
    """The state of a solve is written to in place: what f returns of it must not be."""
    x = sample()
    for f in (
        lambda z, x: z,
        lambda z, x: z.flip(1).flip(1),
        lambda z, x: x,
        lambda z, x: 0.5 * z + x,
    ):
        first, second = pair(f, **EXACT, max_steps=60)
        solution = assert_same_solution(first, second, x)
        kept = solution.value.clone()
        assert_same_solution(first, second, x + 1)
        assert torch.equal(solution.value, kept) and torch.equal(x, sample())


def test_starts_and_cotangents_of_any_layout() -> None:
    first, second = pair(uneven, **EXACT, max_steps=80)
    x = sample(6, 4)
    assert_same(first, second, x.mT.contiguous().mT)
    assert_same_solution(first, second, x, z0=sample(12, 4, 1)[::2])
    found = []
    for layer in (first, second):
        leaf = x.clone().requires_grad_()
        value = layer(leaf)
        found.append(torch.autograd.grad(value, leaf, torch.ones(6, 1).double().expand(6, 4))[0])
        value = layer(leaf)
        found.append(torch.autograd.grad(value, leaf, sample(4, 6).mT)[0])
    torch.testing.assert_close(found[2:], found[:2])


def test_half_precision_is_solved_in_blocks(in_turns: list[int]) -> None:
    first, second = pair(uneven)
    x = sample().bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(second(x), first(x), rtol=5e-2, atol=5e-2)
        assert not in_turns
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(second(x.float()), first(x.float()), rtol=5e-2, atol=5e-2)
    assert in_turns == [4]
