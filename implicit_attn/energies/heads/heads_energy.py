"""Energies of features in heads, queries and keys in one, which may see the layer's input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.checks import check_vector
from implicit_attn.energies.heads.features import Features, project
from implicit_attn.energies.heads.inputs import (
    AttentionInput,
    HeadsContext,
    PairPattern,
    check_added,
    check_parts,
    project_input,
    read_pairs,
)
from implicit_attn.energies.heads.temperatures import (
    Beta,
    HasTemperatures,
    Temperatures,
    by_head,
    describe,
)
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.projected import SOFT_NORM, ProjectedEnergy, Projection, RMSNorm
from implicit_attn.energies.tokens import Pair, hide
from implicit_attn.kernels.pairs import Pairs
from solvers.core.checks import require_count, require_flag


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """Width p of a head: ``head_dim``, or ``dim / heads`` for None."""
    dim, heads = require_count("dim", dim), require_count("heads", heads)
    if head_dim is not None:
        return require_count("head_dim", head_dim)
    if dim % heads:
        raise ValueError(f"heads must divide dim={dim} where head_dim is not given, got {heads}")
    return dim // heads


class HeadsEnergy(HasTemperatures, ProjectedEnergy):
    """A function of the features ``y = norm(W_h z)`` of each head h, queries and keys in one.

    ``projection.weight`` holds the W_h one below the other, (heads p, d). With ``context_dim`` the
    features see the layer's input, ``y = norm(W_h z + P_h x + b_h)``: ``context.weight`` holds the P_h,
    (heads p, context_dim), and ``bias`` the b_h. ``P_h x + b_h`` is computed once a solve.

    Shapes: ``z`` (B, N, d); ``x`` is ignored without ``context_dim``, else (B, N, context_dim), or an
    ``AttentionInput`` with such tokens; ``mask`` (B, N).

    Args:
        dim: features d of the tokens.
        heads: number of heads.
        head_dim: width p of a head; None: ``dim / heads``.
        beta: inverse temperature, or one for each head; None: ``1 / sqrt(p)``.
        learned_beta: train the inverse temperatures, one for each head, kept > 0.
        context_dim: features of the input that the features see; None: they see none.
        bias: learn the b_h, zero at first; with ``context_dim`` they are there anyway.
        norm: norm of each head's projections, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of the weight of z, or None.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        head_dim: int | None = None,
        beta: Beta = None,
        learned_beta: bool = False,
        context_dim: int | None = None,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        width = head_width(dim, heads, head_dim)
        super().__init__(dim, heads=heads, norm=norm)
        self.projection = Projection(dim, heads * width, bound)
        self.temperatures = Temperatures(heads, beta, width, learned_beta)
        self.pattern: PairPattern | None = None  # of an energy that knows pairs
        self.context: Projection | None = None
        if context_dim is not None:
            self.context = Projection(require_count("context_dim", context_dim), heads * width)
        has_bias = require_flag("bias", bias) or context_dim is not None
        self.bias = nn.Parameter(torch.zeros(heads * width)) if has_bias else None
        self._renew()

    def _renew(self) -> None:
        super()._renew()
        largest = self.temperatures.largest
        # |y_i| <= sqrt(p) after the norm.
        bounded = self.norm is not None and largest is not None
        self._limit = largest * self.temperatures.width if bounded else None  # type: ignore[operator]

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """What the features see of ``x``, and its pairs, as a ``Prepared``."""
        ignored = self.context is None and not isinstance(x, AttentionInput)
        return x if ignored or isinstance(x, Prepared) else Prepared(self._context(x, mask))

    def held(self, x: Any) -> Any:
        """Nothing, without a context; what looks at ``x`` all the same has to override this."""
        return None if self.context is None else x

    def potential(self, y: Tensor, mask: Tensor | None, pairs: Pairs | None = None) -> Tensor:
        """The potential of each sample alone, which a subclass may have for less than the force."""
        return self.potential_and_force(y, mask, **_given(pairs))[0]

    def features(
        self,
        z: Tensor,
        x: Any = None,
        *,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """``norm(z W^T + ...)``, (B, heads, N, p); ``weight`` replaces W."""
        return self._evaluate(z, x, mask, weight)[0].unit

    def straight_gradient(
        self,
        z: Tensor,
        x: Any = None,
        *,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """As ``ProjectedEnergy.straight_gradient``, with the input ``x``."""
        at, pairs = self._evaluate(z, x, mask, weight)
        straight = Features(at.unit, None, at.weight)
        force = self.force(at.unit, mask, **_given(pairs))
        return self._back(straight.pull_back(force), z, mask)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        at, pairs = self._evaluate(z, x, mask)
        return self.potential(at.unit, mask, **_given(pairs))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        at, pairs = self._evaluate(z, x, mask)
        value, force = self.potential_and_force(at.unit, mask, **_given(pairs))
        return value, self._back(at.pull_back(force), z, mask)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        at, pairs = self._evaluate(z, x, mask)
        check_vector(v, z)
        raw, moved = at.push(hide(v, mask))
        force, curved = self.force_and_curvature(at.unit, moved, mask, **_given(pairs))
        return self._back(at.pull_back_curvature(force, curved, raw), z, mask)

    def _evaluate(
        self, z: Tensor, x: Any, mask: Tensor | None, weight: Tensor | None = None
    ) -> tuple[Features, Pairs | None]:
        """The features at a state, and the pairs among them where that is not all."""
        visible = self._visible(z, mask)
        context, heads = self._context_of(x, mask, z), self.heads
        assert heads is not None
        weight = self.weight if weight is None else weight
        added = pairs = None
        if context is not None:
            added, pairs = context.query, context.pairs()
            check_added(added, z, type(self).__name__)
        raw = project(visible, weight, self.bias, heads, mask, added)
        pattern = self.pattern
        if pattern is not None and (pairs is not None or pattern.own):
            tokens = z.shape[1]
            pairs = pattern((z.shape[0], heads, tokens, tokens), z.device, pairs)
        return Features.of(raw, self.norm, weight), pairs

    def _context_of(self, x: Any, mask: Tensor | None, z: Tensor) -> HeadsContext | None:
        if isinstance(x, Prepared):
            return x.parts
        ignored = self.context is None and not isinstance(x, AttentionInput)
        return None if ignored else self._context(x, mask, z)

    def _context(self, x: Any, mask: Tensor | None, z: Tensor | None = None) -> HeadsContext:
        name, query = type(self).__name__, None
        allowed, bias = read_pairs(x, mask, z)
        if self.pattern is None and (allowed is not None or bias is not None):
            raise ValueError(f"{name} takes no pairs, got them in x; BiSoftmaxAttention does")
        check_parts(x, mask, z, name)
        x = x.tokens if isinstance(x, AttentionInput) else x
        if self.context is not None:
            assert self.heads is not None
            query = project_input(x, self.context, self.bias, self.heads, mask, name)
        return HeadsContext(query=query, allowed=allowed, bias=bias)

    def _back(self, gradient: Tensor | None, z: Tensor, mask: Tensor | None) -> Tensor:
        assert gradient is not None  # the features depend on the state
        return hide(gradient, mask).to(z.dtype)

    def _temperature(self, y: Tensor) -> tuple[float, Tensor | None]:
        """The number that kernels take for beta, and where the heads differ ``beta^1/2`` (heads, 1, 1).

        ``beta y.y' = u.u'`` for the features ``u = beta^1/2 y`` at one.
        """
        beta = self.beta
        return (1.0, by_head(beta, 3, y).sqrt()) if isinstance(beta, Tensor) else (beta, None)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, {describe(self.beta)}, {super().extra_repr()}"


def _given(pairs: Pairs | None) -> dict[str, Any]:
    """Only energies that know pairs are given some."""
    return {} if pairs is None else {"pairs": pairs}
