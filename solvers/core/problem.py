"""A fixed-point problem on vectors: user functions on pytrees, masks, energies, one evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from solvers.core.layout import Layout, row_norm, take
from solvers.core.modes import Autocast, ordinary, recording
from solvers.core.rows import Point
from solvers.core.solver import Linearizable


class EnergyUpdate(ABC):
    """A map that descends an energy and gives step, energy and gradient in one go.

    Pass an instance as ``f`` to :func:`solvers.fixed_point`; the energy safeguard is then on.

    Attributes:
        symmetric: the Jacobian of the map is symmetric (a gradient step with one step size).
    """

    symmetric: bool = False

    @abstractmethod
    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any | None]:
        """``(f(z), E(z), dE/dz)``: like z, (B,), like z or None where the gradient is not at hand."""

    def __call__(self, z: Any, *args: Any) -> Any:
        return self.joint(z, *args)[0]


class Descent(EnergyUpdate):
    """Gradient step ``f(z) = z - step_size dE/dz`` of a plain energy function, by autograd.

    Args:
        energy: ``energy(z, *args) -> (B,)``.
        step_size: positive number; stationary points do not depend on it.

    Raises:
        ValueError: if the energy does not return one number per sample, or does not depend on z.
    """

    symmetric = True

    def __init__(self, energy: Callable[..., Tensor], step_size: float = 1.0) -> None:
        if not callable(energy):
            raise TypeError(f"energy must be callable, got {energy!r}")
        if isinstance(step_size, bool) or not isinstance(step_size, (int, float)):
            raise TypeError(f"step_size must be a number, got {step_size!r}")
        if not 0 < step_size < float("inf"):
            raise ValueError(f"step_size must be > 0 and finite, got {step_size!r}")
        self.energy = energy
        self.step_size = step_size

    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any]:
        outer = torch.is_grad_enabled()
        with recording():
            leaves, spec = pytree.tree_flatten(ordinary(z))
            args = ordinary(args)
            points = [
                t if outer and t.requires_grad else t.detach().requires_grad_() for t in leaves
            ]
            value = self.energy(pytree.tree_unflatten(points, spec), *args)
            check_energy(value, leaves[0].shape[0])
            gradients = torch.autograd.grad(value.sum(), points, create_graph=outer)
        steps = [t - self.step_size * g for t, g in zip(points, gradients, strict=True)]
        if not outer:
            value, steps = value.detach(), [t.detach() for t in steps]
        rebuild = pytree.tree_unflatten
        return rebuild(steps, spec), value, rebuild(list(gradients), spec)


class Problem(Linearizable):
    """``f`` on a working batch of rows.

    Args:
        f: ``f(z, *args)`` on pytrees.
        layout: how the state lies in (B, D).
        args: pytrees of tensors batched along dim 0.
        energy: ``energy(z, *args) -> (B,)`` or None.
        mask: (B, N) bool or None. Masked coordinates are held at their initial value: their
            residual is zero, they move nowhere and count in no norm.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        layout: Layout,
        args: tuple[Any, ...],
        energy: Callable[..., Tensor] | None,
        mask: Tensor | None,
        symmetric: bool = False,
    ) -> None:
        self.f, self.layout, self.args, self.energy = f, layout, args, energy
        self.mask = None if mask is None else layout.mask_vector(mask)
        self.symmetric = symmetric
        self.has_energy = energy is not None or isinstance(f, EnergyUpdate)
        self.max_steps = 0  # set by the loop
        self.compact = True  # rows may be taken out
        self.checkpoint = False
        self.shrunk = False
        self.autocast: Autocast | None = None
        self._checked = False

    def evaluate(self, z: Tensor) -> Point:
        """Evaluate ``f`` and, if there is one, the energy at z (B, D)."""
        value, energy, gradient = self.map(z)
        residual = value - z
        if self.mask is not None:
            zero = residual.new_zeros(())
            residual = torch.where(self.mask, residual, zero)
            value = torch.where(self.mask, value, zero)
            gradient = None if gradient is None else torch.where(self.mask, gradient, zero)
        norm, reference = row_norm(residual.detach()), row_norm(value.detach())
        return Point(z, residual, norm, reference, energy, gradient)

    def map(self, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(f(z), E(z), dE/dz)`` as vectors, the last two where known."""
        return self._run(self._joint, z)

    def held_map(self, z: Tensor) -> Tensor:
        """``f(z)`` in the coordinates that the mask leaves free, constants in the others."""
        if self.mask is None:
            return self._run(self._alone, z)
        held = z.detach()
        free = torch.where(self.mask, z, held)
        return torch.where(self.mask, self._run(self._alone, free), held)

    def _run(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        try:
            with self.autocast.restored() if self.autocast is not None else nullcontext():
                if self.checkpoint and torch.is_grad_enabled():
                    return checkpoint(function, z, use_reentrant=False)
                return function(z)
        except (RuntimeError, ValueError, IndexError) as error:
            self._explain_shrinking(error, z.shape[0])
            raise

    def _alone(self, z: Tensor) -> Tensor:
        output = self.f(self.layout.tree(z), *self.args)
        return self.layout.vector(output).to(z.dtype)

    def _joint(self, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tree = self.layout.tree(z)
        energy, gradient = None, None
        if isinstance(self.f, EnergyUpdate) and self.energy is None:
            output, energy, gradient = self.f.joint(tree, *self.args)
        else:
            output = self.f(tree, *self.args)
            if self.energy is not None:
                energy = self.energy(tree, *self.args)
        if not self._checked or z.shape[0] == 1:
            self._check_output(output, energy, z)
        vector = self.layout.vector(output).to(z.dtype)
        if gradient is not None:
            gradient = self.layout.vector(gradient)
        return vector, energy, gradient

    def rows(self, index: Tensor, batch: int) -> Problem:
        """The same problem on a part of the batch."""
        part = self.with_args(take(self.args, index, batch))
        part.mask = None if self.mask is None else self.mask.index_select(0, index)
        part.shrunk = True
        return part

    def with_args(self, args: tuple[Any, ...]) -> Problem:
        """The same problem with other arguments of the same shapes."""
        other = copy(self)
        other.args = args
        return other

    def jacobian_product(self, z: Tensor) -> Callable[[Tensor], Tensor]:
        """v -> J(z) v: a vector-Jacobian product where J is symmetric, else reverse over reverse."""
        with recording():
            point = ordinary(z).detach().requires_grad_()
            output = self.with_args(ordinary(self.args)).held_map(point)
            if not output.requires_grad:
                raise RuntimeError(
                    "f(z) is not differentiable in z, so its Jacobian is not at hand"
                )
            if self.symmetric:
                return lambda v: torch.autograd.grad(output, point, v, retain_graph=True)[0]
            weight = torch.zeros_like(output).requires_grad_()
            pullback = torch.autograd.grad(output, point, weight, create_graph=True)[0]
        return lambda v: torch.autograd.grad(pullback, weight, v, retain_graph=True)[0]

    def _check_output(self, output: Any, energy: Tensor | None, z: Tensor) -> None:
        self._checked = True
        refuse_forward_mode(output)
        leaves, spec = pytree.tree_flatten(self.layout.ordered(output))
        if spec != self.layout.spec:
            raise TypeError(f"f must return a state structured like z0, got {spec}")
        names = zip(leaves, self.layout.shapes, self.layout.dtypes, strict=True)
        for leaf, shape, dtype in names:
            expected = (z.shape[0], *shape)
            if not isinstance(leaf, Tensor):
                raise TypeError(f"f must return tensors, got {type(leaf)}")
            if tuple(leaf.shape) != expected:
                raise ValueError(f"f must return shape {expected} like z0, got {tuple(leaf.shape)}")
            if leaf.device != z.device:
                raise ValueError(f"f must return tensors on {z.device} like z0, got {leaf.device}")
            autocast = self.autocast is not None and self.autocast.enabled
            if leaf.dtype != dtype and not (autocast and leaf.is_floating_point()):
                raise TypeError(f"f must return dtype {dtype} like z0, got {leaf.dtype}")
        if energy is not None:
            check_energy(energy, z.shape[0])

    def _explain_shrinking(self, error: Exception, batch: int) -> None:
        """After finished samples have left, a failing f has most likely closed over the batch."""
        if self.shrunk:
            error.args = (f"{error}\n{_SHRUNK.format(batch)}", *error.args[1:])


def refuse_forward_mode(output: Any) -> None:
    """A tangent that reaches f's value would be dropped by the solve: say so instead."""
    if getattr(forward_ad, "_current_level", -1) < 0:
        return
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and forward_ad.unpack_dual(leaf).tangent is not None:
            raise NotImplementedError(
                "forward-mode differentiation through a fixed point is not implemented; use "
                "reverse mode (backward, torch.autograd.grad)"
            )


_SHRUNK = (
    "f was called with the {} samples that are still being solved. If it closes over a tensor of "
    "the whole batch, pass that tensor in args=(...), or give compact=False."
)


def check_energy(energy: Any, batch: int) -> None:
    """One number per sample, or an error that says what came."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"energy must return a tensor of shape ({batch},), got {type(energy)}")
    if tuple(energy.shape) != (batch,):
        raise ValueError(
            f"energy must return one number per sample, shape ({batch},), got shape "
            f"{tuple(energy.shape)}; do not reduce over the batch"
        )
