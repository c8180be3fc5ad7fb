"""Largest singular value of a weight, exact on CPUs and bounded by Gram iteration on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from solvers.core.cuda import on_cuda, uses_tf32
from solvers.core.modes import in_transform, without_autocast

# After twelve squarings the bound exceeds the norm of an n x n matrix by the factor n^(1/16384) at most.
SQUARINGS = 12


def spectral_norm(matrix: Tensor, least: float, *, symmetric: bool = False) -> Tensor:
    """Return the scalar ``max(sigma, least)`` with the largest singular value sigma of ``matrix``.

    On CUDA devices sigma is replaced by the upper bound :func:`gram_bound`, because an eigenvalue
    decomposition takes thousands of kernel launches there. On CPUs an eigenvalue takes half the time of the
    bound. Nonfinite entries are treated as zeros; they remain in the weight, and the status of the solve
    reports them.

    Args:
        matrix: (n, m), float32 or float64.
        least: a number > 0, which makes the result smooth at a zero matrix.
        symmetric: whether the matrix equals its transpose.
    """
    wide = matrix.nan_to_num(0.0, 0.0, 0.0)
    # No square of an entry over- or underflows after the division.
    size = torch.linalg.vector_norm(wide.detach(), torch.inf).clamp_min(least)
    wide, floor = wide / size, least / size
    with without_autocast(wide.device.type):  # autocast would round the products to half precision
        if on_cuda(wide):
            sigma = gram_bound(wide)
        elif symmetric:
            # A Gram matrix would merge eigenvalues of both signs and lose the second derivative.
            sigma = torch.linalg.eigvalsh(wide).abs().amax()
        else:
            # The maximum comes before the root, whose derivative at zero is infinite.
            largest = torch.linalg.eigvalsh(_gram(wide))[-1]
            sigma = torch.maximum(largest, floor.square()).sqrt()
    return torch.maximum(sigma.to(floor.dtype), floor) * size


def gram_bound(matrix: Tensor, squarings: int = SQUARINGS) -> Tensor:
    """Return an upper bound on the largest singular value of ``matrix`` by Gram iteration.

    For the Gram matrix ``A`` and ``p = 2^squarings`` the bound is ``|A^p|_F^(1 / 2p)``. It exceeds the
    singular value by the factor ``m^(1 / 4p)`` at most, where m singular values are equal to the largest;
    the contribution of the smaller ones vanishes doubly exponentially in the number of squarings. The
    bound has derivatives of any order; the first uses ``A^2p`` in the place of ``A^(2p - 1)``, which changes
    it by less than 1/p. It does not synchronise with the device.

    Args:
        matrix: (n, m), finite, with entries of at most about 1.
        squarings: number of squarings of the Gram matrix.

    Source: Delattre, Barthélemy, Araujo, Allauzen, "Efficient Bound of Lipschitz Constant for
    Convolutional Layers by Gram Iteration", ICML 2023, https://arxiv.org/abs/2305.16173.
    """
    forward_mode = getattr(forward_ad, "_current_level", -1) >= 0
    if matrix.requires_grad and not (forward_mode or in_transform()):
        return _GramBound.apply(matrix, squarings)
    return _gram_bound(matrix, squarings)[0]


def _gram_bound(matrix: Tensor, squarings: int) -> tuple[Tensor, Tensor]:
    """Return the bound, and ``A^p`` divided by its norm."""
    exact = matrix.double() if uses_tf32() and on_cuda(matrix) else matrix
    power, tiny = _gram(exact), torch.finfo(exact.dtype).tiny
    log, root = exact.new_zeros(()), 0.5
    for k in range(squarings):
        if k % 3 == 0:  # three squarings divide the norm by n^4 at most, which does not underflow
            # The bound does not depend on the divisor, so the divisor needs no derivative.
            scale = torch.linalg.vector_norm(power.detach()).clamp_min(tiny)
            power, log = power / scale, torch.add(log, scale.log(), alpha=root)
        power, root = power @ power, root / 2
    last = torch.linalg.vector_norm(power).clamp_min(tiny)
    return torch.add(log, last.log(), alpha=root).exp().to(matrix.dtype), power / last


class _GramBound(torch.autograd.Function):
    """The bound with a backward pass of a few operations: ``W A^2p / tr(A^(2p + 1))`` times the bound."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, squarings: int) -> Tensor:
        bound, power = _gram_bound(matrix, squarings)
        ctx.squarings = squarings
        ctx.save_for_backward(matrix, power, bound)
        return bound

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        matrix, power, bound = ctx.saved_tensors
        if torch.is_grad_enabled():
            again = _gram_bound(matrix, ctx.squarings)[0]
            return cotangents[0] * torch.autograd.grad(again, matrix, create_graph=True)[0], None
        gram, exact = _gram(matrix), (power @ power).to(matrix.dtype)
        total = torch.linalg.vecdot(gram.flatten(), exact.flatten())
        factor = cotangents[0] * bound / total.clamp_min(torch.finfo(total.dtype).tiny)
        rows, columns = matrix.shape
        return factor * (exact @ matrix if rows < columns else matrix @ exact), None


def _gram(matrix: Tensor) -> Tensor:
    """Return the smaller of the two Gram matrices."""
    rows, columns = matrix.shape
    return matrix @ matrix.mT if rows < columns else matrix.mT @ matrix
