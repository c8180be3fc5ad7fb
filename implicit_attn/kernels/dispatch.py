"""Public attention kernels, and the choice of their backends.

Bi-softmax and attention to frozen keys check the arguments, convert ``beta`` to a number, choose a backend by
``explain`` or ``explain_frozen_keys``, and call it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from implicit_attn.kernels import fused, reference
from implicit_attn.kernels.arguments import (
    Choice,
    Pairs,
    check_pairs,
    dense_for_transforms,
    refuse_transforms,
    token_pairs,
    traced,
    wide_dtype,
)
from implicit_attn.kernels.bi_softmax import ops
from solvers.core.checks import require_choice
from solvers.core.cuda import on_cuda

_LOG = logging.getLogger("implicit_attn.kernels")
# "blocks" is the public name of the strips.
BACKENDS = {
    "bi-softmax": ("auto", "reference", "blocks", "cpp", "triton"),
    "frozen keys": ("auto", "reference", "flash"),
}
# Beyond this number of tokens no N x N matrix is stored. Below, the dense formula is faster if all its
# matrices fit into the cache, up to this number of pairs, measured on a CPU with widths 16 to 64.
DENSE_TOKENS = 256
DENSE_PAIRS = 2**18
# With fewer pairs of a query and a frozen key in a head the dense formula is used, measured on a CPU.
FLASH_PAIRS = 2**14


def bisoftmax(
    z: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the bi-softmax energy and the log-sum-exp of each row.

    With ``S = beta Z Z^T``, ``L_i = log sum_j m_ij exp(S_ij)`` and ``P_ij = m_ij exp(S_ij - L_i)`` the
    gradient of ``E(Z) = beta^-1 sum_i L_i`` is ``(P + P^T) Z``, for any mask ``m`` (Hu, Zou, Xu,
    "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 3 and 7); the energy is
    ``lse.sum(dim=(1, 2)) / beta``. Masked tokens neither attend nor are attended to
    (``m_ij = mask_i mask_j``). ``causal`` restricts m to ``j <= i``: the energy is then causal, but its
    gradient is not, because the column term carries later tokens into earlier ones. ``pairs`` restrict m
    further, and with ``bias`` the scores are ``S = beta Z Z^T + bias``; neither need be symmetric. A row
    without any key has ``L_i = 0`` and ``P_i = 0``.

    Both results are twice differentiable with "blocks", "cpp" and "triton", in O(N) memory. "reference"
    supports any number of derivatives and forward mode.

    Args:
        z: (B, H, N, p) projected tokens, floating-point.
        beta: inverse temperature > 0, a number or a differentiable tensor with one element or one per
            head, (H, 1, 1).
        mask: (B, N) bool, False at masked tokens; None for no mask.
        causal: whether to restrict row i to columns ``j <= i``.
        limit: bound on every ``|S_ij|``, such as ``beta p`` for RMS-normalised rows; bounds up to 60
            make row maxima unnecessary.
        pairs: bool (N, N), (B, N, N) or (B, H, N, N), True if row i may attend to column j.
        bias: differentiable floating-point tensor of such a shape, finite at allowed pairs. It disables
            ``limit``. Only "reference" supports pairs and biases.
        backend: "reference" (dense), "blocks" (strips of standard operators, O(N) memory), "cpp" (the
            native engine's kernel, for CPUs with AVX2 or AVX-512), "triton" (GPU kernels), or
            "auto"; see ``explain``.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, and lse (B, H, N) in float32 or wider; both are zero
        at masked tokens, whose content is never used.

    Raises:
        TypeError, ValueError: if a dtype, shape, ``beta`` or ``backend`` is invalid.
        NotImplementedError: for forward-mode differentiation with a backend other than "reference".
        ImportError: for "triton" without Triton.
        RuntimeError: for "cpp" on an unsupported processor or if the package was installed without a
            compiler.
    """
    given = _checked(z, None, beta, mask, pairs, bias, backend)
    x, number, root = _at_number(z, beta, 0.5)
    choice = _log("bi-softmax", _choose_bisoftmax(x, mask, given, backend))
    if choice == "reference":
        gradient, lse = reference.bisoftmax(x, number, mask, causal, given)
    else:
        gradient, lse = ops.forward(x, number, mask, causal, limit, choice)
    return gradient if root is None else (gradient / root).to(z.dtype), lse


