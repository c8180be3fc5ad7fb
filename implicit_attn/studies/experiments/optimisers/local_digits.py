"""One attention layer that learns to classify digits by local rules, beside other rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import ImageData
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.experiments.optimisers.own_energies import OwnEnergy, state_spread
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_choice, require_count, require_positive

FIXED, LOCAL, BACKWARD = "fixed weights", "local rule", "back-propagation"
RULES = (FIXED, LOCAL, BACKWARD)
PATCH = 2


@dataclass(frozen=True)
class DigitSettings:
    """How the weights learn.

    Attributes:
        dim: d of tokens and states.
        temperature, step_size: of the elastic (or inner) energy and its steps.
        epochs: one step of every state and one of the weights in each.
        rate: of the gradient steps on W by the local rule.
        readout_rate, weight_rate: of Adam on E, and on W by back-propagation, at first; both fall
            linearly to zero.
        depth: steps that are back-propagated through.
        batch: samples of a step by back-propagation; the other rules take all at once.
        test_steps: most steps of a state for a measurement, from the common start.
        records: measurements on the way.
        kind: "elastic" or "inner".
        seed: of embedding and weights.
    """

    dim: int = 32
    temperature: float = 4.0
    step_size: float = 0.5
    epochs: int = 200
    rate: float = 0.1
    readout_rate: float = 0.02
    weight_rate: float = 0.02
    depth: int = 5
    batch: int = 128
    test_steps: int = 50
    records: int = 20
    kind: str = "elastic"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "epochs", "depth", "batch", "test_steps", "records"):
            require_count(name, getattr(self, name))
        for name in ("temperature", "step_size", "rate", "readout_rate", "weight_rate"):
            require_positive(name, getattr(self, name))


def embed_patches(images: Tensor, dim: int, seed: int) -> Tensor:
    """Tokens (B, 16, dim) of images (B, 1, 8, 8): a random map of each 2 x 2 patch, and its place."""
    generator = torch.Generator().manual_seed(seed)
    patches = F.unfold(images, PATCH, stride=PATCH).mT
    spread = torch.randn(PATCH**2, dim, generator=generator) / PATCH
    place = torch.randn(patches.shape[1], dim, generator=generator)
    return patches @ spread + place


def learn_digits(
    data: ImageData,
    rule: str,
    settings: DigitSettings | None = None,
    *,
    advance: Advance = lambda what: None,
) -> Table:
    r"""Classify by ``softmax(E^T z)``, z a state that runs down its energy ``F(z; W)`` among tokens.

    ``F(z; W) = -T log sum_j exp(-|z - W h_j|^2 / (2T))``. In an epoch of the local rule every training
    sample's state, which lasts over the epochs, makes one step ``z <- z - eta dF/dz``, then
    ``W <- W - rate * mean_i dF_i/dW`` at these states; no label reaches W. Fixed weights leave W as it
    is. Back-propagation has the cross-entropy after ``depth`` steps from the common start by Adam. The
    readout E learns by Adam in all three.

    Args:
        data: 8 x 8 images.
        rule: one of ``RULES``.
        settings: None are the defaults.
        advance: called with the name of each tenth of the epochs.

    Returns:
        A row for each measurement: ``epoch``, ``free_energy`` (the mean over the training samples),
        ``spread`` of their states, ``loss`` and ``accuracy`` on the training samples, and
        ``test_accuracy`` after ``min(epoch, test_steps)`` steps from the common start (``depth`` steps by
        back-propagation).

    Raises:
        ValueError: an unknown rule, or images of another size.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, algorithm 1.
    """
    require_choice("rule", rule, RULES)
    settings = DigitSettings() if settings is None else settings
    if data.train_images.shape[1:] != (1, 8, 8):
        raise ValueError(f"data must be 8 x 8 images, got {tuple(data.train_images.shape[1:])}")
    run = _Run(data, rule, settings)
    every = math.ceil(settings.epochs / settings.records)
    table: Table = []
    for epoch in range(1, settings.epochs + 1):
        if (epoch - 1) % math.ceil(settings.epochs / 10) == 0:
            advance(f"digits, {rule}: epoch {epoch}")
        run.learn()
        run.decay.step()
        if epoch % every == 0 or epoch in (1, settings.epochs):
            table.append({"rule": rule, "epoch": epoch, **run.measure(epoch)})
    return table


class _Run:
    """States, weights and readout of one training."""

    def __init__(self, data: ImageData, rule: str, settings: DigitSettings) -> None:
        self.rule, self.settings = rule, settings
        self.energy = OwnEnergy(settings.kind, settings.temperature)
        self.tokens, self.test_tokens = (
            embed_patches(images, settings.dim, settings.seed)
            for images in (data.train_images, data.test_images)
        )
        self.labels, self.test_labels = data.train_labels, data.test_labels
        self.generator = generator = torch.Generator().manual_seed(settings.seed + 1)
        dim = settings.dim
        weight = torch.randn(1, dim, dim, generator=generator) / dim**0.5
        readout = 0.1 * torch.randn(dim, data.classes, generator=generator)
        self.weight, self.readout = weight.requires_grad_(rule == BACKWARD), readout
        self.readout.requires_grad_()
        groups = [{"params": [self.readout], "lr": settings.readout_rate}]
        if rule == BACKWARD:
            groups.append({"params": [self.weight], "lr": settings.weight_rate})
        self.optimiser = torch.optim.Adam(groups)
        self.decay = torch.optim.lr_scheduler.LinearLR(self.optimiser, 1.0, 0.0, settings.epochs)
        self.z = self.tokens.new_zeros(len(self.tokens), 1, dim)

    def learn(self) -> None:
        settings = self.settings
        if self.rule == BACKWARD:
            order = torch.randperm(len(self.tokens), generator=self.generator)
            for rows in order.split(settings.batch):
                states = self.run_states(self.tokens[rows], settings.depth)
                self.descend(states, self.labels[rows])
            return
        self.z = self.step(self.z, self.tokens)
        if self.rule == LOCAL:
            gradient = self.energy.gradients(self.z, self.tokens, None, self.weight).key
            self.weight = self.weight - settings.rate / len(self.z) * gradient
        self.descend(self.z, self.labels)

    def descend(self, states: Tensor, labels: Tensor) -> None:
        """A step of Adam on the cross-entropy."""
        self.optimiser.zero_grad()
        F.cross_entropy(states[:, 0] @ self.readout, labels).backward()
        self.optimiser.step()

    def step(self, z: Tensor, tokens: Tensor) -> Tensor:
        return z - self.settings.step_size * self.energy.by_state(z, tokens, None, self.weight)

    def run_states(self, tokens: Tensor, steps: int) -> Tensor:
        z = tokens.new_zeros(len(tokens), 1, self.settings.dim)
        for _ in range(steps):
            z = self.step(z, tokens)
        return z

    @torch.no_grad()
    def measure(self, epoch: int) -> dict[str, float]:
        settings = self.settings
        steps = min(epoch, settings.test_steps)
        if self.rule == BACKWARD:
            steps = settings.depth
            self.z = self.run_states(self.tokens, steps)
        logits = self.z[:, 0] @ self.readout
        tests = self.run_states(self.test_tokens, steps)[:, 0] @ self.readout
        return {
            "free_energy": self.energy.value(self.z, self.tokens, None, self.weight).mean().item(),
            "spread": state_spread(self.z),
            "loss": F.cross_entropy(logits, self.labels).item(),
            "accuracy": (logits.argmax(1) == self.labels).float().mean().item(),
            "test_accuracy": (tests.argmax(1) == self.test_labels).float().mean().item(),
        }
