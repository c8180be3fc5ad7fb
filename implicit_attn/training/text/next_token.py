"""Language models: prediction of the next symbol in random windows of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import TextData
from implicit_attn.training.tasks import Measures
from solvers.core.checks import require_count


@dataclass(frozen=True)
class NextToken:
    """Prediction of each next symbol, measured by the loss in nats a symbol on fixed windows.

    The model maps numbers of symbols (B, n) to logits (B, n, V) of the symbols that follow each. An
    epoch is about one pass over the training text: as many windows as there are disjoint ones, or
    ``samples``, each beginning at a random place, drawn anew for every batch. The validation windows
    are spread evenly over the validation text.

    Attributes:
        data: the text.
        length: n, symbols that a window shows.
        windows: number of validation windows; where the text holds fewer disjoint ones they overlap.
        batch: windows at once in the evaluation.
        samples: training windows of an epoch; None: as many as there are disjoint ones.

    Raises:
        ValueError: a part of the text is shorter than ``length + 1``.
    """

    data: TextData
    length: int
    windows: int = 256
    batch: int = 64
    samples: int | None = None

    def __post_init__(self) -> None:
        for name in ("length", "windows", "batch"):
            require_count(name, getattr(self, name))
        if self.samples is not None:
            require_count("samples", self.samples)
        for part in ("train", "validation"):
            held = len(getattr(self.data, part))
            if held <= self.length:
                raise ValueError(
                    f"length must be below the {held} symbols for {part}, got {self.length}"
                )

    @cached_property
    def _numbers(self) -> Tensor:
        number = self.samples or max(1, (len(self.data.train) - 1) // self.length)
        return torch.arange(number, device=self.data.train.device)

    @property
    def inputs(self) -> Tensor:
        """Numbers (N,) of the windows of an epoch; :meth:`augmented` draws where they begin."""
        return self._numbers

    @property
    def targets(self) -> Tensor:
        """The same numbers."""
        return self.inputs

    def to(self, device: torch.device) -> NextToken:
        return replace(self, data=self.data.to(device))

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Random windows (B, n), and the symbols that follow each of theirs, (B, n)."""
        most = len(self.data.train) - self.length
        starts = torch.randint(most, (len(inputs),), generator=generator)
        return self._read(self.data.train, starts)

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        most = len(self.data.validation) - self.length - 1
        starts = torch.linspace(0, most, self.windows, dtype=torch.float64).round().long()
        options = {} if iterations is None else {"iterations": iterations}
        total, number = 0.0, 0
        model.eval()
        for part in starts[rank::world].split(self.batch):
            if len(part):  # a process may have no window
                inputs, targets = self._read(self.data.validation, part)
                with torch.no_grad():
                    total += self.loss(model(inputs, **options), inputs, targets).item()
                number += targets.numel()
        return {"validation_loss": (total, number)}

    def _read(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows that begin at ``starts`` (B,), and the same one symbol later."""
        places = starts[:, None] + torch.arange(self.length + 1)
        window = ids[places.to(ids.device)]
        return window[:, :-1], window[:, 1:]
