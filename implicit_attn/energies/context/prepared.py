"""The type of prepared inputs, for what stands above :mod:`implicit_attn.energies.energy`."""

from __future__ import annotations

from implicit_attn.energies.prepared import Prepared

__all__ = ["Prepared"]
