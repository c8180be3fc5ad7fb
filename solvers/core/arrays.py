"""NumPy instead of torch for small arithmetic on the CPU; torch elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import numpy
import torch
from torch import Tensor

from solvers.core.device import readable

# An array (n, 1) or (n, k): numpy.ndarray on the CPU, Tensor elsewhere.
Array = Any

# Around algebra in NumPy: as in torch, an overflow is no event, its row is rejected later.
SILENT = partial(numpy.errstate, all="ignore")
NUMPY_SIZE = 1 << 17  # numbers up to which NumPy's cheaper calls outweigh torch's threads


def fits_numpy(tensor: Tensor) -> bool:
    """Whether NumPy may compute: a small float32 or float64 tensor on the CPU, no autograd."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    few = readable(tensor.device) and tensor.numel() <= NUMPY_SIZE
    return wide and few and not torch.is_grad_enabled()


def small_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the small systems of a solver: float32 for half precision, else the state's."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Inner products of the rows of two arrays (n, D): (n,). NumPy below 2 has no call of its own for it.
row_dots: Any = getattr(numpy, "vecdot", None) or partial(numpy.einsum, "nd,nd->n")


def row_norms(vectors: Array) -> Array:
    """Euclidean norms (n,) of the rows of a NumPy array (n, D), in its dtype."""
    return numpy.sqrt(row_dots(vectors, vectors))


def on_host(device: torch.device) -> bool:
    """Whether the numbers are kept in NumPy arrays."""
    return readable(device)


class Arrays:
    """Arithmetic on a few numbers per sample, in NumPy on the CPU and in torch elsewhere.

    On 64 numbers NumPy is three times as fast as torch. Code that runs in both uses ``xp.where``,
    ``xp.maximum``, ``a * b``, ``a[rows]`` and the methods below.

    Attributes:
        xp: the module ``numpy`` or ``torch``.
        host: True for NumPy, where reading a number does not wait for a device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.host = on_host(device)
        self.xp: Any = numpy if self.host else torch

    def read(self, tensor: Tensor) -> Array:
        """Tensor -> array, without a copy."""
        return tensor.numpy() if self.host else tensor

    def write(self, array: Array) -> Tensor:
        """Array -> tensor, without a copy."""
        return torch.from_numpy(array) if self.host else array

    def range(self, length: int) -> Array:
        """0, 1, ..., length - 1."""
        return numpy.arange(length) if self.host else torch.arange(length, device=self.device)

    def whole(self, like: Array) -> Array:
        """Zeros of dtype int64 in the shape of ``like``."""
        return self.xp.zeros_like(like, dtype=self.xp.int64)

    def copy(self, array: Array) -> Array:
        return array.copy() if self.host else array.clone()

    def index(self, mask: Array) -> Array:
        """Indices of the True entries of a mask of n entries; waits for the device."""
        if self.host:
            return numpy.flatnonzero(mask)
        return torch.nonzero(mask.reshape(-1)).reshape(-1)

    def count(self, mask: Array) -> int:
        """Number of True entries; waits for the device."""
        return int(numpy.count_nonzero(mask)) if self.host else int(mask.count_nonzero())

    def ratio(self, numerator: Array, denominator: Array) -> Array:
        """``numerator / denominator``, 0 where the numerator is 0."""
        with SILENT():
            return self.xp.where(numerator == 0, numerator, numerator / denominator)

    def choose(self, mask: Array, new: Tensor, old: Tensor) -> Tensor:
        """Rows of ``new`` (n, D) where ``mask`` (n, 1), else rows of ``old``; NaN does not leak.

        Where every row is new, and the host can see it, the result is ``new`` itself.
        """
        if self.host and mask.all():
            return new
        return torch.where(self.write(mask), new, old)


def inner_products_of(vectors: Sequence[Tensor], vector: Tensor) -> Tensor:
    """(B, m) products of m vectors (B, D) with another, in a program.

    A program keeps vectors apart: to write one of them into a buffer it would copy the buffer.
    """
    dtype = torch.promote_types(vector.dtype, torch.float32)
    wide = vector.to(dtype)
    return torch.stack([(each.to(dtype) * wide).sum(1) for each in vectors], dim=1)


def combine_all(start: Tensor, weights: Tensor, vectors: Sequence[Tensor], sign: int = 1) -> Tensor:
    """``start + sign sum_j weights_j vectors_j``, in a program."""
    parts = [
        w.unsqueeze(1) * v for w, v in zip(weights.to(start.dtype).unbind(1), vectors, strict=True)
    ]
    total = reduce(torch.add, parts)
    return start + total if sign > 0 else start - total
