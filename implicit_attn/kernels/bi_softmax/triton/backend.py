"""Bi-softmax by Triton kernels: memory linear in the number of tokens, on CUDA devices.

The definition is in ``reference``, the mathematics in the kernels' own files. Products take the
dtype of ``z`` and accumulate in float32; float32 products are split into three TF32 ones. Set
``TRITON_INTERPRET=1`` before Triton is imported to run the same kernels on the CPU, slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton import launch
from implicit_attn.kernels.bi_softmax.triton.problem import (
    INTERPRETED,
    MODERATE,
    Problem,
    device_of,
    extent_of,
    readable,
)
from implicit_attn.kernels.bi_softmax.triton.tables import MOST_ON_CHIP, halves, on_chip

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST_HEAD = 256
_TRIANGULAR_FROM = 1024  # tokens from which half the tiles outweigh the second launch


def supports(z: Tensor, mask: Tensor | None = None) -> str | None:
    """Whether these kernels take the problem.

    Args:
        z: (B, H, N, p), any dtype and device.
        mask: (B, N) bool or None.
        causal: row i is restricted to columns ``j <= i``.

    Returns:
        None if they do, else the reason why not.
    """
    if z.dim() != 4:
        return f"z must have the shape (B, H, N, p), got {tuple(z.shape)}"
    if z.dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, got {z.dtype}"
    if not 1 <= z.shape[3] <= WIDEST_HEAD:
        return f"the Triton kernels take head widths from 1 to {WIDEST_HEAD}, got {z.shape[3]}"
    if z.numel() // max(z.shape[3], 1) >= 1 << 31:
        return f"B * H * N must be less than 2^31, got the shape {tuple(z.shape)}"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (z.shape[0], z.shape[2])):
        return f"mask must be bool (B, N), got {mask.dtype} {tuple(mask.shape)}"
    if mask is not None and mask.device != z.device:
        return f"mask must be on the device of z, {z.device}, got {mask.device}"
    return _device_reason(z)


def _device_reason(z: Tensor) -> str | None:
    if INTERPRETED:
        return None if z.device.type in ("cpu", "cuda") else f"z is on {z.device}"
    if not z.is_cuda:
        return f"Triton needs a CUDA device (or TRITON_INTERPRET=1), z is on {z.device}"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA devices"
    capability = torch.cuda.get_device_capability(z.device)
    if capability < (8, 0):
        return f"the kernels need compute capability 8.0 or more, {z.device} has {capability}"
    return None


def bisoftmax_forward(
    z: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    *,
    lengths: Tensor | None = None,
    deterministic: bool = True,
    triangular: bool | None = None,
    small: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradient ``(P + P^T) Z`` of the bi-softmax energy and the log-sum-exp of each row.

    Args:
        z: (B, H, N, p), any strides; float32, bfloat16 or float16.
        beta: inverse temperature, > 0.
        mask: (B, N) bool, True where a token counts; what others hold is never read into a result.
        causal: restrict row i to columns ``j <= i``.
        limit: a bound on every ``|S_ij|``; up to 60 it spares the running maximum.
        lengths: (B,) integers in place of ``mask``: the first ``lengths[b]`` tokens count.
        deterministic: False allows atomic additions, where they halve the work on scores.
        triangular: ``L`` from half of the tiles; None: where ``limit`` and the
            registers allow it, from 1024 tokens.
        small: the kernel that holds a whole head of up to 128 tokens on the chip; None: where its
            registers suffice.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z`` and lse (B, H, N) float32, both contiguous
        whatever the strides of ``z``; zero in both where a token does not count.

    Raises:
        ValueError: what ``supports`` says, or options that exclude each other.
    """
    problem = _problem(z, beta, mask, causal, limit, lengths)
    triangular = _wants_triangle(problem, "triangle", triangular)
    out = _contiguous_like(z)
    lse = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
    if z.numel() == 0:
        return out, lse
    with device_of(z):
        if _wants_small(problem, "gradient", small):
            launch.small_gradient(problem, out, lse)
            return out, lse
        problem = _cleaned(problem)
        rows_of = torch.empty_like(lse)
        if causal:
            launch.causal_gradient(problem, lse, rows_of, out)
            return out, lse
        (launch.triangle_lse if triangular else launch.row_lse)(problem, lse, rows_of)
        if deterministic or not problem.bounded:
            launch.gradient(problem, rows_of, out)
        else:
            launch.atomic_gradient(problem, rows_of, out)
    return out, lse


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    mask: Tensor | None = None,
    causal: bool = False,
    lse: Tensor | None = None,
    lse_cotangent: Tensor | None = None,
    *,
    limit: float | None = None,
    lengths: Tensor | None = None,
    triangular: bool | None = None,
    small: bool | None = None,
) -> Tensor:
    """Hessian of the bi-softmax energy times ``v``, plus ``beta (diag(a) P + P^T diag(a)) Z``.

    Args:
        z: (B, H, N, p), as in ``bisoftmax_forward``.
        v: like ``z`` in shape, dtype and device; any strides.
        beta: inverse temperature, > 0.
        mask: as in ``bisoftmax_forward``.
        causal: as in ``bisoftmax_forward``.
        lse: (B, H, N) float32 from ``bisoftmax_forward`` for the same arguments, or None. Only the
            tangents from half of the tiles use it, and compute it first where it is None.
        lse_cotangent: ``a`` (B, H, N), the cotangent of the log-sum-exps; None: zero.
        limit: as in ``bisoftmax_forward``.
        lengths: as in ``bisoftmax_forward``.
        triangular: the mean tangents from half of the tiles; None: as in ``bisoftmax_forward``.
        small: as in ``bisoftmax_forward``.

    Returns:
        (B, H, N, p) in the dtype of ``z``, contiguous; zero where a token does not count.

    Raises:
        ValueError: as ``bisoftmax_forward``, or if ``v``, ``lse`` or ``lse_cotangent`` do not fit.
    """
    problem = _problem(z, beta, mask, causal, limit, lengths)
    triangular = _wants_triangle(problem, "tangents", triangular)
    if (v.shape, v.dtype, v.device) != (z.shape, z.dtype, z.device):
        raise ValueError(
            f"v must be like z, {tuple(z.shape)} {z.dtype} on {z.device}, "
            f"got {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    out = _contiguous_like(z)
    if z.numel() == 0:
        return out
    lse = None if lse is None else _per_row(lse, "lse", z)
    cotangent = None if lse_cotangent is None else _per_row(lse_cotangent, "lse_cotangent", z)
    with device_of(z):
        v = readable(v)
        if _wants_small(problem, "hvp", small):
            launch.small_hvp(problem, v, cotangent, out)
            return out
        problem = _cleaned(problem)
        if problem.keep is not None:
            v = v.masked_fill((problem.keep == 0)[:, None, :, None], 0.0)
        mean = torch.empty(z.shape[:3], dtype=torch.float32, device=z.device)
        rows_of = torch.empty_like(mean)
        if triangular:
            if lse is None:
                lse = torch.empty_like(mean)
                launch.triangle_lse(problem, lse, rows_of)
            launch.triangle_mean(problem, v, lse, cotangent, mean, rows_of)
        else:
            launch.row_mean(problem, v, cotangent, mean, rows_of)
        launch.curvature(problem, v, rows_of, mean, out)
    return out


def _contiguous_like(z: Tensor) -> Tensor:
    """Unfilled. The strides of ``z`` are not kept: compilers are promised contiguous results, and
    offsets within a tile are of 32 bits, which a wide row stride would overflow.
    """
    return torch.empty(z.shape, dtype=z.dtype, device=z.device)


def _problem(
    z: Tensor,
    beta: float,
    mask: Tensor | None,
    causal: bool,
    limit: float | None,
    lengths: Tensor | None,
) -> Problem:
    reason = supports(z, mask)
    if reason is not None:
        raise ValueError(reason)
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta!r}")
    extent = None
    if lengths is not None:
        if mask is not None:
            raise ValueError("give mask or lengths, got both")
        if lengths.is_floating_point() or lengths.shape != (z.shape[0],):
            raise ValueError(
                f"lengths must be integers of shape (B,) = ({z.shape[0]},), "
                f"got {lengths.dtype} {tuple(lengths.shape)}"
            )
        extent = lengths.to(device=z.device, dtype=torch.int32).clamp(0, z.shape[2])
    keep = None if mask is None else mask.contiguous().view(torch.uint8)
    bounded = limit is not None and limit <= MODERATE
    return Problem(readable(z), float(beta), keep, extent, causal, bounded)


