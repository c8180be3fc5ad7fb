"""What is studied: a trained model, its test samples, and how well outputs fit the targets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.block import EquilibriumBlock
from implicit_attn.command_line import LARGEST_SEED
from implicit_attn.data import LOADERS, ImageData, board_counts, load, load_sudoku, some_samples
from implicit_attn.data.sudoku import SOURCES
from implicit_attn.data.unpacking import damaged
from implicit_attn.deq import DEQ
from implicit_attn.models import (
    EquilibriumTransformer,
    ImageClassifier,
    RecurrentBackbone,
    SudokuModel,
    load_model,
)
from implicit_attn.models.energy_transformer import EnergyTransformerLayer
from implicit_attn.studies.tables import Table
from implicit_attn.updates import Update
from implicit_attn.updates.hyperset_step import HyperSETLayer, refuse_memory
from solvers.core.checks import require_nonnegative

BATCH = 128
CHECKPOINT_STEMS = ("weights", "checkpoint")  # files of a run, which is named by its folder
MOST_PUZZLES = 1_000_000  # of a checkpoint's settings
SUDOKU_OPTIONS = ("train", "test", "source", "seed")  # the settings that determine the puzzles
# Of each sample: what is summed, (B,), and the number of terms in the sum, (B,).
Measures = dict[str, tuple[Tensor, Tensor]]
Measure = Callable[[Tensor, Tensor, Tensor], Measures]  # outputs, inputs, targets
Energies = Callable[[Tensor, Tensor], Tensor]  # states (B, N, d), tokens (B, N, d) -> (B,)


def measure_classes(logits: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
    """Accuracy and cross-entropy of logits (B, classes) for labels ``targets`` (B,)."""
    right = (logits.argmax(1) == targets).double()
    one = torch.ones_like(right)
    loss = F.cross_entropy(logits.double(), targets, reduction="none")
    return {"accuracy": (right, one), "loss": (loss, one)}


def measure_boards(logits: Tensor, inputs: Tensor, targets: Tensor) -> Measures:
    """Share of boards without a wrong cell, accuracy and cross-entropy of the unknown cells.

    Logits (B, 81, 9) of the digits 1 .. 9, puzzles (B, 81) with 0 = unknown, solutions (B, 81).
    """
    right, unknown = board_counts(logits.argmax(-1) + 1, inputs, targets)
    losses = F.cross_entropy(logits.double().transpose(1, 2), targets - 1, reduction="none")
    loss = (losses * (inputs == 0)).sum(1)
    whole, cells = (right == unknown).double(), unknown.double()
    accuracy = (whole, torch.ones_like(whole))
    return {"accuracy": accuracy, "cell_accuracy": (right.double(), cells), "loss": (loss, cells)}


class Pool:
    """Means over the samples of several batches."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}

    def add(self, measures: Measures) -> None:
        for name, (values, terms) in measures.items():
            total, number = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (total + values.sum().item(), number + terms.sum().item())

    def means(self) -> dict[str, float]:
        return {name: total / number for name, (total, number) in self.sums.items()}


class DataDiffers(ValueError):
    """The data that was asked for does not fit the model."""


class HeldStep(Update):
    """The step of a recurrent backbone's last iteration of training, as an update of its own.

    A recurrence whose steps depend on the iteration (its time) has no fixed point. With the time
    held at that of the last iteration it has one, and a solver can look for it. Of several layers
    in sequence it is the last layer's step; of layers in cyclic order, one step of each.
    """

    def __init__(self, backbone: RecurrentBackbone) -> None:
        super().__init__()
        refuse_memory(backbone.layers)
        self.backbone = backbone

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        backbone, source = self.backbone, z if x is None else x
        times = torch.arange(1, backbone.iterations + 1, device=z.device)
        for layer in backbone.layers if backbone.order == "cyclic" else backbone.layers[-1:]:
            z = layer.advance(z, layer.context(source, times), backbone.iterations - 1, mask)
        return z


