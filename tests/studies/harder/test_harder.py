"""The harness on a map whose every answer is known: signs that are multiplied along a ring.

It solves the parity of a ring exactly: after t evaluations it is right where the last mark is fewer
than t positions back, and knows nothing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import solvers
from implicit_attn.data.tasks.instances import Instances
from implicit_attn.data.tasks.ring_parity import draw_rings
from implicit_attn.deq import DEQ
from implicit_attn.models import SudokuModel, build_backbone
from implicit_attn.studies.harder.curves import (
    adaptive_curve,
    iteration_curve,
    multiples,
    needed_by_difficulty,
    needed_iterations,
)
from implicit_attn.studies.harder.methods import (
    Answer,
    annealed,
    fixed_depth,
    iterated,
    repeated,
    solved_by,
)
from implicit_attn.studies.harder.seeds import over_seeds
from implicit_attn.updates.update import Update


class Product(Update):
    """``z_i = s_i`` at marks, else ``s_i z_{i-1}``; s = +1 for an even bit, -1 for an odd one."""

    def initial(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., :1])

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        sign, marked = -x[..., :1], x[..., 1:] > 0
        return torch.where(marked, sign, sign * z.roll(1, 1))


class Exact(nn.Module):
    """Even, odd, and a third class where nothing is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = DEQ(Product())

    def encode(self, inputs: Tensor) -> Tensor:
        return inputs

    def decode(self, state: Tensor) -> Tensor:
        z = state[..., 0]
        return torch.stack([z, -z, 0.5 - z.abs()], dim=2)

    def forward(self, inputs: Tensor, iterations: int) -> Tensor:
        z = self.layer.update.initial(inputs)
        for _ in range(iterations):
            z = self.layer.update(z, inputs)
        return self.decode(z)


@pytest.fixture(scope="module")
def rings() -> Instances:
    return draw_rings(50, 12, generator=torch.Generator().manual_seed(0))


def known_share(rings: Instances, budget: int) -> float:
    return (rings.difficulty <= budget).double().mean().item()


@pytest.mark.parametrize("batch", [7, 100])
@pytest.mark.parametrize("make", [iterated, repeated])
def test_iterations_solve_what_they_reach(make: Any, batch: int, rings: Instances) -> None:
    budgets = [1, 4, 8, 12, 20]
    rows = iteration_curve(make(Exact()), rings, budgets, batch=batch)
    assert [row["iterations"] for row in rows] == budgets
    assert [row["evaluations"] for row in rows] == budgets
    for row in rows:
        assert row["solved"] == pytest.approx(known_share(rings, row["iterations"]))
        assert row["solved"] <= row["accuracy"]
    assert rows[-1]["accuracy"] == 1 and 0 < rows[2]["solved"] < 1


def test_positions_that_do_not_count_are_not_asked_for(rings: Instances) -> None:
    near = torch.zeros_like(rings.counted)
    near[rings.inputs[..., 1] > 0] = True  # the marks themselves, known at once
    easy = Instances(rings.inputs, rings.targets, near, rings.difficulty)
    row = iteration_curve(iterated(Exact()), easy, [1])[0]
    assert row["solved"] == row["accuracy"] == 1


def test_what_is_needed_is_the_difficulty(rings: Instances) -> None:
    method = iterated(Exact())
    assert torch.equal(needed_iterations(method, rings, range(1, 13)), rings.difficulty)
    rows = needed_by_difficulty(method, rings, [2, 6, 9])
    assert sum(row["samples"] for row in rows) == 50
    for row in rows:
        reached = [budget for budget in (2, 6, 9) if budget >= row["difficulty"]]
        wanted = reached[0] if reached else None
        assert row["iterations"] == row["iterations_most"] == wanted
        assert row["solved"] == bool(reached)


