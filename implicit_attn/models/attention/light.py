"""Attention whose output is preconditioned by the covariance of the values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from implicit_attn.energies.tokens import accumulation_dtype
from implicit_attn.kernels import covariance_product
from implicit_attn.models.attention.causal import AttentionForm
from implicit_attn.models.attention.newton import covariances
from solvers.core.checks import require_count, require_number
from solvers.core.guards.telling import warn_user
from solvers.core.modes import without_autocast


class LightNewtonAttention(AttentionForm):
    r"""Softmax attention with a second-order correction, ``(I - tau C)^-1 m`` or its series.

    With ``P = softmax(q.k / sqrt(p))``, m is the mean of the values under P and C their covariance.
    The branch is ``sum_h W_O,h y_h`` with ::

        order=None:  y = (I - tau_h C_h)^-1 m_h
        order=m:     y = sum_(r<=m) (tau_h C_h)^r m_h

    It comes from the inner free energy, whose Hessian ``-C/T`` is negative, so that Newton's own step
    would climb; ``I - tau C`` preconditions a descent as long as ``tau C < I``. With ``tau = 0`` it is
    softmax attention. On the CPU the exact form warns where ``I - tau C`` is not positive definite.

    Args:
        dim, heads, causal: as for ``AttentionForm``.
        order: m, each term costs about half an attention in dense operations; None: exact, which
            forms a p x p matrix for every query.
        tau: initial tau_h, of any sign.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, appendix (LightMHA2nd) and LightMHA2nd1st.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        order: int | None = 1,
        causal: bool = True,
        tau: float = 0.01,
    ) -> None:
        super().__init__(dim, heads, causal=causal)
        self.order = None if order is None else require_count("order", order)
        self.tau = nn.Parameter(torch.full((heads,), float(require_number("tau", tau))))

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        value = self.values(memory)
        wide = accumulation_dtype(query.dtype)
        with without_autocast(query.device.type):
            query, key, value = query.to(wide), key.to(wide), value.to(wide)
            weights = self.weights((query @ key.mT) * self.width**-0.5, mask)
            mean, tau = weights @ value, self.tau.view(-1, 1, 1).to(wide)
            if self.order is None:
                return self._solve(weights, value, mean, tau)
            total = term = mean
            for _ in range(self.order):
                term = tau * covariance_product(weights, value, term, mean=mean)
                total = total + term
            return total

    def _solve(self, weights: Tensor, value: Tensor, mean: Tensor, tau: Tensor) -> Tensor:
        eye = torch.eye(self.width, dtype=mean.dtype, device=mean.device)
        matrix = eye - tau.unsqueeze(-1) * covariances(weights, value)
        # Anywhere else the look would wait for the device.
        if matrix.device.type == "cpu" and not torch.compiler.is_compiling():
            _, failed = torch.linalg.cholesky_ex(matrix.detach())
            # Numbers that are not finite came from elsewhere, not from tau.
            failed = (failed > 0) & matrix.detach().isfinite().all(-1).all(-1)
            if bool(failed.any()):
                warn_user(
                    "tau is too large: I - tau C is not positive definite for "
                    f"{int(failed.sum())} of {failed.numel()} queries and heads, where the "
                    "step descends nothing",
                    UserWarning,
                    "tau",
                    self,
                )
        return torch.linalg.solve(matrix, mean)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, order={self.order}"
