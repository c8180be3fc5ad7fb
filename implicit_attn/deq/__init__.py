"""The deep-equilibrium layer: the fixed point of an update, or the minimum of an energy."""

from __future__ import annotations

from implicit_attn.deq.layer import DEQ, OPTIONS, UnrolledLayer, bake, unroll

__all__ = ["DEQ", "OPTIONS", "UnrolledLayer", "bake", "unroll"]
