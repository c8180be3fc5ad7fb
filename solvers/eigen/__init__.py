"""Eigenvalues of the linearisation at a state."""

from __future__ import annotations
