"""Equilibria read images, digits beside simpler models and MNIST by coupled spins.

The programs ``implicit-attn train classify`` and ``train mnist-spins``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from implicit_attn.data import ImageData, RandomAffine, load
from implicit_attn.models import ImageClassifier, SpinClassifier, build_model
from implicit_attn.optional import require
from implicit_attn.programs.backbones import Data, take
from implicit_attn.studies import Study, Subject, format_table, report
from implicit_attn.studies.tables import GREY, ORANGE, Table
from implicit_attn.training import Classification, NonFiniteLoss, Training, accuracy
from implicit_attn.training.script import (
    Job,
    Program,
    Values,
    layer_options,
    mistakes,
    save_weights,
    take_recipe,
)

PRESET: Values = {
    "dim": 64, "heads": 4, "width": 128, "layers": 1, "dropout": 0.1, "rtol": 1e-3, "max_steps": 60,
    "epochs": 20, "batch": 64, "rate": 4e-3,
}  # fmt: skip
POSITIONS = 0.5  # standard deviation of their initial values
LOGISTIC, IDENTITY, ENCODER = "logistic regression", "identity", "encoder layer"
EQUILIBRIUM = "equilibrium"
NOISE = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)  # deviations of the noise on pixels in [0, 1]


@dataclass(kw_only=True)
class Classify(Program):
    """Train an equilibrium block to read handwritten digits, beside simpler models, and report on it.

    implicit-attn train classify: embedded 8x8 digits, about a minute. With --data mnist --patch 4 MNIST.

    Each image becomes tokens x. The block makes x + z* of them, where z* minimises an energy that sees
    x inside its attention and its hidden units; a linear readout classifies the result. The same loop
    trains the same classifier with nothing in the place of the block and with a transformer encoder
    layer of equal size; logistic regression on the pixels stands beside them.
    """

    data: Data = "digits"
    readout: Literal["tokens", "class", "mean"] = "tokens"
    """all tokens, a class token or the mean of all tokens"""
    patch: int = 2
    """height = width of a patch"""
    limit: int | None = None
    """use only so many training images"""

    def folder(self) -> str:
        return f"{self.data}-{self.readout}"

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        # Before minutes of training, and with a message of one line.
        self.logistic = logistic_regression(data)
        values = self.values(PRESET)
        kept = {"data": self.data, "limit": self.limit, "rtol": values["rtol"]}
        self.recipe = take_recipe(values, self.seed)
        _, channels, side, _ = data.train_images.shape
        stem = {"stem": "conv" if self.readout == "class" else "patch"} | take(values, "stem")
        self.around = {"image_size": side, "channels": channels, "classes": data.classes}
        self.around |= {"patch": self.patch, "readout": self.readout, **stem}
        self.around |= {"positions": "learned", "embedding_norm": False}
        rtol, steps = values.pop("rtol"), values.pop("max_steps")
        self.sizes = {name: values[name] for name in ("dim", "heads", "width", "layers", "dropout")}
        backbone = {"name": EQUILIBRIUM, "iterations": steps, **values}
        specification = {"kind": "image-classifier", **self.around, "backbone": backbone}
        layer = layer_options(rtol, max_steps=steps)
        model = self._seeded(lambda: build_model(specification, layer=layer))
        return Job(model, data, self.recipe, {**kept, "model": specification})

    def _seeded(self, build: Callable[[], Any]) -> nn.Module:
        """A new model with positions of the size of the embedded patches: a normed token tells where
        it is."""
        torch.manual_seed(self.seed)
        model = build()
        nn.init.normal_(model.position, std=POSITIONS)
        return model

    def _rivals(self, data: ImageData, kept: Values) -> dict[str, tuple[nn.Module, float]]:
        """Simpler models by name, trained by the same recipe, each with the seconds of its training."""
        found = {}
        for name in (IDENTITY, ENCODER):
            print(f"\n{name}, by the same recipe:", flush=True)
            model = self._seeded(lambda name=name: build_rival(name, self.sizes, self.around))
            job = Job(model, data, self.recipe, kept)
            training = self._training(job, None, f"baseline-{name.split()[0]}")
            if self.resume and training.path.exists():
                training.resume()
            with mistakes(kinds=(NonFiniteLoss,)):
                training.run(overwrite=self.overwrite)
            found[name] = training.model, sum(row["seconds"] for row in training.history)
        return found

    def report(self, training: Training) -> None:
        """Tables as CSV and text, a picture of the equilibrium, and one of it beside the baselines."""
        history, model, data = training.history, training.model, training.data
        save_weights(training)
        models = self._rivals(data, {"data": self.data, "limit": self.limit})
        right = accuracy(models[ENCODER][0], data.test_images, data.test_labels)
        number = sum(p.numel() for p in model.parameters())
        title = (
            f"{self.data}, {EQUILIBRIUM}, {self.readout} readout: test accuracy "
            f"{100 * history[-1]['test_accuracy']:.2f} %, {number:,} parameters"
        )
        write_report(self, training, title, explicit=(ENCODER, right))
        models[EQUILIBRIUM] = model, sum(row["seconds"] for row in history)
        beside = compare(EQUILIBRIUM, models, self.logistic, data)
        beside.save(self.place / "comparison", title)
        print(f"\n{beside}\ncomparison: {self.place / 'comparison.png'}")


def write_report(program: Program, training: Training, title: str, **options: Any) -> None:
    """The picture ``report.png`` and its tables, of what was trained."""
    data, history = training.data, training.history
    spent, rtol = max(1, int(history[-1]["evaluations"])), training.settings["rtol"]
    tests = data.test_images, data.test_labels
    subject = Subject(training.model.eval(), *tests, spent, rtol, title=title, history=history)
    found = report(subject, **options)
    found.save(program.place / "report", title)
    print(f"\n{title}\n\n{found}\n\n{training.summary()}")
    print(f"report: {program.place / 'report.png'} (tables beside it as CSV)")


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
    dim, heads, width, dropout = (sizes[k] for k in ("dim", "heads", "width", "dropout"))
    options: Any = {"batch_first": True, "norm_first": True}
    made = [
        nn.TransformerEncoderLayer(dim, heads, width, dropout, **options)
        for _ in range(sizes["layers"] if name == ENCODER else 0)
    ]
    return ImageClassifier(RivalBackbone(dim, nn.Sequential(*made)), **dict(around))


def logistic_regression(data: ImageData) -> dict[str, Any]:
    """A row of the comparison: scikit-learn's on the raw pixels, with its default penalty."""
    kind = require("sklearn.linear_model", extra="examples").LogisticRegression
    train, test = (images.flatten(1).numpy() for images in (data.train_images, data.test_images))
    start = time.perf_counter()
    fitted = kind(max_iter=2000).fit(train, data.train_labels.numpy())
    seconds = time.perf_counter() - start
    right, size = fitted.score(test, data.test_labels.numpy()), fitted.coef_.size
    size += fitted.intercept_.size
    return {"model": LOGISTIC, "accuracy": right, "parameters": size, "seconds": seconds}


