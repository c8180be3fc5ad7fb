"""The Potts model: every pair of sites has couplings of its own."""

from __future__ import annotations

from torch import Tensor, nn

from implicit_attn.energies.spins.couplings import Couplings
from implicit_attn.models.potts.conditional import ConditionalModel
from solvers.core.checks import require_flag


class PottsModel(ConditionalModel):
    r"""``P(s) ~ exp(sum_i x_i^{s_i} + 1/2 sum_{i != j} J_ij^{s_i s_j})``, with learned J and x.

    The conditionals are exact, and linear in the parameters::

        p(s_i = a | rest) = softmax_a(x_i^a + sum_{j != i} J_ij^{a s_j})

    so the negative log pseudo-likelihood is convex, and its minimum finds the couplings of a Potts
    model from enough samples. Adding to ``J_ij`` what depends on one of the two colours alone only
    moves fields: compare couplings after ``zero_sum`` of ``implicit_attn.energies.spins.gauge``.

    All parameters start at 0, the independent and uniform sites.

    Args:
        sites: N.
        colours: d.
        tied: ``J_ij^{ab} = J_ji^{ba}``, as a Potts model has it. False: the regression of every site
            has couplings of its own, twice as many; there is no joint P then, and no :meth:`energy`.

    Attributes:
        couplings: :class:`Couplings`; ``couplings.weight`` is J (N, N, d, d).
        field: x (N, d).

    Source: Besag, "Statistical analysis of non-lattice data" (1975),
    https://doi.org/10.2307/2987782, for the pseudo-likelihood; Ekeberg et al., "Improved contact
    prediction in proteins" (2013), https://arxiv.org/abs/1211.1281, for Potts models.
    """

    def __init__(self, sites: int, colours: int, tied: bool = True) -> None:
        super().__init__(sites, colours)
        self.tied = require_flag("tied", tied)
        self.couplings = Couplings(sites, colours, symmetric_sites=tied)
        nn.init.zeros_(self.couplings.free)

    def interaction(self, states: Tensor) -> Tensor:
        """``sum_j J_ij^{a s_j}``, (B, N, d)."""
        return self.couplings(states)

    def penalty(self) -> Tensor:
        """``sum_ij |J_ij|^2 / 2``: with ``tied`` every pair counts once."""
        return self.couplings.free.square().sum() * (1.0 if self.tied else 0.5)

    def energy(self, s: Tensor) -> Tensor:
        """``-log P(s)`` up to the log partition function, (B,).

        Args:
            s: as for :meth:`logits`.

        Raises:
            ValueError: the couplings are not tied.
        """
        if not self.tied:
            raise ValueError("tied must be True for an energy, got False: there is no joint P(s)")
        states = self.one_hot(s)
        return -((self.field + 0.5 * self.couplings(states)) * states).sum((1, 2))

    def extra_repr(self) -> str:
        return f"sites={self.sites}, colours={self.colours}, tied={self.tied}"
