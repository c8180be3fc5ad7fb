"""What is studied, a layer or a model with its inputs; and what is found, tables with their figure."""

from __future__ import annotations

import copy
import csv
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.checkpoint import read_progress
from implicit_attn.data import LOADERS, load, some_samples
from implicit_attn.data.files import damaged
from implicit_attn.deq import DEQ
from implicit_attn.models import ImageClassifier, RecurrentBackbone, SpinClassifier, load_model
from implicit_attn.models.backbones import EnergyTransformerLayer
from implicit_attn.optional import require
from implicit_attn.updates import Update
from implicit_attn.updates.hyperset import HyperSETLayer, refuse_memory
from implicit_attn.updates.update import EnergyStep
from implicit_attn.weights import load_pretrained, pretrained_models
from solvers.core.checks import require_nonnegative

Table = list[dict[str, Any]]
DPI = 110
WINDOW = 10.0  # percentage points of accuracy that are drawn below the best
BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"
NOTE_BOX = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}


def write_table(path: str | Path, table: Table) -> None:
    """Write a table as CSV; ValueError if it is empty or a row has a key that the first lacks."""
    if not table:
        raise ValueError("table must have at least one row, got none")
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def format_table(table: Table) -> str:
    """The table as aligned text."""
    if not table:
        return "(empty)"
    names = list(table[0])
    lines = [names, *([_cell(row[name]) for name in names] for row in table)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Study(ABC):
    """What a study finds. Its fields that are lists are tables, and ``print`` shows some of them.

    Example:
        >>> from implicit_attn import DEQ, studies
        >>> from implicit_attn.updates import MeanFieldAttention
        >>> layer = DEQ(MeanFieldAttention(4, 2, bound=0.5))
        >>> found = studies.paths(layer, torch.randn(8, 4, 2))
        >>> [row["start"] for row in found.summary]
        ['input', 'zero', 'random 1', 'random 2']
        >>> drawn = found.figure()  # or found.figure("paths.png"), or found.save("runs/paths")
    """

    printed: ClassVar[tuple[str, ...]] = ()  # names of the tables that ``str`` shows
    size: ClassVar[tuple[float, float]] = (16, 9)  # of the figure, in inches

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, without empty ones."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: each for name, each in found.items() if isinstance(each, list) and each}

    @abstractmethod
    def draw(self, figure: Any) -> None:
        """Draw into an empty figure of matplotlib."""

    def figure(self, path: str | Path | None = None, title: str = "") -> Any:
        """The figure of matplotlib, also written to ``path`` where one is given.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure(self.size, title)
        self.draw(figure)
        if path is not None:
            figure.savefig(path, dpi=DPI)
        return figure

    def save(self, base: str | Path, title: str = "") -> list[Path]:
        """Write ``base.png`` and ``base-NAME.csv`` for each table, and return their paths.

        Folders are made.
        """
        base = Path(base)
        base.parent.mkdir(parents=True, exist_ok=True)
        paths = [base.with_name(f"{base.name}.png")]
        self.figure(paths[0], title)
        for name, table in self.tables.items():
            paths.append(base.with_name(f"{base.name}-{name}.csv"))
            write_table(paths[-1], table)
        return paths

    def __str__(self) -> str:
        shown = [name for name in self.printed if name in self.tables]
        return "\n\n".join(f"{name}\n{format_table(self.tables[name])}" for name in shown)


def median_and_band(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 10 % quantile ``name_10`` and 90 % quantile ``name_90``, without NaN."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=values.device)
    low, middle, high = torch.nanquantile(values.double(), shares).tolist()
    return {name: middle, f"{name}_10": low, f"{name}_90": high}


def median_and_largest(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 90 % quantile ``name_90`` and maximum ``name_largest``."""
    values = values.double()
    found = values.median(), values.quantile(0.9), values.max()
    return {name + end: x.item() for end, x in zip(("", "_90", "_largest"), found, strict=True)}


def histogram(evaluations: Tensor, **columns: Any) -> Table:
    """Rows with ``columns``, evaluations and samples: how many samples took so many evaluations."""
    values, counts = evaluations.unique(return_counts=True)
    return [
        {**columns, "evaluations": value, "samples": count}
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
    ]


# What the figures share.


def new_figure(size: tuple[float, float], title: str = "") -> Any:
    """A figure of matplotlib of so many inches that no window shows."""
    kind = require("matplotlib.figure", extra="examples").Figure
    figure = kind(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13)
    return figure


def draw_band(
    axes: Any,
    rows: Table,
    step: str,
    key: str,
    color: str,
    label: str | None,
    *,
    alpha: float = 0.2,
    **line: Any,
) -> None:
    """Column ``key`` against column ``step``, with the band from ``key_10`` to ``key_90``."""
    steps = [row[step] for row in rows]
    low, high = ([row[f"{key}_{percent}"] for row in rows] for percent in (10, 90))
    axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0)
    axes.plot(steps, [row[key] for row in rows], color=color, label=label, **line)


