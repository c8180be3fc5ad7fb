"""What attention energies are given besides the state: tokens, a memory, pairs that may attend."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_attn.energies.checks import check_dtype, check_mask
from implicit_attn.energies.heads.features import project
from implicit_attn.energies.projected import Projection
from implicit_attn.energies.tokens import hide
from implicit_attn.kernels.pairs import Pairs, four_dimensional
from solvers.core.checks import require_flag


class AttentionInput(NamedTuple):
    """The input ``x`` of an attention energy where it is more than a tensor. All parts are optional.

    ``nn.Transformer``'s boolean masks are True where a pair is excluded; here, as in
    ``scaled_dot_product_attention``, True means that it is allowed. In a sum the other terms find the
    tokens by their name, as in ``attention + Quadratic().select("tokens")``.

    Attributes:
        tokens: (B, N, context_dim), what features of the state's tokens see; with ``cross`` of width
            ``query_context_dim``.
        pairs: bool (N, M), (B, N, M) or (B, H, N, M), True where token i may attend to key j; M is N
            in self-attention.
        pair_bias: floating and finite, of such a shape, added to the scores: ``beta q_i.k_j + bias_ij``.
        memory: (B, M, context_dim), what the keys of cross-attention are made of.
        memory_mask: (B, M) bool, False at masked tokens of the memory.
    """

    tokens: Tensor | None = None
    pairs: Tensor | None = None
    pair_bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Tensor | None = None


class HeadsContext(NamedTuple):
    """What attention energies prepare: a pytree of tensors (B or 1, ...) and None.
    Attributes:
        query: (B, H, N, p), added to the features of z, or of its queries, before the norm.
        key: (B, H, N, p), added to those of the keys; with ``cross`` the keys (B, H, M, p) themselves.
        mask: (B, M) bool, of the keys in cross-attention.
        allowed, bias: as in ``kernels.pairs.Pairs``.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    mask: Tensor | None = None
    allowed: Tensor | None = None
    bias: Tensor | None = None

    def pairs(self) -> Pairs | None:
        return (
            None if self.allowed is None and self.bias is None else Pairs(self.allowed, self.bias)
        )


class PairPattern(nn.Module):
    """The pairs that may attend and their biases, as the constructor of an energy fixes them.

    Args:
        heads: of the energy, H.
        pairs: bool (N, M) or (H, N, M), True where token i may attend to key j, or None.
        pair_bias: floating and finite, of such a shape; an ``nn.Parameter`` is trained. Or None.
        exclude_self: no token attends to itself.
    """

    allowed: Tensor | None

    def __init__(
        self, heads: int, pairs: Any = None, pair_bias: Any = None, exclude_self: bool = False
    ) -> None:
        super().__init__()
        self.exclude_self = require_flag("exclude_self", exclude_self)
        if pairs is not None and (not isinstance(pairs, Tensor) or pairs.dtype != torch.bool):
            got = pairs.dtype if isinstance(pairs, Tensor) else type(pairs).__name__
            raise TypeError(f"pairs must be a bool tensor (N, M) or (H, N, M), got {got}")
        _check_pattern("pairs", pairs, heads)
        # Like other arguments of the constructor, constants are no part of the state.
        self.register_buffer("allowed", pairs, persistent=False)
        if pair_bias is not None:
            if not isinstance(pair_bias, Tensor) or not pair_bias.is_floating_point():
                got = pair_bias.dtype if isinstance(pair_bias, Tensor) else type(pair_bias).__name__
                raise TypeError(
                    f"pair_bias must be a floating tensor (N, M) or (H, N, M), got {got}"
                )
            _check_pattern("pair_bias", pair_bias, heads)
            if not bool(torch.isfinite(pair_bias.detach()).all()):
                raise ValueError(
                    "pair_bias must be finite (exclude pairs by pairs), got NaN or inf"
                )
        if isinstance(pair_bias, nn.Parameter):
            self.bias: Tensor | None = pair_bias
        else:
            self.register_buffer("bias", pair_bias, persistent=False)
        self.own = self.exclude_self or pairs is not None or pair_bias is not None

    def forward(
        self, shape: tuple[int, int, int, int], device: torch.device, given: Pairs | None = None
    ) -> Pairs | None:
        """All conditions on the pairs together, for (B, H, N, M); None where there are none."""
        if given is not None:
            named = (("pairs", given.allowed), ("pair_bias", given.bias))
            given = Pairs(*(None if t is None else four_dimensional(n, t, shape) for n, t in named))
        if not self.own:
            return given
        queries, keys = shape[2:]
        parts = []
        for name, part in (("pairs", self.allowed), ("pair_bias", self.bias)):
            part = part if part is None or part.dim() == 2 else part[None]
            parts.append(None if part is None else four_dimensional(name, part, shape))
        pairs = Pairs(*parts)
        if self.exclude_self:
            pairs = pairs.intersect(~torch.eye(queries, keys, dtype=torch.bool, device=device))
        return pairs if given is None else pairs.merge(given)

    def check_backend(self, backend: str) -> None:
        """Only the dense formulas, which "auto" then takes, know pairs."""
        if self.own and backend not in ("auto", "reference"):
            raise ValueError(
                'pairs, pair_bias and exclude_self need backend="auto" or "reference", got '
                f"{backend!r}"
            )

    def extra_repr(self) -> str:
        return f"exclude_self={self.exclude_self}"


