"""Common parts of attention and feed-forward energies: features of tokens, heads, ``AttentionInput``.

:class:`ProjectedEnergy` is an energy of features. :class:`HasHeads` adds the sizes and inverse
temperatures of heads. :func:`read_input` reads an :class:`AttentionInput` (pairs, a memory).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.energy import AttentionContext, ClosedForm, Evaluation, inverse_softplus
from implicit_attn.energies.tokens import (
    SELECT,
    Features,
    Mask,
    Projection,
    RMSNorm,
    accumulation_dtype,
    check_mask,
    check_norm,
    check_tokens,
    got,
    hide,
    like_state,
    project,
    sum_samples,
    visible_input,
)
from implicit_attn.kernels.arguments import Pairs, check_pairs
from solvers.core.checks import require_count, require_flag, require_positive


def check_state(z: Any, context: AttentionContext, name: str, dim: int, heads: bool) -> None:
    """Check for a state (B, ..., dim), (B, N, dim) with heads, that fits the context of the input."""
    check_tokens(z, context.mask, name, dim=dim, tokens=heads)
    query = context.query if context.log_weights is None else context.log_weights
    if query is not None:
        own = (query.shape[0], query.shape[2]) if heads else tuple(query.shape[:-1])
        if own != tuple(z.shape[:-1]):
            wanted = tuple(z.shape[:-1])
            raise ValueError(f"{name}: x must have the sizes of z before d, {wanted}, got {own}")
    key = context.key
    if key is not None and key.shape[0] != z.shape[0]:
        wanted, own = z.shape[0], key.shape[0]
        raise ValueError(f"{name}: x must have the batch size of z, {wanted}, got {own}")


class ProjectedEnergy(ClosedForm):
    """Energy ``E(z) = potential(y)`` of features ``y = norm(z W^T)`` with a closed-form gradient.

    A subclass sets ``projection`` (or overrides ``weight``) and defines ``potential``. Features of masked
    tokens may have any finite value: their gradient is zero.

    Args:
        dim: features d of the state.
        heads: number of heads that split the features, (B, N, d) -> (B, heads, N, rows / heads);
            None for no head dimension, (B, ..., d) -> (B, ..., rows).
        norm: norm over the last dimension of the features, or None.
    """

    projection: Projection

    def __init__(self, dim: int, *, heads: int | None = None, norm: RMSNorm | None = None) -> None:
        super().__init__()
        self.dim, self.heads, self.norm = dim, heads, check_norm(norm)

    @property
    def weight(self) -> Tensor:
        """W (rows, d), read once per evaluation, because each read of a bounded weight recomputes it."""
        return self.projection.weight

    @abstractmethod
    def potential(self, y: Tensor, context: AttentionContext, need_value: bool) -> Evaluation:
        """Return the value (B,), or None, of features y and its gradient, like y."""

    def read(self, x: Any, mask: Mask) -> AttentionContext:
        return AttentionContext(mask=mask)

    def check(self, z: Any, x: AttentionContext, mask: Mask) -> None:
        check_state(z, x, type(self).__name__, self.dim, self.heads is not None)

    def features(
        self, z: Tensor, x: Any = None, *, mask: Mask = None, weight: Tensor | None = None
    ) -> Tensor:
        """Return ``y``, (B, heads, N, p), or (B, ..., rows) without heads; ``weight`` replaces W."""
        context = self.prepare(x, mask=mask)
        self.check(z, context, mask)
        return self._at(z, context, weight).unit

    def straight_gradient(
        self, z: Tensor, x: Any = None, *, mask: Mask = None, weight: Tensor | None = None
    ) -> Tensor:
        """Return the gradient without the norm's derivative, ``dE/dy W`` at ``y``, like ``z``.

        It is zero at masked tokens. Unless the norm is None, it is not the gradient of a function of z.
        ``weight`` replaces W.

        Source: Hu, Zou, Xu, "Hyper-SET", https://arxiv.org/abs/2502.11646, equations 9 and 11.
        """
        context = self.prepare(x, mask=mask)
        self.check(z, context, mask)
        at = self._at(z, context, weight)
        gradient = self.straight_by_features(at.unit, context)
        return like_state(at.pull_back(gradient, straight=True), z, context.mask)

    def straight_by_features(self, y: Tensor, context: AttentionContext) -> Tensor:
        """Return the gradient with respect to y that :meth:`straight_gradient` uses."""
        return self.potential(y, context, False)[1]

    def evaluate(self, z: Tensor, x: AttentionContext, mask: Mask, need_value: bool) -> Evaluation:
        at = self._at(z, x)
        value, gradient = self.potential(at.unit, x, need_value)
        return value, like_state(at.pull_back(gradient), z, mask)

    def added(self, context: AttentionContext) -> Tensor | None:
        """Return the tensor that is added to ``z W^T``, see :func:`project`."""
        return context.query

    def _at(self, z: Tensor, context: AttentionContext, weight: Tensor | None = None) -> Features:
        weight, mask = self.weight if weight is None else weight, context.mask
        raw = project(hide(z, mask), weight, self.added(context), self.heads, mask)
        return Features.of(raw, self.norm, weight, self.heads)

    def extra_repr(self) -> str:
        return f"norm={self.norm}"


class TokenEnergy(ProjectedEnergy):
    """Energy ``E = -sum_i F(y_i)`` of the features of each token, whose activations are ``dF/dy``."""

    @abstractmethod
    def activate(self, y: Tensor, gates: Tensor | None, need_value: bool) -> Evaluation:
        """Return F of each token, (B, ...), or None, and its derivative, like y."""

    def potential(self, y: Tensor, context: AttentionContext, need_value: bool) -> Evaluation:
        value, active = self.activate(y, context.gates, need_value)
        return -sum_samples(hide(value, context.mask)) if need_value else None, -active


Beta: TypeAlias = float | Sequence[float] | Tensor | None


class Temperatures(nn.Module):
    """Inverse temperatures beta > 0 of the heads.

    Learned ones are ``log(1 + exp(raw))`` with a parameter ``raw`` (heads,), so they remain positive.
    ``beta=None`` means ``width^-1/2`` with the width of a head.

    Attributes:
        number: the constant of all heads; None if they are learned or differ.
        largest: the largest beta; None if they are learned.
    """

    values: Tensor

    def __init__(self, heads: int, beta: Beta, width: int, learned: bool = False) -> None:
        super().__init__()
        if isinstance(beta, Tensor):
            if beta.requires_grad:
                raise TypeError("beta must not require grad; use learned_beta=True to train it")
            beta = beta.tolist()
        equal = beta is None or isinstance(beta, (int, float))
        given = [width**-0.5 if beta is None else beta] * heads if equal else beta
        if not isinstance(given, (list, tuple)) or len(given) != heads:
            raise ValueError(f"beta must be a number or one per head ({heads}), got {beta!r}")
        self.numbers = [require_positive("beta", number) for number in given]
        self.learned = require_flag("learned_beta", learned)
        self.number = self.numbers[0] if equal and not learned else None
        self.largest = None if learned else max(self.numbers)
        if learned:
            self.raw = nn.Parameter(torch.tensor([inverse_softplus(n) for n in self.numbers]))
        elif not equal:
            # Constants are constructor arguments and not part of the state_dict.
            self.register_buffer("values", torch.tensor(self.numbers), persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert the module, recomputing constants from their exact values in the new precision."""
        super()._apply(*args, **kwargs)
        if "values" in self._buffers:
            dtype, device = accumulation_dtype(self.values.dtype), self.values.device
            self.values = torch.tensor(self.numbers, dtype=dtype, device=device)
        return self

    def forward(self) -> float | Tensor:
        """Return the constant number, or one number per head as a tensor (heads,)."""
        if self.number is not None:
            return self.number
        return F.softplus(self.raw) if self.learned else self.values


