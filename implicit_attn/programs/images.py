"""Images are read by backbones, an equilibrium block, coupled spins; backbones fill in hidden patches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from implicit_attn.data import Compose, ImageData, RandomAffine, RandomCrop, RandomFlip, load
from implicit_attn.models import ImageClassifier, SpinClassifier, build_model
from implicit_attn.models.registry import BACKBONES
from implicit_attn.optional import require
from implicit_attn.programs import (
    Job,
    Program,
    Values,
    layer_options,
    mistakes,
    save_weights,
    take_recipe,
)
from implicit_attn.studies import Study, Subject, format_table, report
from implicit_attn.studies.study import GREY, ORANGE, Table
from implicit_attn.training import (
    Classification,
    MaskedImages,
    NonFiniteLoss,
    Training,
    accuracy,
    describe,
)

SOLVED = tuple(name for name, row in BACKBONES.items() if row.solves)
Data = Literal["digits", "mnist", "fashion-mnist", "cifar10"]
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVES: Values = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}


@dataclass(kw_only=True)
class BackboneProgram(Program):
    """Hyper-SET, its equilibrium, or a baseline; ``--options`` reaches every argument of the model."""

    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "deq-transformer",
        "energy-transformer", "crate", "spin-transformer",
    ] = "hyperset"  # fmt: skip
    preset: Literal["small", "paper"] = "small"
    """what two cores train, or what is published of Hyper-SET"""
    iterations: int | None = None
    """of the layer, in each batch the same number; of an equilibrium the most evaluations"""
    layers: int | None = None
    """with weights of their own, each repeated"""

    def adjusted(self, preset: Mapping[str, Any], solves: Mapping[str, Any] = SOLVES) -> Values:
        """A preset without the values that the model does not take."""
        preset = {**preset, **(solves if self.model in SOLVED else {})}
        own = self.further()
        if self.iterations is not None:  # asked for: no random numbers unless these are, too
            preset.pop("random_iterations", None)
        # A preset's first step, 0 for example, is meant for a network that says the steps.
        plain = not str(own.get("step_size", "conditioned-")).startswith("conditioned-")
        if self.model != "hyperset" or plain:
            preset.pop("initial_step", None)
        if isinstance(BACKBONES[self.model].width, str):  # it takes none
            preset.pop("width", None)
        return preset

    def build(self, around: Values, values: Values, step_size: str) -> tuple[Values, nn.Module]:
        """The specification and the model: ``around`` of it, of ``values`` the backbone and rtol."""
        rtol = values.pop("rtol", None)
        backbone = {"name": self.model, **values}
        if self.model == "hyperset":
            backbone = {"step_size": step_size, **backbone}
        specification = {**around, "backbone": backbone}
        layer = layer_options(rtol) if self.model in SOLVED else None
        if layer is None and rtol is not None:
            raise ValueError(f"rtol is for {' and '.join(SOLVED)}, got the model {self.model}")
        torch.manual_seed(self.seed)
        return specification, build_model(specification, layer=layer)

    def report(self, training: Training) -> None:
        """The weights alone, and the test measures at 1/2 to 4 times the trained iterations.

        In every process, because the test samples are split among them; the first one writes.
        """
        trained = training.settings["model"]["backbone"]["iterations"]
        numbers = sorted({max(1, round(times * trained)) for times in (0.5, 1, 2, 4)})
        found = {number: training.evaluate(number) for number in numbers}
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        size = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"\n{training.task.data.name}, {self.model}, {size} parameters; {training.summary()}")
        print("test measures by iterations:")
        for number, measures in found.items():
            print(f"  {number:3d}  " + "  ".join(describe(*each) for each in measures.items()))
        print(f"tables, checkpoint and weights: {self.place}")


def take(values: Values, *names: str) -> Values:
    """The named values that are there, taken out of ``values``."""
    return {name: values.pop(name) for name in names if values.get(name) is not None}


PAPER: Values = {
    "dim": 384, "heads": 6, "patch": 4, "stem": "patch", "readout": "class",
    "initial_step": 0.0, "iterations": 12, "epochs": 200, "batch": 128, "rate": 1e-3, "warmup": 5 / 200,
    "floor": 0.01, "weight_decay": 5e-5, "optimizer": "adam", "clip": None,
}  # fmt: skip
SMALL: Values = {
    "dim": 64, "heads": 4, "patch": 7, "stem": "conv", "readout": "class",
    "initial_step": 0.1, "iterations": 12, "random_iterations": [6, 18], "epochs": 10, "batch": 128,
    "rate": 3e-3, "warmup": 0.1, "floor": 0.005, "weight_decay": 0.02, "optimizer": "adamw", "clip": 1.0,
}  # fmt: skip
SMALL_DIGITS = SMALL | {"patch": 2, "epochs": 40, "batch": 64, "rate": 1.5e-3}
PRESETS: dict[str, dict[str, Values]] = {
    "small": {"digits": SMALL_DIGITS, "cifar10": SMALL | {"patch": 4}, "other": SMALL},
    "paper": {"digits": PAPER | {"patch": 2}, "other": PAPER},
}
AUGMENTS: dict[str, Any] = {
    "digits": None,  # 8x8 pixels are too few for rotations and shifts
    "mnist": RandomAffine(),
    "fashion-mnist": Compose(RandomCrop(2), RandomFlip()),
    "cifar10": Compose(RandomCrop(4), RandomFlip()),
}
# The batch, rates and clipping of the paper's code for 256 codes.
MASKED_PAPER: Values = {
    "dim": 768, "heads": 12, "patch": 4, "initial_step": 0.0, "iterations": 12, "epochs": 300,
    "batch": 64, "rate": 1e-4, "warmup": 0.0, "floor": 1.0, "weight_decay": 0.1, "clip": 3.0,
    "betas": [0.9, 0.96], "masked": 0.4,
}  # fmt: skip
MASKED_SMALL: Values = {
    "dim": 64, "heads": 4, "patch": 4, "initial_step": 0.1, "iterations": 8,
    "random_iterations": [4, 12], "epochs": 5, "batch": 128, "rate": 3e-3, "warmup": 0.1,
    "floor": 0.01, "weight_decay": 0.02, "clip": 1.0, "betas": [0.9, 0.999], "masked": 0.4,
}  # fmt: skip
# At first a model predicts the mean image whatever it sees. Small batches and a high rate shorten this.
MASKED_DIGITS: Values = {"patch": 2, "epochs": 60, "batch": 16, "rate": 4e-3}
# On the digits; the transformer does worse with the sines and cosines than with learned positions, and a
# solve of a small batch costs as much as one of a large batch.
DIGITS_OF: dict[str, Values] = {
    "hyperset": {"positions": "sinusoidal"},
    **{name: {"batch": 32, "rate": 2e-3} for name in SOLVED},
}
# Hidden units with which the models of the preset "small" have about as many parameters.
WIDTHS = {"hyperset": 64, "hyperset-equilibrium": 772, "transformer": 288, "deq-transformer": 288,
          "energy-transformer": 707, "equilibrium": 286}  # fmt: skip


@dataclass(kw_only=True)
class VitImages(BackboneProgram):
    """Train a recurrent attention model to classify images: Hyper-SET, or a baseline.

    implicit-attn train vit-images: embedded 8x8 digits, a minute or two. With --data mnist a quarter
    of an hour; --model transformer: a baseline; --data cifar10 --preset paper --compile: for a GPU.

    The linear readout is of a class token. Of --model hyperset-equilibrium, which is solved for its
    equilibrium, all tokens are read out. --model equilibrium solves equilibrium blocks and --model
    spin-transformer steady states of spins: --layers of them one after the other, each solved once.
    --preset paper is the recipe of Hyper-SET (Hu, Zou, Xu, https://arxiv.org/abs/2502.11646).
    """

    folder = "{data}-{model}"
    data: Data = "digits"
    limit: int | None = None
    """use only so many training images"""
    no_augment: bool = False
    """train on the images as they are"""

    def defaults(self) -> Values:
        chosen = PRESETS[self.preset]
        # At the minimum of its energy a class token has gathered little of the image: all are read out.
        solves = SOLVES | ({"readout": "tokens"} if self.model == "hyperset-equilibrium" else {})
        return self.adjusted(chosen.get(self.data, chosen["other"]), solves)

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        values = self.values("iterations", "layers")
        kept = {"data": self.data, "augmented": not self.no_augment, "limit": self.limit}
        kept |= {"rtol": values.get("rtol")}
        recipe = take_recipe(values, self.seed)
        _, channels, size, _ = data.train_images.shape
        around = {"kind": "image-classifier", "image_size": size, "channels": channels}
        around |= {"classes": data.classes}
        around |= take(
            values, "patch", "stem", "readout", "positions", "pixel_norm", "embedding_norm"
        )
        specification, model = self.build(around, values, "conditioned-state")
        if first:
            numbers = f"{len(data.train_images)} training and {len(data.test_images)} test images"
            print(f"data: {data.name}, {numbers}")
        task = Classification(data, None if self.no_augment else AUGMENTS[self.data])
        return Job(model, task, recipe, {**kept, "model": specification})


@dataclass(kw_only=True)
class MaskedPatches(BackboneProgram):
    """Train a recurrent attention model to fill in hidden patches of images: Hyper-SET, or a baseline.

    implicit-attn train masked-images: embedded 8x8 digits, a minute or two. With --data mnist some ten
    minutes; --model transformer: about as many parameters. Pictures of several runs, beside guesses that
    learn nothing: examples/masked_images.py.

    A learned token stands for each hidden patch. The loss is the squared error of hidden pixels; its
    values at other numbers of iterations are printed.
    --preset paper takes shares, widths and optimiser from Hyper-SET (Hu, Zou, Xu,
    https://arxiv.org/abs/2502.11646), which predicts codes of a pretrained quantiser, not pixels.
    """

    folder = "masked-{data}-{model}"
    data: Data = "digits"
    limit: int | None = None
    """use only so many training images"""
    test: int = 2000
    """test images, at most"""

    def defaults(self) -> Values:
        preset = MASKED_PAPER | ({"patch": 2} if self.data == "digits" else {})
        if self.preset == "small":
            preset = MASKED_SMALL | ({"width": WIDTHS[self.model]} if self.model in WIDTHS else {})
            if self.data == "digits":
                preset |= MASKED_DIGITS | DIGITS_OF.get(self.model, {})
        return self.adjusted(preset, SOLVES | {"iterations": 24})

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        values = self.values("iterations", "layers")
        masked, patch = values.pop("masked"), values.pop("patch")
        task = MaskedImages(data, patch, masked=masked, test=self.test)
        kept = {"data": self.data, "masked": masked}
        kept |= {"limit": self.limit, "test": self.test, "rtol": values.get("rtol")}
        recipe = take_recipe(values, self.seed)
        _, channels, size, _ = data.train_images.shape
        around = {"kind": "masked-images", "image_size": size, "channels": channels, "patch": patch}
        around |= take(values, "positions")
        specification, model = self.build(around, values, "conditioned-input")
        if first:
            numbers = f"{len(data.train_images)} training and {len(task.tests()[0])} test images"
            print(f"data: {data.name}, {numbers}, {task.most} of {task.patches} patches hidden")
        return Job(model, task, recipe, {**kept, "model": specification})


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

    folder = "{data}-{readout}"
    data: Data = "digits"
    readout: Literal["tokens", "class", "mean"] = "tokens"
    """all tokens, a class token or the mean of all tokens"""
    patch: int = 2
    """height = width of a patch"""
    limit: int | None = None
    """use only so many training images"""

    def defaults(self) -> Values:
        return PRESET

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        # Before minutes of training, and with a message of one line.
        self.logistic = logistic_regression(data)
        values = self.values()
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
        """A new model, its positions as large as embedded patches: a normed token tells where it is."""
        torch.manual_seed(self.seed)
        model = build()
        nn.init.normal_(model.position, std=POSITIONS)
        return model

    def _rivals(self, data: ImageData, kept: Values) -> dict[str, tuple[nn.Module, float]]:
        """Simpler models by name, trained by the same recipe, each with the seconds of its training."""
        found = {}
        for name in (IDENTITY, ENCODER):
            print(f"\n{name}, by the same recipe:", flush=True)
            model = self._seeded(partial(build_rival, name, self.sizes, self.around))
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
        history, model, data = training.history, training.model, training.task.data
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
        saved = beside.save(self.place / "comparison", title)
        print(f"\n{beside}\nsaved: {', '.join(map(str, saved))}")


def write_report(program: Program, training: Training, title: str, **options: Any) -> None:
    """The picture ``report.png`` and its tables, of what was trained."""
    data, history = training.task.data, training.history
    spent, rtol = max(1, int(history[-1]["evaluations"])), training.settings["rtol"]
    tests = data.test_images, data.test_labels
    subject = Subject(training.model.eval(), *tests, spent, rtol, title=title, history=history)
    found = report(subject, **options)
    saved = found.save(program.place / "report", title)
    print(f"\n{title}\n\n{found}\n\n{training.summary()}")
    print(f"saved: {', '.join(map(str, saved))}")


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

    ``IDENTITY``: tokens as they are, for what embedding and readout do by themselves; ``ENCODER``:
    ``nn.TransformerEncoderLayer`` with ReLU and its norms inside, which has about as many parameters as
    an ``EquilibriumBlock`` of as many hidden units. ``around``: the other arguments of ``ImageClassifier``.
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
    seconds, size = time.perf_counter() - start, fitted.coef_.size + fitted.intercept_.size
    right = fitted.score(test, data.test_labels.numpy())
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
        note = "{:.1f} % right, {parameters:,} parameters, {seconds:.2g} s"
        notes = [note.format(100 * row["accuracy"], **row) for row in self.comparison]
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

    folder = "{data}-spins"
    data: Literal["mnist", "fashion-mnist"] = "mnist"
    limit: int | None = None
    """use only so many training images"""

    def defaults(self) -> Values:
        return SPINS

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        values = self.values()
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
        data, model = training.task.data, training.model
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
