"""Small models and samples for the tests of the studies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.models import BACKBONES, build_model
from implicit_attn.studies import Subject
from implicit_attn.updates.hyperset import ConditionedStepSizes

SIZE, CLASSES, COUNT = 8, 10, 12


def specification(name: str, **options: Any) -> dict[str, Any]:
    """Of a model for 8x8 images, 4 tokens of 8 features, two heads."""
    backbone: dict[str, Any] = {"name": name, "dim": 8, "heads": 2, **options}
    if name == "hyperset":
        backbone = {"time_dim": 8, "initial_step": 0.1, **backbone}
    shape = {"image_size": SIZE, "channels": 1, "classes": CLASSES, "patch": 4}
    return {"kind": "image-classifier", **shape, "readout": "mean", "backbone": backbone}


def image_subject(name: str, **options: Any) -> Subject:
    """An untrained model of this backbone with random images, float32."""
    torch.manual_seed(0)
    iterations = options.setdefault("iterations", 3)
    model: nn.Module = build_model(specification(name, **options)).eval()
    for module in model.modules():
        if isinstance(module, ConditionedStepSizes):  # else time and state say nothing yet
            nn.init.normal_(module.last.weight, std=0.02)
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(COUNT, 1, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (COUNT,), generator=generator)
    return Subject(model, images, labels, iterations, name=name, title=f"random images, {name}")


def write_weights(path: Path, name: str, **options: Any) -> Path:
    """A checkpoint of such a model as the examples write it, for the digits."""
    torch.manual_seed(0)
    wanted = specification(name, **{"iterations": 3} | options)
    row = {"epoch": 1, "loss": 1.0, "evaluations": 4} if BACKBONES[name].solves else {}
    settings = {"data": "digits", "model": wanted}
    save_checkpoint(path, build_model(wanted), progress={"settings": settings, "history": [row]})
    return path
