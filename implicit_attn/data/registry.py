"""Data sets by name; a new one is one row here. The digits of scikit-learn, which need no file."""

from __future__ import annotations

from collections.abc import Callable

import torch

from implicit_attn.data.cifar import load_cifar10
from implicit_attn.data.images import ImageData, from_pixels
from implicit_attn.data.mnist import load_fashion_mnist, load_mnist
from implicit_attn.optional import require


def load_digits(*, holdout: float = 0.2, seed: int = 0) -> ImageData:
    """Digits with a stratified hold-out as the test set.

    The images are the test part of the UCI set "Optical recognition of handwritten digits"
    (Alpaydin and Kaynak, 1998), as embedded in scikit-learn.

    Args:
        holdout: share of every class that becomes the test set, strictly between 0 and 1.
        seed: of the split; the same seed gives the same split everywhere.

    Returns:
        :class:`ImageData` with images (N, 1, 8, 8) and 10 classes.

    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: ``holdout`` is out of range.
    """
    digits = require("sklearn.datasets", extra="examples").load_digits()
    pixels, labels = torch.from_numpy(digits.images).unsqueeze(1), torch.from_numpy(digits.target)
    if not 0 < holdout < 1:
        raise ValueError(f"holdout must lie strictly between 0 and 1, got {holdout}")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(10):
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        held[members[order[: round(holdout * len(members))]]] = True
    train, test = ((pixels[part], labels[part]) for part in (~held, held))
    return from_pixels("digits", train, test, largest=16)  # inked pixels of 4x4


LOADERS: dict[str, Callable[[], ImageData]] = {
    "digits": load_digits,
    "mnist": load_mnist,
    "fashion-mnist": load_fashion_mnist,
    "cifar10": load_cifar10,
}


def load(name: str) -> ImageData:
    """Load a data set with its loader's defaults.

    Args:
        name: ``"digits"``, ``"mnist"``, ``"fashion-mnist"`` or ``"cifar10"``.

    Raises:
        ValueError: the name is unknown. The loaders' own errors pass through.
    """
    if name not in LOADERS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, LOADERS))}")
    return LOADERS[name]()
