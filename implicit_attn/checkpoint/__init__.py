"""Checkpoints of a training run: safetensors files, written atomically, that restore it exactly."""

from __future__ import annotations

from implicit_attn.checkpoint.constants import restore_constants
from implicit_attn.checkpoint.states import load_checkpoint, read_progress, save_checkpoint

__all__ = ["load_checkpoint", "read_progress", "restore_constants", "save_checkpoint"]
