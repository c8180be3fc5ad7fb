"""Models, one readable file each."""

from __future__ import annotations

from implicit_attn.models.patch_classifier import PatchClassifier
from implicit_attn.models.spin_classifier import SpinClassifier

__all__ = ["PatchClassifier", "SpinClassifier"]
