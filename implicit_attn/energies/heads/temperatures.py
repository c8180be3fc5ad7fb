"""Inverse temperatures of attention heads: one number, one a head, constant or learned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.tokens import accumulation_dtype, sum_samples
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
        self.width = width
        # A learned one may grow during training.
        self.largest: float | None = None
        if self.learned:
            self.raw = nn.Parameter(torch.zeros(heads))
        self.set(beta, torch.zeros(()))

    def set(self, beta: Beta, like: Tensor) -> None:
        """Another ``beta``, as for the constructor, for weights of the dtype and device of ``like``.

        Of learned ones, which keep their parameter, it is the value from which training goes on.
        """
        initial = _numbers(self.heads, self.width**-0.5 if beta is None else beta)
        numbers = initial if isinstance(initial, list) else [initial] * self.heads
        self.number = None if self.learned or isinstance(initial, list) else initial
        if self.learned:
            raw = [number + math.log(-math.expm1(-number)) for number in numbers]
            with torch.no_grad():
                self.raw.copy_(torch.tensor(raw, dtype=torch.float64))
            return
        self.largest, self.numbers = max(numbers), numbers
        self._buffers.pop("values", None)
        if self.number is None:
            # Not part of the state: like a single number it is an argument of the constructor.
            dtype = accumulation_dtype(like.dtype)
            values = torch.tensor(numbers, dtype=dtype, device=like.device)
            self.register_buffer("values", values, persistent=False)

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


class HasTemperatures(nn.Module):
    """A module with ``temperatures``, whose ``beta`` may be read and set."""

    temperatures: Temperatures
    _number: float | None

    @property
    def beta(self) -> float | Tensor:
        """The inverse temperature, or one a head, (heads,). It may be set, as in the constructor.

        What is set takes effect at the next evaluation; learned ones are trained from there.
        """
        # Reading a module and calling it costs more than a look, at every evaluation.
        return self.temperatures() if self._number is None else self._number

    @beta.setter
    def beta(self, beta: Beta) -> None:
        like = next(chain(self.parameters(), self.buffers()), torch.zeros(()))
        self.temperatures.set(beta, like)
        self._renew()

    def _renew(self) -> None:
        """What is derived from the temperatures, after they have changed."""
        self._number = self.temperatures.number

    def _score_beta(self, like: Tensor) -> float | Tensor:
        """What products of features (B, H, N, p) are multiplied by."""
        beta = self.beta
        return by_head(beta, 3, like) if isinstance(beta, Tensor) else beta

    def _over_beta(self, lse: Tensor) -> Tensor:
        """``sum_h beta_h^-1 sum_i lse_hi`` of each sample, (B,)."""
        beta = self.beta
        if isinstance(beta, Tensor):
            return sum_samples(lse / by_head(beta, 2, lse))
        return sum_samples(lse) / beta


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
        if beta.requires_grad:
            raise TypeError(
                "beta must be numbers, which are not trained, got a tensor that requires gradients; "
                "learned_beta=True trains them, from those numbers on"
            )
        beta = beta.tolist()
    if isinstance(beta, (list, tuple)):
        if len(beta) != heads:
            raise ValueError(f"beta must hold a number for each of {heads} heads, got {beta!r}")
        return [require_positive("beta", number) for number in beta]
    return require_positive("beta", beta)