class HeadOptions(TypedDict, total=False):
    """Options shared by attention energies, which ``HeadsEnergy`` documents."""

    head_dim: int | None
    beta: Beta
    learned_beta: bool
    context_dim: int | None
    bias: bool
    norm: RMSNorm | None
    bound: float | None


class HasHeads(nn.Module):
    """A module with heads and inverse temperatures ``beta``."""

    temperatures: Temperatures

    def set_heads(
        self, dim: int, heads: int, head_dim: int | None, beta: Beta, learned_beta: bool
    ) -> None:
        """Set ``dim``, ``heads``, ``width`` and ``temperatures`` from a constructor's arguments."""
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, head_dim)
        self.temperatures = Temperatures(heads, beta, self.width, learned_beta)

    def check(self, z: Any, x: AttentionContext, mask: Mask) -> None:
        check_state(z, x, type(self).__name__, self.dim, True)

    @property
    def beta(self) -> float | Tensor:
        """Inverse temperature, or one per head, (heads,)."""
        return self.temperatures()

    def beta_like(self, y: Tensor) -> float | Tensor:
        """Return ``beta``, or one per head as (H, 1, ...) for ``y`` (B, H, ...), float32 or wider."""
        beta = self.beta
        if not isinstance(beta, Tensor):
            return beta
        return beta.to(accumulation_dtype(y.dtype)).view(-1, *[1] * (y.dim() - 2))

    def score_limit(self, norm: RMSNorm | None) -> float | None:
        """Return a bound ``beta p`` on ``|beta q.k|`` for features of this norm, None if there is none."""
        largest = self.temperatures.largest
        return None if norm is None or largest is None else largest * self.width

    def described(self) -> str:
        """Return ``beta`` as text for ``extra_repr``."""
        beta = self.beta
        if not isinstance(beta, Tensor):
            return f"beta={beta:.4g}"
        return f"beta=({', '.join(f'{number:.4g}' for number in beta.tolist())})"


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """Return the width p of a head: ``head_dim``, or ``dim / heads`` for None."""
    dim, heads = require_count("dim", dim), require_count("heads", heads)
    if head_dim is not None:
        return require_count("head_dim", head_dim)
    if dim % heads:
        raise ValueError(f"heads must divide dim={dim} when head_dim is None, got {heads}")
    return dim // heads


