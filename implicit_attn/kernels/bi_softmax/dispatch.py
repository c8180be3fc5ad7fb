"""Which backend computes the bi-softmax, and the functions that everything else calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_attn.kernels.bi_softmax import ops, reference
from implicit_attn.kernels.operators import has_tangent, refuse_forward_mode, transformed

BACKENDS = ("auto", "reference", "blocks", "triton")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Choice:
    """What ``explain`` returns.

    Attributes:
        backend: "reference", "blocks" or "triton".
        reason: why, in words.
    """

    backend: str
    reason: str


def bisoftmax(
    z: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    deterministic: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradient of the bi-softmax energy, and the log-sum-exp of each row.

    With ``S = beta Z Z^T``, ``L_i = log sum_j m_ij exp(S_ij)`` and ``P_ij = m_ij exp(S_ij - L_i)`` the
    gradient of ``E(Z) = beta^-1 sum_i L_i`` is ``(P + P^T) Z``, for any mask ``m`` (Hu, Zou, Xu,
    "Hyper-SET", arXiv 2502.11646, equations 3 and 7); the energy is ``lse.sum(dim=(1, 2)) / beta``. A
    token attends and is attended to only where it counts (``m_ij = mask_i mask_j``). ``causal`` keeps
    ``j <= i``: the energy is then causal, its gradient is not, because the column term carries later
    tokens into earlier ones.

    Both results can be differentiated: twice by the backends "blocks" and "triton", in memory O(N);
    any number of times, and in forward mode, by "reference".

    Args:
        z: (B, H, N, p) projected tokens, floating.
        beta: inverse temperature, > 0.
        mask: (B, N) bool, True where a token counts; None: all count.
        lengths: (B,) integers from 0 to N, in place of ``mask``: the first ``lengths[b]`` tokens count.
            On another device than the CPU lengths outside of it are not reported (that would wait
            for the device) but taken as the nearest end. The Triton kernels stop at the last
            token; other backends make a mask of it.
        causal: restrict row i to columns ``j <= i``.
        limit: a bound on every ``|S_ij|`` that the caller vouches for, as RMS-normalised rows have
            (``beta p``); a moderate one saves the search for each row's maximum.
        deterministic: False allows Triton's gradient of bounded scores to add by atomics, from half of
            the tiles: rounding then differs from run to run. It changes nothing in other backends,
            in derivatives, or with ``causal``.
        backend: "reference" (dense), "blocks" (stock operators, O(N) memory), "triton" (GPU kernels),
            or "auto": see ``explain``.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, and lse (B, H, N) in float32 or wider. Tokens
        that do not count have zero in both, and their content is never used.

    Raises:
        TypeError, ValueError: for a dtype, shape, ``beta``, length or ``backend`` other than the above,
            or for both ``mask`` and ``lengths``.
        NotImplementedError: forward-mode differentiation by another backend than "reference".
        ImportError: "triton" where Triton is not installed.
    """
    choice = _choose(z, beta, mask, lengths, causal, backend)
    if choice == "reference":
        mask = ops.mask_of(z, mask, lengths)
        return reference.bisoftmax(z, beta, mask=mask, causal=causal, limit=limit)
    lengths = _beside(z, lengths)
    return ops.forward(z, beta, mask, causal, limit, choice, lengths, deterministic)


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    deterministic: bool = True,
    lse: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Hessian of the bi-softmax energy times ``v``.

    With ``T = beta (V Z^T + Z V^T)``, ``r_i = sum_j P_ij T_ij`` and ``W = P * (T - r)`` it is
    ``(P + P^T) V + (W + W^T) Z``.

    Args:
        z: (B, H, N, p), as in ``bisoftmax``.
        v: like ``z``.
        beta, mask, lengths, causal, limit, backend: as in ``bisoftmax``.
        deterministic: as in ``bisoftmax``, and so far of no effect: no kernel of the product adds by
            atomics.
        lse: what ``bisoftmax`` returned for the same arguments; saves computing it again.

    Returns:
        (B, H, N, p) like ``z``; zero for tokens that do not count.

    Raises:
        As ``bisoftmax``; ValueError if ``v`` is not like ``z``, or ``lse`` not (B, H, N).
    """
    choice = _choose(z, beta, mask, lengths, causal, backend)
    reference.check_vector(z, v, lse)
    if choice == "reference" or (backend == "auto" and has_tangent(v)):
        mask = ops.mask_of(z, mask, lengths)
        return reference.bisoftmax_hvp(z, v, beta, mask=mask, causal=causal, lse=lse)
    refuse_forward_mode(v, choice, "bisoftmax_hvp")
    return ops.hvp(z, v, beta, mask, causal, limit, lse, None, choice, _beside(z, lengths))


def explain(
    z: Tensor,
    beta: float,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    deterministic: bool = True,
    backend: str = "auto",
) -> Choice:
    """Which backend ``bisoftmax`` and ``bisoftmax_hvp`` take for these arguments, and why.

    Args:
        z, beta, mask, lengths, causal, limit, deterministic, backend: as in ``bisoftmax``; nothing is
            computed, and neither ``limit`` nor ``deterministic`` decides anything.

    Raises:
        As ``bisoftmax``.
    """
    _check(z, beta, mask, lengths, backend)
    if backend == "auto":
        return _automatic(z, mask, causal)
    if backend != "reference":
        refuse_forward_mode(z, backend, "bisoftmax_hvp")
    if backend == "triton":
        missing = ops.triton_backend().supports(z, mask, causal)
        if missing is not None:
            raise ValueError(f'backend="triton" does not take this input: {missing}')
    return Choice(backend, "asked for")


def check_backend(backend: str) -> str:
    """``backend`` itself where it is one of ``BACKENDS``."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    return backend


