"""Loaders for the data sets of the examples, augmentations, reproducible batches."""

from __future__ import annotations

from implicit_attn.data.augment import Compose, RandomAffine, RandomCrop, RandomFlip
from implicit_attn.data.cifar import load_cifar10
from implicit_attn.data.images import ImageData, epoch_generator, some_samples
from implicit_attn.data.mnist import load_fashion_mnist, load_mnist, read_idx
from implicit_attn.data.registry import LOADERS, load, load_digits
from implicit_attn.data.sudoku import (
    SudokuData,
    load_sudoku,
    read_list,
    resolve_source,
    reveal,
    reveal_up_to,
)
from implicit_attn.data.sudoku_boards import (
    SudokuSymmetries,
    board_counts,
    solve_by_singles,
    solve_sudoku,
    unique_puzzles,
)
from implicit_attn.data.text import HELP, TextData, load_text, ngram_loss

__all__ = [
    "HELP",
    "LOADERS",
    "Compose",
    "ImageData",
    "RandomAffine",
    "RandomCrop",
    "RandomFlip",
    "SudokuData",
    "SudokuSymmetries",
    "TextData",
    "board_counts",
    "epoch_generator",
    "load",
    "load_cifar10",
    "load_digits",
    "load_fashion_mnist",
    "load_mnist",
    "load_sudoku",
    "load_text",
    "ngram_loss",
    "read_idx",
    "read_list",
    "resolve_source",
    "reveal",
    "reveal_up_to",
    "solve_by_singles",
    "solve_sudoku",
    "some_samples",
    "unique_puzzles",
]
