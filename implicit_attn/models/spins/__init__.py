"""Models of spins."""

from __future__ import annotations
