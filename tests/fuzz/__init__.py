"""Random cases of every part of the packages, checked by invariants; ``run.py`` is the command."""

from __future__ import annotations
