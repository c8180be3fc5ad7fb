"""The models of Hyper-SET's official code: built as published, loaded from its weights, written back."""

from __future__ import annotations

from implicit_attn.models.official.convert import load_official, to_official
from implicit_attn.models.official.layout import OfficialLayout
from implicit_attn.models.official.masked_codes import MaskedCodes
from implicit_attn.models.official.published import PUBLISHED, Published, build_official

__all__ = [
    "PUBLISHED",
    "MaskedCodes",
    "OfficialLayout",
    "Published",
    "build_official",
    "load_official",
    "to_official",
]
