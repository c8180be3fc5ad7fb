"""A trained equilibrium beside simpler models: accuracy, harmed images, and what tells its mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.data import ImageData
from implicit_attn.models import ImageClassifier
from implicit_attn.optional import require
from implicit_attn.studies.subjects import Subject, equilibria
from implicit_attn.studies.tables import BLUE, GREY, ORANGE, RED, Study, Table, format_table
from implicit_attn.training import accuracy

BATCH = 256
SAMPLES = 1000  # test images that are harmed and tested for confidence
DRAWS = 3  # random harms of every image that are averaged
LOGISTIC, IDENTITY, ENCODER = "logistic regression", "identity", "encoder layer"
NOISE = 0.3  # deviation of the noise under which a model makes enough mistakes to be counted
RIDGE = 1e-6  # of a covariance, relative to its mean variance
Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Comparison(Study):
    """What :func:`compare` finds.

    Attributes:
        comparison: rows with model, accuracy, parameters and seconds (of training), the least
            accurate first.
        robustness: of :func:`robustness`, for the model and the encoder.
        confidence: of :func:`confidence`, for the same.
        name: of the model that is compared with the others.
        number: of test images.
    """

    comparison: Table
    robustness: Table
    confidence: Table
    name: str
    number: int
    size = (13, 9)

    def draw(self, figure: Any) -> None:
        """Four panels: accuracies, noise, occlusion, and AUROC of the signals of confidence."""
        axes = figure.subplots(2, 2)
        _draw_accuracies(axes[0, 0], self.comparison, self.name)
        for panel, harm in ((axes[0, 1], "noise"), (axes[1, 1], "occlusion")):
            rows = [row for row in self.robustness if row["harm"] == harm]
            _draw_harm(panel, rows, harm, self.name)
        _draw_confidence(axes[1, 0], self.confidence, self.name)

    def __str__(self) -> str:
        right = {row["model"]: row["accuracy"] for row in self.comparison}
        own = right.pop(self.name)
        parts = [f"{100 * (own - other):+.2f} points against the {k}" for k, other in right.items()]
        error = 100 * (2 * own * (1 - own) / self.number) ** 0.5
        shown = [{**row, "accuracy": f"{100 * row['accuracy']:.2f} %"} for row in self.comparison]
        return (
            f"{format_table(shown)}\n\nAccuracy on {self.number} test images: {', '.join(parts)} (standard "
            f"error of a difference about {error:.1f} points; other seeds differ by as much)."
        )


def compare(
    name: str, model: nn.Module, seconds: float, rivals: Mapping[str, tuple[nn.Module, float]],
    data: ImageData,
) -> Comparison:  # fmt: skip
    """A trained equilibrium beside simpler models, and what it tells besides the class.

    Args:
        name, model, seconds: images (B, C, H, W) -> logits, and the time of its training.
        rivals: the same of the others by name; the one named ``ENCODER`` is compared in everything.
        data: whose test images are used; of the training images for what is known.
    """
    every = {**rivals, name: (model, seconds)}
    table: Table = [
        {
            "model": key,
            "accuracy": accuracy(each, data.test_images, data.test_labels),
            "parameters": sum(p.numel() for p in each.parameters()),
            "seconds": spent,
        }
        for key, (each, spent) in every.items()
    ]
    images, labels = data.test_images[:SAMPLES], data.test_labels[:SAMPLES]
    compared = {key: every[key][0] for key in every if key in (ENCODER, name)}
    return Comparison(
        sorted(table, key=lambda row: row["accuracy"]),
        robustness(compared, images, labels),
        confidence(compared, images, labels, data.train_images[:SAMPLES]),
        name,
        len(data.test_images),
    )


# Simpler models: what an equilibrium must beat to be worth its solves.


class RivalBackbone(nn.Module):
    """Tokens (B, N, d) through explicit layers, in the place of an equilibrium."""

    def __init__(self, dim: int, layers: nn.Module) -> None:
        super().__init__()
        self.dim, self.iterations, self.layers = dim, 1, layers

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return self.layers(x)


def build_rival(name: str, sizes: Mapping[str, Any], around: Mapping[str, Any]) -> nn.Module:
    """The classifier around another backbone, with new random weights.

    Args:
        name: ``IDENTITY``: tokens as they are, for what embedding and readout do by themselves; or
            ``ENCODER``: ``nn.TransformerEncoderLayer`` with ReLU and its norms inside, which has about
            as many parameters as an ``EquilibriumBlock`` of as many hidden units.
        sizes: dim, heads, width (hidden units), dropout and layers, one after the other.
        around: the arguments of ``ImageClassifier`` but the backbone.
    """
    dim, heads, width, dropout = (sizes.get(k, 0) for k in ("dim", "heads", "width", "dropout"))
    options: Any = {"batch_first": True, "norm_first": True}
    made = [
        nn.TransformerEncoderLayer(dim, heads, width, dropout, **options)
        for _ in range(sizes.get("layers", 1) if name == ENCODER else 0)
    ]
    return ImageClassifier(RivalBackbone(dim, nn.Sequential(*made)), **dict(around))


def logistic_regression(data: ImageData) -> tuple[nn.Module, float]:
    """scikit-learn's on the raw pixels, with its default penalty, as a linear map; and its seconds."""
    kind = require("sklearn.linear_model", extra="examples").LogisticRegression
    pixels, labels = data.train_images.flatten(1).cpu().numpy(), data.train_labels.cpu().numpy()
    start = time.perf_counter()
    fitted = kind(max_iter=2000).fit(pixels, labels)
    seconds = time.perf_counter() - start
    linear = nn.Linear(pixels.shape[1], data.classes)
    with torch.no_grad():
        # Two classes share one row, and a class without images has none.
        known = torch.as_tensor(fitted.classes_)
        weight, offset = torch.as_tensor(fitted.coef_), torch.as_tensor(fitted.intercept_)
        linear.weight.zero_()
        linear.bias.fill_(-1e9)
        if len(known) == 2:
            weight, offset = torch.cat([-weight, weight]) / 2, torch.cat([-offset, offset]) / 2
        linear.weight[known], linear.bias[known] = weight.float(), offset.float()
    return nn.Sequential(nn.Flatten(), linear), seconds


