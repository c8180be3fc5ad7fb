"""What all models of a site's colour given the other sites share: states, logits, pseudo-likelihood."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from solvers.core.checks import require_count


class ConditionalModel(nn.Module, ABC):
    """Logits of the colour of every site given the colours of the other sites.

    ``p(s_i = a | rest) = softmax_a(x_i^a + f_i^a(s))``, where ``f_i`` must not depend on ``s_i``: then
    the logits of all sites come from one evaluation. A subclass gives f as :meth:`interaction` and a
    measure of its size as :meth:`penalty`.

    Args:
        sites: N, >= 2.
        colours: d, >= 2.
    """

    def __init__(self, sites: int, colours: int) -> None:
        super().__init__()
        self.sites = require_count("sites", sites, low=2)
        self.colours = require_count("colours", colours, low=2)
        self.field = nn.Parameter(torch.zeros(sites, colours))

    @abstractmethod
    def interaction(self, states: Tensor) -> Tensor:
        """What the other sites add to the logits, (B, N, d), of one-hot states (B, N, d)."""

    @abstractmethod
    def penalty(self) -> Tensor:
        """A sum of squares, a scalar, which a fit multiplies by ``l2``; fields are not in it."""

    def logits(self, s: Tensor) -> Tensor:
        """Logits (B, N, d) of every site given the others.

        Args:
            s: colours (B, N) in 0 .. d - 1, integers; or one-hot states, also mean ones, (B, N, d).
        """
        return self.field + self.interaction(self.one_hot(s))

    def forward(self, s: Tensor) -> Tensor:
        return self.logits(s)

    def pseudo_likelihood(self, s: Tensor) -> Tensor:
        r"""The negative log pseudo-likelihood of a site, in nats, a scalar.

        ``- 1/(B N) sum_mu sum_i log p(s_i^mu | rest)``: the mean over samples and sites. Predicting one
        masked site, drawn at random, is an unbiased estimate of it.

        Args:
            s: as for :meth:`logits`.
        """
        states = self.one_hot(s)
        logits = self.field + self.interaction(states)
        return -(states * torch.log_softmax(logits, -1)).sum(-1).mean()

    def check_states(self, s: Tensor) -> Tensor:
        """``s`` as it is, if it is what :meth:`logits` takes.

        Raises:
            TypeError: ``s`` is no tensor, or neither integers nor floating.
            ValueError: a wrong shape, or a colour that is not in 0 .. d - 1.
        """
        n, d = self.sites, self.colours
        if not isinstance(s, Tensor) or s.is_complex() or s.dtype == torch.bool:
            kind = s.dtype if isinstance(s, Tensor) else type(s).__name__
            raise TypeError(f"s must be integers (B, N) or floating (B, N, d), got {kind}")
        wanted = (n, d) if s.is_floating_point() else (n,)
        if s.shape[1:] != wanted or s.dim() != 1 + len(wanted) or len(s) == 0:
            shape = "(B, N, d)" if s.is_floating_point() else "(B, N)"
            raise ValueError(
                f"s must have the shape {shape} with {n} sites and {d} colours, B >= 1, got "
                f"{tuple(s.shape)} of {s.dtype}"
            )
        if not s.is_floating_point():
            low, high = (int(value) for value in s.aminmax())
            if low < 0 or high >= d:
                raise ValueError(f"s must hold colours in 0 .. {d - 1}, got {low} .. {high}")
        return s

    def one_hot(self, s: Tensor) -> Tensor:
        """Colours (B, N) as one-hot states (B, N, d) of the model's dtype; states are only checked.

        Raises:
            TypeError, ValueError: as :meth:`check_states`.
        """
        if self.check_states(s).is_floating_point():
            return s.to(self.field.dtype)
        states = self.field.new_zeros(*s.shape, self.colours)
        return states.scatter_(2, s.long().unsqueeze(2), 1.0)
