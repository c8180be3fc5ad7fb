"""Bi-softmax by a C++ kernel for CPUs with AVX2 or AVX-512.

Each tile of the scores' upper triangle is computed in registers and used for rows and columns: with symmetric
``S``, in units of N^2 p multiply-adds, the gradient costs 2 (1.5 if the tiles are stored) and the
Hessian-vector product 5 (3.5). The stored tiles are limited, so memory is O(N). The kernel does not support
float64 and more than ``MOST_FEATURES`` features; half precision is computed in float32. See ``dispatch`` for
the formulas and ``ops`` for autograd and autocast.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import LARGEST_EXPONENT
from solvers.native import THREADS, engine, told

MOST_FEATURES = 128
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class _Problem(ctypes.Structure):
    """``Problem`` of ``bi_softmax.cpp``, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("z", "v", "mask", "lse", "cotangent")),
        *((name, ctypes.c_void_p) for name in ("output", "output_lse")),
        *((name, ctypes.c_int64) for name in ("batch", "heads", "tokens", "features")),
        *((name, ctypes.c_int64 * 3) for name in ("z_strides", "v_strides")),
        ("fork", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
        ("beta", ctypes.c_float),
        ("causal", ctypes.c_int32),
        ("bounded", ctypes.c_int32),
    )


@cache
def _kernel() -> Any:
    """Return the engine's function, or None without an engine that provides it."""
    solve = getattr(engine(), "implicit_attn_bi_softmax", None)
    if solve is not None:
        solve.argtypes, solve.restype = (ctypes.c_void_p,), ctypes.c_int
    return solve


def lacks(z: Tensor, mask: Tensor | None = None) -> str | None:
    """Return why the kernel does not support this kind of tensor, or None if it does."""
    if z.device.type != "cpu":
        return f"it needs tensors on the CPU, got {z.device}"
    if z.dtype not in DTYPES:
        return f"it computes in float32, got {z.dtype}"
    if not 1 <= z.shape[3] <= MOST_FEATURES:
        return f"it supports heads of 1 to {MOST_FEATURES} features, got {z.shape[3]}"
    return None


def missing() -> str | None:
    """Return why there is no kernel for this processor, or None if there is one."""
    return None if _kernel() else f"the engine for this processor is {told()}"


def bisoftmax_forward(
    z: Tensor, beta: float, mask: Tensor | None, causal: bool, limit: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) in float32."""
    lse = z.new_empty(z.shape[:3], dtype=torch.float32)
    return _solve(z, None, beta, mask, causal, limit, None, None, lse), lse


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
) -> Tensor:
    """Return the Hessian-vector product plus the pullback of a cotangent of the lse, like ``strips``."""
    return _solve(z, v, beta, mask, causal, limit, lse, lse_cotangent, None)


def _solve(
    z: Tensor,
    v: Tensor | None,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lse: Tensor | None,
    cotangent: Tensor | None,
    output_lse: Tensor | None,
) -> Tensor:
    solve: Any = _kernel()
    output = z.new_empty(z.shape, dtype=torch.float32)
    rows, vectors = _rows(z), None if v is None else _rows(v)
    numbers = [None if t is None else t.float().resolve_neg() for t in (lse, cotangent)]
    # All tensors are held by name until the kernel has returned: it gets their addresses alone.
    dense = [None if t is None else t.contiguous() for t in (mask, *numbers)]
    tensors = (rows, vectors, *dense, output, output_lse)
    strides, v_strides = rows.stride()[:3], (0, 0, 0) if vectors is None else vectors.stride()[:3]
    problem = _Problem(
        *(None if t is None else t.data_ptr() for t in tensors), *z.shape, strides, v_strides,
        THREADS.fork, THREADS.number, beta, causal, limit is None or limit <= LARGEST_EXPONENT,
    )  # fmt: skip
    if solve(ctypes.byref(problem)):
        raise MemoryError(f"out of memory for a head of {z.shape[2]} x {z.shape[3]} numbers")
    return output.to(z.dtype)


def _rows(tensor: Tensor) -> Tensor:
    """Convert to float32 with contiguous features."""
    tensor = tensor.float().resolve_neg()
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