def test_one_that_is_lost_again_counts_from_its_last_gain(rings: Instances) -> None:
    some = rings.select(slice(2))
    wrong = (some.targets + 1) % 2

    first = {1: some.targets, 2: wrong, 3: some.targets, 4: some.targets}
    second = {1: some.targets, 2: some.targets, 3: some.targets, 4: wrong}

    def method(inputs: Tensor, budgets: Sequence[int]) -> list[Answer]:
        both = (torch.cat([first[b][:1], second[b][1:]]) for b in budgets)
        return [Answer(predicted, torch.ones(len(inputs))) for predicted in both]

    assert needed_iterations(method, some, [1, 2, 3, 4]).tolist() == [3, 0]


def test_damping_is_slower_and_ends_at_the_same(rings: Instances) -> None:
    budgets = [6, 12, 80]
    damped = iteration_curve(iterated(Exact(), damping=0.5), rings, budgets)
    plain = iteration_curve(iterated(Exact()), rings, budgets)
    assert damped[0]["solved"] < plain[0]["solved"]
    assert damped[-1]["solved"] == plain[-1]["solved"] == 1


def test_annealing_ends_without_noise(rings: Instances) -> None:
    """The part without noise is a quarter of the budget; what it reaches is right again."""
    budgets = [4, 16, 48]
    rows = iteration_curve(annealed(Exact(), noise=0.5), rings, budgets)
    again = iteration_curve(annealed(Exact(), noise=0.5), rings, budgets)
    assert rows == again
    assert rows[-1]["solved"] == 1
    quiet = iteration_curve(annealed(Exact(), noise=0.0), rings, budgets)
    assert [row["solved"] for row in quiet] == pytest.approx(
        [known_share(rings, b) for b in budgets]
    )


def test_the_first_part_of_annealing_is_noisy_from_a_start_at_zero(rings: Instances) -> None:
    """Of two parts only the first has noise: it changes what is known after it."""
    before, after = ([], [])
    for noise, states in ((0.0, before), (5.0, after)):
        model = Exact()
        model.layer.update.register_forward_hook(lambda *each, kept=states: kept.append(each[2]))
        annealed(model, noise=noise, stages=2)(rings.inputs, [8])
        assert len(states) == 8  # noise costs no evaluation
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_a_budget_of_one_is_not_spoilt_by_noise(rings: Instances) -> None:
    (noisy,), (plain,) = (
        annealed(Exact(), noise=noise)(rings.inputs, [1]) for noise in (5.0, 0.0)
    )  # fmt: skip
    assert torch.equal(noisy.predicted, plain.predicted)


@pytest.mark.parametrize("solver", [solvers.Forward(), solvers.Anderson()])
def test_solvers_stop_where_nothing_moves(solver: solvers.Solver, rings: Instances) -> None:
    rows = iteration_curve(solved_by(Exact(), solver), rings, [3, 40])
    assert rows[0]["evaluations"] == 3 and rows[0]["solved"] < 1
    assert rows[1]["solved"] == 1 and rows[1]["evaluations"] < 40


def test_each_instance_stops_at_its_own_time(rings: Instances) -> None:
    table, depths = adaptive_curve(
        Exact(), rings, solvers.Forward(), 40, rtols=[0.5, 1e-6], batch=9
    )
    assert table[1]["solved"] == table[1]["converged"] == 1
    assert table[0]["evaluations"] < table[1]["evaluations"] < table[1]["evaluations_90"] + 1
    exact = [row for row in depths if row["rtol"] == 1e-6]
    assert sum(row["samples"] for row in exact) == 50
    # The residual is first zero at the state after as many evaluations as the run is long.
    assert all(row["evaluations"] == row["difficulty"] + 1 for row in exact)
    short, _ = adaptive_curve(Exact(), rings, solvers.Forward(), 3, rtols=[1e-6])
    # A ring that is all marks stops after two; the others spend the budget.
    assert short[0]["converged"] == pytest.approx(known_share(rings, 1))
    assert short[0]["evaluations_90"] == 3


