"""Softmax attention as steps down the energy of the queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.deq import DEQ
from implicit_attn.energies import AttentionInput, Projection
from implicit_attn.energies.heads import Beta, head_width
from implicit_attn.energies.tokens import check_dtype, hide
from implicit_attn.updates.gradient_step import QueryDescent
from solvers.core.checks import require_choice, require_count, require_flag


class QueryTrajectory(NamedTuple):
    """Where the queries went.

    Attributes:
        queries: (steps + 1, B, heads, N, p), from ``W_q x`` on.
        energies: (steps + 1, B, heads, N), the energy of each query there.
    """

    queries: Tensor
    energies: Tensor


class EnergyAttention(nn.Module):
    r"""Attention whose heads move their queries down an energy among the keys::

        q = W_q x,  k = W_k c,  E(q) = 1/2 |q|^2 - beta^-1 log sum_j exp(beta q.k_j)
        repeat: q <- q - eta dE/dq
        y = W_o concatenate_h(q_h), or W_o concatenate_h(V_h q_h)

    One step with ``eta = 1`` is softmax attention with the keys for values. More steps lower the
    energy further, for ``eta <= 1`` without ever raising it, and draw the queries towards its minima,
    which lie in the hull of the keys. ``steps=None`` goes on to a fixed point and differentiates it
    implicitly. Self-attention has ``c = x``.

    Shapes: ``x`` (B, N, dim), ``context`` (B, M, context_dim) -> (B, N, dim).

    Args:
        dim: features of x.
        context_dim: features of the context in cross-attention; None: self-attention.
        heads: their number.
        head_dim: features p of a head; None: ``dim / heads``.
        beta: inverse temperature, > 0, or one for each head; None: ``1 / sqrt(p)``.
        steps: how many; None: until the queries rest, by a :class:`implicit_attn.DEQ`. Where they rest
            depends on the keys alone, the first queries only choose among the minima: the gradient by
            ``W_q``, and by x in cross-attention, is 0.
        step_size: eta, > 0.
        values: None, or "after": a learned matrix ``V_h`` (p, p) for each head, the identity at first.
            One head with ``p = dim`` and ``W_o = W_v W_k^-1`` is attention with the values ``W_v c``;
            several heads cannot undo their keys, and learn V instead.
        causal: in self-attention token i attends to ``j <= i`` only.
        options: of the ``DEQ`` where ``steps`` is None, such as ``tolerance`` or ``solver``: by default
            L-BFGS with ``max_steps=200``. Where there are several minima it may end in another than
            ``solvers.Forward()``, which repeats the step.

    Attributes:
        descent: the :class:`implicit_attn.updates.QueryDescent`.
        equilibrium: the ``DEQ``, or None; its ``last`` says how each sample's solve ended.

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
        values: str | None = None,
        *,
        causal: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.dim, self.heads = require_count("dim", dim), require_count("heads", heads)
        if context_dim is not None:
            require_count("context_dim", context_dim)
        self.context_dim = context_dim
        self.steps = None if steps is None else require_count("steps", steps)
        width = head_width(dim, heads, head_dim)
        rows = heads * width
        self.causal = require_flag("causal", causal)
        if context_dim is not None and causal:
            raise ValueError(f"causal=True needs self-attention, got context_dim={context_dim!r}")
        if values is not None:
            require_choice("values", values, ("after",))
        self.descent = QueryDescent(rows, heads, step_size=step_size, beta=beta)
        self.query, self.output = Projection(dim, rows), Projection(rows, dim)
        self.key = Projection(context_dim or dim, rows)
        made = torch.eye(width).repeat(heads, 1, 1)
        self.values = None if values is None else nn.Parameter(made)
        if steps is not None and options:
            raise TypeError(f"unknown arguments {sorted(options)}; those of DEQ need steps=None")
        self.equilibrium = None
        if steps is None:
            settings: dict[str, Any] = {"max_steps": 200} | options
            self.equilibrium = DEQ(self.descent, **settings)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        return_trajectory: bool = False,
    ) -> Tensor | QueryTrajectory:
        """The tokens after attention, or with ``return_trajectory`` the way of their queries.

        Args:
            x: (B, N, dim).
            context: (B, M, context_dim) in cross-attention, else None.
            mask: bool (B, M), False at masked keys, which influence nothing; in self-attention, where
                M is N, the attention of such tokens is 0, only a residual is left of them. Or pairs
                (B, N, M) or (B, heads, N, M), True where query i may attend to key j, or floating,
                then added to the scores, minus infinity at pairs that are excluded, as in torch's
                ``scaled_dot_product_attention``. Plus infinity and NaN are refused on a CPU only:
                elsewhere the answer would have to be awaited. A query without any key shrinks: its
                output is 0 after a unit step.
            return_trajectory: needs a number of ``steps``.

        Returns:
            (B, N, dim), or a :class:`QueryTrajectory`.
        """
        queries, given, tokens = self._queries_and_keys(x, context, mask)
        if require_flag("return_trajectory", return_trajectory):
            if self.steps is None:
                raise ValueError("return_trajectory needs a number of steps, got steps=None")
            states, energies = self.descent.trajectory(queries, given, self.steps)
            return QueryTrajectory(self._by_head(states), energies)
        if self.equilibrium is not None:
            found = self.equilibrium(given, tokens, z0=queries)
            # A gradient of 0, not of None, which data parallel training takes for an error.
            queries = found + (queries - queries)
        else:
            prepared = self.descent.prepare(given)
            for _ in range(self.steps or 0):
                queries = self.descent(queries, prepared)
        if self.values is not None:
            moved = self._by_head(queries) @ self.values.mT
            queries = moved.transpose(1, 2).flatten(2)
        return hide(F.linear(queries, self.output.weight), tokens)

    def _queries_and_keys(
        self, x: Tensor, context: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, AttentionInput, Tensor | None]:
        """The first queries, what they move among, and the mask of the tokens of self-attention."""
        _check_tokens("x", x, None, self.dim, self.query.weight)
        if (context is None) != (self.context_dim is None):
            wanted = "None in self-attention" if context is not None else "given with a context_dim"
            raise ValueError(f"context must be {wanted}, got {type(context).__name__}")
        if context is not None:
            _check_tokens("context", context, len(x), self.context_dim, self.query.weight)
        source = x if context is None else context
        seen, pairs, bias = _read_mask(mask, x.shape[0], self.heads, x.shape[1], source.shape[1])
        if self.causal:
            order = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            pairs = order.expand(len(x), -1, -1) if pairs is None else pairs & order
        source = hide(source, seen)
        tokens = seen if context is None else None
        queries = F.linear(source if context is None else x, self.query.weight)
        keys = F.linear(source, self.key.weight)
        return queries, AttentionInput(None, pairs, bias, keys, seen), tokens

    def _by_head(self, queries: Tensor) -> Tensor:
        """(..., N, heads p) -> (..., heads, N, p)."""
        return queries.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, context_dim={self.context_dim}, heads={self.heads}, "
            f"steps={self.steps}, causal={self.causal}"
        )


