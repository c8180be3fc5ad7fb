"""Boards of cells and colours: groups of cells that are learned, and a solver at equilibrium."""

from __future__ import annotations