def project_input(
    x: Any,
    projection: Projection,
    bias: Tensor | None,
    heads: int,
    mask: Tensor | None,
    name: str,
) -> Tensor:
    """``x P^T + bias`` of an input (B, N, k), (B, H, N, p), zero at masked tokens."""
    weight = projection.weight
    width = weight.shape[1]
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{name}: x must hold tokens (B, N, {width}), got {type(x).__name__}; where x is a dict "
            "or a tuple, choose its part with .select(key)"
        )
    if x.dim() != 3 or x.shape[2] != width:
        raise ValueError(f"{name}: x must have the shape (B, N, {width}), got {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"{name}: x must be on {weight.device} like the weights, got {x.device}")
    check_dtype(x, weight, name)
    check_mask(mask, x, f"{name}, x", features=1)
    return project(hide(x, mask), weight, bias, heads, mask)


def read_pairs(
    x: Any, mask: Tensor | None, z: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """``pairs`` and ``pair_bias`` of an ``AttentionInput``, (B, 1 or H, N, M); None of other inputs.

    Solvers take tensors (B, ...) alone, so a matrix for all samples is expanded, which copies nothing.
    """
    if not isinstance(x, AttentionInput):
        return None, None
    batched = [t for t in (z, x.tokens, x.memory, mask) if isinstance(t, Tensor)]
    found = []
    for name, tensor in (("pairs", x.pairs), ("pair_bias", x.pair_bias)):
        if tensor is None:
            found.append(None)
            continue
        right = isinstance(tensor, Tensor) and (
            tensor.dtype == torch.bool if name == "pairs" else tensor.is_floating_point()
        )
        if not right or not 2 <= tensor.dim() <= 4:
            kind = "bool" if name == "pairs" else "floating"
            got = tuple(tensor.shape) if right else getattr(tensor, "dtype", type(tensor).__name__)
            raise TypeError(
                f"{name} must be a {kind} tensor (N, M), (B, N, M) or (B, H, N, M), got {got}"
            )
        if tensor.dim() == 2:
            if not batched:
                raise ValueError(
                    f"{name} must be (B, N, M) or (B, H, N, M) where x holds no tokens, got "
                    f"{tuple(tensor.shape)}; a constant matrix may be given to the energy"
                )
            tensor = tensor.expand(batched[0].shape[0], *tensor.shape)
        found.append(tensor[:, None] if tensor.dim() == 3 else tensor)
    return found[0], found[1]


def expand_pairs(x: Any, batch: int) -> Any:
    """An input with a copy of ``pairs`` and ``pair_bias`` (N, M) for each sample, which copies nothing.

    ``x`` is an ``AttentionInput``, or a pytree that holds some. Solvers take tensors (B, ...) alone.
    """
    if isinstance(x, Tensor) or x is None:
        return x

    def expanded(part: Any) -> Any:
        if not isinstance(part, AttentionInput):
            return part
        wide = {
            name: tensor.expand(batch, *tensor.shape)
            for name, tensor in (("pairs", part.pairs), ("pair_bias", part.pair_bias))
            if isinstance(tensor, Tensor) and tensor.dim() == 2
        }
        return part._replace(**wide)

    return pytree.tree_map(expanded, x, is_leaf=lambda part: isinstance(part, AttentionInput))


def read_memory(x: Any, width: int, z: Tensor | None, name: str) -> tuple[Tensor, Tensor | None]:
    """The memory (B, M, width) of cross-attention, zero where masked, and its mask.

    ``x`` is the memory, a pair of it and its mask, or an ``AttentionInput``; the samples and the device
    are those of the state ``z`` where that is known.
    """
    if isinstance(x, AttentionInput):
        memory, mask = x.memory, x.memory_mask
    else:
        memory, mask = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    shape = f"({'B' if z is None else z.shape[0]}, M, {width})"
    if not isinstance(memory, Tensor):
        raise TypeError(
            f"{name}: x must be a tensor {shape}, a pair of it and a mask, or an AttentionInput with "
            f"such a memory, got {type(memory).__name__}; where x is a dict, choose its part with "
            ".select(key)"
        )
    batch = memory.shape[:1] if z is None else z.shape[:1]
    if memory.dim() != 3 or memory.shape != (*batch, memory.shape[1], width):
        raise ValueError(f"{name}: x must have the shape {shape}, got {tuple(memory.shape)}")
    if z is not None and memory.device != z.device:
        raise ValueError(f"{name}: x must be on {z.device} like z, got {memory.device}")
    check_mask(mask, memory, f"{name}, context", features=1)
    return hide(memory, mask), mask


def masked_key(key: Tensor) -> tuple[Tensor, Tensor]:
    """A key (B, H, 1, p) with its mask (B, 1) in place of no key at all, from which nothing comes."""
    unit = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    return unit, torch.zeros(key.shape[0], 1, dtype=torch.bool, device=key.device)


def check_parts(
    x: Any, mask: Tensor | None, z: Tensor | None, name: str, cross: bool = False
) -> None:
    """Parts of an ``AttentionInput`` that the energy does not look at must make sense, too."""
    if not isinstance(x, AttentionInput):
        return
    for part in ("memory", "memory_mask"):
        if getattr(x, part) is not None and not cross:
            raise ValueError(f"{name}: x.{part} needs cross-attention, got it in self-attention")
    if x.tokens is None:
        return
    if not isinstance(x.tokens, Tensor):
        raise TypeError(
            f"{name}: x.tokens must be a tensor (B, N, ...), got {type(x.tokens).__name__}"
        )
    got = tuple(x.tokens.shape)
    if x.tokens.dim() != 3 or (z is not None and got[:2] != tuple(z.shape[:2])):
        shape = "(B, N, ...)" if z is None else f"({z.shape[0]}, {z.shape[1]}, ...)"
        raise ValueError(f"{name}: x.tokens must have the shape {shape}, got {got}")
    check_mask(mask, x.tokens, f"{name}, x.tokens", features=1)


def check_added(added: Tensor | None, z: Tensor, name: str) -> None:
    """What was made of ``x`` must have the samples and tokens of the state ``z``."""
    if added is None:
        return
    if (added.shape[0], added.shape[2]) != tuple(z.shape[:2]):
        raise ValueError(
            f"{name}: x must have the samples and tokens of z, {tuple(z.shape[:2])}, got "
            f"{(added.shape[0], added.shape[2])}"
        )


def _check_pattern(name: str, pattern: Tensor | None, heads: int) -> None:
    if pattern is None or pattern.dim() == 2 or (pattern.dim() == 3 and len(pattern) in (1, heads)):
        return
    raise ValueError(
        f"{name} must have the shape (N, M) or ({heads}, N, M), got {tuple(pattern.shape)}; what "
        "differs between samples belongs to the input, AttentionInput"
    )


def check_kind(
    cross: bool, causal: bool, exclude_self: bool, query_context_dim: int | None, backend: str
) -> None:
    """Options of self-attention and of cross-attention that exclude each other."""
    for name, given in (("causal", causal), ("exclude_self", exclude_self)):
        if given and cross:
            raise ValueError(f"{name} needs self-attention, got {name}=True with cross=True")
    if query_context_dim is not None and not cross:
        raise ValueError(f"query_context_dim needs cross=True, got {query_context_dim!r}")
    if backend == "flash" and not cross:
        raise ValueError("backend='flash' needs cross=True, got cross=False")
