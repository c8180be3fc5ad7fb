"""The free energy of single tokens among held ones, and its gradients by state and by weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from solvers.core.checks import require_choice, require_positive

KINDS = ("elastic", "inner")


class OwnGradients(NamedTuple):
    """Of the sum of the energies F_i: by the states (B, N, d), and by both weights (H, p, d)."""

    state: Tensor
    query: Tensor
    key: Tensor


class OwnEnergy:
    r"""The mean over heads of each token's free energy among tokens h that are held ::

        elastic:  F_i = -(T/H) sum_h log sum_j exp(-|W1_h z_i - W2_h h_j|^2 / (2T))
        inner:    F_i = -(T/H) sum_h log sum_j exp(W1_h z_i . W2_h h_j / T)

    With the weights P, ``q = W1 z``, ``k = W2 h``, ``m = sum_j P_j k_j`` the gradients are local ::

        elastic:  dF/dz = 1/H sum_h W1_h^T (q - m),   dF/dW1_h = 1/H (q - m) z^T,
                  dF/dW2_h = -1/H sum_j P_j (q - k_j) h_j^T
        inner:    dF/dz = -1/H sum_h W1_h^T m,        dF/dW1_h = -1/H m z^T,
                  dF/dW2_h = -1/H q sum_j P_j h_j^T

    Args:
        kind: "elastic" or "inner".
        temperature: T, > 0.
        causal: token i sees ``j <= i`` only.

    Shapes: z (B, N, d), h (B, M, d), W1 and W2 (H, p, d); W1 None is the identity, for one head of
    width d.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907.
    """

    def __init__(
        self, kind: str = "elastic", temperature: float = 1.0, *, causal: bool = False
    ) -> None:
        self.elastic = require_choice("kind", kind, KINDS) == "elastic"
        self.temperature = require_positive("temperature", temperature)
        self.causal = causal

    def value(self, z: Tensor, h: Tensor, query: Tensor | None, key: Tensor) -> Tensor:
        """F_i, (B, N)."""
        q, k = _project(z, query), _project(h, key)
        energy = -self.temperature * torch.logsumexp(self._scores(q, k), dim=-1)
        if self.elastic:
            energy = energy + 0.5 * q.square().sum(-1)
        return energy.mean(1)

    def by_state(self, z: Tensor, h: Tensor, query: Tensor | None, key: Tensor) -> Tensor:
        """``dF_i/dz_i``, (B, N, d); differentiable, for back-propagation through steps."""
        q, k = _project(z, query), _project(h, key)
        force = -(torch.softmax(self._scores(q, k), dim=-1) @ k)
        return _back(q + force if self.elastic else force, query)

    def gradients(self, z: Tensor, h: Tensor, query: Tensor | None, key: Tensor) -> OwnGradients:
        """All three, without a graph; that by a W1 of None is the one at the identity."""
        with torch.no_grad():
            q, k = _project(z, query), _project(h, key)
            weights = torch.softmax(self._scores(q, k), dim=-1)
            force, pulled = -(weights @ k), weights.mT @ q
            if self.elastic:
                force = force + q
                pulled = pulled - weights.sum(-2).unsqueeze(-1) * k
            heads = len(key)
            by_query = torch.einsum("bhnp,bnd->hpd", force, z) / heads
            by_key = -torch.einsum("bhmp,bmd->hpd", pulled, h) / heads
            return OwnGradients(_back(force, query), by_query, by_key)

    def floor(self, tokens: int) -> float:
        """The lower bound of the mean of F_i of the elastic energy, ``-T log M``, or its causal mean."""
        counts = torch.arange(1 if self.causal else tokens, tokens + 1, dtype=torch.float64)
        return -self.temperature * counts.log().mean().item()

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        """(B, H, N, M); of the elastic energy without what is constant in a row."""
        scores = q @ k.mT
        if self.elastic:
            scores = scores - 0.5 * k.square().sum(-1).unsqueeze(-2)
        if self.causal:
            earlier = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~earlier, -torch.inf)
        return scores / self.temperature


def _project(tokens: Tensor, weight: Tensor | None) -> Tensor:
    """(B, N, d) to (B, H, N, p)."""
    if weight is None:
        return tokens.unsqueeze(1)
    flat = tokens @ weight.flatten(0, 1).mT
    return flat.unflatten(-1, weight.shape[:2]).transpose(1, 2)


def _back(force: Tensor, weight: Tensor | None) -> Tensor:
    """``1/H sum_h W_h^T f_h``, (B, H, N, p) to (B, N, d)."""
    if weight is None:
        return force.squeeze(1)
    return torch.einsum("bhnp,hpd->bnd", force, weight) / len(weight)


def loop_tokens(
    energy: OwnEnergy,
    tokens: Tensor,
    query: Tensor | None,
    key: Tensor,
    *,
    steps: int,
    step_size: float,
) -> Tensor:
    """Steps of all tokens at once down their own energies, each time among the tokens as they stand."""
    for _ in range(steps):
        tokens = tokens - step_size * energy.by_state(tokens, tokens, query, key)
    return tokens


def state_spread(z: Tensor) -> float:
    """Root mean square distance of states (B, N, d) from their mean."""
    flat = z.detach().flatten(0, 1)
    return (flat - flat.mean(0)).square().sum(1).mean().sqrt().item()