def legend_below(figure: Any, axes: Any) -> None:
    """The legend of one panel, in one row below all panels that it explains."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def show_best(axes: Any, values: list[float]) -> None:
    """Limit a panel of accuracies (%) to the ``WINDOW`` points below the best of ``values``."""
    axes.set_ylim(max(min(values), max(values) - WINDOW) - 0.5, max(values) + 0.5)


def leave_empty(axes: Any, reason: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")


BATCH = 128
RUN_FILES = ("weights", "checkpoint")  # of a run, which is named by its folder
Measure = Callable[[Tensor, Tensor, Tensor], dict[str, float]]  # of outputs, inputs, targets


def measure_classes(logits: Tensor, inputs: Any, targets: Tensor) -> dict[str, float]:
    """Accuracy and cross-entropy of logits (N, classes) for labels ``targets`` (N,)."""
    right = (logits.argmax(1) == targets).double().mean().item()
    return {"accuracy": right, "loss": F.cross_entropy(logits.double(), targets).item()}


class HeldStep(Update):
    """The step of a recurrent backbone's last iteration of training, as an update of its own.

    A recurrence whose steps depend on the iteration (its time) has no fixed point. With the time
    held at that of the last iteration it has one, and a solver can look for it. Of several layers it
    is the last layer's step.
    """

    def __init__(self, backbone: RecurrentBackbone) -> None:
        super().__init__()
        refuse_memory(backbone.layers)
        self.backbone = backbone

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        backbone, source = self.backbone, z if x is None else x
        times = torch.arange(1, backbone.iterations + 1, device=z.device)
        layer = backbone.layers[-1]
        return layer.advance(z, layer.context(source, times), backbone.iterations - 1, mask)


@contextmanager
def answering(layer: DEQ, answer: Callable[..., Any]) -> Iterator[None]:
    """Within the block the layer returns ``answer(x, mask)`` in place of its fixed point."""
    layer.forward = answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


@dataclass(frozen=True)
class Subject:
    """A layer or a model to be studied, with its inputs.

    Attributes:
        model: a ``DEQ``; a module that calls one, of which the first is studied; or a model around
            a ``RecurrentBackbone`` with ``tokens`` and ``classify``.
        inputs: of the model, (N, ...); of a bare ``DEQ`` any pytree that it takes.
        targets: (N, ...), what its outputs are measured against, or None.
        trained: iterations in training; of an equilibrium the median evaluations per sample.
        rtol: tolerance of an equilibrium in training.
        measure: of outputs, inputs and targets; classes by default.
        name, title: for files and figures.
        history: a row for each epoch of training, if known.
        observations: of the training, if any were kept: before it, and after every epoch.
    """

    model: Any
    inputs: Any
    targets: Tensor | None = None
    trained: int = 0
    rtol: float = 1e-3
    measure: Measure = measure_classes
    name: str = "layer"
    title: str = ""
    history: Table | None = None
    observations: list[Any] | None = None

    @property
    def recurrence(self) -> RecurrentBackbone | None:
        """The backbone of an unrolled model; None for another model."""
        backbone = getattr(self.model, "backbone", None)
        return backbone if isinstance(backbone, RecurrentBackbone) else None

    @property
    def layer(self) -> DEQ:
        """The layer that is solved: the model's first ``DEQ``, or ``DEQ(HeldStep(backbone))``."""
        if self.recurrence is not None:
            return DEQ(HeldStep(self.recurrence), on_failure="ignore")
        found = next((each for each in self.model.modules() if isinstance(each, DEQ)), None)
        if found is None:
            kind = type(self.model).__name__
            raise TypeError(f"model must hold a DEQ or a RecurrentBackbone, got a {kind} without")
        return found

    def given(self, inputs: Any) -> tuple[Any, Tensor | None]:
        """What the layer is given for these inputs of the model: its input and its mask."""
        if isinstance(self.model, DEQ):
            return inputs, None
        if self.recurrence is not None:
            return self.model.tokens(inputs), None
        seen: list[Any] = []

        def keep(x: Any, mask: Tensor | None = None, **options: Any) -> Any:
            seen.append((x, mask))
            return DEQ.forward(layer, x, mask, **options | {"on_failure": "ignore"})

        layer = self.layer
        with torch.no_grad(), answering(layer, keep):
            self.model(inputs)
        return seen[0]

    def outputs(self, inputs: Any, z: Any) -> Any:
        """The model's outputs where ``z`` is the layer's state."""
        if isinstance(self.model, DEQ):
            return z
        if self.recurrence is not None:
            return self.model.classify(z)
        with answering(self.layer, lambda *_, **__: z):
            return self.model(inputs)

    def judge(self, outputs: Any) -> dict[str, float]:
        """The measures of the model's outputs; nothing without targets."""
        return {} if self.targets is None else self.measure(outputs, self.inputs, self.targets)

    def energy(self, z: Any, x: Any, mask: Tensor | None = None) -> Tensor | None:
        """(B,): what the layer, or a recurrence in its last iteration, descends; None for nothing."""
        if self.recurrence is None:
            update = self.layer.update
            prepared = update.prepare(x, mask=mask)
            return update.joint(z, prepared, mask=mask)[1] if has_energy(update) else None
        layer, index = self.recurrence.layers[-1], self.recurrence.iterations - 1
        if isinstance(layer, HyperSETLayer) and layer.is_plain:
            return sum(layer.observe(z, index)[:2], z.new_zeros(len(z)))
        return layer.energy(z) if isinstance(layer, EnergyTransformerLayer) else None

    def parts(self, size: int = BATCH) -> Iterator[tuple[Any, Tensor | None]]:
        """The samples in batches, in order."""
        if not isinstance(self.inputs, Tensor):
            yield self.inputs, self.targets
            return
        targets = [None] * -(-len(self.inputs) // size)
        answers = targets if self.targets is None else self.targets.split(size)
        yield from zip(self.inputs.split(size), answers, strict=True)

    def first(self, number: int | None) -> Subject:
        """The same with ``number`` samples as of ``data.some_samples``; None: with all."""
        if number is None or self.targets is None:
            return self
        part = some_samples(self.targets, number)
        return replace(self, inputs=self.inputs[part], targets=self.targets[part])

    def exact(self) -> Subject:
        """The same in float64, so that small differences of energies are resolved."""

        def double(x: Tensor) -> Tensor:
            return x.double() if x.is_floating_point() else x

        inputs = pytree.tree_map_only(Tensor, double, self.inputs)
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)


