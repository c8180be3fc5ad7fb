"""Adaptive TAP mean-field theory of coupled vector spins."""

from __future__ import annotations
