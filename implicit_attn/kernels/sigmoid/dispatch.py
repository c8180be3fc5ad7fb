"""Which backend computes sigmoid attention, and the functions that everything else calls."""

from __future__ import annotations

from torch import Tensor

from implicit_attn.kernels.bi_softmax.dispatch import Choice
from implicit_attn.kernels.bi_softmax.reference import check_arguments, check_vector
from implicit_attn.kernels.operators import has_tangent, refuse_forward_mode, transformed
from implicit_attn.kernels.sigmoid import ops, reference

SIGMOID_BACKENDS = ("auto", "reference", "blocks")
# Beyond so many tokens no N x N matrix is held; up to it the dense formula is faster where all its
# matrices together have at most so many pairs, measured on a CPU with widths 16 to 64.
DENSE_TOKENS, DENSE_PAIRS = 256, 2**17


def sigmoid_attention(
    z: Tensor, beta: float, *, mask: Tensor | None = None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Gradient and value of the sigmoid attention energy of each head.

    With ``S = beta Z Z^T`` the energy is ``E(Z) = 1/(2 beta) sum_ij sigma(S_ij)`` over the pairs that
    count, sigma the logistic function, and its gradient ``sigma'(S) Z`` (Hu, Zou, Xu, "Hyper-SET",
    arXiv 2502.11646, table 18, with the sign that makes it the gradient).

    Both results can be differentiated: twice by "blocks", in memory O(N); any number of times, and in
    forward mode, by "reference".

    Args:
        z: (B, H, N, p) projected tokens, floating.
        beta: inverse temperature, > 0.
        mask: (B, N) bool, True where a token counts; None: all count.
        backend: "reference" (dense), "blocks" (stock operators, O(N) memory), or "auto": see
            ``explain_sigmoid``.

    Returns:
        gradient (B, H, N, p) in the dtype of ``z``, zero for tokens that do not count, and value
        (B, H) in float32 or wider.

    Raises:
        TypeError, ValueError: for a dtype, shape, ``beta`` or ``backend`` other than the above.
        NotImplementedError: forward-mode differentiation by "blocks".
    """
    choice = explain_sigmoid(z, beta, mask=mask, backend=backend).backend
    if choice == "reference":
        return reference.sigmoid_attention(z, beta, mask=mask)
    return ops.forward(z, beta, mask)


def sigmoid_attention_hvp(
    z: Tensor, v: Tensor, beta: float, *, mask: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """Hessian of the energy times ``v``: ``sigma'(S) V + (sigma''(S) * T) Z``.

    ``T = beta (V Z^T + Z V^T)``. Like ``z``; zero for tokens that do not count.

    Args:
        z, beta, mask, backend: as in ``sigmoid_attention``.
        v: like ``z``.

    Raises:
        As ``sigmoid_attention``; ValueError if ``v`` is not like ``z``.
    """
    choice = explain_sigmoid(z, beta, mask=mask, backend=backend).backend
    check_vector(z, v, None)
    if choice == "reference" or (backend == "auto" and has_tangent(v)):
        return reference.sigmoid_attention_hvp(z, v, beta, mask=mask)
    refuse_forward_mode(v, choice, "sigmoid_attention_hvp")
    return ops.hvp(z, v, beta, mask)


def explain_sigmoid(
    z: Tensor, beta: float, *, mask: Tensor | None = None, backend: str = "auto"
) -> Choice:
    """Which backend the two functions above take for these arguments, and why.

    Args:
        z, beta, mask, backend: as in ``sigmoid_attention``; nothing is computed.

    Raises:
        As ``sigmoid_attention``.
    """
    check_arguments(z, beta, mask)
    check_sigmoid_backend(backend)
    if backend == "blocks":
        refuse_forward_mode(z, backend, "sigmoid_attention_hvp")
    if backend != "auto":
        return Choice(backend, "asked for")
    if has_tangent(z):
        return Choice("reference", "only the dense formula knows forward-mode differentiation")
    if transformed():
        return Choice("reference", "inside torch.func, for which the dense formula is plain")
    tokens, matrices = z.shape[2], z.shape[0] * z.shape[1]
    size = f"{matrices} matrices of {tokens} x {tokens} pairs"
    cached = z.is_cuda or matrices * tokens**2 <= DENSE_PAIRS
    if tokens <= DENSE_TOKENS and cached:
        return Choice("reference", f"{size}: the dense formula has the least overhead")
    return Choice("blocks", f"{size}: blocks stay in cache and hold no N x N matrix")


def check_sigmoid_backend(backend: str) -> str:
    """``backend`` itself where it is one of ``SIGMOID_BACKENDS``."""
    if backend not in SIGMOID_BACKENDS:
        raise ValueError(f"backend must be one of {SIGMOID_BACKENDS}, got {backend!r}")
    return backend
