"""A trained equilibrium beside simpler models: accuracy, harmed images, and what tells its mistakes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.data import ImageData
from implicit_attn.energies import EquilibriumEnergy
from implicit_attn.models import ImageClassifier
from implicit_attn.optional import require
from implicit_attn.studies.converging import with_energies
from implicit_attn.studies.subjects import Subject, equilibria
from implicit_attn.studies.tables import BLUE, GREEN, GREY, ORANGE, RED, Study, Table, format_table
from implicit_attn.training import accuracy
from implicit_attn.updates import GradientStep

BATCH = 256
SAMPLES = 1000  # test images that are harmed and tested for confidence
LOGISTIC, IDENTITY, ENCODER = "logistic regression", "identity", "encoder layer"
EARLY = 2  # evaluations after which the residual is taken as a signal
NOISE = 0.3  # deviation of the noise under which a model makes enough mistakes to be counted
POWER = 12  # Hessian products of a curvature
RIDGE = 1e-6  # of a covariance, relative to its mean variance
SOFTMAX = "softmax"
OWN = ("energy", "profile")  # signals that only an equilibrium has
TELLING = 0.02  # of two AUROCs, below which they count as equal
FAMILIAR = 0.4  # AUROC of an energy below which it calls what it should not know familiar
ERRORS = 2.0  # standard errors below which a difference counts as none
Models = Mapping[str, nn.Module]


@dataclass(frozen=True)
class Comparison(Study):
    """What :func:`compare` finds.

    Attributes:
        comparison: rows with model, accuracy, parameters and seconds (of training), the least
            accurate first.
        robustness: what ``studies.robustness`` finds, for the model and the encoder.
        confidence: what ``studies.confidence`` finds, for the same.
        name: of the model that is compared with the others.
        images: number of test images, and of those that were harmed.
    """

    comparison: Table
    robustness: Table
    confidence: Table
    name: str
    images: tuple[int, int]
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
        shown = [{**row, "accuracy": f"{100 * row['accuracy']:.2f} %"} for row in self.comparison]
        said = [
            _on_accuracy(self.comparison, self.name, self.images[0]),
            *_on_robustness(self.robustness, self.name, self.images[1]),
            *_on_confidence(self.confidence, self.name),
        ]
        return f"{format_table(shown)}\n\n" + "\n".join(f"- {line}" for line in said)


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
        confidence(compared, images, labels, known=data.train_images[:SAMPLES]),
        name,
        (len(data.test_images), len(images)),
    )


# Simpler models: what an equilibrium must beat to be worth its solves.


class IdentityBackbone(nn.Module):
    """No layer at all: tokens (B, N, d) as they are, for what embedding and readout do by themselves."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.iterations = dim, 1

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return x