def _check_tokens(name: str, value: Any, batch: int | None, width: Any, weight: Tensor) -> None:
    """``value`` must be a tensor (B, N, width) of the dtype of the weights, with ``batch`` samples."""
    shape = f"({'B' if batch is None else batch}, N, {width})"
    got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.dim() != 3:
        raise ValueError(f"{name} must be a tensor {shape}, got {got}")
    if value.shape[2] != width or (batch is not None and len(value) != batch):
        raise ValueError(f"{name} must have the shape {shape}, got {got}")
    check_dtype(value, weight, name)


def _read_mask(
    mask: Any, batch: int, heads: int, queries: int, keys: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The keys that are not masked, the pairs that are allowed, and the bias of their scores."""
    if mask is None:
        return None, None, None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be bool, or floating for pairs, got {got}")
    pairs = queries, keys
    shapes = [(batch, keys), (batch, *pairs), *((batch, n, *pairs) for n in {1, heads})]
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"mask must have the shape {shapes[0]}, {shapes[1]} or {(batch, heads, *pairs)}, got "
            f"{tuple(mask.shape)}"
        )
    if mask.dim() == 2 and mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool where it is one of keys (B, M), got {mask.dtype}")
    if mask.dim() == 2:
        return mask, None, None
    if mask.dtype == torch.bool:
        return None, mask, None
    if mask.device.type == "cpu" and not bool((mask < torch.inf).all()):
        raise ValueError("mask must hold finite numbers or minus infinity, got infinity or NaN")
    allowed = ~mask.isneginf()
    return None, allowed, mask.masked_fill(~allowed, 0.0)
