"""Bi-softmax by Triton kernels, for CUDA devices."""
