"""Models, one readable file each."""

from __future__ import annotations

from implicit_attn.models.patch_classifier import PatchClassifier

__all__ = ["PatchClassifier"]