class BlockStep(Update):
    """A step of an equilibrium block's solve, of the tokens behind the block instead of its state.

    ``f(y, x) = x + g(y - x)``, where ``g`` is the update of the block's ``DEQ`` for its input: what is
    classified depends on ``y = x + z`` alone, and a solve starts at ``y = x``. Residuals are relative
    to ``|y|``, not to ``|z|`` as in the block itself.

    Args:
        block: of self-attention or none, with a state of the tokens' width, in evaluation mode.

    Raises:
        TypeError: the state is mapped to the tokens by a matrix, which has no inverse.
    """

    def __init__(self, block: EquilibriumBlock) -> None:
        super().__init__()
        if block.output is not None:
            raise TypeError("block must have state_dim=None: its tokens do not tell its state")
        self.block: Any = block
        update: Any = block.deq.update
        self.symmetric, self.monitored = update.symmetric, True

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        if isinstance(x, tuple):
            return x
        _, tokens, _ = self.block.arguments(x)
        return x, self.block.deq.update.prepare(tokens, mask=mask)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        tokens, given = self.prepare(x, mask=mask)
        return tokens + self.block.deq.update(z - tokens, given, mask=mask)

    def joint(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        tokens, given = self.prepare(x, mask=mask)
        image, energy, gradient = self.block.deq.update.joint(z - tokens, given, mask=mask)
        return tokens + image, energy, gradient


@dataclass(frozen=True)
class Subject:
    """A trained model with ``tokens`` and ``classify``, and the test samples for the studies.

    Attributes:
        name: short, for file names.
        title: for figures.
        model: with ``tokens(inputs)``, ``classify(state)``, and ``backbone`` or ``layer`` between.
        inputs, targets: test samples, (N, ...) each.
        trained: iterations in training; for an equilibrium the median evaluations per sample.
        rtol: tolerance of an equilibrium in training.
        measure: of the outputs.
        history: a row for each epoch of training, if known.
    """

    name: str
    title: str
    model: Any
    inputs: Tensor
    targets: Tensor
    trained: int
    rtol: float = 1e-3
    measure: Measure = measure_classes
    history: Table | None = None

    @property
    def recurrence(self) -> RecurrentBackbone | None:
        """The backbone of an unrolled model; None for another model."""
        backbone = getattr(self.model, "backbone", None)
        return backbone if isinstance(backbone, RecurrentBackbone) else None

    def require_recurrence(self) -> RecurrentBackbone:
        """The backbone of an unrolled model; TypeError for another model."""
        if self.recurrence is None:
            raise TypeError(f"subject must be an unrolled model, got {type(self.model)}")
        return self.recurrence

    @property
    def layer(self) -> DEQ:
        """The equilibrium layer: of an unrolled model ``DEQ(HeldStep(backbone))``, of a single
        equilibrium block ``DEQ(BlockStep(block))``; TypeError for another model."""
        if self.recurrence is not None:
            return DEQ(HeldStep(self.recurrence), on_failure="ignore")
        owner = getattr(self.model, "backbone", self.model)
        if isinstance(owner, EquilibriumTransformer):
            if len(owner.blocks) > 1:
                raise TypeError(
                    f"model must have one equilibrium block, got {len(owner.blocks)}; "
                    "train with --layers 1"
                )
            block = owner.blocks[0]
            step = BlockStep(block).train(block.training)
            return DEQ(step, max_steps=block.deq.max_steps, on_failure=block.deq.on_failure)
        layer = getattr(owner, "layer", None)
        if not isinstance(layer, DEQ):
            raise TypeError(
                f"model must hold a RecurrentBackbone or a DEQ layer, got {type(owner)}"
            )
        return layer

    @property
    def energy(self) -> Energies | None:
        """``energy(z, x) -> (B,)`` that the model descends, a recurrence in its last iteration."""
        if self.recurrence is None:
            update: Any = self.layer.update
            return (
                (lambda z, x: update.joint(z, update.prepare(x))[1]) if update.monitored else None
            )
        layer, index = self.recurrence.layers[-1], self.recurrence.iterations - 1
        if isinstance(layer, HyperSETLayer) and layer.is_plain:
            return lambda z, x: sum(layer.observe(z, index)[:2], z.new_zeros(len(z)))
        if isinstance(layer, EnergyTransformerLayer):
            return lambda z, x: layer.energy(z)
        return None

    def tokens(self, inputs: Tensor) -> Tensor:
        """The backbone's input, (B, N, d)."""
        return self.model.tokens(inputs)

    def classify(self, z: Tensor) -> Tensor:
        """Outputs for a state."""
        return self.model.classify(z)

    def parts(self, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples in batches, in order."""
        yield from zip(self.inputs.split(size), self.targets.split(size), strict=True)

    def first(self, number: int | None) -> Subject:
        """The same with ``number`` samples as of :func:`some_samples`; None: with all."""
        part = slice(None) if number is None else some_samples(self.targets, number)
        return replace(self, inputs=self.inputs[part], targets=self.targets[part])

    def exact(self) -> Subject:
        """The same in float64, so that small differences of energies are resolved."""
        x = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=x)


def open_subject(path: str | Path, data: str | None = None, samples: int | None = None) -> Subject:
    """The model of a checkpoint with the test samples of its data.

    Args:
        path: of a checkpoint that :func:`implicit_attn.models.load_model` reads.
        data: name of a data set of images; None: the one in the checkpoint's settings. The puzzles
            of a Sudoku model are always those of its settings.
        samples: at most so many test samples; None: all.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such data.
        ValueError: the checkpoint lacks the model's specification or its data, or is of another kind.
        DataDiffers: ``data`` is given for a Sudoku model, or its images or classes are not those
            that the model takes.
    """
    model, progress = load_model(path)
    path = Path(path)
    if not isinstance(model, ImageClassifier | SudokuModel):
        kind = type(model).__name__
        raise ValueError(f"{path} must be of an image classifier or a Sudoku model, got a {kind}")
    settings, history = progress["settings"], progress.get("history") or []
    with damaged(path, "a history of epochs with evaluations, and rtol in the settings"):
        trained = int(history[-1].get("evaluations", 0)) if history else 0
        rtol = require_nonnegative("rtol", settings.get("rtol") or 1e-3)
    if isinstance(model, SudokuModel):
        if data is not None:
            raise DataDiffers(f"{path} solves Sudoku, data must be None, got {data!r}")
        held = load_sudoku(**_puzzle_options(settings, path))
        name, inputs, targets = held.name, held.test_puzzles, held.test_solutions
        measure: Measure = measure_boards
    else:
        name = settings.get("data") if data is None else data
        if not isinstance(name, str) or name not in LOADERS:
            raise ValueError(
                f"{path} does not say what data it was trained on; got {name!r}, give data, one of "
                f"{', '.join(LOADERS)}"
            )
        images = load(name)
        _check_images(images, settings["model"], path)
        inputs, targets, measure = images.test_images, images.test_labels, measure_classes
    subject = Subject(
        path.resolve().parent.name if path.stem in CHECKPOINT_STEMS else path.stem,
        "",
        model,
        inputs,
        targets,
        trained or int(getattr(model, "backbone").iterations),  # noqa: B009
        rtol,
        measure,
        history,
    )
    number = sum(p.numel() for p in model.parameters())
    steps = "iterations" if subject.recurrence is not None else "evaluations (median)"
    title = (
        f"{name}, {settings['model']['backbone']['name']}: {subject.trained} {steps} in training"
    )
    return replace(subject, title=f"{title}, {number:,} parameters").first(samples)


def _puzzle_options(settings: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The arguments of ``load_sudoku`` in the settings of a checkpoint."""
    chosen = {key: settings[key] for key in SUDOKU_OPTIONS if key in settings}
    for name, value in chosen.items():
        low, high = (0, LARGEST_SEED) if name == "seed" else (1, MOST_PUZZLES)
        whole = type(value) is int and low <= value <= high  # True and False are none
        if not (value in SOURCES if name == "source" else whole):
            raise ValueError(f"{path}: {name} is {value!r}, expected what load_sudoku takes")
    return chosen


def _check_images(images: ImageData, model: Mapping[str, Any], path: str | Path) -> None:
    """Images and classes must be those of the model's specification."""
    with damaged(path, "channels, image_size and classes in the specification"):
        wanted, classes = (model["channels"], *2 * [model["image_size"]]), model["classes"]
    shape = tuple(images.test_images.shape[1:])
    if (shape, images.classes) != (wanted, classes):
        raise DataDiffers(
            f"{path} takes images {wanted} of {model['classes']} classes, but {images.name} has "
            f"{shape} of {images.classes}"
        )
