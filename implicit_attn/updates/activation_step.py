"""The associative-memory form: a state, its activation, and an energy of the activation."""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.updates.gradient_step import StepSize, move
from implicit_attn.updates.update import Update


class ActivationStep(Update):
    r"""``f(z, x) = z - eta (z - x + dE_int/dg)`` at the activation ``g = dLag/dz``.

    It descends the monitored energy, which is not ``E_int`` alone::

        E(z) = sum_i [ z_i.g_i - Lag(z_i) - x_i.g_i ] + E_int(g),   dE/dz = (dg/dz) (z - x + dE_int/dg)

    since ``dg/dz``, the Hessian of the convex Lagrangian, is positive semidefinite. The derivative of
    the normalisation appears nowhere in the update. For a concave ``E_int`` the unit step never
    raises E, whatever the weights.

    Args:
        energy: ``E_int``, an energy of the activation; it sees the layer's input ``x`` too.
        lagrangian: of the activation, for example ``RMSNormLagrangian()``.
        step_size: eta, > 0.
        channels: d for a step per channel.
        learned: train the step.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None counts as zero.

    Source: Krotov and Hopfield (2021); Hoover et al., "Energy Transformer" (2023), eqs. 1-6.
    """

    monitored = True

    def __init__(
        self,
        energy: Energy,
        lagrangian: Lagrangian,
        step_size: float = 1.0,
        *,
        channels: int | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(energy, Energy):
            raise TypeError(f"energy must be an Energy, got {type(energy)}")
        if not isinstance(lagrangian, Lagrangian):
            raise TypeError(f"lagrangian must be a Lagrangian, got {type(lagrangian)}")
        self.energy = energy
        self.lagrangian = lagrangian
        self.step_size = StepSize(step_size, channels, learned)

    def activation(self, z: Tensor) -> Tensor:
        """``g(z)``, (B, N, d): what a readout sees."""
        return self.lagrangian.activation(z)

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        gradient = self.energy.grad(self.activation(z), x, mask=mask)
        return move(z, self._force(z, x, gradient, mask), self.step_size())

    def joint(
        self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        g = self.activation(z)
        interaction, gradient = self.energy.value_and_grad(g, x, mask=mask)
        force = self._force(z, x, gradient, mask)
        pull = z if x is None else z - x
        own = (pull * g).sum(-1)
        if mask is not None:
            own = torch.where(mask, own, 0.0)
        value = own.flatten(1).sum(1) - self.lagrangian(z, mask=mask) + interaction
        slope = self.lagrangian.hessian_product(z, force)
        return move(z, force, self.step_size()), value, slope

    def _force(self, z: Tensor, x: Tensor | None, gradient: Tensor, mask: Tensor | None) -> Tensor:
        force = gradient + (z if x is None else z - x)
        return force if mask is None else torch.where(mask.unsqueeze(-1), force, 0.0)
