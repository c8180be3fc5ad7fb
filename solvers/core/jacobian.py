"""Products with the Jacobian ``J = d output / d point`` of a recorded evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

JacobianProduct = Callable[[Tensor], Tensor]


def gradients(
    output: Tensor,
    variables: Sequence[Tensor],
    cotangent: Tensor | None = None,
    *,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """``(d output / d variable)^T cotangent`` for each variable; the graph is kept.

    None stands for zero: ``output`` does not depend on the variable. Without a ``cotangent`` the
    output must be a scalar.
    """
    if not output.requires_grad:
        return [None] * len(variables)
    return list(
        torch.autograd.grad(
            output,
            variables,
            cotangent,
            retain_graph=True,
            create_graph=create_graph,
            allow_unused=True,
        )
    )


def pullback(output: Tensor | None, point: Tensor) -> JacobianProduct:
    """``v -> J^T v``, zero where ``output`` does not depend on ``point`` or is None."""

    def product(v: Tensor) -> Tensor:
        image = None if output is None else gradients(output, [point], v)[0]
        return torch.zeros_like(v) if image is None else image

    return product


def pushforward(output: Tensor, point: Tensor) -> JacobianProduct:
    """``v -> J v``, as the pullback of ``J^T weight`` with respect to ``weight``.

    This is reverse over reverse: ``output`` must be twice differentiable by autograd.
    """
    with torch.enable_grad():
        weight = torch.zeros_like(output).requires_grad_()
        image = gradients(output, [point], weight, create_graph=True)[0]
    return pullback(image, weight)


def gradient_of_energy(
    energy: Tensor, points: list[Tensor], *, create_graph: bool
) -> tuple[Tensor, ...]:
    """dE/dz, zero for leaves that the energy does not depend on; ValueError where that is all."""
    found: tuple[Tensor | None, ...] = (None,) * len(points)
    if energy.requires_grad:
        found = torch.autograd.grad(
            energy.sum(), points, create_graph=create_graph, allow_unused=True
        )
    if all(part is None for part in found):
        raise ValueError(
            "energy must depend on z through differentiable operations, got one without gradient"
        )
    return tuple(
        torch.zeros_like(t) if g is None else g for g, t in zip(found, points, strict=True)
    )
