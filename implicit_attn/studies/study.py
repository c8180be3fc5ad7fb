"""What is studied, a layer or a model with its inputs; tables, and parts of figures."""

from __future__ import annotations

import copy
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.data import load, some_samples
from implicit_attn.deq import DEQ
from implicit_attn.models import (
    ImageClassifier,
    RecurrentBackbone,
    SpinClassifier,
    load_model,
    read_settings,
)
from implicit_attn.optional import require
from implicit_attn.updates.hyperset import HyperSETLayer
from implicit_attn.weights import load_pretrained, pretrained_models, weights_file

Table = list[dict[str, Any]]  # rows with the same keys
DPI = 110
BATCH = 128
BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#d9772b", "#3a8f5c", "#b5323c", "#777777"
PURPLE, BROWN, PINK = "#7b4fa3", "#8c6d46", "#c65fa0"
# Colour and marker of each method, the same in all figures.
LOOKS = {
    "plain forward": (BLUE, "s"),
    "forward": (ORANGE, "o"),
    "gradient, auto step": (GREEN, "P"),
    "L-BFGS": (RED, "v"),
    "Anderson": (PURPLE, "^"),
    "Broyden": (BROWN, "D"),
    "Newton": (PINK, "X"),
    "recurrence": (BLUE, "o"),
}


def write_table(path: str | Path, table: Table) -> None:
    """Write a table as CSV."""
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def format_table(table: Table) -> str:
    """Return the table as aligned text."""
    cells = [
        [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in table
    ]
    lines = [list(table[0]), *cells]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


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


def draw_band(axes: Any, steps: Any, values: Tensor, color: str, label: str) -> None:
    """Draw the median of ``values`` (B, T) against ``steps`` (T), and the band from 10 % to 90 %."""
    shares = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    low, middle, high = values.double().cpu().nanquantile(shares, dim=0)
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(steps, middle, color=color, label=label)


def leave_empty(axes: Any, reason: str) -> None:
    """A panel that has nothing to show says why."""
    axes.text(0.5, 0.5, reason, ha="center", transform=axes.transAxes)
    axes.set(xticks=[], yticks=[], xlabel="")


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
        title: of figures.
    """

    model: Any
    inputs: Any
    targets: Tensor | None = None
    trained: int = 0
    rtol: float = 1e-3
    title: str = ""

    @property
    def recurrence(self) -> RecurrentBackbone | None:
        """The backbone of an unrolled model; None for another model."""
        backbone = getattr(self.model, "backbone", None)
        return backbone if isinstance(backbone, RecurrentBackbone) else None

    @property
    def layer(self) -> DEQ:
        """The model's first ``DEQ``."""
        found = next((each for each in self.model.modules() if isinstance(each, DEQ)), None)
        if found is None:
            raise TypeError(f"model must contain a DEQ, got a {type(self.model).__name__} without")
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
        """Return accuracy and cross-entropy of logits for the targets."""
        targets: Any = self.targets
        right = (logits.argmax(1) == targets).double().mean().item()
        return {"accuracy": right, "loss": F.cross_entropy(logits.double(), targets).item()}

    def energy(self, z: Any, x: Any, mask: Tensor | None = None) -> Tensor | None:
        """(B,): what the layer, or Hyper-SET in its last iteration, descends; None for nothing."""
        if self.recurrence is None:
            update = self.layer.update
            prepared = update.prepare(x, mask=mask)
            return update.joint(z, prepared, mask=mask)[1] if update.monitored else None
        layer = self.recurrence.layers[-1]
        if not (isinstance(layer, HyperSETLayer) and layer.is_plain):
            return None
        attention, feedforward, _ = layer.observe(z, self.recurrence.iterations - 1)
        return attention + feedforward

    def parts(self) -> Iterator[Any]:
        """The inputs in batches."""
        yield from self.inputs.split(BATCH) if isinstance(self.inputs, Tensor) else [self.inputs]

    def exact(self) -> Subject:
        """The same in float64, so that small differences of energies are resolved."""
        inputs = pytree.tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, self.inputs
        )
        return replace(self, model=copy.deepcopy(self.model).double(), inputs=inputs)


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


def open_subject(source: str | Path, samples: int | None = None) -> Subject:
    """The image classifier of a file of weights, with the test images of its data.

    Args:
        source: a name of :func:`implicit_attn.pretrained_models`, or the path of a file.
        samples: at most so many test samples; None: all.

    Raises:
        FileNotFoundError: its data are not there.
        ValueError: there are no such weights, or they are of another kind of model.
    """
    path = weights_file(source)
    settings = read_settings(path)
    shipped = str(source) in pretrained_models()
    model: Any = load_pretrained(str(source)) if shipped else load_model(path)[0]
    if not isinstance(model, ImageClassifier | SpinClassifier):
        raise ValueError(f"{path} must hold an image classifier, got a {type(model).__name__}")
    images = load(str(settings.get("data")))
    backbone: Any = getattr(model, "backbone", None)
    trained = int(settings.get("evaluations") or getattr(backbone, "iterations", 1))
    steps = "iterations" if isinstance(backbone, RecurrentBackbone) else "evaluations (median)"
    number = sum(p.numel() for p in model.parameters())
    named = (settings["model"].get("backbone") or {}).get("name", "coupled spins")
    part = some_samples(images.test_labels, samples or len(images.test_labels))
    return Subject(
        model, images.test_images[part], images.test_labels[part], trained, settings.get("rtol") or 1e-3,
        f"{images.name}, {named}: {trained} {steps} in training, {number:,} parameters",
    )  # fmt: skip
