"""Sudoku as a Potts model, its graph and its solutions from solved boards; pictures of a learned solver."""
