"""Attention made of coupled vector spins reads MNIST: ``implicit-attn train mnist-spins``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from implicit_attn.data import RandomAffine, load
from implicit_attn.models import SpinClassifier
from implicit_attn.studies import Subject, report
from implicit_attn.training import Training, accuracy
from implicit_attn.training.script import Job, Values, layer_options, save_weights, take_recipe
from implicit_attn.training.script import Program as Script

PRESET: Values = {
    "dim": 10, "bound": 0.9, "epochs": 10, "batch": 128, "rate": 4e-3, "floor": 0.002,
    "rtol": 1e-4, "max_steps": 60,
}  # fmt: skip


@dataclass(kw_only=True)
class MnistSpins(Script):
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
        values = self.values(PRESET)
        kept = {name: values[name] for name in ("dim", "bound", "rtol", "max_steps")}
        kept |= {"data": self.data, "limit": self.limit}
        recipe = take_recipe(values, self.seed)
        layer = layer_options(values.pop("rtol"), max_steps=values.pop("max_steps"))
        kept["model"] = {"kind": "spin-classifier", **values}
        torch.manual_seed(self.seed)
        model = SpinClassifier(**values, layer=layer)
        return Job(model, data, recipe, kept, augment=RandomAffine(), observe=site_norms)

    def report(self, training: Training) -> None:
        """Tables as CSV and text, one picture."""
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        data, model, history = training.data, training.model, training.history
        right = 100 * accuracy(model, data.test_images, data.test_labels)
        title = (
            f"{self.data}, spins of dimension {model.attention.couplings.dim}: test accuracy "
            f"{right:.2f} %, {sum(p.numel() for p in model.parameters())} parameters"
        )
        rtol, spent = training.settings["rtol"], max(1, int(history[-1]["evaluations"]))
        subject = Subject(
            model, data.test_images, data.test_labels, spent, rtol, title=title, history=history
        )
        found = report(subject, training.observations)
        found.save(self.place / "report", title)
        print(f"\n{title}\n{training.summary()}\n\n{found}\n\nreport: {self.place / 'report.png'}")


def site_norms(model: Any) -> list[list[float]]:
    """Frobenius norms of the couplings between sites, rounded for the checkpoint."""
    with torch.no_grad():
        norms = model.attention.couplings.site_norms()
    return [[round(value, 4) for value in row] for row in norms.tolist()]
