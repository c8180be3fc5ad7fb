"""Gradient steps of a bi-softmax energy whose normalisers lag one evaluation behind."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from implicit_attn.energies.attention import BiSoftmaxAttention
from implicit_attn.energies.differentiation import add_trees
from implicit_attn.energies.energy import Energy, Scaled, Sum, Weighted
from implicit_attn.kernels import bisoftmax
from implicit_attn.updates.gradient_step import StepSize, move
from implicit_attn.updates.update import Update


class CarriedState(NamedTuple):
    """State of a ``CarriedNormaliser``.

    Attributes:
        tokens: z (B, N, d).
        lse: L (B, N, heads), the log-sum-exp of each row of each head's scores.
    """

    tokens: Tensor
    lse: Tensor


class CarriedNormaliser(Update):
    r"""``f(z, L) = (z - eta g(z, L), lse(z))``, with the state's own L for the softmax weights.

    ``g`` is the gradient of the energy in which the bi-softmax term's ``P_ij`` is
    ``exp(S_ij(z) - L_i)``; the sweep over the pairs that computes it finds ``lse(z)`` as well, where
    the plain gradient needs one sweep for each. At a fixed point ``L = lse(z)`` and ``g`` is the
    gradient, so fixed points and implicit gradients are those of ``GradientStep(energy)``. On the way
    there nothing descends: the joint Jacobian is not symmetric and no energy is watched, so the
    layer's default solver is Anderson. (Lagging a nonlinear coefficient by one iteration is the
    lagged diffusivity of Vogel and Oman, "Iterative methods for total variation denoising", 1996.)

    The layer's output is a :class:`CarriedState`::

        update = CarriedNormaliser(0.4 * BiSoftmaxAttention(64, heads=4) + Quadratic())
        layer = DEQ(update)  # starts from update.initial(x)
        layer(x).tokens  # (B, N, d)

    Args:
        energy: a ``BiSoftmaxAttention`` that is not causal, or a sum in which exactly one term is
            such an energy, scaled or weighted or not.
        step_size: eta, > 0.

    Raises:
        TypeError: if ``energy`` is no energy.
        ValueError: if it has no such term, or more than one.
    """

    def __init__(self, energy: Energy, step_size: float = 1.0) -> None:
        super().__init__()
        if not isinstance(energy, Energy):
            raise TypeError(f"energy must be an Energy, got {type(energy)}")
        self.energy = energy if isinstance(energy, Sum) else Sum([energy])
        held = [m for m in energy.modules() if isinstance(m, BiSoftmaxAttention)]
        places = [
            index
            for index, term in enumerate(self.energy.terms)
            if isinstance(_core(term), BiSoftmaxAttention)
        ]
        if len(held) != 1 or len(places) != 1 or held[0].causal:
            raise ValueError(
                "energy must be a sum with exactly one BiSoftmaxAttention among its terms, not "
                f"causal, got {energy}"
            )
        self._place = places[0]
        self.step_size = StepSize(step_size)

    @property
    def attention(self) -> BiSoftmaxAttention:
        """The term whose normalisers are carried."""
        return _core(self.energy.terms[self._place])  # type: ignore[return-value]

    def initial(self, x: Tensor) -> CarriedState:
        """Where a solve starts: the input and its own lse."""
        attention = self.attention
        y = attention.features(x)
        _, lse = bisoftmax(y, attention.beta, backend=attention.backend)
        return CarriedState(x, lse.transpose(1, 2).to(x.dtype))

    def forward(
        self, z: CarriedState, x: Any = None, *, mask: Tensor | None = None
    ) -> CarriedState:
        if not (isinstance(z, tuple) and len(z) == 2):
            raise TypeError(
                "the state of CarriedNormaliser is a CarriedState (tokens, lse), as "
                f"update.initial(x) is; got {type(z).__name__}"
            )
        tokens, carried = z
        lse = carried.transpose(1, 2)
        gradient, found = self.attention.carried_gradient(tokens, lse, mask=mask)
        total = add_trees(None, gradient, _factor(self.energy.terms[self._place]))
        for index, term in enumerate(self.energy.terms):
            if index != self._place:
                total = add_trees(total, term.grad(tokens, x, mask=mask), 1.0)
        step = move(tokens, total, self.step_size())
        return CarriedState(step, found.transpose(1, 2).to(carried.dtype))


def _core(term: Any) -> Any:
    """The energy inside its weights."""
    while isinstance(term, (Scaled, Weighted)):
        term = term.energy
    return term


def _factor(term: Any) -> Any:
    """The product of the weights around an energy."""
    factor: Any = 1.0
    while isinstance(term, (Scaled, Weighted)):
        factor, term = factor * term.factor(), term.energy
    return factor
