"""Energies of coupled vector spins."""

from __future__ import annotations
