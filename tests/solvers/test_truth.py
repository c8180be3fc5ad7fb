"""A value that is CONVERGED is right: families with known answers, by every solver.

The families and their answers are those of ``problems/families.py``; ``benchmarks/truth.py`` has more samples
and other people's solvers.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

import solvers
from benchmarks import truth
from benchmarks.truth import BUDGET, SLACK, TOLERANCE, Outcome
from problems.families import FAMILIES, Family, relative
from solvers.core.judge import span_factor

SAMPLES = 20


@cache
def family(name: str) -> tuple[Family, Tensor]:
    """The problems and their answers."""
    made = FAMILIES[name](Generator().manual_seed(1), SAMPLES)
    return made, made.reference()


@cache
def outcomes(name: str) -> dict[str, Outcome]:
    """Every solver of the package on a family, and plain iteration where samples can run away."""
    with torch.no_grad():
        return {n: run() for n, run in truth.contestants(family(name)[0], peers=False).items()}


def errors(name: str, outcome: Outcome) -> Tensor:
    """True errors in units of the tolerance."""
    return relative(outcome.value, family(name)[1]).nan_to_num(nan=torch.inf) / TOLERANCE


def false(name: str, slack: float = SLACK) -> dict[str, int]:
    """The number of CONVERGED samples with an error above ten tolerances (``slack``), by solver."""
    own = {n: o for n, o in outcomes(name).items() if not n.startswith("plain")}
    return {n: int((o.converged & (errors(name, o) > slack)).sum()) for n, o in own.items()}


def share(name: str, solver: str = "default") -> float:
    """The share of samples that are CONVERGED and right."""
    outcome = outcomes(name)[solver]
    return (outcome.converged & (errors(name, outcome) <= SLACK)).double().mean().item()


RUNAWAY = [
    "lasso 6x10", "lasso 20x50", "lasso 5x12", "douglas-rachford", "huber", "log-cosh", "tanh from 3",
    "tanh from 8", "arctan from 3", "arctan from 8", "root of atan from 2", "root of atan from 4",
]  # fmt: skip
ENERGIES = [name for name in FAMILIES if name.startswith("energy x")]
SLOW = ["energy of condition 1000", "energy of condition 10000"]
CONTRACTIONS = [name for name in FAMILIES if name.startswith("contraction")]


@pytest.mark.parametrize("name", RUNAWAY)
def test_an_iterate_that_runs_away_is_not_converged(name: str) -> None:
    wrong = false(name)
    assert not any(wrong.values()), wrong


def test_rows_that_influence_each_other_are_not_converged_falsely() -> None:
    wrong = false("coupled rows")
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(
    "name", [*ENERGIES, *SLOW, *CONTRACTIONS, "tanh network", "label propagation"]
)
def test_the_error_of_converged_samples_is_within_ten_tolerances(name: str) -> None:
    wrong = false(name)
    if name in SLOW:  # the steps of gradient descent show too little of the flat directions
        wrong.pop("gradient descent")
    assert max(wrong.values()) <= 0.05 * SAMPLES, wrong


@pytest.mark.parametrize(
    ("name", "least"),
    [("douglas-rachford", 0.95), ("log-cosh", 0.95), ("arctan from 3", 0.95), ("arctan from 8", 0.95),
     ("tanh from 3", 0.95), ("tanh from 8", 0.95), ("huber", 0.8), *((name, 0.95) for name in ENERGIES),
     *((name, 0.95) for name in CONTRACTIONS), ("tanh network", 0.95), ("label propagation", 0.95)],
)  # fmt: skip
def test_the_default_solver_solves(name: str, least: float) -> None:
    assert share(name) >= least


@pytest.mark.parametrize("name", ["lasso 6x10", "lasso 20x50", "lasso 5x12"])
def test_the_default_solver_solves_what_plain_iteration_solves(name: str) -> None:
    assert share(name) >= share(name, "plain, by an oracle")


def test_an_energy_needs_the_same_evaluations_in_all_units() -> None:
    counts = torch.stack([outcomes(name)["default"].evaluations for name in ENERGIES])
    medians = counts.median(dim=1).values
    assert medians.max() - medians.min() <= 1, medians.tolist()
    assert (counts < BUDGET).all()


@pytest.mark.parametrize("name", [*ENERGIES, *CONTRACTIONS])
def test_the_estimated_error_is_of_the_order_of_the_true_one(name: str) -> None:
    outcome = outcomes(name)["default"]
    assert outcome.error is not None and outcome.error.shape == (SAMPLES,)
    assert (outcome.error[outcome.converged] <= 1.01 * TOLERANCE).all()
    ratio = outcome.error / (errors(name, outcome) * TOLERANCE)
    assert 0.1 < ratio[outcome.converged].median().item() < 100


def test_the_gain_of_a_combination_of_steps() -> None:
    g = Generator().manual_seed(0)
    changes = torch.randn(3, 4, 9, generator=g, dtype=torch.float64)
    steps = torch.randn(3, 4, 9, generator=g, dtype=torch.float64)
    changes[:, 2], steps[:, 2] = 0, 0  # an empty slot
    steps[1], changes[2, 3] = 2 * changes[1], changes[2, 1]
    factor = span_factor(steps, changes)
    weights = torch.randn(20_000, 1, 4, generator=g, dtype=torch.float64)
    for sample, (own, other) in enumerate(zip(steps, changes, strict=True)):
        ratio = (weights @ own).norm(dim=2) / (weights @ other).norm(dim=2)
        single = (own.norm(dim=1) / other.norm(dim=1)).nan_to_num(0.0).max()
        assert factor[sample] >= 0.999 * ratio.max() / single
    assert abs(factor[1] - 1) < 1e-5  # all combinations have the gain 2
    # The exact answer of the first: the largest generalised singular value.
    own, other = steps[0, [0, 1, 3]], changes[0, [0, 1, 3]]
    exact = torch.linalg.matrix_norm(torch.linalg.pinv(other) @ own, 2)
    single = (own.norm(dim=1) / other.norm(dim=1)).max()
    assert abs(factor[0] * single / exact - 1) < 1e-4


def test_leaves_of_unlike_sizes_each_meet_the_tolerance() -> None:
    def f(z: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"k": 0.5 * z["k"] + 5e5, "p": 0.5 * z["p"] + 5e-4}  # solved by 1e6 and 1e-3

    start: Any = {"k": torch.tensor([[1e6]]).double(), "p": torch.tensor([[5e-2]]).double()}
    value: Any = solvers.fixed_point(f, start).value
    assert abs(value["p"].item() / 1e-3 - 1) <= SLACK * TOLERANCE
    assert abs(value["k"].item() / 1e6 - 1) <= SLACK * TOLERANCE
