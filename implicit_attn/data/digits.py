"""The handwritten digits of scikit-learn: 1,797 images of 8x8, without a download."""

from __future__ import annotations

import torch

from implicit_attn.data.images import ImageData, from_pixels, stratified_holdout
from implicit_attn.optional import require

_LARGEST_VALUE = 16  # each pixel counts the inked ones of a 4x4 block


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
    train, test = ((pixels[i], labels[i]) for i in stratified_holdout(labels, holdout, seed))
    return from_pixels("digits", train, test, largest=_LARGEST_VALUE)