# Harmed images.


def add_noise(images: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """``images`` (B, C, H, W) in [0, 1] with Gaussian noise, cut to [0, 1] again."""
    noise = torch.randn(images.shape, generator=generator).to(images)
    return (images + deviation * noise).clamp(0.0, 1.0)


def occlude(images: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """``images`` (B, C, H, W) with a square of 0 somewhere, ``share`` of the height and width."""
    hidden = torch.ones(len(images), 1, *images.shape[2:], dtype=torch.bool)
    for way, length in ((2, images.shape[2]), (3, images.shape[3])):
        size = round(share * length)
        first = torch.randint(length - size + 1, (len(images), 1), generator=generator)
        place = torch.arange(length)
        covered = (place >= first) & (place < first + size)
        hidden = hidden & covered.view(len(images), 1, *((length, 1) if way == 2 else (1, length)))
    return images.masked_fill(hidden.to(images.device), 0.0)


HARMS: dict[str, tuple[Callable[..., Tensor], tuple[float, ...]]] = {
    "noise": (add_noise, (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)),
    "occlusion": (occlude, (0.0, 0.125, 0.25, 0.375, 0.5)),
}


def robustness(models: Models, images: Tensor, labels: Tensor) -> Table:
    """Accuracy of each model on images (N, C, H, W) in [0, 1] harmed in the same ways.

    Returns:
        Rows with harm, strength, model, accuracy.
    """
    table: Table = []
    for name, (harm, strengths) in HARMS.items():
        for strength in strengths:
            generator = torch.Generator().manual_seed(0)
            number = DRAWS if strength > 0 else 1  # without any harm all draws would be the same
            made = torch.cat([harm(images, strength, generator) for _ in range(number)])
            for model, module in models.items():
                right = accuracy(module, made, labels.repeat(number))
                row = {"harm": name, "strength": strength, "model": model}
                table.append({**row, "accuracy": right})
    return table


# Signals of confidence.


def confidence(models: Models, images: Tensor, labels: Tensor, known: Tensor) -> Table:
    """How well the signals of each model tell its mistakes, and foreign images, from the others.

    Args:
        models: by name; images (B, C, H, W) -> logits (B, classes), put into evaluation mode.
        images, labels: of the kind that the models know, in [0, 1], none of them seen in training.
        known: images of training, for the distance of features.

    Returns:
        Rows with task, model, signal, auroc (0.5 is chance), positives and negatives. The tasks are
        "mistakes", "mistakes under noise" (Gaussian, of deviation ``NOISE``) and the foreign kinds.
    """
    kinds = foreign_images(images, labels)
    noisy = add_noise(images, NOISE, torch.Generator().manual_seed(0))
    shown = {"mistakes": images, "mistakes under noise": noisy, **kinds}
    table: Table = []
    for name, model in models.items():
        for signal, scores in signals(model, torch.cat(list(shown.values())), known).items():
            parts = dict(zip(shown, scores.split([*map(len, shown.values())]), strict=True))
            for task, part in parts.items():
                positive, negative = part, parts["mistakes"]
                if task not in kinds:
                    with torch.no_grad():
                        wrong = torch.cat([model(p).argmax(1) for p in shown[task].split(BATCH)])
                    wrong = wrong != labels
                    positive, negative = part[wrong], part[~wrong]
                row = {"task": task, "model": name, "signal": signal}
                row |= {"auroc": auroc(positive, negative), "positives": len(positive)}
                table.append({**row, "negatives": len(negative)})
    return table


def auroc(positive: Tensor, negative: Tensor) -> float:
    """The probability that a positive score (P,) is above a negative one (N,), ties counted half.

    NaN where there are none of one kind.
    """
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    ordered, wanted = negative.double().sort().values, positive.double()
    below = torch.searchsorted(ordered, wanted).double()
    upto = torch.searchsorted(ordered, wanted, right=True).double()
    return ((below + upto) / (2 * len(negative))).mean().item()


def foreign_images(images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Images like ``images`` (N, C, H, W) that show none of their classes, by name.

    "pixels drawn": every pixel drawn from all pixels of all images; "pixels shuffled": the pixels of
    an image in another order; "inverted": one minus the image; "two blended": the mean of two images
    of different classes, as many as there are such pairs.
    """
    generator = torch.Generator().manual_seed(0)
    number, flat = len(images), images.flatten(1)
    drawn = flat.flatten()[torch.randint(flat.numel(), flat.shape, generator=generator)]
    order = torch.rand(flat.shape, generator=generator).argsort(1).to(images.device)
    other = torch.randperm(number, generator=generator).to(images.device)
    differ = labels != labels[other]
    return {
        "pixels drawn": drawn.view_as(images),
        "pixels shuffled": flat.gather(1, order).view_as(images),
        "inverted": 1 - images,
        "two blended": ((images + images[other]) / 2)[differ],
    }


def signals(model: nn.Module, images: Tensor, known: Tensor) -> dict[str, Tensor]:
    """Scores of images (N, ...) that are to be high where a model is out of its depth, each (N,).

    "softmax" is one minus the largest probability, the usual baseline; "energy" that of the first
    equilibrium; "features" the squared Mahalanobis distance from ``known`` images of what the model's
    ``norm`` gives, averaged over the tokens: that of Lee et al. (https://arxiv.org/abs/1807.03888) with
    one mean for all classes.
    """
    found, usual = _measure(model, images), _measure(model, known)
    if "features" in found:
        found["features"] = mahalanobis(usual["features"], found["features"])
    return found


@torch.no_grad()
def _measure(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Scores (N,) of softmax and energy, and the features (N, d), as far as the model has them."""
    model.eval()
    kept: dict[str, Tensor] = {}

    def keep(module: nn.Module, given: Any, made: Tensor) -> None:
        kept["features"] = made.flatten(1, -2).mean(1) if made.dim() > 2 else made

    handle = getattr(model, "norm", nn.Identity()).register_forward_hook(keep)
    parts: list[dict[str, Tensor]] = []
    for part in images.split(BATCH):
        found = {"softmax": 1 - F.softmax(model(part).double(), dim=1).amax(1)}
        found |= {name: features.double() for name, features in kept.items()}
        if equilibria(model):
            subject = Subject(model, part)
            layer, (x, mask) = subject.layer, subject.given(part)
            tolerance = solvers.Tolerance(rtol=1e-3)
            z = layer.solve(x, mask, tolerance=tolerance, on_failure="ignore").value
            energy = subject.energy(z, x, mask)
            found |= {} if energy is None else {"energy": energy.double()}
        parts.append(found)
    handle.remove()
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def mahalanobis(known: Tensor, rows: Tensor) -> Tensor:
    """Squared Mahalanobis distances of ``rows`` (N, K) from the mean of ``known`` (M, K), (N,).

    Directions in which those do not differ get a small variance.
    """
    covariance = torch.atleast_2d(torch.cov(known.T))
    size = covariance.diagonal().mean().clamp_min(1e-12)
    ridge = RIDGE * size * torch.eye(known.shape[1], dtype=known.dtype, device=known.device)
    away = rows - known.mean(0)
    return ((away @ torch.linalg.inv(covariance + ridge)) * away).sum(1)


# The figure.

LABELS = {
    "noise": "deviation of Gaussian noise on pixels in [0, 1]",
    "occlusion": "side of the hidden square, share of the image's",
}
# Of the model, and of the one that it is compared with.
MARKS = {
    "energy": ("o", BLUE, "energy at the equilibrium"),
    "softmax": ("D", ORANGE, "1 - largest softmax"),
    "features": ("^", RED, "distance of features"),
}
CROSSES = {"softmax": "x", "features": "+"}


def _draw_accuracies(axes: Any, table: Table, name: str) -> None:
    """Errors rather than accuracies: bars that start at zero show their ratio."""
    errors = [100 * (1 - row["accuracy"]) for row in table]
    colors = [ORANGE if row["model"] == name else GREY for row in table]
    bars = axes.barh(range(len(table)), errors, color=colors, height=0.6)
    notes = [
        f"{100 * row['accuracy']:.1f} % right, {row['parameters']:,} parameters, {row['seconds']:.2g} s"
        for row in table
    ]
    axes.bar_label(bars, notes, padding=4, fontsize=8)
    axes.set_yticks(range(len(table)), [row["model"] for row in table])
    axes.invert_yaxis()
    axes.set_xlim(0, 2.2 * max(*errors, 0.1))
    axes.set(xlabel="test images classified wrongly, %", title="Models on the same images")


def _draw_harm(axes: Any, rows: Table, harm: str, name: str) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        color, marker = (ORANGE, "o") if model == name else (GREY, "s")
        right = [100 * row["accuracy"] for row in own]
        look: Any = {"color": color, "marker": marker, "markersize": 4, "label": model}
        axes.plot([row["strength"] for row in own], right, **look)
    axes.set(xlabel=LABELS[harm], ylabel="accuracy, %", title=f"Robustness to {harm}")
    axes.legend(frameon=False, loc="lower left")


def _draw_confidence(axes: Any, trust: Table, name: str) -> None:
    """A row a task; a mark for each signal of the model, crosses for the other models' softmax."""
    tasks = list(dict.fromkeys(row["task"] for row in trust))
    shown: dict[str, Any] = {}
    for row in trust:
        signal, own = row["signal"], row["model"] == name
        if row["auroc"] != row["auroc"] or signal not in (MARKS if own else CROSSES):
            continue  # no mistakes to be told, or too much for a picture
        marker, color, label = MARKS[signal]
        if not own:
            marker, color, label = CROSSES[signal], GREY, f"{label}, {row['model']}"
        place = tasks.index(row["task"])
        shown[label] = axes.scatter(row["auroc"], place, marker=marker, color=color, s=42, zorder=3)
    for place in range(len(tasks)):
        axes.axhline(place, color=GREY, linewidth=0.5, alpha=0.5)
    axes.axvline(0.5, color=GREY, linestyle="--", linewidth=1)
    counts = {row["task"]: row["positives"] for row in trust if row["model"] == name}
    axes.set_yticks(range(len(tasks)), [f"{task} ({counts[task]})" for task in tasks])
    axes.set(ylim=(len(tasks) - 0.4, -0.65), xlim=(-0.03, 1.03))
    axes.set_xlabel("AUROC (dashed, 0.5: chance; 1: always told apart)")
    axes.set_title("Telling mistakes and foreign images")
    axes.legend(
        shown.values(), shown.keys(), fontsize=8, frameon=False, ncols=2, loc="upper center",
        bbox_to_anchor=(0.35, -0.16),
    )  # fmt: skip
