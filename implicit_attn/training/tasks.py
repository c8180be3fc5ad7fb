"""Training tasks: samples, a loss that is a sum of terms, and measures on the test samples."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import ImageData, SudokuData, SudokuSymmetries, TextData, board_counts
from implicit_attn.data.images import hidden_patches, hide_patches, split_patches
from implicit_attn.data.sudoku import reveal_up_to
from solvers.core.checks import require_count, require_nonnegative

Augment = Callable[[Tensor, torch.Generator], Tensor]
Pair = tuple[Tensor, Tensor]
Measures = dict[str, tuple[float, float]]  # sum and number


class Task(ABC):
    """What :class:`Training` needs. Losses and measures are sums, which processes can add up.

    Attributes:
        data: with ``to(device)``.
        names: of the measures.
        kept: names of the training inputs and targets in the data, ``train_...``; those of the test samples
            begin with ``test_``. One name stands for what is both.
        batch: test samples at once.
    """

    data: Any
    names: tuple[str, ...]
    kept: tuple[str, ...]
    batch = 256

    @property
    def inputs(self) -> Tensor:
        """(N, ...) training inputs of the model."""
        return getattr(self.data, self.kept[0])

    @property
    def targets(self) -> Tensor:
        """(N, ...) targets of these inputs."""
        return getattr(self.data, self.kept[-1])

    def tests(self) -> Pair:
        """(M, ...) test inputs and their targets."""
        inputs, targets = (self.kept[k].replace("train", "test") for k in (0, -1))
        return getattr(self.data, inputs), getattr(self.data, targets)

    @abstractmethod
    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """Sum of the terms of the loss, a scalar."""

    @abstractmethod
    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        """Sum and number of every measure of a test batch."""

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        """Number of terms that the loss of these samples sums."""
        return len(inputs)

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        """A batch with random augmentations, drawn from ``generator`` alone."""
        return inputs, targets

    def begin(self) -> None:  # noqa: B027
        """Called before every epoch, which must not depend on the one before."""

    def run(
        self,
        forward: Callable[..., Any],
        inputs: Tensor,
        targets: Tensor,
        generator: torch.Generator,
        **options: Any,
    ) -> tuple[Tensor, int]:
        """Sum of the terms of the loss of an augmented batch, and their number."""
        return self.loss(forward(inputs, **options), inputs, targets), self.terms(inputs, targets)

    def to(self, device: torch.device) -> Any:
        """The same task with its tensors on ``device``."""
        return replace(self, data=self.data.to(device))  # type: ignore[type-var]

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, rank: int = 0, world: int = 1, iterations: int | None = None
    ) -> Measures:
        """Sum and number of every measure on every ``world``-th test sample from number ``rank`` on.

        ``iterations`` of a recurrent model; None: as many as in training.
        """
        model.eval()
        options = {} if iterations is None else {"iterations": iterations}
        sums: Measures = dict.fromkeys(self.names, (0.0, 0.0))
        parts = (each[rank::world].split(self.batch) for each in self.tests())
        for inputs, targets in zip(*parts, strict=True):
            if len(inputs):  # a process may have no test samples
                found = self.measures(model(inputs, **options), inputs, targets)
                for name, (total, number) in found.items():
                    sums[name] = (sums[name][0] + total, sums[name][1] + number)
        return sums


@dataclass(frozen=True)
class Classification(Task):
    """Classification of images by cross-entropy, measured by the accuracy on the test images.

    ``augment(images, generator) -> images``, where there is one, acts on training batches.
    """

    data: ImageData
    augment: Augment | None = None
    names = ("test_accuracy",)
    kept = ("train_images", "train_labels")

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        return (inputs if self.augment is None else self.augment(inputs, generator)), targets

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        return {"test_accuracy": (float((outputs.argmax(1) == targets).sum()), len(inputs))}


Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass
class CarriedStates:
    """Boards that a training goes on with, each from the state that its last step left.

    At the age, in iterations, of its life, drawn log-uniformly from ``lives``, a board retires, and a
    fresh one takes its place. So the training sees states up to the longest life at the cost of a few
    iterations a step, and an update that leaves what it has found is shown its error.

    Attributes:
        size: boards of the pool; as long as it has fewer than a batch, none is carried.
        lives: shortest and longest, in iterations.
        noise: standard deviation of what is added to carried states, times a uniform number a board.

    Raises:
        TypeError, ValueError: a size below 1, lives out of order, or a negative noise.

    Source: states carried from step to step as in Anil et al., "Path independent equilibrium models
    can better exploit test-time computation" (2022), https://arxiv.org/abs/2211.09961, who ask for the
    same end from every start; the pool is that of Mordvintsev et al., "Growing neural cellular
    automata" (2020), https://distill.pub/2020/growing-ca.
    """

    size: int = 48
    lives: tuple[int, int] = (48, 1024)
    noise: float = 0.1
    _rows: tuple[Tensor, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        require_count("size", self.size)
        least, most = (require_count("lives", number) for number in self.lives)
        if least > most:
            raise ValueError(f"lives must be (shortest, longest), got {self.lives}")
        require_nonnegative("noise", self.noise)

    def __len__(self) -> int:
        return len(self._rows[0]) if self._rows else 0

    @property
    def ages(self) -> Tensor:
        """(len,) iterations that every board of the pool has behind it."""
        return self._rows[3]

    def clear(self) -> None:
        """Forget all boards."""
        self._rows = ()

    def join(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Batch:
        """A batch with as many carried boards behind it.

        Returns:
            Indices of the carried boards in the pool (C,), C = B or 0; inputs and targets (B + C, N);
            states (C, N, q, m), or (0,) where C = 0.
        """
        number = len(inputs) if len(self) >= len(inputs) else 0
        index = torch.randperm(len(self), generator=generator)[:number].to(inputs.device)
        if number == 0:
            return index, inputs, targets, torch.empty(0, device=inputs.device)
        puzzles, solutions, states = (rows[index] for rows in self._rows[:3])
        if self.noise > 0:
            strength = self.noise * torch.rand(number, generator=generator).to(states)
            if states.device.type != "cpu":  # the processor would draw longer than a step takes
                seed = int(torch.randint(2**62, (), generator=generator))
                generator = torch.Generator(states.device).manual_seed(seed)
            drawn = torch.randn(states.shape, generator=generator, device=states.device)
            states = states + strength.view(-1, *[1] * (drawn.dim() - 1)) * drawn.to(states)
        return index, torch.cat([inputs, puzzles]), torch.cat([targets, solutions]), states

    def put(
        self,
        index: Tensor,
        inputs: Tensor,
        targets: Tensor,
        states: Tensor,
        iterations: int,
        generator: torch.Generator,
    ) -> None:
        """Keep what a step of so many ``iterations`` left of the batch that :meth:`join` made."""
        number = len(inputs) - len(index)
        least, most = (math.log(life) for life in self.lives)
        lives = torch.exp(least + (most - least) * torch.rand(number, generator=generator))
        ages = torch.full((number,), iterations, device=inputs.device)
        lives = lives.to(inputs.device)
        fresh = (inputs[:number], targets[:number], states[:number], ages, lives)
        rows = self._rows or tuple(new[:0].clone() for new in fresh)
        rows[2][index], rows[3][index] = states[number:], rows[3][index] + iterations
        retired = index[rows[3][index] >= rows[4][index]][:number]
        for kept, new in zip(rows, fresh, strict=True):
            kept[retired] = new[: len(retired)]
        room = slice(len(retired), len(retired) + self.size - len(rows[0]))
        pairs = zip(rows, fresh, strict=True)
        self._rows = tuple(torch.cat([kept, new[room]]) for kept, new in pairs)


@dataclass(frozen=True)
class SudokuCompletion(Task):
    """Sudoku by cross-entropy of the unknown cells; measures: loss, cell accuracy, solved boards.

    The model maps puzzles (B, 81), 0 = unknown, to logits (B, 81, 9) of the digits 1 .. 9, or in training
    to (K, B, 81, 9), answers of which the mean loss is taken.

    Attributes:
        data: puzzles with their solutions.
        symmetries: drawn for every training puzzle; None: none.
        givens: fewest and most, the most below 81. Each time a puzzle is seen, further cells of its
            solution are revealed up to a number drawn uniformly between them; a puzzle with more keeps
            its own. None: puzzles stay as they are.
        carried: a pool of boards with their states, of which every batch has as many as of fresh ones,
            for a model that takes ``state``; None: fresh boards alone.
        batch: puzzles at once in the evaluation.

    Raises:
        TypeError, ValueError: givens that are no integers or out of order.
    """

    data: SudokuData
    symmetries: SudokuSymmetries | None = None
    givens: tuple[int, int] | None = None
    carried: CarriedStates | None = None
    batch: int = 100
    names = ("test_loss", "cell_accuracy", "solved_boards")
    kept = ("train_puzzles", "train_solutions")

    def __post_init__(self) -> None:
        if self.givens is not None:
            least, most = (require_count("givens", number, low=0) for number in self.givens)
            if not least <= most < self.data.train_puzzles.shape[1]:
                raise ValueError(f"givens must be fewest <= most < 81, got {self.givens}")

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        if self.givens is not None:
            least, most = self.givens
            number = torch.randint(least, most + 1, (len(inputs), 1), generator=generator)
            inputs = reveal_up_to(inputs, targets, number, generator)
        if self.symmetries is None:
            return inputs, targets
        return self.symmetries(inputs, targets, generator)

    def begin(self) -> None:
        if self.carried is not None:
            self.carried.clear()

    def run(
        self,
        forward: Callable[..., Any],
        inputs: Tensor,
        targets: Tensor,
        generator: torch.Generator,
        **options: Any,
    ) -> tuple[Tensor, int]:
        if self.carried is None:
            return super().run(forward, inputs, targets, generator, **options)
        index, inputs, targets, states = self.carried.join(inputs, targets, generator)
        outputs, states = forward(inputs, **options, state=states)
        self.carried.put(index, inputs, targets, states, options["iterations"], generator)
        return self.loss(outputs, inputs, targets), self.terms(inputs, targets)

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return int((inputs == 0).sum())

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        answers = outputs if outputs.dim() == 4 else outputs.unsqueeze(0)
        unknown = inputs == 0
        wanted = (targets[unknown] - 1).repeat(len(answers))
        chosen = answers[:, unknown].flatten(0, 1)
        return F.cross_entropy(chosen, wanted, reduction="sum") / len(answers)

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        right, unknown = board_counts(outputs.argmax(-1) + 1, inputs, targets)
        cells = int(unknown.sum())
        return {
            "test_loss": (self.loss(outputs, inputs, targets).item(), cells),
            "cell_accuracy": (int(right.sum()), cells),
            "solved_boards": (int((right == unknown).sum()), len(inputs)),
        }


@dataclass(frozen=True)
class NextToken(Task):
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
    names = ("validation_loss",)

    def __post_init__(self) -> None:
        _require_counts(self, "length", "windows", "batch", "samples")
        for part in ("train", "validation"):
            held = len(getattr(self.data, part))
            if held <= self.length:
                raise ValueError(
                    f"length must be below the {held} symbols for {part}, got {self.length}"
                )

    @cached_property
    def inputs(self) -> Tensor:  # type: ignore[override]
        """Numbers (N,) of the windows of an epoch; :meth:`augmented` draws where they begin."""
        number = self.samples or max(1, (len(self.data.train) - 1) // self.length)
        return torch.arange(number, device=self.data.train.device)

    @property
    def targets(self) -> Tensor:
        """The same numbers."""
        return self.inputs

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        """Random windows (B, n), and the symbols that follow each of theirs, (B, n)."""
        most = len(self.data.train) - self.length
        return self._read(self.data.train, torch.randint(most, (len(inputs),), generator=generator))

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return targets.numel()

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1).float(), targets.flatten(), reduction="sum")

    def tests(self) -> Pair:
        most = len(self.data.validation) - self.length - 1
        starts = torch.linspace(0, most, self.windows, dtype=torch.float64).round().long()
        return self._read(self.data.validation, starts)

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        return {"validation_loss": (self.loss(outputs, inputs, targets).item(), targets.numel())}

    def _read(self, ids: Tensor, starts: Tensor) -> Pair:
        """Windows that begin at ``starts`` (B,), and the same one symbol later."""
        places = starts[:, None] + torch.arange(self.length + 1)
        window = ids[places.to(ids.device)]
        return window[:, :-1], window[:, 1:]


LEAST_ERROR = 1e-10  # of an image, where its PSNR is 100 dB: one without error would be infinite


@dataclass(frozen=True)
class MaskedImages(Task):
    r"""Reconstruction of hidden patches, by the mean squared error of their pixels.

    The model maps images (B, C, S, S), NaN in hidden patches, to predicted images (B, C, S, S). The
    loss is the mean over hidden patches i, of all images, of ``|predicted_i - p_i|^2 / P``, P pixels
    a patch; visible patches do not count. Every batch hides other patches. How many of an image's N
    patches is drawn uniformly from 1 .. ``round(masked N)``, as in the paper.

    Measures, on masks of ``round(masked N)`` patches that depend on ``seed`` alone: ``test_loss``, and
    ``test_psnr``, the mean over the images of ``-10 log10`` of the error of their hidden pixels in dB.

    Attributes:
        data: images; their labels are not used.
        patch: height = width of a patch.
        masked: share of the patches that is hidden, in (0, 1); at least one is and one is not.
        test: number of test images; None: all.
        seed: of the masks of the test images.
        batch: images at once in the evaluation.

    Raises:
        ValueError: a size or share is out of range, or the patch does not divide the image.

    Source: Hu, Zou, Xu, "Hyper-SET" (https://arxiv.org/abs/2502.11646), whose shares these are; He et
    al., "Masked Autoencoders" (https://arxiv.org/abs/2111.06377), for the error on hidden patches.
    """

    data: ImageData
    patch: int
    masked: float = 0.4
    test: int | None = None
    seed: int = 0
    batch: int = 256
    names = ("test_loss", "test_psnr")
    kept = ("train_images",)  # :meth:`augmented` hides patches

    def __post_init__(self) -> None:
        _require_counts(self, "patch", "batch", "test")
        if not 0 < self.masked < 1:
            raise ValueError(f"masked must lie in (0, 1), got {self.masked!r}")
        if self.patches < 2:
            raise ValueError(
                f"patch must leave 2 patches at least in an image, got {self.patch} for "
                f"{tuple(self.data.train_images.shape[1:])}"
            )

    @property
    def patches(self) -> int:
        """N, patches of an image."""
        return split_patches(self.data.train_images[:1], self.patch).shape[1]

    @property
    def most(self) -> int:
        """Hidden patches of a test image, the most of a training image."""
        return min(max(1, round(self.masked * self.patches)), self.patches - 1)

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        """Images with NaN in hidden patches, and the same images whole."""
        counts = torch.randint(1, self.most + 1, (len(inputs),), generator=generator)
        return self._hide(inputs, counts, generator), inputs

    def terms(self, inputs: Tensor, targets: Tensor) -> int:
        return int(hidden_patches(inputs, self.patch).sum())

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.errors(outputs, inputs, targets).sum()

    def errors(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """(B, N) mean squared errors of the hidden patches of ``inputs``, 0 for visible ones."""
        wanted = split_patches(targets, self.patch)
        error = (split_patches(outputs.to(wanted.dtype), self.patch) - wanted).square().mean(-1)
        return error.masked_fill(~hidden_patches(inputs, self.patch), 0.0)

    def tests(self) -> Pair:
        """The test images with their hidden patches NaN, and whole."""
        images, _ = self.data.some_test(self.test)
        generator = torch.Generator().manual_seed(self.seed)
        return self._hide(images, torch.full((len(images),), self.most), generator), images

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
        """Sums and numbers of the measures of predicted images, of a model or a baseline."""
        errors = self.errors(outputs, inputs, targets).double()
        each = errors.sum(1) / self.most  # every image has as many hidden patches as any other
        decibels = -10 * each.clamp_min(LEAST_ERROR).log10()
        return {
            "test_loss": (errors.sum().item(), float(self.terms(inputs, targets))),
            "test_psnr": (decibels.sum().item(), float(len(inputs))),
        }

    def _hide(self, images: Tensor, counts: Tensor, generator: torch.Generator) -> Tensor:
        """NaN in ``counts`` (B,) patches of each image, drawn uniformly."""
        order = torch.rand(len(counts), self.patches, generator=generator).argsort(1)
        hidden = order.argsort(1) < counts.unsqueeze(1)
        return hide_patches(images, hidden.to(images.device), self.patch)


def _require_counts(task: Task, *names: str) -> None:
    for name in names:
        if getattr(task, name) is not None:
            require_count(name, getattr(task, name))


def describe(name: str, value: float) -> str:
    """A measure as text: losses as numbers, a PSNR in decibels, everything else in per cent."""
    words = name.replace("_", " ")
    if name.endswith("psnr"):
        return f"{words.replace('psnr', 'PSNR')} {value:.2f} dB"
    return f"{words} {value:.4f}" if name.endswith("loss") else f"{words} {100 * value:.2f} %"


@torch.no_grad()
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
    model.eval()
    options = {} if iterations is None else {"iterations": iterations}
    outputs = [model(part, **options).argmax(1) for part in images.split(size)]
    return (torch.cat(outputs) == labels).double().mean().item()
