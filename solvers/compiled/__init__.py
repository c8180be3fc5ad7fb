"""Solves whose evaluations, products and algebra are compiled together, a few at a time."""

from __future__ import annotations
