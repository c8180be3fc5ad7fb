"""Inverse temperatures of attention heads: one number, one a head, constant or learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.tokens import accumulation_dtype
from solvers.core.checks import require_flag, require_positive

Beta: TypeAlias = float | Sequence[float] | Tensor | None


class Temperatures(nn.Module):
    """The inverse temperatures beta of the heads, all > 0.

    Learned ones are ``log(1 + exp(raw))`` of a parameter ``raw`` (heads,), so they stay positive.

    Args:
        heads: their number H.
        beta: a number, or one for each head; None: ``width^-1/2``.
        width: of a head.
        learned: train them, one for each head.
    """

    values: Tensor

    def __init__(self, heads: int, beta: Beta, width: int, learned: bool = False) -> None:
        super().__init__()
        self.heads, self.learned = heads, require_flag("learned_beta", learned)
        initial = _numbers(heads, width**-0.5 if beta is None else beta)
        self.number = None if self.learned or isinstance(initial, list) else initial
        # A learned one may grow during training.
        self.largest: float | None = None
        numbers = initial if isinstance(initial, list) else [initial] * heads
        if self.learned:
            raw = [number + math.log(-math.expm1(-number)) for number in numbers]
            self.raw = nn.Parameter(torch.tensor(raw))
            return
        self.largest, self.numbers = max(numbers), numbers
        if self.number is None:
            # Not part of the state: like a single number it is an argument of the constructor.
            self.register_buffer("values", torch.tensor(numbers), persistent=False)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """As every module, but constants keep their digits in whatever precision comes next."""
        super()._apply(*args, **kwargs)
        if self.number is None and not self.learned:
            dtype = accumulation_dtype(self.values.dtype)
            self.values = torch.tensor(self.numbers, dtype=dtype, device=self.values.device)
        return self

    def forward(self) -> float | Tensor:
        """The one constant number, or one a head as a tensor (heads,)."""
        if self.number is not None:
            return self.number
        return F.softplus(self.raw) if self.learned else self.values

    def extra_repr(self) -> str:
        return describe(self())


def describe(beta: float | Tensor) -> str:
    """``beta`` for a module's text."""
    if not isinstance(beta, Tensor):
        return f"beta={beta:.4g}"
    return f"beta=({', '.join(f'{number:.4g}' for number in beta.tolist())})"


def by_head(beta: Tensor, dimensions: int, like: Tensor) -> Tensor:
    """``beta`` (heads,) as (heads, 1, ...) of so many dimensions, float32 or wider."""
    wide = beta.to(accumulation_dtype(like.dtype))
    return wide.view(-1, *[1] * (dimensions - 1))


def _numbers(heads: int, beta: float | Sequence[float] | Tensor) -> float | list[float]:
    if isinstance(beta, Tensor):
        beta = beta.detach().tolist()
    if isinstance(beta, (list, tuple)):
        if len(beta) != heads:
            raise ValueError(f"beta must hold a number for each of {heads} heads, got {beta!r}")
        return [require_positive("beta", number) for number in beta]
    return require_positive("beta", beta)
