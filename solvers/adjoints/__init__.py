"""How gradients flow through a fixed point: implicit, unrolled, phantom, one step."""

from __future__ import annotations
