"""Which backend computes sigmoid attention, and the functions that everything else calls."""

from __future__ import annotations

import math

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
from implicit_attn.kernels.operators import has_tangent, refuse_forward_mode
from implicit_attn.kernels.sigmoid import reference, strips
from solvers.core.checks import require_choice

# "blocks" is the public name of the strips.
SIGMOID_BACKENDS = ("auto", "reference", "blocks")
# Beyond so many tokens no N x N matrix is held; up to it the dense formula is faster where all its
# matrices together have at most so many pairs, measured on a CPU with widths 16 to 64.
DENSE_TOKENS, DENSE_PAIRS = 256, 2**17


def sigmoid_attention(
    z: Tensor, beta: float | Tensor, *, mask: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradient and value of the sigmoid attention energy of each head.

    With ``S = beta Z Z^T`` the energy is ``E(Z) = 1/(2 beta) sum_ij sigma(S_ij)`` over the pairs
    without masked tokens, sigma the logistic function, and its gradient ``sigma'(S) Z`` (Hu, Zou, Xu,
    "Hyper-SET", https://arxiv.org/abs/2502.11646, table 18, with the sign that makes it the gradient).

    Both results can be differentiated: twice by "blocks", in memory O(N); any number of times, and in
    forward mode, by "reference".

    Args:
        z: (B, H, N, p) projected tokens, floating.
        beta: inverse temperature, > 0; a tensor of one element may be differentiated by.
        mask: (B, N) bool, False at masked tokens; None: none is masked.
        backend: "reference" (dense), "blocks" (strips of stock operators, O(N) memory), or "auto": see
            ``explain_sigmoid``.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, zero at masked tokens, and value (B, H) in
        float32 or wider.

    Raises:
        TypeError, ValueError: for a dtype, shape, ``beta`` or ``backend`` other than the above.
        NotImplementedError: forward-mode differentiation by "blocks".
    """
    choice = _choose(z, beta, mask, backend)
    varying = by_rescaling(beta)
    if varying is not None:
        root = varying.sqrt()
        gradient, value = sigmoid_attention(rescaled(z, root), 1.0, mask=mask, backend=backend)
        return (gradient / root).to(z.dtype), value / varying
    beta = float(beta)
    if choice == "reference":
        return reference.sigmoid_attention(z, beta, mask=mask)
    return strips.forward(z, beta, mask)


def sigmoid_attention_hvp(
    z: Tensor, v: Tensor, beta: float | Tensor, *, mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Hessian of the energy times ``v``: ``sigma'(S) V + (sigma''(S) * T) Z``.

    ``T = beta (V Z^T + Z V^T)``; the result is like ``z``, zero at masked tokens.

    Args:
        z, beta, mask, backend: as in ``sigmoid_attention``.
        v: like ``z``.

    Raises:
        TypeError, ValueError: as ``sigmoid_attention``; if ``v`` is not like ``z``.
    """
    choice = _choose(z, beta, mask, backend)
    check_vector(z, v, None)
    varying = by_rescaling(beta)
    if varying is not None:
        scaled, v = rescaled(z, varying.sqrt()), v.to(wide_dtype(v))
        return sigmoid_attention_hvp(scaled, v, 1.0, mask=mask, backend=backend).to(z.dtype)
    beta = float(beta)
    if choice == "reference" or (backend == "auto" and has_tangent(v)):
        return reference.sigmoid_attention_hvp(z, v, beta, mask=mask)
    refuse_forward_mode(v, choice, "sigmoid_attention_hvp")
    return strips.hvp(z, v, beta, mask)


def _choose(z: Tensor, beta: float | Tensor, mask: Tensor | None, backend: str) -> str:
    choice = explain_sigmoid(z, beta, mask=mask, backend=backend)
    log_choice("sigmoid", choice)
    return choice.backend


def explain_sigmoid(
    z: Tensor, beta: float | Tensor, *, mask: Tensor | None = None, backend: str = "auto"
) -> Choice:
    """Which backend the two functions above take for these arguments, and why.

    It raises the errors of ``sigmoid_attention``; nothing is computed.
    """
    check_arguments(z, beta, mask)
    check_sigmoid_backend(backend)
    if backend == "blocks":
        refuse_forward_mode(z, backend, "sigmoid_attention_hvp")
    if backend != "auto":
        return Choice(backend, "asked for")
    # On a CUDA device no cache bounds the pairs.
    pairs = math.inf if z.is_cuda else DENSE_PAIRS
    return dense_for_transforms(z) or dense_or_strips(z, DENSE_TOKENS, pairs)


def check_sigmoid_backend(backend: str) -> str:
    """``backend`` itself where it is one of ``SIGMOID_BACKENDS``."""
    return require_choice("backend", backend, SIGMOID_BACKENDS)