def test_what_ends_without_converging_is_not_counted(rings: Instances) -> None:
    """States that are no numbers end a solve at once; one that converges may do so at the last."""

    class Broken(Product):
        def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
            return super().forward(z, x, mask=mask) * float("nan")

    model = Exact()
    last = int(rings.difficulty.max()) + 1
    table, _ = adaptive_curve(model, rings, solvers.Forward(), last, rtols=[1e-6])
    assert table[0]["converged"] == 1
    model.layer = DEQ(Broken())
    table, _ = adaptive_curve(model, rings, solvers.Forward(), 40, rtols=[1e-6])
    assert table[0]["converged"] == 0 and table[0]["evaluations"] < 40


def test_a_fixed_depth_does_not_care_for_the_budget(rings: Instances) -> None:
    method = fixed_depth(lambda inputs: Exact()(inputs, 7), 7)
    rows = iteration_curve(method, rings, [1, 50])
    assert [row["evaluations"] for row in rows] == [7, 7]
    assert rows[0]["solved"] == rows[1]["solved"] == pytest.approx(known_share(rings, 7))


@pytest.mark.parametrize("budgets", [[], [3, 3], [4, 2], [0, 1]])
def test_budgets_increase(budgets: list[int], rings: Instances) -> None:
    with pytest.raises(ValueError, match="budgets must"):
        iteration_curve(iterated(Exact()), rings, budgets)


def test_multiples_of_training() -> None:
    assert multiples(32) == [8, 16, 32, 64, 128, 256, 512]
    assert multiples(2, high=2) == [1, 2, 4]  # half an iteration is one
    for wrong in ({"trained": 0}, {"trained": 4, "low": 0.0}, {"trained": 4, "low": 2, "high": 1}):
        with pytest.raises(ValueError, match=r"trained|low|high"):
            multiples(**wrong)  # type: ignore[arg-type]


def test_methods_refuse_what_they_cannot_do() -> None:
    with pytest.raises(ValueError, match="damping"):
        iterated(Exact(), damping=0.0)
    with pytest.raises(ValueError, match="damping"):
        annealed(Exact(), damping=2.5)
    with pytest.raises(ValueError, match="stages"):
        annealed(Exact(), stages=1)
    with pytest.raises(ValueError, match="noise"):
        annealed(Exact(), noise=-1.0)


def test_seeds_become_one_row() -> None:
    rows = [
        {"a": 1, "seed": 0, "m": 0.5},
        {"a": 2, "seed": 0, "m": None},
        {"a": 1, "seed": 1, "m": 1.0},
    ]
    assert over_seeds(rows, ["a"], ["m"]) == [
        {"a": 1, "seeds": 2, "m": 0.75, "m_least": 0.5, "m_most": 1.0},
        {"a": 2, "seeds": 1, "m": None, "m_least": None, "m_most": None},
    ]
    with pytest.raises(ValueError, match="at least one row"):
        over_seeds([], ["a"], ["m"])


def test_a_sudoku_model_fits() -> None:
    """A board is a sample, its unknown cells count, their number is its difficulty."""
    cells = torch.arange(81)
    solution = (
        3 * (cells // 9) + cells // 27 + cells % 9
    ) % 9  # (0-based) a board of the usual kind
    solutions = solution.expand(2, 81).clone()
    unknown = torch.zeros(2, 81, dtype=torch.bool)
    unknown[0, ::4] = unknown[1, ::2] = True
    puzzles = torch.where(unknown, 0, solutions + 1)
    boards = Instances(puzzles, solutions, unknown, unknown.sum(1))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SudokuModel(build_backbone("transformer", 8, 2, iterations=2)).eval()
    rows = iteration_curve(repeated(model), boards, [1, 2, 4])
    assert [row["iterations"] for row in rows] == [1, 2, 4]
    logits = model(puzzles, iterations=4)
    wanted = (logits.argmax(2) == solutions)[unknown].double().mean().item()
    assert rows[-1]["accuracy"] == pytest.approx(wanted)
    depths = needed_by_difficulty(repeated(model), boards, [1, 2])
    assert [row["difficulty"] for row in depths] == [21, 41]
