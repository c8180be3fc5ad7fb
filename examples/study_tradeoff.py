"""Layers against iterations: small models of Hyper-SET of one depth, each layer repeated, are trained.

    python examples/study_tradeoff.py              # digits, depth 12: a minute or two

The weights of the runs go to the folder --weights.
"""

import shutil
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import torch
from image_tasks import Classification
from options import Run
from runner import Result, Table, run
from torch.nn import functional as F
from training import Training

from implicit_attn.data import load
from implicit_attn.models import build_model


def study_tradeoff(
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    depth: int = 12,  # layers times iterations
    layers: tuple[int, ...] = (),  # divisors of the depth (default: all)
    epochs: int = 6,  # of each training
    rate: float = 4e-3,  # largest learning rate
    seeds: int = 1,  # trainings of each
    limit: int | None = None,  # use only so many training images
    weights: Path = Path("runs/study-tradeoff/weights"),  # replaced by every call
) -> Result:
    images = load(data).first(limit)
    _, channels, size, _ = images.train_images.shape
    shape = {"image_size": size, "channels": channels, "classes": images.classes, "patch": 2}
    small = {"name": "hyperset", "dim": 32, "heads": 2, "time_dim": 32, "initial_step": 0.1}
    numbers = sorted(layers) or [k for k in range(1, depth + 1) if depth % k == 0]
    if any(depth % number for number in numbers):
        raise SystemExit(f"--layers must divide the depth {depth}, got {layers}")
    table: Table = []
    for number in numbers:
        for seed in range(seeds):
            backbone = {**small, "layers": number, "iterations": depth // number}
            built = {"kind": "image-classifier", **shape, "readout": "tokens", "backbone": backbone}
            torch.manual_seed(seed)
            model = build_model(built)
            folder = weights / f"{number}x{depth // number}-seed{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            options = Run(epochs=epochs, batch=64, rate=rate, seed=seed, accelerator="cpu").fill({})
            task = Classification(images, len(images.test_labels), augment=False)
            training = Training(options, model, task, {"data": data, "model": built}, folder)
            training.run()
            with torch.no_grad():
                parts = [model.eval()(part) for part in images.test_images.split(256)]
            loss = F.cross_entropy(torch.cat(parts), images.test_labels).item()
            table.append({
                "layers": number, "iterations": depth // number, "seed": seed,
                "parameters": sum(p.numel() for p in model.parameters()), "loss": loss,
                "accuracy": 100 * training.history[-1]["test_accuracy"],
                "seconds": sum(row["seconds"] for row in training.history),
            })  # fmt: skip
    figure, axes = plt.subplots(1, 3, figsize=(13, 4))
    names = [f"{number} x {depth // number}" for number in numbers]
    for panel, key in zip(axes, ("accuracy", "loss", "parameters"), strict=True):
        for place, number in enumerate(numbers):
            values = [row[key] for row in table if row["layers"] == number]
            panel.plot([place] * len(values), values, "o", color="C0")
        panel.set_xticks(range(len(names)), names)
        panel.set(
            xlabel="layers x iterations of each",
            ylabel=f"{key} (test, %)" if key == "accuracy" else key,
        )
    return {"table": table}, figure


if __name__ == "__main__":
    run(study_tradeoff)
