"""Attention as optimiser steps: forms of causal attention, and queries that descend their energy."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.deq import DEQ
from implicit_attn.energies import AttentionInput, Projection
from implicit_attn.energies.heads import Beta, Temperatures, head_width
from implicit_attn.energies.tokens import accumulation_dtype, check_tokens, hide, visible_input
from implicit_attn.kernels import covariance_product
from implicit_attn.kernels.arguments import dense_for_transforms
from implicit_attn.updates.update import QueryDescent
from solvers.core.checks import require_choice, require_count, require_flag, require_instance
from solvers.core.modes import without_autocast

TAU = 0.01  # initial value of tau


class AttentionForm(nn.Module):
    """Base class of the residual branch u of an attention layer ``z + u(z)``: heads, then ``W_O``.

    A subclass defines ``attend`` on the heads' features. Projections have no bias.

    Args:
        dim: features d of a token.
        heads: number of heads H, a divisor of d; each has the width p = d / H.
        causal: whether token i attends only to ``j <= i``.
        values: whether there is a ``W_V``.

    Shapes: tokens ``z`` (B, N, d) -> (B, N, d); ``memory`` (B, N, d), the source of keys and values, or
    None for z; ``mask`` (B, N) bool, False at masked tokens, whose output is 0 and to which no other
    token attends.
    """

    def __init__(self, dim: int, heads: int, *, causal: bool = True, values: bool = True) -> None:
        super().__init__()
        self.width = head_width(dim, heads, None)
        self.dim, self.heads, self.causal = dim, heads, require_flag("causal", causal)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False) if require_flag("values", values) else None
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(
        self, z: Tensor, memory: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        if memory is not None and memory.shape != z.shape:
            raise ValueError(
                f"{name}: memory must have the shape of z, {tuple(z.shape)}, got "
                f"{tuple(memory.shape)}"
            )
        z = hide(z, mask)
        memory = z if memory is None else hide(memory, mask)
        query, key = self.split(self.query(z)), self.split(self.key(memory))
        attended = self.attend(query, key, memory, mask).to(query.dtype)
        return hide(self.output(attended.transpose(1, 2).flatten(2)), mask)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Return the input of ``W_O``, (B, H, N, p), for queries and keys (B, H, N, p) and the memory."""

    def values(self, memory: Tensor) -> Tensor:
        """Return ``W_V h``, (B, H, N, p)."""
        return self.split(self.value(memory))  # type: ignore[misc]

    def split(self, tokens: Tensor) -> Tensor:
        """Convert (B, N, H p) to (B, H, N, p)."""
        return tokens.unflatten(-1, (self.heads, self.width)).transpose(1, 2)

    def allowed(self, count: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Return the allowed pairs, bool (N, N) or (B, 1, N, N), including self-pairs; None for all."""
        pairs = None
        if self.causal:
            pairs = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        if mask is None:
            return pairs
        itself = torch.eye(count, dtype=torch.bool, device=device)
        seen = mask[:, None, None, :] | itself
        return seen if pairs is None else seen & pairs

    def weights(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        """Return the softmax of scores (B, H, N, N) over the allowed pairs."""
        pairs = self.allowed(scores.shape[-1], mask, scores.device)
        return (scores if pairs is None else scores.masked_fill(~pairs, -torch.inf)).softmax(-1)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


class CausalAttention(AttentionForm):
    """Softmax attention, ``W_O sum_j P_ij v_j`` with ``P = softmax(q.k / sqrt(p))``.

    With ``W_V = W_K`` and ``W_O,h = W_Q,h^T / H`` it is the negative gradient of each token's free energy
    ``-(T/H) sum_h log sum_j exp(q_h.k_hj / T)`` at ``T = sqrt(p)`` for fixed keys.

    Args:
        dim, heads, causal: see ``AttentionForm``.

    It uses torch's fused attention, which has no second derivatives in reverse mode. Forward-mode
    derivatives and the transforms of ``torch.func`` use the dense formula of the other forms.

    Source: Vaswani et al. (2017), https://arxiv.org/abs/1706.03762; as a gradient step Ren, Ouyang,
    Tang, Liu, "Transformers as Intrinsic Optimizers", https://arxiv.org/abs/2511.00907, theorem 3.
    """

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        value = self.values(memory)
        if dense_for_transforms(query, key, value) is not None:
            return self.weights((query @ key.mT) * self.width**-0.5, mask) @ value
        pairs = None if mask is None else self.allowed(query.shape[2], mask, query.device)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=pairs, is_causal=self.causal and mask is None
        )


class NewtonAttention(AttentionForm):
    r"""The Newton direction of ``F_h = -T_h log sum_j exp(-|q_h - k_hj|^2 / (2 T_h))`` in each head.

    With elastic weights ``P = softmax_j(-|q - k_j|^2 / (2T))``, the mean ``m`` of the keys and their
    covariance C under P, ``w = q - m`` is the gradient of a head's energy with respect to its query and
    ``A = I - C/T`` its Hessian. The branch is ``sum_h W_O,h W_V,h M_h y_h`` with
    ``M_h = W_Q,h^T (W_Q,h W_Q,h^T)^-1`` and ::

        order=None:  y = (I - C/T)^-1 w
        order=m:     y = sum_(r<=m) (tau C)^r w

    With ``W_V = W_Q``, ``W_O,h = -(eta/H) M_h`` and, for an order, ``tau = 1/T`` this is the step
    ``-(eta/H) sum_h (Hessian of F_h)^+ gradient of F_h``, or its series, which converges where the energy is
    locally convex, ``|C/T| < 1``; otherwise the exact step leads to a saddle. T_h > 0 is learned from
    ``sqrt(2p)``, tau_h of any sign from 0.01.

    Args:
        dim, heads, causal: see ``AttentionForm``.
        order: number m of terms after the first; each costs about half an attention in dense
            operations. None for the exact inverse, which forms a p x p matrix for every query.
        values: False omits ``W_V M_h``: ``sum_h W_O,h y_h``, which can represent the same functions.

    Raises:
        torch.linalg.LinAlgError: in ``forward`` with values, if the rows of a head's ``W_Q`` are
            linearly dependent; with ``order=None`` also if ``I - C/T`` is singular.

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
    ) -> None:
        super().__init__(dim, heads, causal=causal, values=values)
        self.order = None if order is None else require_count("order", order, low=0)
        self.temperature = Temperatures(heads, (2.0 * self.width) ** 0.5, self.width, learned=True)
        self.tau = nn.Parameter(torch.full((heads,), TAU)) if order else None

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        wide = accumulation_dtype(query.dtype)
        with without_autocast(query.device.type):
            query, key = query.to(wide), key.to(wide)
            # Only differences of features matter; removing a common offset preserves digits.
            query, key = query - key[:, :, :1], key - key[:, :, :1]
            temperature = cast(Tensor, self.temperature()).to(wide).view(-1, 1, 1)
            scores = query @ key.mT - 0.5 * key.square().sum(-1).unsqueeze(-2)
            weights = self.weights(scores / temperature, mask)
            mean = weights @ key
            moved = query - mean
            if self.order is None:
                eye = torch.eye(self.width, dtype=wide, device=moved.device)
                hessian = eye - covariances(weights, key) / temperature.unsqueeze(-1)
                direction = torch.linalg.solve(hessian, moved)
            else:
                direction = sum_series(weights, key, mean, moved, self.tau, self.order)
            return direction if self.value is None else direction @ self._return_map(wide)

    def _return_map(self, dtype: torch.dtype) -> Tensor:
        """Return ``(W_V,h M_h)^T``, (H, p, p), which maps query features to values."""
        weights = (self.query.weight, cast(nn.Linear, self.value).weight)
        query, value = (each.to(dtype).unflatten(0, (self.heads, -1)) for each in weights)
        return torch.linalg.solve(query @ query.mT, query @ value.mT)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, order={self.order}, values={self.value is not None}"


