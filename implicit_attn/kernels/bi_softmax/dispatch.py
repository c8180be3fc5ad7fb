"""Which backend computes the bi-softmax, and the functions that everything else calls."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.kernels.arguments import (
    Choice,
    by_rescaling,
    check_arguments,
    check_vector,
    dense_for_transforms,
    dense_or_strips,
    log_choice,
    rescaled,
    wide_dtype,
)
from implicit_attn.kernels.bi_softmax import ops, reference
from implicit_attn.kernels.bi_softmax.cpp import backend as cpp
from implicit_attn.kernels.operators import has_tangent, refuse_forward_mode, transformed
from implicit_attn.kernels.pairs import check_pairs
from solvers.core.checks import require_choice
from solvers.native import process

# "blocks" is the public name of the strips.
BACKENDS = ("auto", "reference", "blocks", "cpp", "triton")
# Beyond so many tokens no N x N matrix is held. Up to it the dense formula is faster where all its
# matrices fit the cache: so many pairs at most, measured on a CPU with widths 16 to 64.
DENSE_TOKENS, DENSE_PAIRS = 256, 2**18
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def bisoftmax(
    z: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    deterministic: bool = True,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gradient of the bi-softmax energy, and the log-sum-exp of each row.

    With ``S = beta Z Z^T``, ``L_i = log sum_j m_ij exp(S_ij)`` and ``P_ij = m_ij exp(S_ij - L_i)`` the
    gradient of ``E(Z) = beta^-1 sum_i L_i`` is ``(P + P^T) Z``, for any mask ``m`` (Hu, Zou, Xu,
    "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 and 7); the energy is
    ``lse.sum(dim=(1, 2)) / beta``. Masked tokens neither attend nor are attended to
    (``m_ij = mask_i mask_j``). ``causal`` keeps ``j <= i``: the energy is then causal, its gradient is
    not, because the column term carries later tokens into earlier ones. ``pairs`` and ``bias`` restrict
    m further and make the scores ``S = beta Z Z^T + bias``; a row without any key has ``L_i = 0`` and
    ``P_i = 0``. They need not be symmetric.

    Both results can be differentiated: twice by "blocks", "cpp" and "triton", in memory O(N);
    any number of times, and in forward mode, by "reference".

    Args:
        z: (B, H, N, p) projected tokens, floating.
        beta: inverse temperature, > 0; a tensor of one element may be differentiated by.
        mask: (B, N) bool, False at masked tokens; None: none is masked.
        lengths: (B,) integers from 0 to N, in place of ``mask``: all but the first ``lengths[b]``
            tokens are masked. Lengths on another device than the CPU are not checked, which would wait
            for the device, but taken as the nearest end. The Triton kernels stop at the last
            token; other backends make a mask of it.
        causal: restrict row i to columns ``j <= i``.
        limit: the caller's bound on every ``|S_ij|``, such as ``beta p`` for RMS-normalised rows; up
            to 60 it saves the search for each row's maximum.
        deterministic: False allows Triton's gradient of bounded scores to add by atomics, from half of
            the tiles: rounding then differs from run to run. It changes nothing in other backends,
            in derivatives, or with ``causal``.
        pairs: bool (N, N), (B, N, N) or (B, H, N, N), True where row i may attend to column j.
        bias: floating, of such a shape, finite where the pair is allowed; may be differentiated by.
            ``limit`` is then not used. Pairs and biases are taken by "reference" alone.
        backend: "reference" (dense), "blocks" (strips of stock operators, O(N) memory), "cpp" (a
            kernel for CPUs with AVX2 or AVX-512, which the first call compiles, some seconds, into
            the user's cache), "triton" (GPU kernels), or "auto": see ``explain``.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, and lse (B, H, N) in float32 or wider; both zero
        at masked tokens, whose content is never used.

    Raises:
        TypeError, ValueError: for a dtype, shape, ``beta``, length or ``backend`` other than the above,
            or for both ``mask`` and ``lengths``.
        NotImplementedError: forward-mode differentiation by another backend than "reference".
        ImportError: "triton" where Triton is not installed.
        RuntimeError: "cpp" where there is no compiler or it fails, on another kind of processor, or
            where others may write to the cache.
    """
    paired = pairs is not None or bias is not None
    choice = _choose(z, beta, mask, lengths, backend, paired)
    varying = by_rescaling(beta)
    if varying is not None:
        root = varying.sqrt()
        gradient, lse = bisoftmax(
            rescaled(z, root), 1.0, mask=mask, lengths=lengths, causal=causal, limit=limit,
            deterministic=deterministic, pairs=pairs, bias=bias, backend=backend,
        )  # fmt: skip
        return (gradient / root).to(z.dtype), lse
    beta = float(beta)
    if choice == "reference":
        mask = ops.mask_of(z, mask, lengths)
        given = check_pairs(pairs, bias, _pair_shape(z)) if paired else None
        return reference.bisoftmax(z, beta, mask=mask, causal=causal, limit=limit, pairs=given)
    lengths = None if lengths is None else lengths.to(z.device)
    return ops.forward(z, beta, mask, causal, limit, choice, lengths, deterministic)


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    lse: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Hessian of the bi-softmax energy times ``v``.

    With ``T = beta (V Z^T + Z V^T)``, ``r_i = sum_j P_ij T_ij`` and ``W = P * (T - r)`` it is
    ``(P + P^T) V + (W + W^T) Z``.

    Args:
        z: (B, H, N, p), as in ``bisoftmax``.
        v: like ``z``.
        beta, mask, lengths, causal, limit, pairs, bias, backend: as in ``bisoftmax``.
        lse: what ``bisoftmax`` returned for the same arguments; saves computing it again.

    Returns:
        (B, H, N, p) like ``z``; zero at masked tokens.

    Raises:
        TypeError, ValueError: as ``bisoftmax``; if ``v`` is not like ``z``, or ``lse`` not (B, H, N).
    """
    paired = pairs is not None or bias is not None
    choice = _choose(z, beta, mask, lengths, backend, paired)
    check_vector(z, v, lse)
    varying = by_rescaling(beta)
    if varying is not None:
        scaled, v = rescaled(z, varying.sqrt()), v.to(wide_dtype(v))
        product = bisoftmax_hvp(
            scaled, v, 1.0, mask=mask, lengths=lengths, causal=causal, limit=limit, lse=lse,
            pairs=pairs, bias=bias, backend=backend,
        )  # fmt: skip
        return product.to(z.dtype)
    beta = float(beta)
    if choice == "reference" or (backend == "auto" and has_tangent(v)):
        mask = ops.mask_of(z, mask, lengths)
        given = check_pairs(pairs, bias, _pair_shape(z)) if paired else None
        options = {"mask": mask, "causal": causal, "lse": lse, "pairs": given}
        return reference.bisoftmax_hvp(z, v, beta, **options)
    refuse_forward_mode(v, choice, "bisoftmax_hvp")
    lse = None if lse is None else lse.detach()
    lengths = None if lengths is None else lengths.to(z.device)
    return ops.hvp(z, v, beta, mask, causal, limit, lse, None, choice, lengths)


def explain(
    z: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    lengths: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    deterministic: bool = True,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Choice:
    """Which backend ``bisoftmax`` and ``bisoftmax_hvp`` take for these arguments, and why.

    It raises the errors of ``bisoftmax``. Nothing is computed, though "cpp" may be compiled, and
    ``causal``, ``limit`` and ``deterministic`` decide nothing.

    "auto" takes Triton on a GPU where it can. On a CPU it takes the C++ kernel only where the
    environment variable ``IMPLICIT_ATTN_CPP`` is 1 when the package is imported: it was faster than
    strips at every size measured, but its first use on a machine runs a compiler. Otherwise, and
    for what that kernel does not take, it is the dense formula for small problems and strips beyond.
    """
    _check(z, beta, mask, lengths, backend)
    if check_pairs(pairs, bias, _pair_shape(z)) is not None:
        return _for_pairs(backend)
    if backend == "auto":
        return _automatic(z, mask)
    if backend != "reference":
        refuse_forward_mode(z, backend, "bisoftmax_hvp")
    if backend == "triton":
        ops.require_triton(z, mask)
    if backend == "cpp":
        cpp.require(z)
    return Choice(backend, "asked for")


def check_backend(backend: str) -> str:
    """``backend`` itself where it is one of ``BACKENDS``."""
    return require_choice("backend", backend, BACKENDS)


def _check(
    z: Tensor, beta: float | Tensor, mask: Tensor | None, lengths: Tensor | None, backend: str
) -> None:
    check_arguments(z, beta, mask)
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


def _pair_shape(z: Tensor) -> tuple[int, int, int, int]:
    return z.shape[0], z.shape[1], z.shape[2], z.shape[2]


def _for_pairs(backend: str) -> Choice:
    if backend not in ("auto", "reference"):
        raise ValueError(f'pairs and bias need backend="auto" or "reference", got {backend!r}')
    return Choice("reference", "only the dense formula takes pairs and biases")


def _choose(
    z: Tensor,
    beta: float | Tensor,
    mask: Tensor | None,
    lengths: Tensor | None,
    backend: str,
    paired: bool,
) -> str:
    """The backend, in the operators' words; under a compiler they ask for kernels by themselves."""
    if paired:
        _check(z, beta, mask, lengths, backend)
        return _for_pairs(backend).backend
    if torch.compiler.is_compiling():
        named = {"triton": ops.UNCHECKED_TRITON, "cpp": ops.UNCHECKED_CPP}.get(backend)
        if backend == "auto" and (z.is_cuda or (process.ENABLED and cpp.lacks(z) is None)):
            named = backend
        if named is not None:
            _check(z, beta, mask, lengths, backend)
            return named
    choice = explain(z, beta, mask=mask, lengths=lengths, backend=backend)
    log_choice("bi-softmax", choice)
    return choice.backend


def _automatic(z: Tensor, mask: Tensor | None) -> Choice:
    dense = dense_for_transforms(z)
    if dense is not None:
        return dense
    note = ""
    if z.is_cuda:
        missing = ops.triton_lacks(z, mask)
        if missing is None:
            return Choice("triton", "a CUDA tensor that the kernels take")
        note = f" (no Triton: {missing})"
    elif process.ENABLED:
        missing = cpp.unavailable(z)
        if missing is None:
            return Choice("cpp", f"{cpp.VARIABLE} is 1 and the C++ kernel takes this tensor")
        note = f" (no C++ kernel: {missing})"
    return dense_or_strips(z, DENSE_TOKENS, DENSE_PAIRS, note)
