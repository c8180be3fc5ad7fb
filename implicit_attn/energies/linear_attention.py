"""Linear attention with gates as an energy of the queries, among keys that stay."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import Energy, Prepared
from implicit_attn.energies.feature_maps import FEATURE_MAPS, Mapped, map_features
from implicit_attn.energies.heads import (
    HasTemperatures,
    HeadOptions,
    check_held,
    read_memory,
    read_pairs,
)
from implicit_attn.energies.projected import Features, Projection, like_state, project
from implicit_attn.energies.tokens import (
    Pair,
    accumulation_dtype,
    check_dtype,
    check_mask,
    check_tokens,
    check_vector,
    hide,
)
from implicit_attn.kernels.running import running_products, running_states
from solvers.core.checks import require_choice, require_flag
from solvers.core.modes import without_autocast

if TYPE_CHECKING:
    from typing_extensions import Unpack

GATES = ("none", "keys", "decay")


class FrozenKeys(NamedTuple):
    """What a solve keeps of the keys' tokens: a pytree of tensors (B, ...) and None.

    Attributes:
        features: causal: the gated features f (B, H, N, p), else None.
        log_decay: causal: ``log a`` (B, H, N), or None.
        states: causal: of ``running_states``; else ``sum_j gamma_j f_j f_j^T`` (B, H, p, p).
        attends: which queries have a key, (B, N or 1) bool; None: all.
    """

    features: Tensor | None
    log_decay: Tensor | None
    states: Tensor
    attends: Tensor | None = None


class GatedLinearAttention(HasTemperatures, Energy):
    """Energy whose gradient step is linear attention of z among gated keys made of x.

    With ``q = norm(W_q z)``, ``f_j = phi(norm(W_k x_j))`` and ``T = 1 / beta``::

        E = -(T/2) sum_h sum_i sum_j gamma_ij (phi(q_i).f_j)^2

    Its gradient by q is ``-T phi'(q_i) * sum_j gamma_ij (phi(q_i).f_j) f_j``. The gates are made of x
    alone, so no gradient by z flows through them: ``"none"``: 1; ``"keys"``:
    ``gamma_j = sigmoid(w_h.x_j + b_h)``; ``"decay"``: ``gamma_ij = a_(j+1) ... a_i`` with such ``a_l``.
    With ``feature_map="identity"`` and no norm E is concave in z, whatever x.

    The cost is linear in the numbers of queries and keys; causal sums are running ones.

    Shapes: ``z`` (B, N, d), ``mask`` (B, N). ``x`` (B, M, context_dim), or a pair of it and a mask
    (B, M) bool, or an ``AttentionInput`` with a memory. With ``causal`` x holds the same N tokens as z,
    and ``mask`` is theirs, too.

    Args:
        dim: features d of the state's tokens.
        heads: number of heads.
        causal: query i sees the tokens ``j <= i`` of x, of which there are N.
        feature_map: phi, as for :class:`implicit_attn.energies.attention.LinearAttention`.
        gate: one of ``GATES``; ``"decay"`` needs ``causal``.
        shared: head_dim, beta, learned_beta, context_dim (of x, default ``dim``), norm (of queries and keys)
            and bound (of ``W_q`` and ``W_k``), as for
            :class:`implicit_attn.energies.attention.HeadsEnergy`.

    Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers",
    https://arxiv.org/abs/2511.00907, theorem 2 and its footnote; the gates of Sun et al., "Retentive
    Network", https://arxiv.org/abs/2307.08621, whose decays are the initial ones here, and Yang et al.,
    "Gated Linear Attention", https://arxiv.org/abs/2312.06635.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        feature_map: str = "identity",
        gate: str = "none",
        **shared: Unpack[HeadOptions],
    ) -> None:
        super().__init__()
        options = self.set_heads(dim, heads, **shared)
        if options.bias:
            raise ValueError("bias must be False for a GatedLinearAttention, got True")
        self.causal = require_flag("causal", causal)
        self.feature_map = require_choice("feature_map", feature_map, FEATURE_MAPS)
        self.gate = require_choice("gate", gate, GATES)
        if gate == "decay" and not causal:
            raise ValueError('gate="decay" needs causal=True, got causal=False')
        self.context_dim = dim if options.context_dim is None else options.context_dim
        self.norm = options.norm
        self.query = Projection(dim, heads * self.width, options.bound)
        self.key = Projection(self.context_dim, heads * self.width, options.bound)
        self.gates = None if gate == "none" else Projection(self.context_dim, heads)
        # 1 - 2^(-5-h), the decay of head h in RetNet, has the logit log(2^(5+h) - 1).
        starts = [math.log(2.0 ** (5 + head) - 1.0) for head in range(heads)]
        bias = torch.tensor(starts) if gate == "decay" else torch.zeros(heads)
        self.gate_bias = None if gate == "none" else nn.Parameter(bias)
        self.concave = feature_map == "identity" and options.norm is None

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """The sums over the keys, as a ``Prepared``."""
        return x if isinstance(x, Prepared) else Prepared(self._freeze(x, mask))

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        query, mapped, keys = self._evaluate(z, x, mask)
        seen = _seen(keys, mask)
        force = self._products(mapped.value, keys)
        value = -0.5 * (mapped.value.to(accumulation_dtype(force.dtype)) * force).sum(-1)
        value = value if seen is None else value.masked_fill(~seen, 0.0)
        force = _only(-mapped.push(self._over(force)), seen).to(query.unit.dtype)
        return self.over_beta(value), like_state(query.pull_back(force), z, mask)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        query, mapped, keys = self._evaluate(z, x, mask)
        check_vector(v, z)
        raw, moved = query.push(hide(v, mask))
        shift, seen = mapped.push(moved), _seen(keys, mask)
        force, curved = (self._over(self._products(t, keys)) for t in (mapped.value, shift))
        curved = mapped.pull_back_curvature(force, curved, moved)
        force, curved = (_only(-t, seen).to(raw.dtype) for t in (mapped.push(force), curved))
        return like_state(query.pull_back_curvature(force, curved, raw), z, mask)

    def _evaluate(
        self, z: Tensor, x: Any, mask: Tensor | None
    ) -> tuple[Features, Mapped, FrozenKeys]:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        keys = x.parts if isinstance(x, Prepared) else self._freeze(x, mask, z)
        check_held(keys.states, z, name, None if keys.features is None else keys.features.shape[2])
        weight = self.query.weight
        raw = project(hide(z, mask), weight, None, self.heads, mask)
        query = Features.of(raw, self.norm, weight, self.heads)
        return query, map_features(self.feature_map, query.unit), keys

    def _freeze(self, x: Any, mask: Tensor | None, z: Tensor | None = None) -> FrozenKeys:
        name = type(self).__name__
        if read_pairs(x, mask, z, name, cross=True) is not None:
            raise ValueError(f"{name} takes no pairs, got them in x; SoftmaxAttention does")
        weight = self.key.weight
        tokens, seen = self._memory(x, mask, z, weight)
        check_dtype(tokens, weight, name)
        raw = project(tokens, weight, None, self.heads, seen)
        unit = raw if self.norm is None else self.norm.normalise(raw)[0]
        features = map_features(self.feature_map, unit).value
        decay = None
        if self.gates is not None:
            decay = F.logsigmoid(
                F.linear(tokens, self.gates.weight, self.gate_bias).mT
            )  # (B, H, M)
        if decay is not None and self.gate == "keys":
            # In the product of two features each takes the root of the gate.
            features = features * (0.5 * decay).exp().unsqueeze(-1)
            decay = None
        if seen is not None:
            features = features.masked_fill(~seen[:, None, :, None], 0.0)
        if not self.causal:
            attends = None if seen is None else seen.any(1, keepdim=True)
            if not features.shape[2]:
                attends = features.new_zeros(len(features), 1, dtype=torch.bool)
            features = features.to(accumulation_dtype(features.dtype))
            with without_autocast(features.device.type):
                return FrozenKeys(None, None, features.mT @ features, attends)
        if decay is not None and seen is not None:
            decay = decay.masked_fill(~seen[:, None], 0.0)
        return FrozenKeys(features, decay, running_states(features, decay))

    def _memory(
        self, x: Any, mask: Tensor | None, z: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens of x, zero where they are masked, and their mask."""
        tokens, seen = read_memory(x, weight.shape[1], z, type(self).__name__)
        if not self.causal:
            return tokens, seen
        if seen is not None:
            raise ValueError(
                f"{type(self).__name__}: with causal=True mask is that of x, too; got another"
            )
        if z is not None:
            check_held(tokens, z, type(self).__name__, tokens.shape[1])
        check_mask(mask, tokens, f"{type(self).__name__}, x", features=1)
        return hide(tokens, mask), mask

    def _products(self, rows: Tensor, keys: FrozenKeys) -> Tensor:
        """``sum_j gamma_ij (r_i.f_j) f_j`` of rows (B, H, N, p)."""
        if keys.features is None:
            with without_autocast(rows.device.type):
                return rows.to(keys.states.dtype) @ keys.states
        return running_products(rows, keys.features, keys.log_decay, states=keys.states)

    def _over(self, force: Tensor) -> Tensor:
        """``T`` times a force (B, H, N, p)."""
        return force / self.score_beta(force)

    def extra_repr(self) -> str:
        return (
            f"heads={self.heads}, causal={self.causal}, feature_map={self.feature_map}, "
            f"gate={self.gate}, {self.described()}, norm={self.norm}"
        )


def _seen(keys: FrozenKeys, mask: Tensor | None) -> Tensor | None:
    """Queries that are not masked and have a key, (B, 1, N or 1) bool; None: all."""
    masks = [each[:, None] for each in (keys.attends, mask) if each is not None]
    return masks[0] & masks[-1] if masks else None


def _only(values: Tensor, seen: Tensor | None) -> Tensor:
    return values if seen is None else values.masked_fill(~seen.unsqueeze(-1), 0.0)
