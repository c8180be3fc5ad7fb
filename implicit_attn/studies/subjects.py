"""What is studied: a trained model, the test samples, and ways to look into the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from implicit_attn.data import ImageData, load, load_sudoku
from implicit_attn.deq import DEQ
from implicit_attn.models import RecurrentBackbone, SudokuModel, load_model
from implicit_attn.models.energy_transformer import EnergyTransformerLayer
from implicit_attn.studies.measures import Measure, measure_boards, measure_classes
from implicit_attn.studies.tables import Table
from implicit_attn.updates import Update
from implicit_attn.updates.hyperset_step import HyperSETLayer

BATCH = 128
FILES_OF_A_RUN = ("weights", "checkpoint")  # then the folder says which run it was
SUDOKU_OPTIONS = ("train", "test", "source", "seed")  # of the settings, that say which puzzles
Energies = Callable[[Tensor, Tensor], Tensor]  # states (B, N, d), tokens (B, N, d) -> (B,)


class DataDiffers(ValueError):
    """The data that was asked for does not go with the model."""


class HeldStep(Update):
    """The step that a recurrent backbone makes in its last iteration of training, for ever.

    A recurrence whose steps depend on time has no fixed point to speak of; with time held at T it
    has, and a solver can look for it. Of several layers one after the other it is the last one's
    step, of layers in turn one round.

    Args:
        backbone: whose step it is.
    """

    def __init__(self, backbone: RecurrentBackbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        source = z if x is None else x
        last = self.backbone.iterations - 1
        times = torch.arange(1, last + 2, device=z.device)
        cyclic = self.backbone.order == "cyclic"
        for layer in self.backbone.layers if cyclic else self.backbone.layers[-1:]:
            z = layer.advance(z, layer.context(source, times), last, mask)
        return z


@dataclass(frozen=True)
class Subject:
    """A trained model with ``tokens`` and ``classify``, and the test samples for the studies.

    Attributes:
        name: short, for file names.
        title: for figures.
        model: with ``tokens(inputs)``, ``classify(state)``, and ``backbone`` or ``layer`` between.
        inputs, targets: test samples.
        trained: iterations in training; for an equilibrium the median evaluations per sample.
        rtol: tolerance of an equilibrium in training.
        measure: of outputs.
        history: rows of the epochs of training, if any.
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
        """The backbone, if it is an unrolled one."""
        backbone = getattr(self.model, "backbone", None)
        return backbone if isinstance(backbone, RecurrentBackbone) else None

    @property
    def layer(self) -> DEQ:
        """The equilibrium layer; of an unrolled model, ``DEQ(HeldStep(backbone))``.

        Raises:
            TypeError: the model has neither.
        """
        if self.recurrence is not None:
            return DEQ(HeldStep(self.recurrence), on_failure="ignore")
        owner = getattr(self.model, "backbone", self.model)
        layer = getattr(owner, "layer", None)
        if not isinstance(layer, DEQ):
            raise TypeError(
                f"model must hold a RecurrentBackbone or a DEQ layer, got {type(owner)}"
            )
        return layer

    @property
    def energy(self) -> Energies | None:
        """``energy(z, x) -> (B,)`` that the model descends, or None."""
        return energy_of(self.recurrence if self.recurrence is not None else self.layer)

    def tokens(self, inputs: Tensor) -> Tensor:
        """The backbone's input, (B, N, d)."""
        return self.model.tokens(inputs)

    def classify(self, z: Tensor) -> Tensor:
        """Outputs for a state."""
        return self.model.classify(z)

    def parts(self, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        """The samples in batches, in order."""
        yield from zip(self.inputs.split(size), self.targets.split(size), strict=True)

    def first(self, number: int) -> Subject:
        """The same with the first ``number`` samples, or all where there are fewer."""
        return replace(self, inputs=self.inputs[:number], targets=self.targets[:number])

    def exact(self) -> Subject:
        """The same in float64, where energies are known well beyond their fall."""
        inputs = self.inputs.double() if self.inputs.is_floating_point() else self.inputs
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)


def energy_of(part: RecurrentBackbone | DEQ) -> Energies | None:
    """The energy that a layer descends, of an unrolled one as its last iteration sees it."""
    if isinstance(part, DEQ):
        if not part.update.monitored:
            return None
        update: Any = part.update
        return lambda z, x: update.joint(z, update.prepare(x))[1]
    layer, index = part.layers[-1], part.iterations - 1
    if isinstance(layer, HyperSETLayer):
        return lambda z, x: sum(layer.observe(z, index)[:2], z.new_zeros(len(z)))
    if isinstance(layer, EnergyTransformerLayer):
        return lambda z, x: layer.energy(z)
    return None


def open_subject(path: str | Path, data: str | None = None, samples: int | None = None) -> Subject:
    """The model of a checkpoint with the test samples of its data.

    Args:
        path: of a checkpoint that :func:`implicit_attn.models.load_model` reads.
        data: name of a data set of images; None: what the checkpoint's settings say. The puzzles
            of a Sudoku model are always those of its settings.
        samples: at most so many test samples; None: all.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such data.
        ValueError: the checkpoint says neither how its model is built nor what data it saw.
        DataDiffers: ``data`` is given for a Sudoku model, or its images or classes are not those
            that the model takes.
    """
    model, progress = load_model(path)
    settings, history = progress["settings"], progress.get("history") or []
    if isinstance(model, SudokuModel):
        if data is not None:
            raise DataDiffers(f"{path} solves Sudoku, data must be None, got {data!r}")
        chosen = {key: settings[key] for key in SUDOKU_OPTIONS if key in settings}
        held = load_sudoku(**chosen)
        name, inputs, targets = held.name, held.test_puzzles, held.test_solutions
        measure: Measure = measure_boards
    else:
        name = settings.get("data") if data is None else data
        if not isinstance(name, str):
            raise ValueError(
                f"{path} does not say what data it was trained on; got {name!r}, give data"
            )
        images = load(name)
        _check_images(images, settings["model"], path)
        inputs, targets, measure = images.test_images, images.test_labels, measure_classes
    backbone = settings["model"]["backbone"]
    trained = int(history[-1].get("evaluations", 0)) if history else 0
    path = Path(path)
    subject = Subject(
        path.resolve().parent.name if path.stem in FILES_OF_A_RUN else path.stem,
        "",
        model,
        inputs,
        targets,
        trained or int(getattr(model, "backbone").iterations),  # noqa: B009
        float(settings.get("rtol") or 1e-3),
        measure,
        history,
    )
    return _titled(subject, name, backbone["name"]).first(
        len(inputs) if samples is None else samples
    )


def _check_images(images: ImageData, model: Mapping[str, Any], path: str | Path) -> None:
    """Images and classes must be those of the model's specification."""
    wanted = (model["channels"], model["image_size"], model["image_size"])
    shape = tuple(images.test_images.shape[1:])
    if (shape, images.classes) != (wanted, model["classes"]):
        raise DataDiffers(
            f"{path} takes images {wanted} of {model['classes']} classes, but {images.name} has "
            f"{shape} of {images.classes}"
        )


def _titled(subject: Subject, data: str, backbone: str) -> Subject:
    number = sum(p.numel() for p in subject.model.parameters())
    steps = "iterations" if subject.recurrence is not None else "evaluations (median)"
    title = f"{data}, {backbone}: {subject.trained} {steps} in training, {number:,} parameters"
    return replace(subject, title=title)
