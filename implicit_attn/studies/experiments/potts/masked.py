"""Training of transformers on masked tokens, and their loss against the number of recycles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from implicit_attn.models import MaskedTransformer
from implicit_attn.studies.experiments.potts.data import PottsData, seeded
from implicit_attn.studies.tables import Table
from implicit_attn.training import MaskedTokens, Recipe
from solvers.core.checks import require_count


def masked_task(data: PottsData, tested: int) -> MaskedTokens:
    """One masked token a sequence, measured on the first ``tested`` test sequences."""
    return MaskedTokens(data.train, data.test[:tested], data.colours)


def train_masked(model: nn.Module, task: MaskedTokens, recipe: Recipe, steps: int) -> None:
    """So many steps of the recipe (its epochs are not looked at), on batches drawn with repetition."""
    optimizer = recipe.build_optimizer(model)
    generator = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for step in range(require_count("steps", steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step / steps)
        iterations = recipe.draw_iterations(generator)
        options = {} if iterations is None else {"iterations": iterations}
        chosen = torch.randint(len(task.inputs), (recipe.batch,), generator=generator)
        tokens, answers = task.augmented(task.inputs[chosen], task.targets[chosen], generator)
        loss = task.loss(model(tokens, **options), tokens, answers) / task.terms(tokens, answers)
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()


def make_transformer(data: PottsData, dim: int, seed: int, **options: int) -> MaskedTransformer:
    """A new one with four heads, its weights drawn from ``seed`` alone."""
    shape = (data.sites, data.colours, dim, 4, 2 * dim)
    return seeded(partial(MaskedTransformer, *shape, **options), seed)


def masked_loss(model: nn.Module, task: MaskedTokens, iterations: int | None = None) -> float:
    """Mean loss of the test sequences, each site masked in its turn."""
    total, number = task.evaluate(model, 0, 1, iterations)["test_loss"]
    return total / number


def loss_by_recycles(
    name: str, model: nn.Module, data: PottsData, recycles: Sequence[int], tested: int
) -> Table:
    """Rows with ``method``, ``recycles`` and ``excess``, the loss above that of the true conditionals."""
    task, bayes = masked_task(data, tested), data.bayes(tested)
    return [
        {"method": name, "recycles": number, "excess": masked_loss(model, task, number) - bayes}
        for number in recycles
    ]
