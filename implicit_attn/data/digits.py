"""The handwritten digits that scikit-learn carries: 1,797 images of 8x8, no download."""

from __future__ import annotations

import torch

from implicit_attn.data.images import ImageData, stratified_holdout
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
    images = torch.tensor(digits.images, dtype=torch.float32).div_(_LARGEST_VALUE).unsqueeze(1)
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = stratified_holdout(labels, holdout, seed)
    return ImageData(
        name="digits",
        classes=10,
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
    )