def _check(
    z: Tensor, beta: float, mask: Tensor | None, lengths: Tensor | None, backend: str
) -> None:
    reference.check_arguments(z, beta, mask)
    check_backend(backend)
    if lengths is None:
        return
    if mask is not None:
        raise ValueError("give mask or lengths, got both")
    if lengths.dtype not in _INTEGERS:
        raise TypeError(f"lengths must be of an integer dtype, got {lengths.dtype}")
    if tuple(lengths.shape) != (z.shape[0],):
        raise ValueError(
            f"lengths must have the shape (B,) = ({z.shape[0]},), got {tuple(lengths.shape)}"
        )
    # Numbers are looked at only where there are any, and without a wait for a device.
    known = type(lengths) is Tensor and lengths.device.type == "cpu"
    if not known or not len(lengths) or torch.compiler.is_compiling() or transformed():
        return
    least, most = (int(end) for end in lengths.aminmax())
    if least < 0 or most > z.shape[2]:
        raise ValueError(f"lengths must be from 0 to N = {z.shape[2]}, got {least} to {most}")


def _beside(z: Tensor, lengths: Tensor | None) -> Tensor | None:
    return None if lengths is None else lengths.to(z.device)


def _choose(
    z: Tensor,
    beta: float,
    mask: Tensor | None,
    lengths: Tensor | None,
    causal: bool,
    backend: str,
) -> str:
    """The backend; "auto" and "triton" as they are where the operator has to find out by itself."""
    if torch.compiler.is_compiling() and (backend == "triton" or (backend == "auto" and z.is_cuda)):
        _check(z, beta, mask, lengths, backend)
        return backend
    return explain(z, beta, mask=mask, lengths=lengths, causal=causal, backend=backend).backend


def _automatic(z: Tensor, mask: Tensor | None, causal: bool) -> Choice:
    tokens = z.shape[2]
    if has_tangent(z):
        return Choice("reference", "only the dense formula knows forward-mode differentiation")
    if transformed():
        return Choice("reference", "inside torch.func, for which the dense formula is plain")
    few = tokens <= DENSE_TOKENS and z.shape[0] * z.shape[1] * tokens**2 <= DENSE_PAIRS
    size = f"{z.shape[0] * z.shape[1]} matrices of {tokens} x {tokens} pairs"
    if z.is_cuda:
        missing = ops.triton_lacks(z, mask, causal)
        if missing is None:
            return Choice("triton", "a CUDA tensor that the kernels take")
        size = f"{size} (no Triton: {missing})"
    if few:
        return Choice("reference", f"{size}: the dense formula has the least overhead")
    return Choice("blocks", f"{size}: blocks stay in cache and hold no N x N matrix")


# Beyond so many tokens no N x N matrix is held. Up to it the dense formula is faster where all its
# matrices fit the cache: so many pairs at most, measured on a CPU with widths 16 to 64.
DENSE_TOKENS, DENSE_PAIRS = 256, 2**18
