"""Sudoku by the two simplest rules of logic, the baseline that every solver should be held against."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.data.sudoku_boards import SIDE, units
from implicit_attn.models import sudoku_pairs


def solve_by_singles(puzzles: Tensor) -> Tensor:
    """Fill in naked and hidden singles until there are none, (B, 81); 0 where nothing follows.

    A naked single is a cell that only one digit is left for, a hidden single a digit that only one
    cell of a row, column or box is left for.

    Args:
        puzzles: (B, 81) int64, 0 = unknown.
    """
    pairs, cells = sudoku_pairs().float(), units()
    digits = torch.arange(1, SIDE + 1)
    clues = puzzles.unsqueeze(2) == digits
    possible = clues | (puzzles == 0).unsqueeze(2)  # (B, 81, 9)
    while True:
        single = possible.sum(2, keepdim=True) == 1
        seen = torch.einsum("ij,bjd->bid", pairs, (possible & single).float()) > 0
        left = possible & ~seen
        in_units = left[:, cells]  # (B, 27, 9 cells, 9 digits)
        hidden = in_units & (in_units.sum(2, keepdim=True) == 1)
        forced = torch.zeros_like(left, dtype=torch.int64)
        forced.index_add_(1, cells.flatten(), hidden.flatten(1, 2).long())
        is_forced = forced > 0
        left = torch.where(is_forced.any(2, keepdim=True), left & is_forced, left)
        if torch.equal(left, possible):
            break
        possible = left
    return torch.where(possible.sum(2) == 1, possible.long().argmax(2) + 1, 0)