def sum_series(
    weights: Tensor, values: Tensor, mean: Tensor, start: Tensor, tau: Tensor | None, order: int
) -> Tensor:
    """Return ``sum_(r <= order) (tau C)^r start`` with the covariance C of the values; tau (H,) or None."""
    total = term = start
    if tau is not None:
        for _ in range(order):
            term = tau.view(-1, 1, 1).to(term.dtype) * covariance_product(
                weights, values, term, mean=mean
            )
            total = total + term
    return total


def covariances(weights: Tensor, values: Tensor) -> Tensor:
    """Return ``C_i = sum_j P_ij v_j v_j^T - m_i m_i^T`` of every query, (B, H, N, p, p)."""
    width = values.shape[-1]
    values = values - values[..., :1, :]  # remove a common offset, whose squares would cancel
    mean = weights @ values
    squares = (values.unsqueeze(-1) * values.unsqueeze(-2)).flatten(-2)
    outer = mean.unsqueeze(-1) * mean.unsqueeze(-2)
    return (weights @ squares).unflatten(-1, (width, width)) - outer


class LightNewtonAttention(AttentionForm):
    r"""Softmax attention with a second-order correction, the series of ``(I - tau C)^-1 m``.

    With ``P = softmax(q.k / sqrt(p))``, m is the mean of the values under P and C their covariance.
    The branch is ``sum_h W_O,h y_h`` with ::

        y = sum_(r<=order) (tau_h C_h)^r m_h

    The inner free energy has the Hessian ``-C/T`` < 0, so Newton's step would ascend; ``I - tau C``
    preconditions a descent as long as ``tau C < I``. tau_h of any sign is learned from 0.01; with
    ``tau = 0`` it is softmax attention.

    Args:
        dim, heads, causal: see ``AttentionForm``.
        order: number of terms of the series after the first.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, LightMHA2nd1st.
    """

    def __init__(self, dim: int, heads: int, *, order: int = 1, causal: bool = True) -> None:
        super().__init__(dim, heads, causal=causal)
        self.order = require_count("order", order)
        self.tau = nn.Parameter(torch.full((heads,), TAU))

    def attend(self, query: Tensor, key: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        value = self.values(memory)
        wide = accumulation_dtype(query.dtype)
        with without_autocast(query.device.type):
            query, key, value = query.to(wide), key.to(wide), value.to(wide)
            weights = self.weights((query @ key.mT) * self.width**-0.5, mask)
            mean = weights @ value
            return sum_series(weights, value, mean, mean, self.tau, self.order)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, order={self.order}"


# Form by name, and the options that the name fixes.
ATTENTION_FORMS: dict[str, tuple[type[AttentionForm], dict[str, Any]]] = {
    "softmax": (CausalAttention, {}),
    "newton": (NewtonAttention, {"order": None}),
    "newton-taylor": (NewtonAttention, {}),
    "newton-taylor-no-value": (NewtonAttention, {"values": False}),
    "light-newton-taylor": (LightNewtonAttention, {}),
}


def build_attention_form(name: str, dim: int, heads: int, **options: Any) -> AttentionForm:
    """Build an attention form of ``ATTENTION_FORMS``, a residual branch (B, N, d) -> (B, N, d).

    Args:
        name: "softmax", "newton", "newton-taylor", "newton-taylor-no-value" or
            "light-newton-taylor".
        dim, heads: features d of a token, number of attention heads.
        options: further arguments of the form; TypeError for one that its name fixes.
    """
    kind, fixed = ATTENTION_FORMS[require_choice("name", name, ATTENTION_FORMS)]
    return kind(dim, heads, **fixed, **options)


class QueryTrajectory(NamedTuple):
    """Trajectory of the queries.

    Attributes:
        queries: (steps + 1, B, heads, N, p), starting with ``W_q x``.
        energies: (steps + 1, B, heads, N), energy of each query.
    """

    queries: Tensor
    energies: Tensor


class EnergyAttention(nn.Module):
    r"""Attention whose heads move their queries down an energy among the keys::

        q = W_q x,  k = W_k c,  E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)
        repeat: q <- q - eta dE/dq
        y = W_o concatenate_h(q_h)

    One step with ``eta = 1`` is softmax attention with the keys as values; one head with ``p = dim`` and
    ``W_o = W_v W_k^-1`` is attention with the values ``W_v c``. With ``eta <= 1`` no step
    increases the energy, and the queries move towards its minima, in the convex hull of the keys.

    Shapes: ``x`` (B, N, dim), ``context`` (B, M, context_dim) -> (B, N, dim). Self-attention has ``c = x``.

    Args:
        dim: features of x.
        context_dim: features of the context in cross-attention; None for self-attention.
        heads, head_dim: number of heads, features p of a head; None for ``dim / heads``.
        beta: inverse temperature > 0, or one per head; None for ``1 / sqrt(p)``.
        steps: number of steps; None to solve for a fixed point with a :class:`implicit_attn.DEQ`. The
            fixed points depend only on the keys; the initial queries select a minimum, so the gradient of
            ``W_q``, and of x in cross-attention, is 0.
        step_size: eta > 0.
        options: options of the ``DEQ`` if ``steps`` is None; by default L-BFGS with ``max_steps=200``, which
            may converge to another minimum than ``solvers.Forward()``, which repeats the step.

    Attributes:
        descent: the :class:`implicit_attn.updates.QueryDescent`.
        equilibrium: the ``DEQ``, or None; its ``last`` reports each sample's solve.

    Example:
        >>> import torch
        >>> attention = EnergyAttention(16, heads=2, steps=3)
        >>> x = torch.randn(1, 5, 16)
        >>> attention(x).shape
        torch.Size([1, 5, 16])
        >>> energies = attention(x, return_trajectory=True).energies
        >>> energies.shape, bool((energies[1:] <= energies[:-1] + 1e-5).all())
        (torch.Size([4, 1, 2, 5]), True)

    Source: Bal, "Attention as Energy Minimization: Visualizing Energy Landscapes" (2021),
    https://mcbal.github.io/post/attention-as-energy-minimization-visualizing-energy-landscapes/; the
    energy: Ramsauer et al. (2020), https://arxiv.org/abs/2008.02217.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int | None = None,
        heads: int = 1,
        head_dim: int | None = None,
        beta: Beta = None,
        steps: int | None = 1,
        step_size: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.context_dim = dim, heads, context_dim
        self.steps = None if steps is None else require_count("steps", steps)
        rows = heads * head_width(dim, heads, head_dim)
        self.descent = QueryDescent(rows, heads, step_size=step_size, beta=beta)
        self.query, self.output = Projection(dim, rows), Projection(rows, dim)
        self.key = Projection(dim if context_dim is None else context_dim, rows)
        if steps is not None and options:
            raise TypeError(f"unknown arguments {sorted(options)}; options of DEQ need steps=None")
        settings: dict[str, Any] = {"max_steps": 200} | options
        self.equilibrium = DEQ(self.descent, **settings) if steps is None else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        return_trajectory: bool = False,
    ) -> Tensor | QueryTrajectory:
        """Return the tokens after attention, or with ``return_trajectory`` the trajectory of queries.

        Args:
            x: (B, N, dim).
            context: (B, M, context_dim) in cross-attention, else None.
            mask: bool (B, M), False at masked keys; in self-attention (M = N) the output of masked tokens
                is 0. Or pairs (B, N, M) or (B, heads, N, M): bool, True if query i may attend to key j, or
                floating-point and added to the scores, with -inf at excluded pairs. A query without any key
                shrinks: its output is 0 after a unit step.
            return_trajectory: whether to return a :class:`QueryTrajectory`, which needs an integer ``steps``.
        """
        queries, given, tokens = self._queries_and_keys(x, context, mask)
        if require_flag("return_trajectory", return_trajectory):
            if self.steps is None:
                raise ValueError("return_trajectory=True needs an integer steps, got steps=None")
            states, energies = self.descent.trajectory(queries, given, self.steps)
            return QueryTrajectory(self._by_head(states), energies)
        if self.equilibrium is not None:
            found = self.equilibrium(given, tokens, z0=queries)
            # Data-parallel training needs a gradient of 0 instead of None.
            queries = found + (queries - queries)
        else:
            prepared = self.descent.prepare(given)
            for _ in range(self.steps or 0):
                queries = self.descent(queries, prepared)
        return hide(F.linear(queries, self.output.weight), tokens)

    def _queries_and_keys(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, AttentionInput, Tensor | None]:
        """Return the initial queries, the keys, and the mask of the tokens in self-attention."""
        cross = self.context_dim is not None
        if (context is not None) != cross:
            wanted = "given with context_dim" if cross else "None in self-attention"
            raise ValueError(f"context must be {wanted}, got {type(context).__name__}")
        if mask is not None:
            require_instance("mask", mask, Tensor, "a tensor")
        seen = mask if mask is not None and mask.dim() == 2 else None
        pairs, bias = (None, None) if mask is seen else _pairs_and_bias(cast(Tensor, mask))
        tokens, name = None if cross else seen, "EnergyAttention"
        queries = visible_input(x, self.query.weight, tokens, name, tokens=True)
        source = x if context is None else context
        source = visible_input(source, self.key.weight, seen, f"{name}, context", tokens=True)
        keys = F.linear(source, self.key.weight)
        given = AttentionInput(None, pairs, bias, keys, seen)
        return F.linear(queries, self.query.weight), given, tokens

    def _by_head(self, queries: Tensor) -> Tensor:
        """Convert (..., N, heads p) to (..., heads, N, p)."""
        return queries.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, context_dim={self.context_dim}, heads={self.heads}, "
            f"steps={self.steps}"
        )


def _pairs_and_bias(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the allowed pairs of a mask of pairs, and the bias of their scores."""
    if not mask.is_floating_point():
        return mask, None
    allowed = ~mask.isneginf()
    return allowed, mask.masked_fill(~allowed, 0.0)
