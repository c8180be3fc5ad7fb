"""Models of discrete sites that are trained by pseudo-likelihood: Potts, factored attention, Sudoku."""

from __future__ import annotations
