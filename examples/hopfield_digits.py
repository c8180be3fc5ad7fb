"""Does one attention step over stored digits remove noise from other digits?

    python examples/hopfield_digits.py        # half a minute

At temperature 1 / beta the energy of the continuous memory is a mixture of Gaussians around its patterns, and
one step of attention is the posterior mean of the pattern given a noisy state. On 8x8 digits of norm 1 two
memories denoise held-out images: one stores the clean training images, the other is fitted by maximum
likelihood to noisy images only. From noise 0.08 on, the memory of clean images has the lowest error.
"""

from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, columns, run
from torch import Generator, Tensor

from implicit_attn.data import load_digits
from implicit_attn.energies import Hopfield
from implicit_attn.models import fit_patterns

CLEAN, FITTED = "memory of clean images", "memory fitted to noisy images"
STYLES = {
    "noisy": ("C4", ":"), "mean image": ("C4", "--"), "nearest neighbour": ("C1", "-"),
    "best linear": ("C2", "-"), CLEAN: ("C0", "-"), FITTED: ("C3", "-"),
}  # fmt: skip


def unit_images(images: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, C H W) of norm 1, float64: all images weigh the same as patterns."""
    flat = images.flatten(1).double()
    return flat / flat.norm(dim=1, keepdim=True)


def fit(noisy: Tensor, beta: float, counts: tuple[int, ...], generator: Generator) -> Hopfield:
    """Of ``counts`` the number of patterns with the highest likelihood of the last fifth."""
    kept = len(noisy) - len(noisy) // 5
    options: Any = {"steps": 100, "tolerance": 1e-4, "generator": generator}
    fits = [fit_patterns(noisy[:kept], min(count, kept), beta, **options) for count in counts]
    memories = [each.memory for each in fits]
    return max(memories, key=lambda memory: memory.log_prob(noisy[kept:]).mean().item())


def methods(
    train: Tensor, noise: float, memory: Hopfield, fitted: Hopfield
) -> dict[str, Callable[[Tensor], Tensor]]:
    """Each maps noisy images (B, pixels) to restored ones."""
    mean = train.mean(0)
    covariance = (train - mean).mT @ (train - mean) / len(train)
    noisy_covariance = covariance + noise**2 * torch.eye(len(mean), dtype=mean.dtype)
    gain = torch.linalg.solve(noisy_covariance, covariance)
    return {
        "noisy": lambda z: z,
        "mean image": lambda z: mean.expand_as(z),
        "nearest neighbour": lambda z: train[torch.cdist(z, train).argmin(1)],
        "best linear": lambda z: mean + (z - mean) @ gain,
        CLEAN: lambda z: z - memory.grad(z),
        FITTED: lambda z: z - fitted.grad(z),
    }


def hopfield_digits(
    noises: tuple[float, ...] = (0.05, 0.08, 0.12, 0.2),  # standard deviations of the noise
    counts: tuple[int, ...] = (5, 10, 20, 40, 80),  # candidate numbers of patterns
    seed: int = 0,  # random seed of the noise and the initial patterns
) -> Result:
    data = load_digits()
    train, test = unit_images(data.train_images), unit_images(data.test_images)
    generator, ordered = torch.Generator().manual_seed(seed), sorted(set(noises))
    shown, rows, table = ordered[len(ordered) // 2], {}, []
    for noise in ordered:
        noisy_train, noisy = (
            images + noise * torch.randn(images.shape, generator=generator, dtype=images.dtype)
            for images in (train, test)
        )
        memory = Hopfield(train, beta=noise**-2)
        fitted = fit(noisy_train, noise**-2, counts, generator)
        stored = {CLEAN: len(train), FITTED: len(fitted.patterns)}
        made = {}
        for name, restore in methods(train, noise, memory, fitted).items():
            made[name] = restore(noisy)
            error = (made[name] - test).square().mean().sqrt().item() / noise
            row = {"noise": noise, "method": name, "patterns": stored.get(name, 0)}
            table.append(row | {"error": error})
        if noise == shown:
            picks = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:12]
            rows = {"clean": test[picks]} | {name: each[picks] for name, each in made.items()}

    side = data.test_images.shape[-1]
    figure = plt.figure(figsize=(13, 5))
    figure.suptitle("Memories of digits: denoising by one attention step")
    left, right = figure.subfigures(1, 2, width_ratios=[3, 2], squeeze=False).flat
    for axes, (name, images) in zip(left.subplots(len(rows), 1), rows.items(), strict=True):
        tiles = images.reshape(len(images), -1, side).permute(1, 0, 2).flatten(1)
        axes.imshow(tiles.numpy(), cmap="gray_r", vmin=0, vmax=0.4)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
    left.suptitle(f"held-out digits, noise {shown:g}", fontsize=10)
    axes = right.subplots()
    for name, (color, line) in STYLES.items():
        (errors,) = columns(table, "error", method=name)
        axes.plot(ordered, errors, label=name, color=color, linestyle=line, marker="o", ms=3.5)
    axes.set(ylabel="root mean square error of a pixel / noise", ylim=(0, 1.6), xscale="log")
    axes.set_xticks(ordered, [f"{noise:g}" for noise in ordered])
    axes.minorticks_off()
    axes.set(xlabel="noise, standard deviation of a pixel (images of norm 1)")
    axes.legend(fontsize=8)
    return {"digits": table}, figure


if __name__ == "__main__":
    run(hopfield_digits)
