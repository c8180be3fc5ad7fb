"""Random solves, energies and kernels, checked by invariants; ``run.py`` is the command."""

from __future__ import annotations
