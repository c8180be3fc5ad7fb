"""An equilibrium block reads handwritten digits, beside simpler models: ``implicit-attn demo``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from implicit_attn.data import ImageData, load
from implicit_attn.models import build_model
from implicit_attn.programs.backbones import Data, take
from implicit_attn.programs.comparison import (
    ENCODER,
    IDENTITY,
    LOGISTIC,
    build_rival,
    compare,
    logistic_regression,
)
from implicit_attn.studies import Subject, report
from implicit_attn.training import NonFiniteLoss, Training, accuracy
from implicit_attn.training.script import (
    Job,
    Program,
    Values,
    layer_options,
    mistakes,
    save_weights,
    take_recipe,
)

PRESETS: dict[str, Values] = {
    "equilibrium": {"rate": 4e-3, "dropout": 0.1, "layers": 1, "epochs": 20},
    "hyperset": {"rate": 2e-3, "bound": 2.0, "maximum": 2.0, "epochs": 20},
}
SHARED: Values = {"dim": 64, "heads": 4, "width": 128, "batch": 64, "rtol": 1e-3, "max_steps": 60}
POSITIONS = 0.5  # standard deviation of their initial values


@dataclass(kw_only=True)
class Classify(Program):
    """Train an equilibrium block to read handwritten digits, beside simpler models, and report on it.

    implicit-attn train classify: embedded 8x8 digits, about a minute. With --data mnist --patch 4 MNIST;
    --model hyperset: an energy that sees the image as 1/2 |z - x|^2; --baselines none: without others.

    Each image becomes tokens x. The block makes x + z* of them, where z* minimises an energy that sees
    x inside its attention and its hidden units; a linear readout classifies the result. The same loop
    trains the same classifier with nothing in the place of the block and with a transformer encoder
    layer of equal size; logistic regression on the pixels stands beside them.
    """

    data: Data = "digits"
    model: Literal["equilibrium", "hyperset"] = "equilibrium"
    readout: Literal["tokens", "class", "mean"] = "tokens"
    """all tokens, a class token or (equilibrium) the mean of all tokens"""
    patch: int = 2
    """height = width of a patch"""
    baselines: Literal["all", "none"] = "all"
    """simpler models trained beside it"""
    limit: int | None = None
    """use only so many training images"""

    def folder(self) -> str:
        return f"{self.data}-{self.readout}"

    def job(self, first: bool) -> Job:
        data = load(self.data).first(self.limit)
        # Before minutes of training, and with a message of one line.
        self.logistic = logistic_regression(data) if self.baselines == "all" else None
        preset = SHARED | PRESETS[self.model]
        if self.model == "hyperset" and self.readout == "tokens":
            preset |= {"epochs": 16}
        values = self.values(preset)
        kept = {"data": self.data, "limit": self.limit, "rtol": values["rtol"]}
        self.recipe = take_recipe(values, self.seed)
        _, channels, side, _ = data.train_images.shape
        stem = {"stem": "conv" if self.readout == "class" else "patch"} | take(values, "stem")
        self.around = {"image_size": side, "channels": channels, "classes": data.classes}
        self.around |= {"patch": self.patch, "readout": self.readout, **stem}
        rtol, steps = values.pop("rtol"), values.pop("max_steps")
        layer = layer_options(rtol, max_steps=steps)
        self.sizes = {name: values[name] for name in ("dim", "heads", "width")}
        self.around |= {"positions": "learned", "embedding_norm": False}
        if self.model == "equilibrium":
            self.sizes |= {name: values[name] for name in ("layers", "dropout")}
        name = {"hyperset": "hyperset-equilibrium"}.get(self.model, self.model)
        backbone = {"name": name, "iterations": steps, **values}
        specification = {"kind": "image-classifier", **self.around, "backbone": backbone}
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
        found = {} if self.logistic is None else {LOGISTIC: self.logistic}
        for name in (IDENTITY, ENCODER) if self.baselines == "all" else ():
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
        rivals = self._rivals(data, {"data": self.data, "limit": self.limit})
        explicit = None
        if rivals:
            right = accuracy(rivals[ENCODER][0], data.test_images, data.test_labels)
            explicit = (ENCODER, right)
        number = sum(p.numel() for p in model.parameters())
        title = (
            f"{self.data}, {self.model}, {self.readout} readout: test accuracy "
            f"{100 * history[-1]['test_accuracy']:.2f} %, {number:,} parameters"
        )
        spent, rtol = max(1, int(history[-1]["evaluations"])), training.settings["rtol"]
        tests = data.test_images, data.test_labels
        subject = Subject(model.eval(), *tests, spent, rtol, title=title, history=history)
        found = report(subject, explicit=explicit)
        found.save(self.place / "report", title)
        print(f"\n{title}\n\n{found}\n\n{training.summary()}")
        print(f"report: {self.place / 'report.png'} (tables beside it as CSV)")
        if rivals:
            seconds = sum(row["seconds"] for row in history)
            beside = compare(self.model, model, seconds, rivals, data)
            beside.save(self.place / "comparison", title)
            print(f"\n{beside}\ncomparison: {self.place / 'comparison.png'}")
