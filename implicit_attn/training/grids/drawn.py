"""Training on batches that are drawn anew, each for one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from implicit_attn.data.tasks.instances import Instances
from implicit_attn.training.finite import NonFiniteLoss
from implicit_attn.training.recipe import Recipe

Draw = Callable[[int, torch.Generator], Instances]  # (instances of a batch, generator) -> a batch


def train_on_drawn(
    model: nn.Module, draw: Draw, recipe: Recipe, *, advance: Callable[[int], object] | None = None
) -> list[float]:
    """Cross-entropy of the counted positions, one optimiser step for each drawn batch.

    Args:
        model: ``model(inputs)``, or ``model(inputs, iterations=)`` where the recipe draws iterations,
            -> logits (B, N, C).
        draw: ``draw(number, generator)`` -> a batch.
        recipe: its ``epochs`` are steps of one batch here; its seed is that of batches and iterations.
        advance: called with the number of each step before it.

    Returns:
        The loss of each step.

    Raises:
        NonFiniteLoss: a loss is not finite.
    """
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer = recipe.build_optimizer(model)
    losses: list[float] = []
    model.train()
    for step in range(recipe.epochs):
        if advance is not None:
            advance(step)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step / recipe.epochs)
        batch = draw(recipe.batch, generator)
        iterations = recipe.draw_iterations(generator)
        options: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
        logits = model(batch.inputs, **options)
        loss = F.cross_entropy(logits[batch.counted], batch.targets[batch.counted])
        losses.append(loss.item())
        if not torch.isfinite(loss):
            raise NonFiniteLoss(f"loss is {losses[-1]} at step {step}: lower the learning rate")
        optimizer.zero_grad()
        loss.backward()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
    model.eval()
    return losses
