"""Training tasks: samples, a loss that is a sum of terms, and measures on the test samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import ImageData, SudokuData, SudokuSymmetries, board_counts
from solvers.core.checks import require_count

Augment = Callable[[Tensor, torch.Generator], Tensor]
Measures = dict[str, tuple[float, float]]  # sum and number


class Task(Protocol):
    """What :class:`Training` needs. Losses and measures are sums, which processes can add up."""

    @property
    def inputs(self) -> Tensor:
        """(N, ...) training inputs of the model."""
        ...

    @property
    def targets(self) -> Tensor:
        """(N, ...) targets of these inputs."""
        ...

    def to(self, device: torch.device) -> Task:
        """The same task with its tensors on ``device``."""
        ...

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """A batch with random augmentations, drawn from ``generator`` alone."""
        ...

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        """Number of terms that the loss of these samples sums."""
        ...

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the terms of the loss, a scalar."""
        ...

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        """Measures on every ``world``-th test sample from number ``rank`` on.

        ``iterations`` of a recurrent model; None: as many as in training.
        """
        ...


@dataclass(frozen=True)
class Classification:
    """Classification of images by cross-entropy, measured by the accuracy on the test images.

    ``augment(images, generator) -> images``, where there is one, acts on training batches.
    """

    data: ImageData
    augment: Augment | None = None

    @property
    def inputs(self) -> Tensor:
        return self.data.train_images

    @property
    def targets(self) -> Tensor:
        return self.data.train_labels

    def to(self, device: torch.device) -> Classification:
        return replace(self, data=self.data.to(device))

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return (inputs if self.augment is None else self.augment(inputs, generator)), targets

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return len(inputs)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        images, labels = self.data.test_images[rank::world], self.data.test_labels[rank::world]
        right = _count_right(model, images, labels, 256, iterations)
        return {"test_accuracy": (right, len(images))}


@dataclass(frozen=True)
class SudokuCompletion:
    """Sudoku by cross-entropy of the unknown cells; measures: loss, cell accuracy, solved boards.

    The model maps puzzles (B, 81), 0 = unknown, to logits (B, 81, 9) of the digits 1 .. 9. Symmetries
    of the board are drawn for every training puzzle; ``batch`` is the batch size of the evaluation.
    """

    data: SudokuData
    symmetries: SudokuSymmetries | None = None
    batch: int = 100

    @property
    def inputs(self) -> Tensor:
        return self.data.train_puzzles

    @property
    def targets(self) -> Tensor:
        return self.data.train_solutions

    def to(self, device: torch.device) -> SudokuCompletion:
        return replace(self, data=self.data.to(device))

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        if self.symmetries is None:
            return inputs, targets
        return self.symmetries(inputs, targets, generator)

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return int((inputs == 0).sum())

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        unknown = inputs == 0
        return F.cross_entropy(outputs[unknown], targets[unknown] - 1, reduction="sum")

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        puzzles = self.data.test_puzzles[rank::world]
        solutions = self.data.test_solutions[rank::world]
        cells = known = solved = 0
        loss = 0.0
        batches = _outputs(model, puzzles, solutions, self.batch, iterations)
        for outputs, part, answers in batches:
            loss += self.loss(outputs, part, answers).item()
            right, unknown = board_counts(outputs.argmax(-1) + 1, part, answers)
            cells, known = cells + int(right.sum()), known + int(unknown.sum())
            solved += int((right == unknown).sum())
        return {
            "test_loss": (loss, known),
            "cell_accuracy": (cells, known),
            "solved_boards": (solved, len(puzzles)),
        }