def bisoftmax_hvp(
    z: Tensor,
    v: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    lse: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Return the Hessian of the bi-softmax energy times ``v``.

    With ``T = beta (V Z^T + Z V^T)``, ``r_i = sum_j P_ij T_ij`` and ``W = P * (T - r)`` it is
    ``(P + P^T) V + (W + W^T) Z``.

    Args:
        z: (B, H, N, p), as in ``bisoftmax``.
        v: tensor like ``z``.
        beta, mask, causal, limit, pairs, bias, backend: see ``bisoftmax``.
        lse: lse that ``bisoftmax`` returned for the same arguments, which "cpp" does not compute again.

    Returns:
        (B, H, N, p) like ``z``, zero at masked tokens.

    Raises:
        TypeError, ValueError: see ``bisoftmax``; also if ``v`` is not like ``z`` or ``lse`` not (B, H, N).
    """
    given = _checked(z, None, beta, mask, pairs, bias, backend)
    _check_vector(z, v, lse)
    x, number, root = _at_number(z, beta, 0.5)
    v = v if root is None else v.to(x.dtype)
    choice = _log("bi-softmax", _choose_bisoftmax(x, mask, given, backend, v))
    if choice == "reference":
        return reference.bisoftmax_hvp(x, v, number, mask, causal, given).to(z.dtype)
    lse = None if lse is None else lse.detach()
    product = ops.hvp(x, v, number, mask, causal, limit, lse, None, choice)
    return product.to(z.dtype)


def frozen_key_attention(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    backend: str = "auto",
    need_lse: bool = True,
) -> tuple[Tensor, Any]:
    """Return ``sum_j P_ij k_j`` and ``L_i`` for ``P_ij = exp(beta q_i.k_j - L_i)`` over unmasked keys.

    With a ``bias``, ``P_ij = exp(beta q_i.k_j + bias_ij - L_i)``.

    Args:
        query: (B, H, N, p), floating-point.
        key: (B, H, M, p), of the same dtype.
        beta: inverse temperature > 0, a number or a differentiable tensor with one element or one per
            head, (H, 1, 1).
        mask: (B, M) bool, False at masked keys; None for no mask. If all keys are masked, both
            results are zero.
        pairs: bool (N, M), (B, N, M) or (B, H, N, M), True if query i may attend to key j. The results of
            a query without any key are zero.
        bias: differentiable floating-point tensor of such a shape, finite at allowed pairs.
        causal: whether query i attends only to keys ``j <= i``.
        backend: "reference" (dense), "flash" (torch's attention: no N x M matrix for the mean and its
            first derivatives), or "auto"; see ``explain_frozen_keys``. "flash" on CUDA devices has not
            been run on a GPU yet.
        need_lse: whether to compute L. On CUDA devices torch's attention does not return it, and it costs
            another product of queries and keys; so does its gradient on every device.

    Returns:
        (B, H, N, p) in the dtype of ``query``, and (B, H, N) in float32 or wider, or None without
        ``need_lse``; differentiable any number of times.

    Raises:
        TypeError, ValueError: if a dtype, shape, ``beta`` or ``backend`` is invalid.
        NotImplementedError: for forward-mode differentiation with "flash".
    """
    given = _checked(query, key, beta, mask, pairs, bias, backend, causal)
    x, number, factor = _at_number(query, beta, 1.0)
    key = key if factor is None else key.to(x.dtype)
    lse: Tensor | None
    if _log("frozen keys", _choose_frozen_keys(x, key, backend)) == "reference":
        if causal:
            order = token_pairs(None, True, x.shape[2], x.device)
            given = (given or Pairs()).intersect(order)
        mean, lse = reference.dense(x, key, number, mask, given)
    else:
        refuse_transforms("flash", x, key)
        mean, lse = fused.attend(x, key, number, mask, given, causal, need_lse)
    return mean.to(query.dtype), lse if need_lse else None


def explain(
    z: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    limit: float | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> Choice:
    """Return the backend of ``bisoftmax`` and ``bisoftmax_hvp`` for these arguments, and the reason.

    It raises the errors of ``bisoftmax`` without computing anything. ``causal`` and ``limit`` have no effect.

    "auto" chooses Triton on a GPU and the native engine's kernel on a CPU if they support the input,
    otherwise the dense formula for small problems and strips for larger ones.
    """
    given = _checked(z, None, beta, mask, pairs, bias, backend)
    return _choose_bisoftmax(z, mask, given, backend)


def explain_frozen_keys(
    query: Tensor,
    key: Tensor,
    beta: float | Tensor,
    *,
    mask: Tensor | None = None,
    pairs: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    backend: str = "auto",
) -> Choice:
    """Return the backend of ``frozen_key_attention`` for these arguments, and the reason.

    It raises the same errors without computing anything.
    """
    _checked(query, key, beta, mask, pairs, bias, backend, causal)
    return _choose_frozen_keys(query, key, backend)


def check_backend(backend: str, kernel: str = "bi-softmax") -> str:
    """Return ``backend`` if ``kernel`` ("bi-softmax", "frozen keys") supports it."""
    return require_choice("backend", backend, BACKENDS[kernel])


def _at_number(
    x: Tensor, beta: float | Tensor, power: float
) -> tuple[Tensor, float, Tensor | None]:
    """Return ``x``, ``beta`` as a number, None; or ``beta^power x``, 1, ``beta^power`` for tensors.

    The backends only accept numbers. Because ``beta Z Z^T = Y Y^T`` for ``Y = beta^(1/2) Z``, the results
    follow from those of Y at beta = 1, and autograd differentiates with respect to ``beta``.
    """
    if isinstance(beta, Tensor):
        # A tensor per head, even for one head, avoids waiting for the device to read a number.
        by_head, recorded = beta.dim() == 3, torch.is_grad_enabled() and beta.requires_grad
        if by_head or recorded or traced(beta):
            factor = (beta if by_head else beta.reshape(())) ** power
            # Rounding the product to half precision would change the scores.
            return x.to(wide_dtype(x)) * factor, 1.0, factor
    return x, float(beta), None


def _log(kernel: str, choice: Choice) -> str:
    if not torch.compiler.is_compiling() and _LOG.isEnabledFor(logging.DEBUG):
        _LOG.debug("%s: %s (%s)", kernel, choice.backend, choice.reason)
    return choice.backend


# --- the choice of a backend ----------------------------------------------------------------------


def _choose_bisoftmax(
    z: Tensor, mask: Tensor | None, pairs: Pairs | None, backend: str, *others: Tensor
) -> Choice:
    if pairs is not None:
        if backend not in ("auto", "reference"):
            raise ValueError(f'pairs and bias need backend="auto" or "reference", got {backend!r}')
        return Choice("reference", "only the dense formula supports pairs and biases")
    if backend == "reference":
        return Choice(backend, "asked for")
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
        return Choice(backend, "compiled: the operator checks its input when it runs")
    if backend != "auto":
        refuse_transforms(backend, z, *others)
        ops.require_backend(backend, z, mask)
        return Choice(backend, "asked for")
    dense = dense_for_transforms(z, *others)
    if dense is not None:
        return dense
    fused = "triton" if z.is_cuda else "cpp"
    missing = ops.lacks(fused, z, mask)
    if missing is None:
        return Choice(fused, f"the {fused} kernel supports this tensor")
    batch, heads, count, _ = z.shape
    size = f"{batch * heads} matrices of {count} x {count} pairs (no {fused} kernel: {missing})"
    if count <= DENSE_TOKENS and batch * heads * count**2 <= DENSE_PAIRS:
        return Choice("reference", f"{size}: the dense formula has the least overhead")
    return Choice("blocks", f"{size}: blocks of rows fit into the cache and need no N x N matrix")


def _choose_frozen_keys(query: Tensor, key: Tensor, backend: str) -> Choice:
    cuda = on_cuda(query)
    unsupported = not cuda and query.device.type != "cpu"
    if backend == "flash" and unsupported:
        raise ValueError(f'backend="flash" needs tensors on a CPU or CUDA, got {query.device}')
    if query.numel() == 0 or key.numel() == 0:
        return Choice("reference", "empty: scaled_dot_product_attention needs a query and a key")
    if backend != "auto":
        return Choice(backend, "asked for")
    if unsupported:
        return Choice("reference", "the fused operators support CPU and CUDA only")
    if traced(query, key):
        return Choice("reference", "compilers, transforms and forward mode need the dense formula")
    count = query.shape[2] * key.shape[2]
    if count < FLASH_PAIRS and not cuda:
        return Choice("reference", f"{count} pairs: the dense formula has the least overhead")
    return Choice("flash", f"{count} pairs: scaled_dot_product_attention needs no N x M matrix")


# --- argument checks ------------------------------------------------------------------------------


def _checked(
    query: Tensor,
    key: Tensor | None,
    beta: float | Tensor,
    mask: Tensor | None,
    pairs: Tensor | None,
    bias: Tensor | None,
    backend: str,
    causal: bool = False,
) -> Pairs | None:
    """Check the arguments of bi-softmax, whose ``key`` is None, or of frozen keys; return the pairs."""
    kernel, names, shapes = "frozen keys", "query and key", "(B, H, N, p) and (B, H, M, p)"
    if key is None:
        key, kernel, names, shapes = query, "bi-softmax", "z", "(B, H, N, p)"
    if not query.is_floating_point() or key.dtype != query.dtype:
        raise TypeError(
            f"{names} must have one floating-point dtype, got {query.dtype} and {key.dtype}"
        )
    matrices = query.dim() == key.dim() == 4
    if not matrices or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"{names} must have the shape {shapes}, got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    if causal and queries != keys:
        raise ValueError(f"causal=True needs as many queries as keys, got {queries} and {keys}")
    _check_beta(beta, heads)
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must have dtype bool, got {mask.dtype}")
    if mask is not None and tuple(mask.shape) != (batch, keys):
        raise ValueError(f"mask must have the shape {(batch, keys)}, got {tuple(mask.shape)}")
    check_backend(backend, kernel)
    return check_pairs(pairs, bias, (batch, heads, queries, keys))


def _check_beta(beta: float | Tensor, heads: int) -> None:
    """Check one inverse temperature > 0, or one per head, (H, 1, 1)."""
    if isinstance(beta, Tensor):
        fits = beta.numel() == 1 or tuple(beta.shape) == (heads, 1, 1)
        if not fits or not beta.is_floating_point():
            raise ValueError(
                f"beta must be a number or a floating-point tensor with one element or of shape "
                f"(H, 1, 1) = ({heads}, 1, 1), got {beta.dtype} {tuple(beta.shape)}"
            )
        # Its values are read only if this does not wait for a device.
        if beta.device.type != "cpu" or traced(beta) or not heads:
            return
        beta = float(beta.detach().min())
    if isinstance(beta, (str, bytes, list, tuple)) or beta is None:
        raise TypeError(f"beta must be a number or a tensor of one element, got {beta!r}")
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta!r}")


def _check_vector(z: Tensor, v: Tensor, lse: Tensor | None) -> None:
    """Check that ``v`` is like ``z``, and the optional ``lse`` (B, H, N)."""
    if v.shape != z.shape or v.dtype != z.dtype or v.device != z.device:
        raise ValueError(
            f"v must have the properties of z, {tuple(z.shape)} {z.dtype} on {z.device}, "
            f"got {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    if lse is not None and (lse.shape != z.shape[:3] or lse.device != z.device):
        raise ValueError(
            f"lse must have the shape (B, H, N) = {tuple(z.shape[:3])} on {z.device}, "
            f"got {tuple(lse.shape)} on {lse.device}"
        )
