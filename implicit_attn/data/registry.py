"""Data sets by name; a new one is one row here."""

from __future__ import annotations

from collections.abc import Callable

from implicit_attn.data.cifar import load_cifar10
from implicit_attn.data.digits import load_digits
from implicit_attn.data.images import ImageData
from implicit_attn.data.mnist import load_fashion_mnist, load_mnist

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