@dataclass(frozen=True)
class MaskedTokens:
    """Masked modelling: some tokens of a sequence are hidden and predicted from the others.

    The model maps tokens (B, N), integers in [0, d] where d stands for a hidden token, to logits
    (B, N, d). The loss is the cross-entropy of the hidden tokens. With one hidden token, drawn uniformly,
    its expectation is the negative log pseudo-likelihood per site,
    ``-1/N sum_i E log p(s_i | all other sites)``, whose minimum are the conditionals of the
    distribution. With several it is another objective: each is predicted from fewer sites.

    Measures, whatever ``masks``: loss and accuracy with every site of every test sample hidden in its
    turn, so ``test_loss`` is the negative log pseudo-likelihood per site.

    Attributes:
        train: (M, N) training sequences, integers in [0, d).
        test: (K, N) test sequences.
        colours: d.
        masks: hidden tokens of a training sequence, at most N.
        batch: sequences of a batch of the evaluation; N of them are made of each test sequence.

    Raises:
        TypeError: sequences that are no integers, or a number that is none.
        ValueError: shapes, tokens or numbers out of range.

    Source: Devlin et al., "BERT" (https://arxiv.org/abs/1810.04805), for the task; Rende et al.
    (https://arxiv.org/abs/2304.07235) for its reading as a pseudo-likelihood.
    """

    train: Tensor
    test: Tensor
    colours: int
    masks: int = 1
    batch: int = 4000

    def __post_init__(self) -> None:
        for name in ("colours", "masks", "batch"):
            require_count(name, getattr(self, name))
        for name, tokens in (("train", self.train), ("test", self.test)):
            if tokens.dtype != torch.int64:
                raise TypeError(f"{name} must be of int64, got {tokens.dtype}")
            if tokens.dim() != 2 or 0 in tokens.shape:
                raise ValueError(f"{name} must have the shape (M, N), got {tuple(tokens.shape)}")
            if tokens.min() < 0 or tokens.max() >= self.colours:
                raise ValueError(f"{name} must hold integers in [0, {self.colours})")
        sites = self.train.shape[1]
        if self.test.shape[1] != sites:
            raise ValueError(f"test must have {sites} sites as train, got {self.test.shape[1]}")
        if self.masks > sites:
            raise ValueError(f"masks must be at most the {sites} sites, got {self.masks}")

    @property
    def inputs(self) -> Tensor:
        return self.train

    @property
    def targets(self) -> Tensor:
        return self.train

    def to(self, device: torch.device) -> MaskedTokens:
        return replace(self, train=self.train.to(device), test=self.test.to(device))

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        order = torch.rand(inputs.shape, generator=generator)
        hidden = order.topk(self.masks, dim=1).indices.to(inputs.device)
        return inputs.scatter(1, hidden, self.colours), targets

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return self.masks * len(inputs)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = inputs == self.colours
        return F.cross_entropy(outputs[hidden], targets[hidden], reduction="sum")

    def evaluate(
        self, model: nn.Module, rank: int, world: int, iterations: int | None = None
    ) -> Measures:
        test = self.test[rank::world]
        sites = test.shape[1]
        each = torch.eye(sites, dtype=torch.bool, device=test.device)
        loss, right = 0.0, 0
        for part in test.split(max(1, self.batch // sites)):
            answers = part.repeat_interleave(sites, dim=0)  # (B N, N), site after site of a sample
            inputs = answers.masked_fill(each.repeat(len(part), 1), self.colours)
            for outputs, hidden, wanted in _outputs(
                model, inputs, answers, len(inputs), iterations
            ):
                loss += self.loss(outputs, hidden, wanted).item()
                guessed = (outputs.argmax(-1) == wanted) & (hidden == self.colours)
                right += int(guessed.sum())
        return {"test_loss": (loss, test.numel()), "token_accuracy": (right, test.numel())}


def describe(name: str, value: float) -> str:
    """A measure as text: losses as numbers, a PSNR in decibels, everything else in per cent."""
    words = name.replace("_", " ")
    if name.endswith("psnr"):
        return f"{words.replace('psnr', 'PSNR')} {value:.2f} dB"
    return f"{words} {value:.4f}" if name.endswith("loss") else f"{words} {100 * value:.2f} %"


def accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    size: int = 256,
    *,
    iterations: int | None = None,
) -> float:
    """Accuracy of ``model`` in evaluation mode on ``images`` (N, C, H, W) with ``labels`` (N,).

    ``size`` is the batch size; ``iterations`` of a recurrent model, None: as many as in training.
    """
    return _count_right(model, images, labels, size, iterations) / len(images)


def _count_right(
    model: nn.Module, images: Tensor, labels: Tensor, size: int, iterations: int | None
) -> int:
    parts = _outputs(model, images, labels, size, iterations)
    return sum(int((outputs.argmax(1) == answers).sum()) for outputs, _, answers in parts)


def _outputs(
    model: nn.Module, inputs: Tensor, targets: Tensor, size: int, iterations: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Outputs in evaluation mode, inputs and targets of batches in order."""
    model.eval()
    options = {} if iterations is None else {"iterations": iterations}
    for part, answers in zip(inputs.split(size), targets.split(size), strict=True):
        if len(part) > 0:  # a process may have no test samples
            with torch.no_grad():
                outputs = model(part, **options)
            yield outputs, part, answers
