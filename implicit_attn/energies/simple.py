"""Energies without projections: the quadratic, the external field, and functions of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from implicit_attn.energies.checks import check_input, check_tokens, check_vector
from implicit_attn.energies.custom.signatures import FunctionCall
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.tokens import Pair, hide, sum_samples, sum_squares


class Quadratic(Energy):
    """``E = 1/2 |z - x|^2``, or ``1/2 |z|^2`` where there is no input.

    Gradient ``z - x``, Hessian the identity. The unit gradient step on ``Quadratic() + energy`` is
    ``z <- x - energy.grad(z)``.

    Shapes: ``z`` (B, ...), ``x`` like ``z`` or None, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        difference = self._difference(z, x, mask)
        return 0.5 * sum_squares(difference), difference

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self._difference(z, x, mask)

    def _difference(self, z: Tensor, x: Any, mask: Tensor | None) -> Tensor:
        check_tokens(z, mask, "Quadratic", features=0)
        return hide(z if x is None else z - check_input(x, z, "Quadratic"), mask)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        check_tokens(z, mask, "Quadratic", features=0)
        check_vector(v, z)
        return hide(v, mask)


class Field(Energy):
    """``E = -<x, z>``: the input as an external field. Gradient ``-x``, Hessian zero.

    Shapes: ``z`` (B, ...), ``x`` like ``z``, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    concave = True  # linear

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        field = self._field(z, x, mask)
        return -sum_samples(field * hide(z, mask)), -field

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        self._field(z, x, mask)
        check_vector(v, z)
        return torch.zeros_like(v)

    def _field(self, z: Tensor, x: Tensor | None, mask: Tensor | None) -> Tensor:
        check_tokens(z, mask, "Field", features=0)
        return hide(check_input(x, z, "Field"), mask)


class FunctionEnergy(Energy):
    """A function ``(z)`` or ``(z, x)`` as an energy, differentiated automatically.

    Args:
        function: ``function(z)`` or ``function(z, x)`` -> (B,), made of differentiable torch
            operations; it is given ``mask=`` where it has a parameter of that name. A module is
            registered, so that optimizers find its parameters.
        concave: whether the function is known to be concave in ``z``.

    Raises:
        TypeError: if ``function`` does not have such a signature.
        ValueError: when evaluated, if it returns anything but one number per sample, or if a mask
            is given to a function that takes none.
    """

    def __init__(self, function: Callable[..., Tensor], *, concave: bool = False) -> None:
        super().__init__()
        self.call = FunctionCall.read(function)
        self.function = function
        self.concave = concave

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return self.call(self.function, z, x, mask)

    def _label(self) -> str:
        return f"the function {self.call.name}"

    def extra_repr(self) -> str:
        return self.call.name
