"""Tasks on boards of which some cells are given."""

from __future__ import annotations
