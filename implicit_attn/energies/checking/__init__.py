"""``check_energy``: whether an energy keeps what layers and solvers rely on, mistake by mistake."""

from __future__ import annotations