def has_energy(update: Update) -> bool:
    """Whether the update descends an energy, also one that its solver does not look at."""
    return update.monitored or isinstance(update, EnergyStep)


def subject_of(model: Any, inputs: Any = None, targets: Tensor | None = None) -> Subject:
    """What a study is given: a :class:`Subject`, a name of shipped weights, or a model with inputs.

    Raises:
        TypeError: inputs are missing, or given with a subject that has its own; no layer is found.
    """
    if isinstance(model, str):
        model = open_subject(model)
    if isinstance(model, Subject):
        if inputs is not None or targets is not None:
            raise TypeError("x and targets must be None where the subject has its own")
        return model
    if not isinstance(model, nn.Module) or inputs is None:
        raise TypeError(
            f"layer must be a DEQ or a model that holds one, with its input x; got "
            f"{type(model).__name__} and {type(inputs).__name__}"
        )
    subject = Subject(model.eval(), inputs, targets, title=type(model).__name__)
    if subject.recurrence is not None:
        return replace(subject, trained=subject.recurrence.iterations)
    layer = subject.layer
    with torch.no_grad():
        solved = layer.solve(*subject.given(inputs), on_failure="ignore")
    tolerance = layer.tolerance or solvers.Tolerance()
    rtol = float(torch.as_tensor(tolerance.rtol).max()) or 1e-3
    return replace(subject, trained=max(1, int(solved.evaluations.median())), rtol=rtol)