class EncoderBackbone(nn.Module):
    """``nn.TransformerEncoderLayer`` with ReLU and its norms inside, ``layers`` one after the other.

    With as many hidden units it has as many parameters as an ``EquilibriumBlock``. Tokens (B, N, d).
    """

    def __init__(
        self, dim: int, heads: int, hidden: int, *, layers: int = 1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dim, self.iterations = dim, 1
        options: Any = {"batch_first": True, "norm_first": True}
        made = [
            nn.TransformerEncoderLayer(dim, heads, hidden, dropout, **options)
            for _ in range(layers)
        ]
        self.layers = nn.Sequential(*made)

    def forward(self, x: Tensor, *, iterations: int | None = None) -> Tensor:
        return self.layers(x)


def build_rival(name: str, backbone: Mapping[str, Any], around: Mapping[str, Any]) -> nn.Module:
    """The classifier around another backbone, with new random weights.

    Args:
        name: ``IDENTITY`` or ``ENCODER``.
        backbone: the arguments of ``EncoderBackbone``.
        around: the arguments of ``ImageClassifier`` but the backbone.
    """
    encoder = name == ENCODER
    made = EncoderBackbone(**dict(backbone)) if encoder else IdentityBackbone(backbone["dim"])
    return ImageClassifier(made, **dict(around))


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


def robustness(
    models: Models, images: Tensor, labels: Tensor, *, draws: int = 3, seed: int = 0
) -> Table:
    """Accuracy of each model on images harmed in the same ways.

    Args:
        models: by name; images (B, C, H, W) -> logits (B, classes), put into evaluation mode.
        images, labels: (N, C, H, W) in [0, 1], and (N,) int64.
        draws: random harms of every image that are averaged.
        seed: of these draws, which are the same for all models.

    Returns:
        Rows with harm, strength, model, accuracy.
    """
    table: Table = []
    for name, (harm, strengths) in HARMS.items():
        for strength in strengths:
            generator = torch.Generator().manual_seed(seed)
            number = draws if strength > 0 else 1  # without any harm all draws would be the same
            made = torch.cat([harm(images, strength, generator) for _ in range(number)])
            for model, module in models.items():
                right = predictions(module, made) == labels.repeat(number)
                row = {"harm": name, "strength": strength, "model": model}
                table.append({**row, "accuracy": right.double().mean().item()})
    return table


def predictions(model: nn.Module, images: Tensor) -> Tensor:
    """The class of each image, (N,) int64, in evaluation mode."""
    model.eval()
    with torch.no_grad():
        return torch.cat([model(part).argmax(1) for part in images.split(BATCH)])


# Signals of confidence.


def confidence(
    models: Models, images: Tensor, labels: Tensor, *, known: Tensor | None = None,
    foreign: Mapping[str, Tensor] | None = None, seed: int = 0,
) -> Table:  # fmt: skip
    """How well the signals of each model tell its mistakes, and foreign images, from the others.

    Args:
        models: by name; images (B, C, H, W) -> logits (B, classes), put into evaluation mode.
        images, labels: of the kind that the models know, in [0, 1], none of them seen in training.
        known: images of training, for the signals that are distances; None: without these.
        foreign: images of other kinds by name; None: :func:`foreign_images`.
        seed: of the noise, and of these images.

    Returns:
        Rows with task, model, signal, auroc (0.5 is chance), positives and negatives. The tasks are
        "mistakes", "mistakes under noise" (Gaussian, of deviation ``NOISE``) and the foreign kinds.
    """
    kinds = foreign_images(images, labels, seed) if foreign is None else dict(foreign)
    noisy = add_noise(images, NOISE, torch.Generator().manual_seed(seed))
    shown = {"mistakes": images, "mistakes under noise": noisy, **kinds}
    table: Table = []
    for name, model in models.items():
        together = signals(model, torch.cat(list(shown.values())), known)
        lengths = [len(each) for each in shown.values()]
        for signal, scores in together.items():
            parts = dict(zip(shown, scores.split(lengths), strict=True))
            for task, part in parts.items():
                positive, negative = part, parts["mistakes"]
                if task not in kinds:
                    wrong = predictions(model, shown[task]) != labels
                    positive, negative = part[wrong], part[~wrong]
                row = {"task": task, "model": name, "signal": signal}
                row |= {"auroc": auroc(positive, negative), "positives": len(positive)}
                table.append({**row, "negatives": len(negative)})
    order = list(shown)
    return sorted(
        table, key=lambda row: (list(models).index(row["model"]), order.index(row["task"]))
    )


def auroc(positive: Tensor, negative: Tensor) -> float:
    """The probability that a positive score is above a negative one, ties counted half; NaN if none.

    Args:
        positive, negative: (P,) and (N,), finite.
    """
    if len(positive) == 0 or len(negative) == 0:
        return float("nan")
    ordered, wanted = negative.double().sort().values, positive.double()
    below = torch.searchsorted(ordered, wanted).double()
    upto = torch.searchsorted(ordered, wanted, right=True).double()
    return ((below + upto) / (2 * len(negative))).mean().item()


def foreign_images(images: Tensor, labels: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """Images like ``images`` (N, C, H, W) that show none of their classes, by name.

    "pixels drawn": every pixel drawn from all pixels of all images; "pixels shuffled": the pixels of
    an image in another order; "inverted": one minus the image; "two blended": the mean of two images
    of different classes, as many as there are such pairs.
    """
    generator = torch.Generator().manual_seed(seed)
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


def signals(model: nn.Module, images: Tensor, known: Tensor | None = None) -> dict[str, Tensor]:
    """Scores of images (N, ...) that are to be high where a model is out of its depth, each (N,).

    "softmax" is one minus the largest probability, the usual baseline. Of the first equilibrium also
    "energy" (at the equilibrium), "residual" (relative, after ``EARLY`` evaluations) and "flatness"
    (minus the smallest eigenvalue of the Hessian of its energy).

    With ``known`` images, of training, there are Mahalanobis distances from them: "profile", of the
    numbers of an equilibrium, and "features", of what the model's ``norm`` gives, averaged over the
    tokens. The latter, which needs no equilibrium, is that of Lee et al.
    (https://arxiv.org/abs/1807.03888) with one mean for all classes.
    """
    found, features = _measure(model, images)
    if known is None:
        return found
    usual, usual_features = _measure(model, known)
    own = [name for name in found if name != SOFTMAX]
    if own:
        rows, usual_rows = (torch.stack([e[name] for name in own], dim=1) for e in (found, usual))
        # Units differ by orders of magnitude, which the ridge must not see.
        scale = usual_rows.std(0).clamp_min(1e-12)
        found["profile"] = mahalanobis(usual_rows / scale, rows / scale)
    if features is not None and usual_features is not None:
        found["features"] = mahalanobis(usual_features, features)
    return found


def _measure(model: nn.Module, images: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """The signals that need no reference, and the features (N, d), if the model has a ``norm``."""
    model.eval()
    parts: list[dict[str, Tensor]] = []
    features: list[Tensor] = []
    with torch.no_grad(), _kept(getattr(model, "norm", None), features):
        for part in images.split(BATCH):
            found = {SOFTMAX: 1 - F.softmax(model(part).double(), dim=1).amax(1)}
            if equilibria(model):
                kept = len(features)
                found |= _of_equilibrium(Subject(model, part))
                del features[kept:]
            parts.append(found)
    joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return joined, torch.cat(features).double() if features else None


@contextmanager
def _kept(norm: Any, features: list[Tensor]) -> Iterator[None]:
    """What ``norm`` returns within the block, averaged over the tokens, is appended to features."""

    def keep(module: nn.Module, given: Any, made: Tensor) -> None:
        features.append(made.flatten(1, -2).mean(1) if made.dim() > 2 else made)

    handle = norm.register_forward_hook(keep) if isinstance(norm, nn.Module) else None
    yield
    if handle is not None:
        handle.remove()


def _of_equilibrium(subject: Subject) -> dict[str, Tensor]:
    layer, (x, mask) = subject.layer, subject.given(subject.inputs)
    options: Any = {"on_failure": "ignore"}
    with with_energies(layer):
        early = layer.solve(
            x, mask, max_steps=EARLY, tolerance=solvers.Tolerance(rtol=0.0), **options
        )
        z = layer.solve(x, mask, tolerance=solvers.Tolerance(rtol=1e-3), **options).value
    energy, found = subject.energy(z, x, mask), {"residual": early.residual.double()}
    if energy is not None:
        found = {"energy": energy.double(), **found}
    curvature = smallest_curvature(subject, z, x, mask)
    return found if curvature is None else {**found, "flatness": -curvature.double()}


def smallest_curvature(
    subject: Subject, z: Tensor, x: Any, mask: Tensor | None = None, products: int = POWER
) -> Tensor | None:
    """(B,): about the smallest eigenvalue of the energy's Hessian at the state ``z`` (B, N, d).

    A power iteration on ``I - Hess`` that starts at the state. Other energies than
    ``EquilibriumEnergy``, whose eigenvalues are at most 1, would need another shift: None for them.
    """
    update = subject.layer.update
    energy: Any = getattr(update, "energy", None)
    if not isinstance(update, GradientStep) or not isinstance(energy, EquilibriumEnergy):
        return None
    prepared = update.prepare(x, mask=mask)
    v = z / z.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
    found = v.new_zeros(len(v))
    for _ in range(products):
        curved = energy.hvp(z, v, prepared, mask=mask)
        found = (v * curved).flatten(1).sum(1)
        v = v - curved
        v = v / v.flatten(1).norm(dim=1).clamp_min(1e-12)[:, None, None]
    return found


def mahalanobis(known: Tensor, rows: Tensor) -> Tensor:
    """Squared Mahalanobis distances of ``rows`` (N, K) from the mean of ``known`` (M, K), (N,).

    Directions in which those do not differ get a small variance.
    """
    covariance = torch.atleast_2d(torch.cov(known.T))
    size = covariance.diagonal().mean().clamp_min(1e-12)
    ridge = RIDGE * size * torch.eye(known.shape[1], dtype=known.dtype, device=known.device)
    away = rows - known.mean(0)
    return ((away @ torch.linalg.inv(covariance + ridge)) * away).sum(1)


# What follows from the tables, in words.


def _differ(first: float, second: float, number: int) -> str:
    """ "more", "less" or "as much", by the standard error of a difference of two shares."""
    spread = (first * (1 - first) + second * (1 - second)) / number
    if abs(first - second) <= ERRORS * spread**0.5:
        return "as much"
    return "more" if first > second else "less"


def _on_accuracy(table: Table, name: str, number: int) -> str:
    own = next(row["accuracy"] for row in table if row["model"] == name)
    others = [row for row in table if row["model"] != name]
    parts = [
        f"{100 * (own - row['accuracy']):+.2f} points against the {row['model']}" for row in others
    ]
    error = 100 * (2 * own * (1 - own) / number) ** 0.5
    return (
        f"Accuracy on {number} test images: {', '.join(parts)} (standard error of a difference about "
        f"{error:.1f} points; other seeds differ by as much)."
    )


def _on_robustness(table: Table, name: str, number: int) -> list[str]:
    lines: list[str] = []
    for harm in dict.fromkeys(row["harm"] for row in table):
        rows = {
            (row["model"], row["strength"]): row["accuracy"] for row in table if row["harm"] == harm
        }
        strengths = [strength for model, strength in rows if model == name and strength > 0]
        if (ENCODER, 0.0) not in rows or not strengths:
            continue
        verdicts = {_differ(rows[name, s], rows[ENCODER, s], number) for s in strengths}
        worst = max(strengths, key=lambda s: abs(rows[name, s] - rows[ENCODER, s]))
        both = f"{100 * rows[name, worst]:.1f} % for {100 * rows[ENCODER, worst]:.1f} %"
        if verdicts == {"as much"}:
            verdict = "as robust as the encoder layer, within the error: it gains nothing here"
        elif "less" not in verdicts:
            verdict = "more robust than the encoder layer"
        elif "more" not in verdicts:
            verdict = "less robust than the encoder layer"
        else:
            verdict = "more robust at some strengths and less at others"
        lines.append(f"{harm.capitalize()}: {verdict} (largest difference at {worst:g}: {both}).")
    return lines


def _on_confidence(table: Table, name: str) -> list[str]:
    """For each task the better of the equilibrium's own signals beside the best of the others."""
    lines: list[str] = []
    for task in dict.fromkeys(row["task"] for row in table):
        rows = [row for row in table if row["task"] == task and row["auroc"] == row["auroc"]]
        own = {row["signal"]: row for row in rows if row["model"] == name}
        mine = [row for signal, row in own.items() if signal in OWN]
        usual = [row for row in rows if row["signal"] in (SOFTMAX, "features")]
        if not mine or SOFTMAX not in own:
            continue
        best, rival = (max(each, key=lambda row: row["auroc"]) for each in (mine, usual))
        gap = best["auroc"] - rival["auroc"]
        verdict = (
            "better than" if gap > TELLING else "worse than" if gap < -TELLING else "no better than"
        )
        line = (
            f"{task.capitalize()} ({best['positives']} images): its {best['signal']} (AUROC "
            f"{best['auroc']:.2f}) is {verdict} the {rival['signal']} of the {rival['model']} "
            f"({rival['auroc']:.2f}); its own softmax has {own[SOFTMAX]['auroc']:.2f}."
        )
        low = own.get("energy", {}).get("auroc", 1.0)
        if low < FAMILIAR:
            line += (
                f" Its energy is lower there ({low:.2f}): by itself no measure of what is foreign."
            )
        lines.append(line)
    return lines


# The figure.

LABELS = {
    "noise": "deviation of Gaussian noise on pixels in [0, 1]",
    "occlusion": "side of the hidden square, share of the image's",
}
# Of the model, and of the one that it is compared with; other signals are in the table alone.
MARKS = {
    "energy": ("o", BLUE, "energy at the equilibrium"),
    "profile": ("s", GREEN, "distance of energy, residual, curvature"),
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
