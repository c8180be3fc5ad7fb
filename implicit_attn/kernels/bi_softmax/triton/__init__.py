"""Bi-softmax by Triton kernels, for CUDA devices."""

from __future__ import annotations
