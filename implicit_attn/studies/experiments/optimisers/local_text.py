"""A loop of one causal attention layer that learns to predict symbols by local rules."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import TextData
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.experiments.optimisers.local_digits import (
    BACKWARD,
    LOCAL,
    RULES,
)
from implicit_attn.studies.experiments.optimisers.own_energies import (
    OwnEnergy,
    loop_tokens,
    state_spread,
)
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_choice, require_count, require_positive


@dataclass(frozen=True)
class TextSettings:
    """How the weights learn.

    Attributes:
        dim, length: d of tokens, and tokens of a window.
        loops: K, steps of all tokens; 0 leaves the readout the embedding of the one token.
        temperature, step_size: of the elastic energy and its steps.
        steps, batch: of the training, and its windows a step.
        rate: of the gradient steps on W by the local rule.
        readout_rate, weight_rate: of Adam on E, and on W by back-propagation, at first; both fall
            linearly to zero.
        windows: of the validation text, spread evenly.
        records: measurements on the way.
        query: W1 is learned as well; else it is the identity.
        seed: of embedding, weights and batches.
    """

    dim: int = 32
    length: int = 32
    loops: int = 4
    temperature: float = 4.0
    step_size: float = 0.5
    steps: int = 400
    batch: int = 32
    rate: float = 0.3
    readout_rate: float = 0.1
    weight_rate: float = 0.01
    windows: int = 256
    records: int = 20
    query: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        require_count("loops", self.loops, low=0)
        for name in ("dim", "length", "steps", "batch", "windows", "records"):
            require_count(name, getattr(self, name))
        for name in ("temperature", "step_size", "rate", "readout_rate", "weight_rate"):
            require_positive(name, getattr(self, name))


def learn_text(
    data: TextData,
    rule: str,
    settings: TextSettings | None = None,
    *,
    advance: Advance = lambda what: None,
) -> Table:
    r"""Predict the next symbol by ``softmax(E^T z_i)`` after K steps of all tokens at once.

    Each step takes every token down its own energy among itself and the tokens before it as they
    stand, ``F_i = -T log sum_(j<=i) exp(-|W1 z_i - W2 z_j|^2 / (2T))``, from a fixed random embedding
    on. The local rule makes a step ``W <- W - rate * mean_i dF_i/dW`` of both weights at the last
    tokens, which are held; no symbol that is to be predicted reaches them. Back-propagation has the
    cross-entropy through all loops by Adam. The readout E learns by Adam in all three.

    Args:
        data: the text.
        rule: one of ``RULES``.
        settings: None are the defaults.
        advance: called with the name of each tenth of the steps.

    Returns:
        A row for each measurement on the validation windows: ``step``, ``free_energy`` (mean of F_i),
        ``spread`` of the last tokens and ``loss`` in nats a symbol.

    Raises:
        ValueError: an unknown rule, or a text too short for a window.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, algorithms 2 and 3.
    """
    require_choice("rule", rule, RULES)
    settings = TextSettings() if settings is None else settings
    if min(len(data.train), len(data.validation)) <= settings.length:
        raise ValueError(f"length must be below the symbols of each part, got {settings.length}")
    run = _Run(data, rule, settings)
    every = math.ceil(settings.steps / settings.records)
    table: Table = [{"rule": rule, "step": 0, **run.measure()}]
    for step in range(1, settings.steps + 1):
        if (step - 1) % math.ceil(settings.steps / 10) == 0:
            advance(f"text, {rule}: step {step}")
        run.learn()
        run.decay.step()
        if step % every == 0 or step == settings.steps:
            table.append({"rule": rule, "step": step, **run.measure()})
    return table


class _Run:
    """Weights and readout of one training."""

    def __init__(self, data: TextData, rule: str, settings: TextSettings) -> None:
        self.data, self.rule, self.settings = data, rule, settings
        self.energy = OwnEnergy("elastic", settings.temperature, causal=True)
        self.generator = generator = torch.Generator().manual_seed(settings.seed)
        dim, symbols = settings.dim, len(data.alphabet)
        self.embedding = torch.randn(symbols, dim, generator=generator)
        both = torch.randn(2, 1, dim, dim, generator=generator) / dim**0.5
        self.key = both[0].clone().requires_grad_(rule == BACKWARD)
        self.query = both[1].clone().requires_grad_(rule == BACKWARD) if settings.query else None
        self.readout = (0.1 * torch.randn(dim, symbols, generator=generator)).requires_grad_()
        groups = [{"params": [self.readout], "lr": settings.readout_rate}]
        if rule == BACKWARD:
            weights = [each for each in (self.query, self.key) if each is not None]
            groups.append({"params": weights, "lr": settings.weight_rate})
        self.optimiser = torch.optim.Adam(groups)
        self.decay = torch.optim.lr_scheduler.LinearLR(self.optimiser, 1.0, 0.0, settings.steps)
        last = len(data.validation) - settings.length - 1
        starts = torch.linspace(0, last, settings.windows).long()
        self.inputs, self.targets = _windows(data.validation, starts, settings.length)

    def learn(self) -> None:
        settings, train = self.settings, self.data.train
        last = len(train) - settings.length
        starts = torch.randint(last, (settings.batch,), generator=self.generator)
        inputs, targets = _windows(train, starts, settings.length)
        z = self.loop(inputs)
        self.optimiser.zero_grad()
        F.cross_entropy((z @ self.readout).flatten(0, 1), targets.flatten()).backward()
        self.optimiser.step()
        if self.rule == LOCAL:
            gradients = self.energy.gradients(z, z, self.query, self.key)
            rate = settings.rate / inputs.numel()
            self.key = self.key - rate * gradients.key
            if self.query is not None:
                self.query = self.query - rate * gradients.query

    def loop(self, inputs: Tensor) -> Tensor:
        settings, tokens = self.settings, self.embedding[inputs]
        size = settings.step_size
        return loop_tokens(
            self.energy, tokens, self.query, self.key, steps=settings.loops, step_size=size
        )

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        z = self.loop(self.inputs)
        logits = (z @ self.readout).flatten(0, 1)
        return {
            "free_energy": self.energy.value(z, z, self.query, self.key).mean().item(),
            "spread": state_spread(z),
            "loss": F.cross_entropy(logits, self.targets.flatten()).item(),
        }


def _windows(ids: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Symbols (B, length), and those that follow each."""
    places = starts[:, None] + torch.arange(length + 1)
    held = ids[places]
    return held[:, :-1], held[:, 1:]
