"""Steps of associative memories: of a state, by the gradient of an energy of its activation."""

from __future__ import annotations

from torch import Tensor

from implicit_attn.energies.energy import Energy
from implicit_attn.energies.lagrangians import Lagrangian
from implicit_attn.energies.tokens import hide
from implicit_attn.updates.gradient_step import EnergyStep, move


class ActivationStep(EnergyStep):
    r"""``f(z, x) = z - eta (z - x + dE_int/dg)`` at the activation ``g = dLag/dz``.

    It descends the energy that is monitored, which is not ``E_int`` alone::

        E(z) = sum_i [ z_i.g_i - Lag(z_i) - x_i.g_i ] + E_int(g),   dE/dz = (dg/dz) (z - x + dE_int/dg)

    since ``dg/dz``, the Hessian of the convex Lagrangian, is positive semidefinite. The update itself
    does not contain ``dg/dz``. For a concave ``E_int`` the unit step never raises E, whatever the
    weights.

    Args:
        energy: ``E_int``, an energy of the activation; it is given the layer's input ``x`` too.
        lagrangian: whose gradient is the activation, for example ``RMSNormLagrangian()``.
        step_size: eta, > 0.
        channels: d for a step size per channel.
        learned: train the step size.

    Shapes: ``z`` and ``x`` (B, N, d); ``x`` None for zero.

    Source: Krotov and Hopfield (2021), https://arxiv.org/abs/2008.06996; Hoover et al., "Energy
    Transformer" (2023), https://arxiv.org/abs/2302.07253, equations 1 to 6.
    """

    def __init__(
        self,
        energy: Energy,
        lagrangian: Lagrangian,
        step_size: float = 1.0,
        *,
        channels: int | None = None,
        learned: bool = False,
    ) -> None:
        super().__init__(energy, step_size, channels=channels, learned=learned)
        if not isinstance(lagrangian, Lagrangian):
            raise TypeError(f"lagrangian must be a Lagrangian, got {type(lagrangian)}")
        self.lagrangian = lagrangian

    def activation(self, z: Tensor) -> Tensor:
        """``g(z)``, (B, N, d)."""
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
        own = hide((pull * g).sum(-1), mask)
        value = own.flatten(1).sum(1) - self.lagrangian(z, mask=mask) + interaction
        slope = self.lagrangian.hessian_product(z, force)
        return move(z, force, self.step_size()), value, slope

    def _force(self, z: Tensor, x: Tensor | None, gradient: Tensor, mask: Tensor | None) -> Tensor:
        return hide(gradient + (z if x is None else z - x), mask)
