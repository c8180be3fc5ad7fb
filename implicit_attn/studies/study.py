"""What is studied, a layer or a model with its inputs; and what a study returns, tables with a plot."""

from __future__ import annotations

import copy
import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.data import LOADERS, load, some_samples
from implicit_attn.deq import DEQ
from implicit_attn.models import ImageClassifier, RecurrentBackbone, SpinClassifier, load_model
from implicit_attn.models.backbones import EnergyTransformerLayer
from implicit_attn.optional import require
from implicit_attn.updates import Update
from implicit_attn.updates.hyperset import HyperSETLayer, refuse_memory
from implicit_attn.updates.update import EnergyStep
from implicit_attn.weights import load_pretrained, pretrained_models

Table = list[dict[str, Any]]
DPI = 110
BATCH = 128
BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"
LINES = [BLUE, ORANGE, GREEN, RED, "#7b4fa3", "#8c6d46", "#c65fa0"]  # one for each solver


def write_table(path: str | Path, table: Table) -> None:
    """Write a table as CSV; ValueError if it is empty or a row has a key that the first lacks."""
    if not table:
        raise ValueError("table must have at least one row, got none")
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def format_table(table: Table) -> str:
    """Return the table as aligned text."""
    if not table:
        return "(empty)"
    cells = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in table
    ]
    lines = [list(table[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


@dataclass(frozen=True)
class Study(ABC):
    """What a study returns: its fields that are lists are tables, rows with the same keys.

    Example:
        >>> from implicit_attn import DEQ, studies
        >>> from implicit_attn.updates import MeanFieldAttention
        >>> layer = DEQ(MeanFieldAttention(4, 2, bound=0.5))
        >>> found = studies.paths(layer, torch.randn(8, 4, 2))
        >>> [row["start"] for row in found.summary]
        ['input', 'zero', 'random 1', 'random 2']
        >>> figure = found.plot()  # or found.save("runs/paths")
    """

    printed: ClassVar[tuple[str, ...]] = ()  # names of the tables that ``str`` shows

    @property
    def tables(self) -> dict[str, Table]:
        """The tables by name, without empty ones."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: each for name, each in found.items() if isinstance(each, list) and each}

    @abstractmethod
    def plot(self, title: str = "") -> Any:
        """The figure of matplotlib."""

    def save(self, base: str | Path, title: str = "") -> list[Path]:
        """Write ``base.png`` and ``base-NAME.csv`` for each table, and return their paths."""
        base = Path(base)
        base.parent.mkdir(parents=True, exist_ok=True)
        paths = [base.with_name(f"{base.name}.png")]
        self.plot(title).savefig(paths[0], dpi=DPI)
        for name, table in self.tables.items():
            paths.append(base.with_name(f"{base.name}-{name}.csv"))
            write_table(paths[-1], table)
        return paths

    def __str__(self) -> str:
        shown = [name for name in self.printed if name in self.tables]
        return "\n\n".join(f"{name}\n{format_table(self.tables[name])}" for name in shown)


def median_and_band(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 10 % and 90 % quantiles ``name_10`` and ``name_90``, without NaN."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64, device=values.device)
    low, middle, high = torch.nanquantile(values.double(), shares).tolist()
    return {name: middle, f"{name}_10": low, f"{name}_90": high}


def median_and_largest(name: str, values: Tensor) -> dict[str, float]:
    """Median ``name``, 90 % quantile ``name_90`` and maximum ``name_largest``."""
    values = values.double()
    found = values.median(), values.quantile(0.9), values.max()
    return {name + end: x.item() for end, x in zip(("", "_90", "_largest"), found, strict=True)}


def new_figure(size: tuple[float, float], title: str = "") -> Any:
    """A figure of matplotlib of so many inches that no window shows."""
    kind = require("matplotlib.figure", extra="examples").Figure
    figure = kind(figsize=size, layout="constrained")
    if title:
        figure.suptitle(title, fontsize=13)
    return figure


def draw_band(
    axes: Any, rows: Table, step: str, key: str, color: str, label: str | None, *, alpha: float = 0.2,
    **line: Any,
) -> None:  # fmt: skip
    """Draw column ``key`` against column ``step``, and the band from ``key_10`` to ``key_90``."""
    steps, middle, low, high = ([r[k] for r in rows] for k in (step, key, f"{key}_10", f"{key}_90"))
    axes.fill_between(steps, low, high, color=color, alpha=alpha, linewidth=0)
    axes.plot(steps, middle, color=color, label=label, **line)


def leave_empty(axes: Any, reason: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")


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


@dataclass(frozen=True)
class Subject:
    """A layer or a model to be studied, with its inputs.

    Attributes:
        model: a ``DEQ``; a module that calls one, of which the first is studied; or a model around
            a ``RecurrentBackbone`` with ``tokens`` and ``classify``.
        inputs: of the model, (N, ...); of a bare ``DEQ`` any pytree that it takes.
        targets: labels (N,) of the model's outputs, or None.
        trained: iterations in training; of an equilibrium the median evaluations per sample.
        rtol: tolerance of an equilibrium in training.
        name, title: for files and figures.
    """

    model: Any
    inputs: Any
    targets: Tensor | None = None
    trained: int = 0
    rtol: float = 1e-3
    name: str = "layer"
    title: str = ""

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
            raise TypeError(
                f"model must contain a DEQ or a RecurrentBackbone, got a {kind} without"
            )
        return found

    @torch.no_grad()
    def given(self, inputs: Any) -> tuple[Any, Tensor | None]:
        """Return the input and the mask that the layer receives for these inputs of the model."""
        if isinstance(self.model, DEQ):
            return inputs, None
        if self.recurrence is not None:
            return self.model.tokens(inputs), None
        seen: dict[str, Any] = {}
        self._call(inputs, seen)
        return seen["x"], seen.get("mask")

    def outputs(self, inputs: Any, z: Any) -> Any:
        """Return the model's outputs with ``z`` as the layer's state."""
        if isinstance(self.model, DEQ):
            return z
        if self.recurrence is not None:
            return self.model.classify(z)
        with self.layer.register_forward_hook(lambda *_: z):
            return self._call(inputs, {})

    def _call(self, inputs: Any, seen: dict[str, Any]) -> Any:
        """Call the model with one evaluation of its layer, and note the layer's arguments in ``seen``."""

        def note(layer: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
            seen.update(zip(("x", "mask"), args, strict=False))
            seen.update({k: v for k, v in options.items() if k in ("x", "mask")})
            return args, options | {"max_steps": 1, "on_failure": "ignore"}

        with self.layer.register_forward_pre_hook(note, with_kwargs=True):
            return self.model(inputs)

    def judge(self, logits: Tensor) -> dict[str, float]:
        """Accuracy and cross-entropy of logits for the targets; nothing without targets."""
        if self.targets is None:
            return {}
        right = (logits.argmax(1) == self.targets).double().mean().item()
        return {"accuracy": right, "loss": F.cross_entropy(logits.double(), self.targets).item()}

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

    def parts(self) -> Iterator[Any]:
        """The inputs in batches."""
        yield from self.inputs.split(BATCH) if isinstance(self.inputs, Tensor) else [self.inputs]

    def exact(self) -> Subject:
        """The same in float64, so that small differences of energies are resolved."""
        inputs = pytree.tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, self.inputs
        )
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)


def has_energy(update: Update) -> bool:
    """Whether the update descends an energy, also one that its solver does not look at."""
    return update.monitored or isinstance(update, EnergyStep)


def subject_of(model: Any, inputs: Any = None, targets: Tensor | None = None) -> Subject:
    """What a study is given: a :class:`Subject`, a name of shipped weights, or a model with inputs.

    Raises:
        TypeError: inputs are missing, or no layer is found.
    """
    if isinstance(model, str):
        model = open_subject(model)
    if isinstance(model, Subject):
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
    """The image classifier of a file of weights, with the test images of its data.

    Args:
        source: a name of :func:`implicit_attn.pretrained_models`, or the path of a file.
        data: name of a data set of images; None: the one in the settings of the file.
        samples: at most so many test samples; None: all.

    Raises:
        FileNotFoundError: there is no such file, or no such data.
        ValueError: it holds another kind of model, or its images or classes are not those of ``data``.
    """
    shipped = pretrained_models().get(str(source))
    path = Path(source) if shipped is None else shipped.path
    model, settings = load_model(path)
    if shipped is not None:
        model = load_pretrained(shipped.name)
    name = settings.get("data") if data is None else data
    if not isinstance(model, ImageClassifier | SpinClassifier) or name not in LOADERS:
        kind = type(model).__name__
        raise ValueError(f"{path} must hold a classifier of known images, got a {kind} of {name!r}")
    images = load(str(name))
    found, wanted = images.test_images.shape[1:], model.image_shape
    if (found, images.classes) != (wanted, model.head.out_features):
        raise ValueError(f"data must be like that of {path}, {wanted}, got {tuple(found)}")
    backbone: Any = getattr(model, "backbone", None)
    trained = int(settings.get("evaluations") or getattr(backbone, "iterations", 1))
    steps = "iterations" if isinstance(backbone, RecurrentBackbone) else "evaluations (median)"
    number = sum(p.numel() for p in model.parameters())
    named = (settings["model"].get("backbone") or {}).get("name", "coupled spins")
    part = some_samples(images.test_labels, samples or len(images.test_labels))
    return Subject(
        model, images.test_images[part], images.test_labels[part], trained, settings.get("rtol") or 1e-3,
        name=path.resolve().parent.name if path.stem == "weights" else path.stem,
        title=f"{name}, {named}: {trained} {steps} in training, {number:,} parameters",
    )  # fmt: skip
