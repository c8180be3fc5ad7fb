"""Gradients of a fixed point: implicit, unrolled, phantom and one-step."""
