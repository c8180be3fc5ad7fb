"""Parity along a ring: instances of any size with their answers, and a training on freshly drawn ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.training import NonFiniteLoss, Recipe


class Rings(NamedTuple):
    """Inputs (B, N, 2), the right classes (B, N) int64, and the longest run of each ring (B,)."""

    inputs: Tensor
    targets: Tensor
    difficulty: Tensor

    def select(self, rows: Tensor) -> Rings:
        """The rings ``rows``: numbers or a mask."""
        return Rings(*(each[rows] for each in self))

    def right(self, predicted: Tensor) -> Tensor:
        """(B, N) bool: positions where ``predicted`` (B, N) is right."""
        return predicted == self.targets


def draw_rings(
    number: int, size: int, generator: torch.Generator, marks: tuple[int, int] = (1, 3)
) -> Rings:
    r"""Rings of random bits, some positions marked; the answer is the parity since the last mark.

    With bits ``b_i`` and positions counted around the ring::

        y_i = b_i                      where i is marked
        y_i = (b_i + y_{i-1}) mod 2    elsewhere

    A map that looks at neighbours alone needs as many applications as the longest run from a mark to
    the last position before the next one: this run is the difficulty. The inputs are ``2 b_i - 1`` and,
    at marks, 1, else -1. ``marks``: least and most marks of a ring, of which at most ``size`` are set.

    Source: prefix sums as a task of extrapolation: Bansal et al., "End-to-end Algorithm Synthesis with
    Recurrent Networks" (2022), https://arxiv.org/abs/2202.05826; ring and marks are ours.
    """
    bits = torch.randint(2, (number, size), generator=generator)
    wanted = torch.randint(marks[0], marks[1] + 1, (number, 1), generator=generator)
    marked = torch.rand(number, size, generator=generator).argsort(1).argsort(1) < wanted
    parity, run = torch.zeros_like(bits[:, 0]), torch.zeros_like(bits[:, 0])
    targets, longest = torch.empty_like(bits), torch.zeros_like(run)
    # Twice around: the second time, what came before the first mark is known. Runs that begin at no
    # mark, the first time, are too short, never too long.
    for here in [*range(size)] * 2:
        parity = torch.where(marked[:, here], bits[:, here], bits[:, here] ^ parity)
        run = torch.where(marked[:, here], 1, run + 1)
        targets[:, here] = parity
        longest = torch.maximum(longest, run)
    inputs = torch.stack([bits, marked.long()], dim=2).float() * 2 - 1
    return Rings(inputs, targets, longest)


def train(
    model: nn.Module, draw: Callable[[int, torch.Generator], Rings], recipe: Recipe
) -> list[float]:
    """The losses of ``recipe.epochs`` steps, each on one batch of ``draw(number, generator)``."""
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizer, losses = recipe.build_optimizer(model), list[float]()
    model.train()
    for step in range(recipe.epochs):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step / recipe.epochs)
        batch = draw(recipe.batch, generator)
        iterations = recipe.draw_iterations(generator)
        options: dict[str, Any] = {} if iterations is None else {"iterations": iterations}
        loss = F.cross_entropy(model(batch.inputs, **options).mT, batch.targets)
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
