"""Attention as a Newton step of each head's elastic energy, exact or as a truncated series."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.energies.tokens import accumulation_dtype
from implicit_attn.kernels import covariance_product
from implicit_attn.models.attention.causal import AttentionForm, PositiveScalars
from solvers.core.checks import require_count, require_nonnegative, require_number, require_positive
from solvers.core.modes import without_autocast


class NewtonAttention(AttentionForm):
    r"""The Newton direction of ``F_h = -T_h log sum_j exp(-|q_h - k_hj|^2 / (2 T_h))`` in each head.

    With elastic weights ``P = softmax_j(-|q - k_j|^2 / (2T))``, the mean ``m`` of the keys and their
    covariance C under P, ``w = q - m`` is the gradient of a head's energy by its query and
    ``A = I - C/T`` its Hessian. The branch is ``sum_h W_O,h W_V,h M_h y_h`` with
    ``M_h = W_Q,h^T (W_Q,h W_Q,h^T)^-1`` and ::

        order=None:  y = ((1 + damping) I - C/T)^-1 w
        order=m:     y = sum_(r<=m) (tau C)^r w

    With ``W_V = W_Q``, ``W_O,h = -(eta/H) M_h`` and, for an order, ``tau = 1/T`` this is the step
    ``-(eta/H) sum_h (Hessian of F_h)^+ gradient of F_h``, or that with the series for the inverse. The
    series converges where ``|C/T| < 1``, that is where the energy is locally convex, with an error of
    at most ``|C/T|^(m+1) / (1 - |C/T|) |w|``; elsewhere the exact step goes to a saddle.

    Args:
        dim, heads, causal: as for ``AttentionForm``.
        order: m, terms of the series after the first, each costs about half an attention in dense
            operations; None: exact, which forms a p x p matrix for every query.
        values: False leaves ``W_V M_h`` out: ``sum_h W_O,h y_h``. The functions that can be learned
            are the same.
        temperature: initial T_h, kept > 0; None: ``sqrt(2p)``.
        tau: initial tau_h, of any sign; None: 0.01. There is none with ``order`` None or 0.
        damping: >= 0, for ``order=None`` only.

    Raises:
        torch.linalg.LinAlgError: in ``forward`` with values, where the rows of a head's ``W_Q`` are
            linearly dependent, and with ``order=None`` where ``(1 + damping) I - C/T`` is singular.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907: MHA2nd (exact), MHA2nd1st (order 1), MHA2nd1st-noV. The sign is
    Newton's; the temperature of the series is the learned tau, as in their light form.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        order: int | None = 1,
        values: bool = True,
        causal: bool = True,
        temperature: float | None = None,
        tau: float | None = None,
        damping: float = 0.0,
    ) -> None:
        super().__init__(dim, heads, causal=causal, values=values)
        self.order = None if order is None else require_count("order", order, low=0)
        self.damping = require_nonnegative("damping", damping)
        if damping and order is not None:
            raise ValueError(f"damping needs order=None, got damping={damping} with order={order}")
        initial = (2.0 * self.width) ** 0.5 if temperature is None else temperature
        self.temperature = PositiveScalars(heads, require_positive("temperature", initial))
        if tau is not None and not order:
            raise ValueError(f"tau needs an order >= 1, got tau={tau!r} with order={order}")
        number = 0.01 if tau is None else float(require_number("tau", tau))
        self.tau = nn.Parameter(torch.full((heads,), number)) if order else None

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        with without_autocast(query.device.type):
            query, key = query.to(wide), key.to(wide)
            # All below depends on differences of features alone; a common offset would cost digits.
            query, key = query - key[:, :, :1], key - key[:, :, :1]
            temperature = self.temperature().to(wide)
            scores = query @ key.mT - 0.5 * key.square().sum(-1).unsqueeze(-2)
            weights = self.weights(scores / temperature, mask)
            mean = weights @ key
            moved = query - mean
            if self.order is None:
                direction = self._solve(weights, key, moved, temperature)
            else:
                direction = self._sum_series(weights, key, mean, moved)
            return direction if self.value is None else direction @ self._return_map(wide)

    def _solve(self, weights: Tensor, key: Tensor, moved: Tensor, temperature: Tensor) -> Tensor:
        covariance = covariances(weights, key) / temperature.unsqueeze(-1)
        eye = torch.eye(self.width, dtype=moved.dtype, device=moved.device)
        return torch.linalg.solve((1.0 + self.damping) * eye - covariance, moved)

    def _sum_series(self, weights: Tensor, key: Tensor, mean: Tensor, moved: Tensor) -> Tensor:
        total = term = moved
        if self.tau is not None:
            tau = self.tau.view(-1, 1, 1).to(moved.dtype)
            for _ in range(self.order or 0):
                term = tau * covariance_product(weights, key, term, mean=mean)
                total = total + term
        return total

    def _return_map(self, dtype: torch.dtype) -> Tensor:
        """``(W_V,h M_h)^T``, (H, p, p): features of queries to values."""
        assert self.value is not None
        query, value = (self.by_head(layer).to(dtype) for layer in (self.query, self.value))
        return torch.linalg.solve(query @ query.mT, query @ value.mT)

    def extra_repr(self) -> str:
        values = self.value is not None
        return (
            f"{super().extra_repr()}, order={self.order}, values={values}, damping={self.damping}"
        )


def covariances(weights: Tensor, values: Tensor) -> Tensor:
    """``C_i = sum_j P_ij v_j v_j^T - m_i m_i^T`` of every query, (B, H, N, p, p)."""
    width = values.shape[-1]
    values = values - values[..., :1, :]  # a common offset does not count, but its squares cancel
    mean = weights @ values
    squares = (values.unsqueeze(-1) * values.unsqueeze(-2)).flatten(-2)
    outer = mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return (weights @ squares).unflatten(-1, (width, width)) - outer
