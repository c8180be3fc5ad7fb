"""Energies without weights: the quadratic well, the external field, and plain functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.energies.checks import check_input, check_mask, check_state, check_vector
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.tokens import hide, sum_samples, sum_squares


class Quadratic(Energy):
    """``E = 1/2 |z - x|^2``, or ``1/2 |z|^2`` where there is no input.

    Gradient ``z - x``, Hessian the identity. An input pulls on the state as a field does: with a
    unit step the update of ``Quadratic() + energy`` is ``x - energy.grad(z)``.

    Shapes: ``z`` (B, ...), ``x`` like ``z`` or None, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        return 0.5 * sum_squares(self._difference(z, x, mask))

    def value_and_grad(
        self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        difference = self._difference(z, x, mask)
        return 0.5 * sum_squares(difference), difference

    def grad(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        return self._difference(z, x, mask)

    def hvp(
        self, z: Tensor, v: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        check_state(z, "Quadratic")
        check_mask(mask, z, "Quadratic")
        check_vector(v, z)
        return hide(v, mask)

    def _difference(self, z: Tensor, x: Tensor | None, mask: Tensor | None) -> Tensor:
        check_state(z, "Quadratic")
        check_mask(mask, z, "Quadratic")
        return hide(z if x is None else z - check_input(x, z, "Quadratic"), mask)


class Field(Energy):
    """``E = -<x, z>``: the input as an external field. Gradient ``-x``, no curvature.

    Shapes: ``z`` (B, ...), ``x`` like ``z``, ``mask`` (B, N) for ``z`` (B, N, ...).
    """

    concave = True  # linear

    def forward(self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None) -> Tensor:
        field = self._field(z, x, mask)
        return -sum_samples(field * hide(z, mask))

    def value_and_grad(
        self, z: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        field = self._field(z, x, mask)
        return -sum_samples(field * hide(z, mask)), -field

    def hvp(
        self, z: Tensor, v: Tensor, x: Tensor | None = None, *, mask: Tensor | None = None
    ) -> Tensor:
        self._field(z, x, mask)
        check_vector(v, z)
        return torch.zeros_like(v)

    def _field(self, z: Tensor, x: Tensor | None, mask: Tensor | None) -> Tensor:
        check_state(z, "Field")
        check_mask(mask, z, "Field")
        return hide(check_input(x, z, "Field"), mask)


class FunctionEnergy(Energy):
    """A plain function as an energy: gradient and Hessian-vector product by differentiation.

    Args:
        function: ``function(z)`` or ``function(z, x)`` -> (B,), made of differentiable torch
            operations; it is given ``mask=`` where it has a parameter of that name. A module's
            parameters are found by optimizers; tensors that a function closes over are not.
        concave: set it where the function is known to be concave in ``z``.

    Raises:
        TypeError: if ``function`` cannot be called so.
        ValueError: when evaluated, if it returns anything but one number per sample, or if a mask
            is given to a function that takes none.
    """

    def __init__(self, function: Callable[..., Tensor], *, concave: bool = False) -> None:
        super().__init__()
        if not callable(function):
            raise TypeError(f"function must be callable, got {function!r}")
        self.function = function
        self.concave = concave
        self.name = getattr(function, "__qualname__", type(function).__name__)
        self._takes_x, self._takes_mask = read_signature(function, self.name)

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        if mask is not None and not self._takes_mask:
            raise ValueError(
                f"{self.name} takes no mask, so tokens that do not count would influence it; "
                f"give it a parameter mask or pass no mask, got {tuple(mask.shape)}"
            )
        arguments = (z, x) if self._takes_x else (z,)
        if self._takes_mask:
            return self.function(*arguments, mask=mask)
        return self.function(*arguments)

    def _label(self) -> str:
        return f"the function {self.name}"

    def extra_repr(self) -> str:
        return self.name


def read_signature(function: Callable[..., Any], name: str) -> tuple[bool, bool]:
    """Whether ``function`` takes x after z, and whether it takes a mask by name."""
    if isinstance(function, nn.Module):  # its __call__ takes anything
        function = function.forward
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise TypeError(f"the signature of {name} cannot be read; wrap it in a function") from error
    kinds = inspect.Parameter
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    takes_mask = any(p.name == "mask" and p.kind in by_name for p in parameters)
    rest = [p for p in parameters if p.name != "mask" or p.kind not in by_name]
    placed = [p for p in rest if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    starred = any(p.kind is kinds.VAR_POSITIONAL for p in rest)
    needed = [p for p in placed[2:] if p.default is kinds.empty]
    needed += [p for p in rest if p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty]
    if needed or not (placed or starred):
        raise TypeError(
            f"{name} must be callable as function(z) or function(z, x), "
            f"got {name}{inspect.signature(function)}"
        )
    return len(placed) > 1 or starred, takes_mask
