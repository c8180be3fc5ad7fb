"""Loaders for the data sets of the examples, augmentations, reproducible batches."""

from __future__ import annotations

from implicit_attn.data.images import LOADERS as LOADERS
from implicit_attn.data.images import ImageData as ImageData
from implicit_attn.data.images import load as load
from implicit_attn.data.images import load_digits as load_digits
from implicit_attn.data.images import some_samples as some_samples
from implicit_attn.data.sudoku import SudokuData as SudokuData
from implicit_attn.data.sudoku import SudokuSymmetries as SudokuSymmetries
from implicit_attn.data.sudoku import board_counts as board_counts
from implicit_attn.data.sudoku import load_sudoku as load_sudoku
from implicit_attn.data.sudoku import read_list as read_list
from implicit_attn.data.sudoku import resolve_source as resolve_source
from implicit_attn.data.sudoku import reveal as reveal
from implicit_attn.data.sudoku import reveal_up_to as reveal_up_to
from implicit_attn.data.sudoku import solve_by_singles as solve_by_singles
from implicit_attn.data.sudoku import solve_sudoku as solve_sudoku
from implicit_attn.data.sudoku import sudoku_pairs as sudoku_pairs
from implicit_attn.data.sudoku import unique_puzzles as unique_puzzles
from implicit_attn.data.text import HELP as HELP
from implicit_attn.data.text import TextData as TextData
from implicit_attn.data.text import load_text as load_text
from implicit_attn.data.text import ngram_loss as ngram_loss
from solvers.core.exports import define_all

define_all(vars())
