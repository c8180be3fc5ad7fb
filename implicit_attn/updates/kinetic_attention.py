"""Attention whose tokens are vector spins in time, coupled by the softmax of the input."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.energy import Prepared
from implicit_attn.energies.heads import head_width
from implicit_attn.energies.projected import Projection, merge_heads, split_heads
from implicit_attn.energies.tokens import (
    accumulation_dtype,
    check_dtype,
    check_input,
    check_tokens,
    hide,
)
from implicit_attn.kernels.pairs import token_pairs
from implicit_attn.updates.mean_field import check_fields, softmax_couplings
from implicit_attn.updates.update import Update
from solvers import SphericalSite, kinetic_map
from solvers.core.checks import require_choice, require_flag, require_positive

CLOSURES = ("gaussian", "naive", "tap", "plefka")


class KineticAttention(Update):
    r"""Means of spins on spheres that all change at once, each in the field of the others.

    In each head, of width p, the tokens are put on the sphere of radius ``R = sqrt(p / 2)``. There they
    are the field of spins of the same length, which couple by attention weights of the input::

        J_ij = softmax_j(scale q_i.k_j),   theta_i = beta (x_i + sum_j J_ij m_j)
        m_i = theta_i / (1 + sqrt(1 + (|theta_i|^2 + Delta_i) / R^2))
        Delta_i = beta^2 sum_j J_ij^2 (R^2 - |m_j|^2)

    ``Delta_i`` is the noise of the spins around their means; the closure "naive" leaves it out. The
    state is m, so its fixed point is the steady state of the means of a kinetic spin model. Read as a
    transformer layer, the field is the residual connection, ``J m`` the attention, and the response to
    the field a normalisation. There is no value projection: heads mix only through J.

    The slope of the response is at most 1/2 and the rows of J sum to 1. With "naive" and ``beta < 2`` the
    map is therefore a contraction, so that its fixed point exists and is unique. It commutes with
    permutations of the tokens, unless ``causal``.

    Args:
        dim: d.
        heads: a divisor of d, with ``p = d / heads >= 2``.
        beta: inverse temperature, > 0.
        closure: "gaussian", "naive", "tap" or "plefka", see ``solvers.kinetic_step``. The last two are
            expansions for weak couplings; "plefka" with beta 2 is worse than "naive", and "tap" costs
            p^3 for each token.
        scale: factor of the scores, > 0; None: 1, as in the source.
        self_coupling: whether a token couples to itself; False excludes ``J_ii`` from the softmax.
        causal: a token couples to itself and the tokens before it only.

    Shapes: ``z`` and ``x`` (B, N, d), any N. ``mask`` (B, N) bool: masked tokens are no keys and keep
    their state. A token without any key has the field ``beta x_i``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.

    Source: Bal, "Spin-model transformers", https://mcbal.github.io/post/spin-model-transformers/, there with
    the closure "plefka", and with p - 2 for p in the radius; the Gaussian closure of Mezard and
    Sakellariou (2011), https://arxiv.org/abs/1103.3433, for spheres in many dimensions.
    """

    def __init__(
        self,
        dim: int,
        heads: int = 1,
        beta: float = 1.0,
        closure: str = "gaussian",
        scale: float | None = None,
        self_coupling: bool = True,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.heads, self.width = dim, heads, head_width(dim, heads, None)
        if self.width < 2:
            raise ValueError(
                f"heads must leave each head at least 2 features, got dim={dim}, heads={heads}"
            )
        self.beta = require_positive("beta", beta)
        self.closure = require_choice("closure", closure, CLOSURES)
        self.scale = 1.0 if scale is None else require_positive("scale", scale)
        self.self_coupling = require_flag("self_coupling", self_coupling)
        self.causal = require_flag("causal", causal)
        self.radius = math.sqrt(self.width / 2)
        self.site = SphericalSite(self.radius, large_dimension=True)
        self.queries_keys = Projection(dim, 2 * dim)

    def on_spheres(self, x: Tensor) -> Tensor:
        """The tokens (B, N, d) with every head scaled to length R; zero stays zero.

        A head whose length is not far above ``eps p`` (2e-6 for p = 16 in float32) gets less, as
        ``R |x| / sqrt(|x|^2 + (eps p)^2)``: the scale of the tokens counts there, and only there.
        """
        parts = x.view(*x.shape[:-1], self.heads, self.width)
        wide = parts.to(accumulation_dtype(x.dtype))
        # Below this length a token shrinks to zero smoothly: its direction has no derivative at zero.
        least = torch.finfo(wide.dtype).eps * self.width
        length = (wide.square().sum(-1, keepdim=True) + least**2).sqrt()
        return (wide * (self.radius / length)).to(x.dtype).view(x.shape)

    def couplings(self, x: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """``J`` (B, heads, N, N), without beta, of tokens ``x`` (B, N, d) on their spheres."""
        check_dtype(x, self.queries_keys.weight, type(self).__name__)
        query, key = F.linear(hide(x, mask), self.queries_keys.weight).chunk(2, dim=-1)
        query, key = self.scale * split_heads(query, self.heads), split_heads(key, self.heads)
        pairs = token_pairs(mask, self.causal, x.shape[1], x.device, own=self.self_coupling)
        return softmax_couplings(query, key, pairs).to(x.dtype)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Prepared:
        """The field ``beta x`` (B, N, d) and the couplings ``beta J`` (B, heads, N, N)."""
        check_fields(x, mask, type(self).__name__, self.dim)
        x = self.on_spheres(x)
        return Prepared((self.beta * x, self.beta * self.couplings(x, mask=mask)))

    def initial(self, x: Tensor) -> Tensor:
        """The means in the field alone, ``J = 0``."""
        return self.start(x, self.prepare(x))

    def start(self, x: Any, prepared: Prepared) -> Tensor:
        field = prepared.parts[0].detach()
        parts = field.view(*field.shape[:-1], self.heads, self.width)
        size = parts.square().sum(-1, keepdim=True)
        return (parts / (1 + (1 + size / self.radius**2).sqrt())).view(field.shape)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        name = type(self).__name__
        check_tokens(z, mask, name, dim=self.dim, tokens=True)
        prepared = x if isinstance(x, Prepared) else self.prepare(x, mask=mask)
        field, couplings = prepared.parts
        field = check_input(field, z, name)
        if not z.numel():  # no samples, or no tokens
            return z
        batch = z.shape[0]

        def fold(y: Tensor) -> Tensor:
            return split_heads(y, self.heads).flatten(0, 1)

        apart = None if mask is None else mask.repeat_interleave(self.heads, dim=0)
        options: dict[str, Any] = {"site": self.site, "closure": self.closure, "mask": apart}
        mean = kinetic_map(fold(z), fold(field), couplings.flatten(0, 1), **options)
        return merge_heads(mean.unflatten(0, (batch, self.heads)))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, heads={self.heads}, beta={self.beta:.4g}, closure={self.closure!r}, "
            f"scale={self.scale:.4g}, self_coupling={self.self_coupling}, causal={self.causal}"
        )
