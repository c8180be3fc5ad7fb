"""``implicit-attn study``: the studies, also ``python -m implicit_attn.studies``."""

from __future__ import annotations

from implicit_attn.studies.command import main, parser

__all__ = ["main", "parser"]