class AttentionInput(NamedTuple):
    """Input ``x`` of an attention energy with several parts, all of them optional.

    In ``pairs`` True means that a pair is allowed, as in ``scaled_dot_product_attention``; in
    ``nn.Transformer``'s boolean masks True means excluded. In a sum, other terms select the tokens by
    name, as in ``attention + Quadratic().select("tokens")``.

    Attributes:
        tokens: (B, N, context_dim), the input that the features of the state's tokens depend on.
        pairs: bool (N, M), (B, N, M) or (B, H, N, M), True if token i may attend to key j; M is N
            in self-attention.
        pair_bias: finite floating-point tensor of such a shape, added to the scores:
            ``beta q_i.k_j + bias_ij``.
        memory: (B, M, context_dim), tokens from which cross-attention computes its keys.
        memory_mask: (B, M) bool, False at masked tokens of the memory.
    """

    tokens: Tensor | None = None
    pairs: Tensor | None = None
    pair_bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Mask = None


def check_exclude_self(
    exclude_self: bool, backend: str, cross: bool = False, causal: bool = False
) -> bool:
    """Check that ``exclude_self`` is used with self-attention and a dense backend."""
    for name, given in (("causal", causal), ("exclude_self", exclude_self)):
        if given and cross:
            raise ValueError(f"{name} needs self-attention, got {name}=True with cross=True")
    if require_flag("exclude_self", exclude_self) and backend not in ("auto", "reference"):
        raise ValueError(f'exclude_self needs backend="auto" or "reference", got {backend!r}')
    return exclude_self


def fit_pairs(
    given: Pairs, shape: tuple[int, ...], device: torch.device, exclude_self: bool = False
) -> Pairs:
    """Return the pairs of an input for (B, H, N, M), optionally without self-pairs."""
    pairs = check_pairs(given.allowed, given.bias, shape, "pair_bias") or Pairs()  # type: ignore[arg-type]
    if not exclude_self:
        return pairs
    return pairs.intersect(~torch.eye(shape[2], dtype=torch.bool, device=device)[None, None])


def fit_keys(
    given: Pairs, query: Tensor, key: Tensor, mask: Mask, exclude_self: bool = False
) -> tuple[Tensor, Tensor | None, Pairs]:
    """Return keys (B, H, M, p), their mask (B, M), and the matching pairs of an input.

    If M is 0, one masked key without influence is used instead.
    """
    shape = (*query.shape[:3], key.shape[2])
    pairs = fit_pairs(given, shape, query.device, exclude_self)
    if key.shape[2]:
        return key, mask, pairs
    masked = torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)
    return key.new_zeros(*key.shape[:2], 1, key.shape[3]), masked, Pairs()


def input_terms(
    rows: int, context_dim: int | None, bias: bool
) -> tuple[Projection | None, nn.Parameter | None]:
    """Return the weight P and the bias b of features ``W z + P x + b``, each None if it is not used."""
    context, biased = None, require_flag("bias", bias) or context_dim is not None
    if context_dim is not None:
        context = Projection(require_count("context_dim", context_dim), rows)
    return context, nn.Parameter(torch.zeros(rows)) if biased else None


def project_input(
    x: Any, projection: Projection, bias: Tensor | None, heads: int, mask: Mask, name: str
) -> Tensor:
    """Return ``x P^T + bias`` (B, H, N, p) of an input (B, N, k), zero at masked tokens."""
    weight = projection.weight
    return project(visible_input(x, weight, mask, name, tokens=True), weight, bias, heads, mask)


def read_input(
    x: Any, mask: Mask, name: str, width: int | None = None
) -> tuple[Any, Pairs, Any, Tensor | None]:
    """Return tokens, pairs, memory and its mask of an ``AttentionInput``; other inputs are the tokens.

    ``width`` is the number of features of the memory (B, M, width) in cross-attention, which is zero at
    masked tokens; x may then be the memory or a pair (memory, mask). In self-attention it is None.
    """
    tokens, memory, seen, pairs = x, x, None, Pairs()
    if isinstance(x, AttentionInput):
        tokens, memory, seen, pairs = x.tokens, x.memory, x.memory_mask, Pairs(x.pairs, x.pair_bias)
        for part in ("memory", "memory_mask"):
            if width is None and getattr(x, part) is not None:
                raise ValueError(f"{name}: x.{part} must be None in self-attention, got a tensor")
        if tokens is not None:
            check_tokens(tokens, mask, f"{name}, x.tokens", tokens=True)
    elif width is not None and isinstance(x, (tuple, list)) and len(x) == 2:
        memory, seen = x
    if width is None:
        return tokens, pairs, tokens, mask
    if not isinstance(memory, Tensor) or memory.dim() != 3 or memory.shape[2] != width:
        wanted = f"{name}: x must be a tensor (B, M, {width}), a pair of one and a mask, or an "
        wanted += f"AttentionInput with such a memory, {got(memory)}"
        raise ValueError(wanted) if isinstance(memory, Tensor) else TypeError(wanted + SELECT)
    check_mask(seen, memory, f"{name}, context", features=1)
    return tokens, pairs, hide(memory, seen), seen