def _wants_small(problem: Problem, kernel: str, small: bool | None) -> bool:
    if small and problem.tokens > MOST_ON_CHIP:
        raise ValueError(f"small holds at most {MOST_ON_CHIP} tokens, got {problem.tokens}")
    if small is not None:
        return small
    return on_chip(kernel, problem.tokens, problem.padded_width, problem.z.element_size())


def _wants_triangle(problem: Problem, kernel: str, triangular: bool | None) -> bool:
    possible = problem.bounded and not problem.causal
    if triangular and not possible:
        raise ValueError(f"triangular needs a limit of at most {MODERATE} and no causal mask")
    if triangular is not None or not possible or problem.tokens < _TRIANGULAR_FROM:
        return bool(triangular)
    return halves(kernel, problem.padded_width, problem.z.element_size())


def _cleaned(problem: Problem) -> Problem:
    """Zeros where a token does not count: the tiled kernels then need the mask at the ends only."""
    if problem.keep is None:
        return problem
    z = problem.z.masked_fill((problem.keep == 0)[:, None, :, None], 0.0)
    extent = extent_of(problem.keep)
    return Problem(z, problem.beta, problem.keep, extent, problem.causal, problem.bounded)


def _per_row(x: Tensor, name: str, z: Tensor) -> Tensor:
    if x.shape != z.shape[:3] or x.device != z.device:
        raise ValueError(
            f"{name} must have the shape (B, H, N) = {tuple(z.shape[:3])} on {z.device}, "
            f"got {tuple(x.shape)} on {x.device}"
        )
    return x.to(torch.float32).contiguous()
