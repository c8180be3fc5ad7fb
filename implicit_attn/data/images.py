"""Labelled images, their patches, and generators that repeat exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from solvers.core.checks import require_count


@dataclass(frozen=True)
class ImageData:
    """A data set of labelled images, split into training and test.

    Attributes:
        name: the one that :func:`implicit_attn.data.load` takes, or another one where a copy differs
            from the original.
        classes: number of classes C.
        train_images, test_images: (N, channels, height, width) float32 in [0, 1].
        train_labels, test_labels: (N,) int64 in 0 .. C - 1.

    Raises:
        TypeError, ValueError: a dtype, a shape or a range differs from those above.
    """

    name: str
    classes: int
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            self._check(part, getattr(self, f"{part}_images"), getattr(self, f"{part}_labels"))
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise ValueError(
                f"{self.name}: an image of test_images is {tuple(self.test_images.shape[1:])}, "
                f"expected {tuple(self.train_images.shape[1:])} as in train_images"
            )

    def first(self, limit: int | None) -> ImageData:
        """The same data with ``limit`` training images only; None: all of them.

        The first ones; of images that are sorted by their classes, as many evenly spaced ones, which
        have all classes.

        Raises:
            ValueError: there are several classes, and these images are all of one.
        """
        if limit is None:
            return self
        chosen = some_samples(self.train_labels, limit)
        images, labels = self.train_images[chosen], self.train_labels[chosen]
        if self.classes > 1 and bool((labels == labels[0]).all()):
            raise ValueError(
                f"limit must leave training images of two classes at least, got {limit}"
            )
        return replace(self, train_images=images, train_labels=labels)

    def some_test(self, number: int | None) -> tuple[Tensor, Tensor]:
        """``number`` test images (None: all) and their labels, chosen as those of :meth:`first`."""
        every = len(self.test_labels) if number is None else number
        chosen = some_samples(self.test_labels, every)
        return self.test_images[chosen], self.test_labels[chosen]

    def to(self, device: torch.device | str) -> ImageData:
        """The same data on another device."""
        names = ("train_images", "train_labels", "test_images", "test_labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def _check(self, part: str, images: Tensor, labels: Tensor) -> None:
        if images.dtype != torch.float32 or labels.dtype != torch.int64:
            raise TypeError(
                f"{self.name}: {part}_images and {part}_labels are {images.dtype} and "
                f"{labels.dtype}, expected torch.float32 and torch.int64"
            )
        if images.dim() != 4 or images.numel() == 0 or labels.shape != images.shape[:1]:
            raise ValueError(
                f"{self.name}: {part}_images {tuple(images.shape)} and {part}_labels "
                f"{tuple(labels.shape)}, expected (N, channels, height, width) and (N,), none empty"
            )
        for what, values, top in (("images", images, 1), ("labels", labels, self.classes - 1)):
            low, high = values.min().item(), values.max().item()
            # Written so that NaN, which compares false, is refused as well.
            if not (low >= 0 and high <= top):
                raise ValueError(
                    f"{self.name}: {part}_{what} lie in [{low}, {high}], expected [0, {top}]"
                )


def some_samples(targets: Tensor, number: int) -> slice | Tensor:
    """An index of ``number`` samples: the first, or where targets are sorted labels evenly spaced ones."""
    number = min(require_count("number", number), len(targets))
    labels = targets.dim() == 1 and not targets.is_floating_point()
    if labels and bool((targets[1:] >= targets[:-1]).all()):
        return torch.arange(number, device=targets.device) * len(targets) // number
    return slice(number)


def from_pixels(
    name: str, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], *, largest: int = 255
) -> ImageData:
    """10 classes, from pairs of pixels (N, C, H, W) in 0 .. ``largest`` and labels (N,)."""
    parts = [(pixels.float().div_(largest), labels.long()) for pixels, labels in (train, test)]
    return ImageData(name, 10, *parts[0], *parts[1])


# Patches; the pixels of hidden ones are NaN.


def split_patches(images: Tensor, patch: int) -> Tensor:
    """Images (B, C, S, S) -> the pixels of their patches (B, N, C patch^2), row by row.

    Raises:
        ValueError: the images are not square, or ``patch`` does not divide their side.
    """
    batch, channels, size, width = images.shape
    if size != width or size % require_count("patch", patch):
        raise ValueError(
            f"patch must divide the side of square images, got {patch} for {size} x {width}"
        )
    side = size // patch
    parts = images.reshape(batch, channels, side, patch, side, patch)
    return parts.permute(0, 2, 4, 1, 3, 5).reshape(batch, side * side, -1)


def join_patches(pixels: Tensor, patch: int) -> Tensor:
    """The inverse of :func:`split_patches`: (B, N, C patch^2) -> (B, C, S, S), S = sqrt(N) patch."""
    batch, number, _ = pixels.shape
    side = math.isqrt(number)
    parts = pixels.reshape(batch, side, side, -1, patch, patch)
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(batch, -1, side * patch, side * patch)


def hidden_patches(images: Tensor, patch: int) -> Tensor:
    """(B, N) bool, True where a patch of the images (B, C, S, S) holds a NaN."""
    return split_patches(images, patch).isnan().any(-1)


def hide_patches(images: Tensor, hidden: Tensor, patch: int) -> Tensor:
    """The images (B, C, S, S) with NaN in all pixels of the patches ``hidden`` (B, N) bool."""
    pixels = split_patches(images, patch)
    return join_patches(pixels.masked_fill(hidden.unsqueeze(-1), math.nan), patch)


# Generators.


def hash_seed(stream: tuple[int, ...], **numbers: int) -> int:
    """A seed below 2^64 from ``numbers``, by numpy's ``SeedSequence``, unrelated to its neighbours'.

    ``stream`` keeps uses apart that have equal numbers: () are the epochs, (1,) the batches, (2,)
    the steps of a model.
    """
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"{name} must be >= 0, got {value!r}")
    sequence = np.random.SeedSequence([*numbers.values()], spawn_key=stream)
    return int(sequence.generate_state(1, np.uint64)[0])


def epoch_generator(seed: int, epoch: int, batch: int | None = None) -> torch.Generator:
    """A CPU generator whose numbers depend on ``(seed, epoch)`` only, or on those and ``batch``.

    A resumed training draws the same order as one that was never interrupted.

    Raises:
        ValueError: ``seed``, ``epoch`` or ``batch`` is negative.
    """
    stream, of_batch = ((), {}) if batch is None else ((1,), {"batch": batch})
    return torch.Generator().manual_seed(hash_seed(stream, seed=seed, epoch=epoch, **of_batch))
