"""Memories of digits as densities: likelihood and denoising of held-out images beside baselines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_attn.data import ImageData
from implicit_attn.energies import Hopfield
from implicit_attn.models.memories.fitting import fit_patterns
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.tables import Table
from solvers.core.checks import require_positive

MEMORIES = ("memory of clean images", "memory fitted to noisy images")


class Gallery(NamedTuple):
    """Images for the picture, rows of pixels."""

    side: int
    noise: float
    rows: dict[str, Tensor]  # (n, pixels) each: the clean images, the noisy ones, what methods make
    samples: dict[str, Tensor]  # (n, pixels) each: of the fitted memory


def unit_images(images: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, C H W) of norm 1, so that all images weigh the same as patterns, float64."""
    flat = images.flatten(1).double()
    return flat / flat.norm(dim=1, keepdim=True)


def digit_densities(
    data: ImageData,
    noises: Sequence[float],
    *,
    counts: Sequence[int] = (5, 10, 20, 40, 80),
    seed: int = 0,
    advance: Advance = lambda what: None,
) -> tuple[Table, Gallery]:
    """Noise of variance 1 / beta is taken off held-out images by one step of memories at beta.

    Two memories: of the training images themselves, and of patterns fitted by maximum likelihood to
    *noisy* training images, which never sees a clean one. Their number is that of ``counts`` with the
    highest likelihood of the last fifth of the noisy training images, which the fit leaves out.

    Args:
        data: images; test images are held out.
        noises: standard deviations of a pixel, > 0, of images of norm 1.
        counts: numbers of fitted patterns to choose from, each >= 1.
        seed: of the noise and the first patterns.
        advance: called with the name of each noise.

    Returns:
        A row for each noise and method: ``noise``, ``method``, ``patterns`` (stored ones), ``error``
        (root mean square of a pixel, in units of the noise) and ``log_likelihood``
        (mean nats of a noisy test image; NaN where the method is no density). And images of the
        middle noise.

    Raises:
        ValueError: for no noises or counts, or one out of range.
    """
    train, test = unit_images(data.train_images), unit_images(data.test_images)
    if not noises or not counts:
        raise ValueError(f"noises and counts must not be empty, got {noises} and {counts}")
    shown = sorted(noises)[len(noises) // 2]
    generator = torch.Generator().manual_seed(seed)
    table: Table = []
    gallery: Gallery | None = None
    for noise in noises:
        advance(f"noise {require_positive('noises', noise):g}")
        noisy_train, noisy = (
            images + noise * torch.randn(images.shape, generator=generator, dtype=images.dtype)
            for images in (train, test)
        )
        beta = noise**-2
        fitted = _fit(noisy_train, beta, counts, generator)
        memories = (Hopfield(train, beta=beta), fitted)
        methods = _methods(train, noise, *memories)
        made = {name: restore(noisy) for name, (restore, _) in methods.items()}
        for name, (_, log_prob) in methods.items():
            error = (made[name] - test).square().mean().sqrt().item() / noise
            nats = math.nan if log_prob is None else log_prob(noisy).mean().item()
            stored = {name: len(m.patterns) for name, m in zip(MEMORIES, memories, strict=True)}
            row = {"noise": noise, "method": name, "patterns": stored.get(name, 0)}
            table.append(row | {"error": error, "log_likelihood": nats})
        if noise == shown:
            picks = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed))[:12]
            rows = {"clean": test[picks]} | {name: each[picks] for name, each in made.items()}
            samples = fitted.sample(12, generator)
            mean = samples - fitted.grad(samples)
            drawn = {"patterns": fitted.patterns[:12], "samples": samples, "after one step": mean}
            gallery = Gallery(data.test_images.shape[-1], noise, rows, drawn)
    assert gallery is not None
    return table, gallery


def _fit(noisy: Tensor, beta: float, counts: Sequence[int], generator: torch.Generator) -> Hopfield:
    kept = len(noisy) - len(noisy) // 5
    memories = [
        fit_patterns(
            noisy[:kept], min(count, kept), beta, steps=100, tolerance=1e-4, generator=generator
        ).memory
        for count in counts
    ]
    return max(memories, key=lambda memory: memory.log_prob(noisy[kept:]).mean().item())


Method = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]


def _methods(train: Tensor, noise: float, memory: Hopfield, fitted: Hopfield) -> dict[str, Method]:
    """Each a denoiser, and a log density of noisy images where it has one."""
    mean = train.mean(0)
    centred = train - mean
    covariance = centred.mT @ centred / len(train)
    noisy_covariance = covariance + noise**2 * torch.eye(len(mean), dtype=mean.dtype)
    gain = torch.linalg.solve(noisy_covariance, covariance)
    gaussian = torch.distributions.MultivariateNormal(mean, noisy_covariance)
    single = Hopfield(mean.unsqueeze(0), beta=memory.beta)

    def nearest(z: Tensor) -> Tensor:
        return train[torch.cdist(z, train).argmin(1)]

    return {
        "noisy": (lambda z: z, None),
        "mean image": (lambda z: mean.expand_as(z), single.log_prob),
        "nearest neighbour": (nearest, None),
        "best linear": (lambda z: mean + (z - mean) @ gain, gaussian.log_prob),
        MEMORIES[0]: (lambda z: z - memory.grad(z), memory.log_prob),
        MEMORIES[1]: (lambda z: z - fitted.grad(z), fitted.log_prob),
    }