@dataclass(frozen=True)
class Comparison(Study):
    """What :func:`compare` finds.

    Attributes:
        comparison: rows with model, accuracy, parameters and seconds (of training), the least
            accurate first.
        noise: rows with model, deviation and accuracy, under Gaussian noise.
        name: of the model that is compared with the others.
        number: of test images.
    """

    comparison: Table
    noise: Table
    name: str
    number: int
    size = (13, 4.5)

    def draw(self, figure: Any) -> None:
        """Errors rather than accuracies: bars that start at zero show their ratio; and noise."""
        bars, lines = figure.subplots(1, 2, width_ratios=[1.3, 1])
        errors = [100 * (1 - row["accuracy"]) for row in self.comparison]
        colors = [ORANGE if row["model"] == self.name else GREY for row in self.comparison]
        notes = [
            f"{100 * row['accuracy']:.1f} % right, {row['parameters']:,} parameters, "
            f"{row['seconds']:.2g} s"
            for row in self.comparison
        ]
        drawn = bars.barh(range(len(errors)), errors, color=colors, height=0.6)
        bars.bar_label(drawn, notes, padding=4, fontsize=8)
        bars.set_yticks(range(len(errors)), [row["model"] for row in self.comparison])
        bars.invert_yaxis()
        bars.set_xlim(0, 2.2 * max(*errors, 0.1))
        bars.set(xlabel="test images classified wrongly, %", title="Models on the same images")
        for model in dict.fromkeys(row["model"] for row in self.noise):
            right = [100 * row["accuracy"] for row in self.noise if row["model"] == model]
            color, marker = (ORANGE, "o") if model == self.name else (GREY, "s")
            lines.plot(NOISE, right, color=color, marker=marker, markersize=4, label=model)
        lines.set(xlabel="deviation of Gaussian noise on pixels in [0, 1]", ylabel="accuracy, %")
        lines.set_title("Robustness to noise")
        lines.legend(frameon=False, loc="lower left")

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
    name: str,
    models: Mapping[str, tuple[nn.Module, float]],
    logistic: dict[str, Any],
    data: ImageData,
) -> Comparison:
    """The model ``name`` beside the others of ``models``, each with the seconds of its training."""
    images, labels = data.test_images, data.test_labels
    table, noise = [logistic], []
    for key, (model, seconds) in models.items():
        size = sum(p.numel() for p in model.parameters())
        row = {"model": key, "accuracy": accuracy(model, images, labels)}
        table.append({**row, "parameters": size, "seconds": seconds})
        for deviation in NOISE if key in (ENCODER, name) else ():
            generator = torch.Generator().manual_seed(0)  # the same noise for all models
            drawn = deviation * torch.randn(images.shape, generator=generator).to(images)
            right = accuracy(model, (images + drawn).clamp(0, 1), labels)
            noise.append({"model": key, "deviation": deviation, "accuracy": right})
    table.sort(key=lambda row: row["accuracy"])
    return Comparison(table, noise, name, len(images))