def open_subject(
    source: str | Path, data: str | None = None, samples: int | None = None
) -> Subject:
    """The image classifier of a checkpoint, or of shipped weights, with the test images of its data.

    Args:
        source: a name of :func:`implicit_attn.pretrained_models`, or the path of a checkpoint.
        data: name of a data set of images; None: the one in the checkpoint's settings.
        samples: at most so many test samples; None: all.

    Raises:
        FileNotFoundError: there is no such checkpoint, or no such data.
        ValueError: the checkpoint lacks the model's specification or its data, is of another kind,
            or its images or classes are not those of ``data``.
    """
    shipped = pretrained_models().get(str(source))
    path = Path(source) if shipped is None else shipped.path
    model: Any = load_model(path)[0] if shipped is None else load_pretrained(shipped.name)
    if not isinstance(model, ImageClassifier | SpinClassifier):
        raise ValueError(f"{path} must be of an image classifier, got a {type(model).__name__}")
    progress = read_progress(path)
    settings, history = progress["settings"], progress.get("history") or []
    with damaged(path, "a history of epochs with evaluations, and rtol in the settings"):
        trained = int(history[-1].get("evaluations", 0)) if history else 0
        rtol = require_nonnegative("rtol", settings.get("rtol") or 1e-3)
    name = settings.get("data") if data is None else data
    if not isinstance(name, str) or name not in LOADERS:
        raise ValueError(
            f"data must be one of {', '.join(LOADERS)}, got {name!r}: {path} does not say it"
        )
    images = load(name)
    inputs, targets = images.test_images, images.test_labels
    found = (*inputs.shape[1:], images.classes)
    wanted = (*model.image_shape, model.head.out_features)
    if found != wanted:
        raise ValueError(
            f"data must have images {wanted[:3]} of {wanted[3]} classes for {path}, got "
            f"{found[:3]} of {found[3]}"
        )
    backbone = (settings["model"].get("backbone") or {}).get("name", "coupled spins")
    unrolled = isinstance(getattr(model, "backbone", None), RecurrentBackbone)
    trained = trained or int(getattr(getattr(model, "backbone", None), "iterations", 1))
    steps = "iterations" if unrolled else "evaluations (median)"
    number = sum(p.numel() for p in model.parameters())
    return Subject(
        model, inputs, targets, trained, rtol,
        name=path.resolve().parent.name if path.stem in RUN_FILES else path.stem,
        title=f"{name}, {backbone}: {trained} {steps} in training, {number:,} parameters",
        history=history, observations=progress.get("observations") or None,
    ).first(samples)  # fmt: skip
