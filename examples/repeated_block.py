"""How well does one transformer block classify images, applied once or at its fixed point?

    python examples/repeated_block.py                    # CIFAR-10, ten minutes of one core
    python examples/repeated_block.py --data digits

The block is DEQTransformer, with a random number of iterations from 4 to 12 for each training batch. At its
fixed point it is more accurate than a block used once, and nearly as accurate as three stacked layers with
2.6 times as many weights. Images are normalised per channel, without augmentation; the readout is a class
token.
"""

import time
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQTransformer
from implicit_attn.data import load

DIM, HEADS, HIDDEN = 64, 4, 128
ONCE, REPEATED, THREE = "one block, once", "one block, repeated", "three blocks"
RATES = {ONCE: 1e-2, REPEATED: 6e-3, THREE: 3e-3}
DRAWN = (4, 12)  # iterations in training; 8 in evaluation
MARKS = (1, 2, 4, 8, 16, 32)


class Classifier(nn.Module):
    """Patches and a class token with learned positions, blocks, a linear readout of the class token."""

    def __init__(self, images: Tensor, patch: int, classes: int, blocks: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Conv2d(images.shape[1], DIM, patch, stride=patch)
        number = (images.shape[-1] // patch) ** 2 + 1
        self.front = nn.Parameter(0.5 * torch.randn(DIM))
        self.place = nn.Parameter(0.5 * torch.randn(number, DIM))
        self.blocks, self.norm, self.head = blocks, nn.LayerNorm(DIM), nn.Linear(DIM, classes)

    def forward(self, images: Tensor, **iterations: int) -> Tensor:
        patches = self.embed(images).flatten(2).mT
        front = self.front.expand(len(patches), 1, -1)
        tokens = torch.cat((front, patches), 1) + self.place
        return self.head(self.norm(self.blocks(tokens, **iterations)[:, 0]))


def blocks_of(name: str) -> nn.Module:
    if name == THREE:
        options: Any = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = nn.TransformerEncoderLayer
        return nn.Sequential(*(layer(DIM, HEADS, HIDDEN, 0.0, **options) for _ in range(3)))
    return DEQTransformer(DIM, HEADS, HIDDEN, iterations=DRAWN if name == REPEATED else 1)


def train(
    model: nn.Module, images: Tensor, labels: Tensor, rate: float, epochs: int, seed: int
) -> float:
    """AdamW, the rate rising over a tenth and falling linearly to 0; the processor time in seconds."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    generator, start, batch = torch.Generator().manual_seed(seed), time.process_time(), 64
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(10 * (step + 1) / steps, (1 - step / steps) / 0.9)
    )
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=generator)
        for chosen in order.split(batch)[: len(images) // batch]:
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
    return time.process_time() - start


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, **iterations: int) -> float:
    parts = zip(images.split(200), labels.split(200), strict=True)
    right = sum(int((model(part, **iterations).argmax(1) == label).sum()) for part, label in parts)
    return 100 * right / len(labels)


def repeated_block(
    data: Literal["cifar10", "mnist", "digits"] = "cifar10",  # data set
    train_images: int = 10_000,  # maximum number of training images
    test_images: int = 2_000,  # maximum number of test images
    patch: int = 4,  # side of a patch in pixels
    epochs: int = 5,  # number of training epochs
    seeds: int = 2,  # number of trainings of each model
) -> Result:
    loaded = load(data)
    chosen = torch.Generator().manual_seed(0)
    first = torch.randperm(len(loaded.train_images), generator=chosen)[:train_images]
    tested = torch.randperm(len(loaded.test_images), generator=chosen)[:test_images]
    images, labels = loaded.train_images[first].float(), loaded.train_labels[first]
    tests, answers = loaded.test_images[tested].float(), loaded.test_labels[tested]
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    images, tests = (images - mean) / std, (tests - mean) / std
    accuracies, by_iterations = Table(), Table()
    for name, rate in RATES.items():
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = Classifier(images, patch, loaded.classes, blocks_of(name))
            seconds = train(model, images, labels, rate, epochs, seed)
            model.eval()
            row: dict[str, Any] = {"model": name, "seed": seed, "rate": rate}
            row["accuracy"] = accuracy(model, tests, answers)
            row["parameters"] = sum(each.numel() for each in model.parameters())
            accuracies.append(row | {"seconds": seconds})
            for mark in MARKS if name == REPEATED else ():
                found = accuracy(model, tests, answers, iterations=mark)
                by_iterations.append({"seed": seed, "iterations": mark, "accuracy": found})
    figure, axes = plt.subplots(figsize=(6.2, 4.2))
    for seed in range(seeds):
        (curve,) = columns(by_iterations, "accuracy", seed=seed)
        axes.plot(MARKS, curve, "o-", color="C0", label=None if seed else REPEATED)
        for name, color in ((ONCE, "C1"), (THREE, "C4")):
            ((height,),) = columns(accuracies, "accuracy", model=name, seed=seed)
            axes.axhline(height, color=color, linestyle="--", label=None if seed else name)
    axes.axvspan(*DRAWN, color="C4", alpha=0.15, linewidth=0, label="drawn in training")
    axes.set_xscale("log", base=2)
    axes.set_xticks(MARKS, [str(mark) for mark in MARKS])
    axes.set_title(f"{data}, {len(images):,} images")
    axes.set(xlabel="iterations", ylabel="test accuracy (%)")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return {"accuracy": accuracies, "iterations": by_iterations}, figure


if __name__ == "__main__":
    run(repeated_block)
