"""Updates ``z <- f(z, x)``: what a layer iterates to its fixed point."""

from __future__ import annotations

from implicit_attn.updates.activation_step import ActivationStep
from implicit_attn.updates.base import FunctionUpdate, Update
from implicit_attn.updates.gradient_step import GradientStep, StepSize

__all__ = ["ActivationStep", "FunctionUpdate", "GradientStep", "StepSize", "Update"]
