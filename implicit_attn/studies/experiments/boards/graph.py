"""Which cells constrain each other, learned from solved boards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.models import (
    FactoredAttention,
    PottsModel,
    fit_pseudolikelihood,
    random_symmetries,
    sudoku_pairs,
)
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.spins.measures import contact_precision, contact_scores
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_count

CELLS, DIGITS = 81, 9
BATCH = 128
FEW_BATCH = 32  # of the fits to a few boards, without symmetries


class Recipe(NamedTuple):
    """A model and how it is fitted: rows of the factored head, or None for the Potts model."""

    rows: str | None
    rate: float
    fields: bool


RECIPES = {
    "factored, softmax head": Recipe("softmax", 0.1, False),
    "factored, softmax head, with fields": Recipe("softmax", 0.1, True),
    "factored, linear head": Recipe("linear", 0.1, False),
    "Potts": Recipe(None, 0.01, False),
}
COUNTING = "counting equal pairs"
BY_STEPS = ("factored, softmax head", "Potts")


def equal_share(boards: Tensor) -> Tensor:
    """(81, 81): the share of boards (N, 81) in which two cells hold the same digit."""
    digits = torch.nn.functional.one_hot(boards - 1, DIGITS).double()
    return torch.einsum("nia,nja->ij", digits, digits) / len(boards)


def build(recipe: Recipe, seed: int) -> FactoredAttention | PottsModel:
    """The model of a recipe; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if recipe.rows is None:
            model: FactoredAttention | PottsModel = PottsModel(CELLS, DIGITS)
        else:
            model = FactoredAttention(CELLS, DIGITS, rows=recipe.rows)
    # All digits are alike in every cell: fields can only learn the chance of the boards.
    model.field.requires_grad_(recipe.fields)
    return model


def couplings_of(model: FactoredAttention | PottsModel) -> Tensor:
    """J (81, 81, 9, 9), detached."""
    found = model.couplings.weight if isinstance(model, PottsModel) else model.couplings()
    return found.detach()


def scores_of(model: FactoredAttention | PottsModel) -> Tensor:
    """Strength of every pair, (81, 81)."""
    return contact_scores(couplings_of(model))


def graph_by_steps(
    boards: Tensor, steps: int, *, seed: int = 0, advance: Advance = lambda what: None
) -> tuple[Table, dict[str, Tensor]]:
    """Precision at the 810 pairs during a fit to boards under random symmetries, batches of 128.

    Args:
        boards: (N, 81) in 1 .. 9.
        steps: of Adam, at a constant rate.

    Returns:
        Rows ``model``, ``steps``, ``precision``, ``loss`` (of the batch, nats a cell) at about ten
        steps, evenly in the logarithm; and the strengths at the end, by model.
    """
    require_count("steps", steps)
    watched = sorted({1, *(round(steps ** (k / 12)) for k in range(13))})
    pairs, table, ends = sudoku_pairs(), [], {}
    for name in BY_STEPS:
        advance(name)
        recipe = RECIPES[name]
        model = build(recipe, seed)
        rows: Table = []

        def watch(
            step: int,
            loss: float,
            model: FactoredAttention | PottsModel = model,
            rows: Table = rows,
            name: str = name,
        ) -> None:
            if step in watched:
                precision = contact_precision(scores_of(model), pairs)
                rows.append({"model": name, "steps": step, "precision": precision, "loss": loss})

        fit_pseudolikelihood(
            model, boards - 1, solver="adam", steps=steps, rate=recipe.rate, schedule="constant",
            batch=BATCH, augment=random_symmetries, seed=seed, watch=watch,
        )  # fmt: skip
        table += rows
        ends[name] = scores_of(model)
    return table, ends


def graph_by_boards(
    boards: Tensor,
    numbers: Sequence[int],
    steps: int = 150,
    *,
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> Table:
    """Precision at the 810 pairs from the first boards of a list alone, without symmetries.

    The baseline counts how often two cells hold the same digit: those that constrain each other never
    do. Pairs that no board tells apart count by their mean.

    Args:
        boards: (N, 81) in 1 .. 9.
        numbers: of boards, each at most N.
        steps: of Adam, at a constant rate.

    Returns:
        Rows ``model``, ``boards``, ``precision``.
    """
    pairs, table = sudoku_pairs(), []
    for number in numbers:
        if require_count("boards", number) > len(boards):
            raise ValueError(f"boards must be <= {len(boards)}, got {number}")
        few = boards[:number]
        found = {COUNTING: contact_precision(-equal_share(few), pairs)}
        for name, recipe in RECIPES.items():
            advance(f"{name}, {number} boards")
            model = build(recipe, seed)
            fit_pseudolikelihood(
                model, few - 1, solver="adam", steps=steps, rate=recipe.rate,
                schedule="constant", batch=FEW_BATCH, seed=seed,
            )  # fmt: skip
            found[name] = contact_precision(scores_of(model), pairs)
        table += [{"model": k, "boards": number, "precision": v} for k, v in found.items()]
    return table
