"""The size of a map's Jacobian as a loss: Jacobian regularisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp
from torch.utils import _pytree as pytree

from solvers.core.checks import require_callable, require_count, require_instance
from solvers.core.device import small_dtype
from solvers.core.jacobian import gradients
from solvers.core.layout import Layout, check_args, check_mask
from solvers.core.modes import (
    constant_weights,
    eager,
    in_transform,
    ordinary,
    recording,
    uncompiled,
)


@eager
def jacobian_penalty(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    mask: Any = None,
    samples: int | None = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Mean square of the singular values of ``J = df/dz`` at ``z``, ``|J|_F^2 / D``, for each sample.

    Hutchinson's estimate: with random signs v, ``E |J^T v|^2 = |J|_F^2``; one product with ``J^T`` for each
    v. Added to a loss it keeps the map contracting, so that its fixed point stays cheap to find. It has
    gradients by what ``f`` reads, and by ``z`` where that requires one: with the ``value`` of a solve the
    whole gradient, in which the fixed point moves with the weights (its adjoint is part of the same
    backward pass); with ``value.detach()`` that at a point held fixed, as in the paper.

    Args:
        f: ``f(z, *args)``, like z, each sample on its own.
        z: state, a tensor (B, ...) or a pytree of them, D numbers a sample.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0.
        mask: as for :func:`solvers.fixed_point`: masked tokens are held constant, and neither their rows
            and columns of J nor their share of D count.
        samples: random vectors, >= 1; None: all D unit vectors, which is exact.
        generator: of the random vectors; None: torch's global one of the device.

    Returns:
        (B,) in float32 or wider, not differentiable under ``no_grad`` and ``inference_mode``.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument; if ``f`` does not
            depend on z through autograd.

    Source: Bai, Koltun, Kolter, "Stabilizing Equilibrium Models by Jacobian Regularization" (2021),
    section 4, https://arxiv.org/abs/2106.14342; Hutchinson, "A stochastic estimator of the trace of the
    influence matrix" (1990), https://doi.org/10.1080/03610919008812866.
    """
    require_callable("f", f)
    layout = Layout.of(z, "z")
    first = pytree.tree_leaves(z)[0]
    check_args(args, first.shape[0], first.device, "z", "f")
    if samples is not None:
        require_count("samples", samples)
    require_instance("generator", generator, torch.Generator, "a torch.Generator", optional=True)
    keep = None
    if mask is not None:
        check_mask(mask, layout, first.shape[0], first.device)
        keep = layout.mask_vector(mask)
    with recording(), constant_weights(), uncompiled():
        total, products = None, 0
        point = layout.vector(ordinary(z))
        product = _product(f, layout, point, ordinary(args), keep)
        wide = small_dtype(point.dtype)  # a sum of squares overflows in float16
        for v in _vectors(point, keep, samples, generator):
            square = product(v).to(wide).square().sum(1)
            total = square if total is None else total + square
            products += 1
        assert total is not None
        size = point.shape[1] if keep is None else keep.sum(1).clamp_min(1)
        result = total / (size if samples is None else products * size)
    return result if torch.is_grad_enabled() else result.detach()


def _product(
    f: Callable[..., Any], layout: Layout, z: Tensor, args: tuple[Any, ...], keep: Tensor | None
) -> Callable[[Tensor], Tensor]:
    """``v -> J^T v`` (B, D) with a graph; zero at masked coordinates."""

    def mapped(z: Tensor) -> Tensor:
        output = layout.vector(f(layout.tree(z), *args))
        if output.shape != z.shape:
            raise ValueError(f"f must return a state like z, {z.shape[1]} numbers a sample")
        return output

    if in_transform():  # whose tensors know no nested autograd.grad
        _, pull, *_ = vjp(mapped, z)
        product: Callable[[Tensor], Tensor] = lambda v: pull(v)[0]  # noqa: E731
    else:
        point = z if z.requires_grad else z.detach().requires_grad_()
        output = mapped(point)
        if not output.requires_grad:
            raise ValueError(
                "f(z) must depend on z through autograd, got a result without gradient"
            )
        product = lambda v: _pulled(output, point, v)  # noqa: E731
    if keep is None:
        return product
    return lambda v: torch.where(keep, product(v), 0)


def _pulled(output: Tensor, point: Tensor, v: Tensor) -> Tensor:
    image = gradients(output, [point], v, create_graph=True)[0]
    return torch.zeros_like(point) if image is None else image


def _vectors(
    like: Tensor, keep: Tensor | None, samples: int | None, generator: torch.Generator | None
) -> Iterator[Tensor]:
    """Vectors (B, D) of random signs, or all unit vectors; zero at masked coordinates."""
    shape, device = like.shape, like.device
    for number in range(shape[1] if samples is None else samples):
        if samples is None:
            v = torch.zeros(shape, dtype=like.dtype, device=device)
            v[:, number] = 1
        else:
            # Where the generator lives, so that its numbers are the same for every device.
            home = device if generator is None else generator.device
            signs = torch.randint(0, 2, shape, generator=generator, device=home)
            v = (2 * signs - 1).to(device, like.dtype)
        yield v if keep is None else torch.where(keep, v, 0)
