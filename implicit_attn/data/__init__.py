"""Readers for the data sets of the examples, and batches in a repeatable order."""

from __future__ import annotations

from implicit_attn.data.augment import RandomAffine
from implicit_attn.data.digits import load_digits
from implicit_attn.data.idx import read_idx
from implicit_attn.data.images import ImageData, batches, epoch_generator, stratified_holdout
from implicit_attn.data.mnist import load_fashion_mnist, load_mnist
from implicit_attn.data.registry import LOADERS, load

__all__ = [
    "LOADERS",
    "ImageData",
    "RandomAffine",
    "batches",
    "epoch_generator",
    "load",
    "load_digits",
    "load_fashion_mnist",
    "load_mnist",
    "read_idx",
    "stratified_holdout",
]
