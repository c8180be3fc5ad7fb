"""Solves on CUDA devices: a fused turn of the loop, and solves that are recorded as CUDA graphs."""