# MNIST by coupled spins.

SPINS: Values = {
    "dim": 10, "bound": 0.9, "epochs": 10, "batch": 128, "rate": 4e-3, "floor": 0.002,
    "rtol": 1e-4, "max_steps": 60,
}  # fmt: skip


@dataclass(kw_only=True)
class MnistSpins(Program):
    """Train attention made of coupled vector spins to read MNIST, and watch the couplings form.

    implicit-attn train mnist-spins: minutes an epoch at most. The shipped weights are studied by
    implicit-attn study report --weights mnist-spins.

    An image becomes the fields x of 16 sites; a class token has a learned field. The layer returns
    their mean-field response z = J z - f(z) + x. The state of the class token, which depends on the
    image through the couplings J alone, is read out.
    """

    data: Literal["mnist", "fashion-mnist"] = "mnist"
    limit: int | None = None
    """use only so many training images"""

    def folder(self) -> str:
        return f"{self.data}-spins"

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        values = self.values(SPINS)
        kept = {name: values[name] for name in ("dim", "bound", "rtol", "max_steps")}
        kept |= {"data": self.data, "limit": self.limit}
        recipe = take_recipe(values, self.seed)
        layer = layer_options(values.pop("rtol"), max_steps=values.pop("max_steps"))
        kept["model"] = {"kind": "spin-classifier", **values}
        torch.manual_seed(self.seed)
        model = SpinClassifier(**values, layer=layer)
        return Job(model, Classification(data, RandomAffine()), recipe, kept, site_norms)

    def report(self, training: Training) -> None:
        """Tables as CSV and text, one picture."""
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        data, model = training.data, training.model
        right = 100 * accuracy(model, data.test_images, data.test_labels)
        title = (
            f"{self.data}, spins of dimension {model.attention.couplings.dim}: test accuracy "
            f"{right:.2f} %, {sum(p.numel() for p in model.parameters())} parameters"
        )
        write_report(self, training, title, couplings=training.observations)


def site_norms(model: Any) -> list[list[float]]:
    """Frobenius norms of the couplings between sites, rounded for the checkpoint."""
    with torch.no_grad():
        norms = model.attention.couplings.site_norms()
    return [[round(value, 4) for value in row] for row in norms.tolist()]
