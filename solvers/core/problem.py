"""A fixed-point problem on vectors (B, D), made of the user's functions on pytrees, and its Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from solvers.core.checks import require_instance, require_positive
from solvers.core.layout import Layout, check_like, leaves_of, take
from solvers.core.modes import autocast_dtype, ordinary, recording, twice_differentiable
from solvers.core.rows import Evaluation, norms

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
    options: Any = {"retain_graph": True, "create_graph": create_graph, "allow_unused": True}
    return list(torch.autograd.grad(output, variables, cotangent, **options))


def pullback(
    output: Tensor | None, point: Tensor, *, create_graph: bool = False
) -> JacobianProduct:
    """``v -> J^T v``, zero where ``output`` does not depend on ``point`` or is None."""

    def product(v: Tensor) -> Tensor:
        if output is None:
            return torch.zeros_like(v)
        image = gradients(output, [point], v, create_graph=create_graph)[0]
        return torch.zeros_like(v) if image is None else image

    return product


class EnergyUpdate(ABC):
    """A map that descends an energy and returns the step, the energy and its gradient in one call.

    Pass an instance as ``f`` to :func:`solvers.fixed_point` to turn the energy safeguard on.

    Attributes:
        symmetric: whether the Jacobian of the map is symmetric (a gradient step with one step size).
    """

    symmetric: bool = False

    @abstractmethod
    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any | None]:
        """Return ``(f(z), E(z), dE/dz)``: like z, (B,), and like z or None if the gradient is unknown."""

    def __call__(self, z: Any, *args: Any) -> Any:
        return self.joint(z, *args)[0]


class Descent(EnergyUpdate):
    """Gradient step ``f(z) = z - step_size dE/dz`` of an energy function, by autograd.

    Args:
        energy: ``energy(z, *args) -> (B,)``.
        step_size: positive number; it does not change the stationary points.

    Raises:
        ValueError: if the energy does not return one number per sample or does not depend on z.
    """

    symmetric = True

    def __init__(self, energy: Callable[..., Tensor], step_size: float = 1.0) -> None:
        require_instance("energy", energy, Callable, "callable")
        self.energy = energy
        self.step_size = require_positive("step_size", step_size)

    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any]:
        outer = torch.is_grad_enabled()
        # Neither what a compiler makes of the energy nor fused attention can be differentiated twice.
        with recording(), twice_differentiable() if outer else nullcontext():
            leaves, spec = pytree.tree_flatten(ordinary(z))
            args = ordinary(args)
            points = [
                t if outer and t.requires_grad else t.detach().requires_grad_() for t in leaves
            ]
            value = self.energy(pytree.tree_unflatten(points, spec), *args)
            check_energy(value, leaves[0].shape[0])
            parts: Any = [None] * len(points)
            if value.requires_grad:
                parts = torch.autograd.grad(
                    value.sum(), points, create_graph=outer, allow_unused=True
                )
        if all(part is None for part in parts):
            raise ValueError(
                "energy must be a differentiable function of z, got a result without a graph"
            )
        pairs = list(zip(points, parts, strict=True))
        found = [torch.zeros_like(t) if g is None else g for t, g in pairs]
        steps = [t - self.step_size * g for t, g in zip(points, found, strict=True)]
        if not outer:
            value, steps = value.detach(), [t.detach() for t in steps]
        rebuild = pytree.tree_unflatten
        return rebuild(steps, spec), value, rebuild(found, spec)


class Sharing(nn.Module):
    """The map ``f(z, *args, *shared)`` of tensors that all samples share, which may be results.

    As those of the parameters of a module, their derivatives are available in any order.
    """

    def __init__(self, f: Callable[..., Any], *shared: Tensor | None) -> None:
        super().__init__()
        self.f, self.number = f, len(shared)
        for place, tensor in enumerate(shared):
            self._parameters[f"shared{place}"] = tensor  # type: ignore[assignment]

    @property
    def shared(self) -> list[Any]:
        """The tensors, or what stands in their places."""
        return [self._parameters[f"shared{number}"] for number in range(self.number)]

    def forward(self, z: Any, *args: Any) -> Any:
        return self.f(z, *args, *self.shared)


@dataclass(eq=False)
class Problem:
    """``z = f(z)`` on a working batch of rows.

    Variants (other rows, other arguments) are made by ``rows`` and :func:`dataclasses.replace`.
    """

    f: Callable[..., Any]  # f(z, *args) on pytrees
    layout: Layout
    args: tuple[Any, ...] = ()  # pytrees of tensors batched along dim 0
    autocast: torch.dtype | None = None  # of the autocast in which f runs
    energy: Callable[..., Tensor] | None = None  # energy(z, *args) -> (B,)
    # (B, D) bool. Coordinates where it is False keep their initial value: their residual is zero, and
    # they enter no norm.
    mask: Tensor | None = None
    symmetric: bool = False  # the Jacobian of f is symmetric
    compact: bool = True  # rows may be taken out
    batch: int = 0  # samples before rows were taken out; 0 if none were

    bounds: ClassVar[None] = None
    traced: ClassVar[bool] = False

    @classmethod
    def of(
        cls,
        f: Callable[..., Any],
        energy: Callable[..., Tensor] | None,
        z0: Any,
        args: tuple[Any, ...],
        mask: Any,
        compact: bool,
        layout: Layout | None = None,
    ) -> Problem:
        """The problem of a call of :func:`solvers.fixed_point` with these arguments."""
        layout, first = layout or Layout.of(z0), leaves_of(z0)[0]
        return cls(
            f,
            layout,
            args,
            autocast_dtype(first.device.type),
            energy=energy,
            mask=None if mask is None else layout.mask_vector(mask, first),
            symmetric=bool(getattr(f, "symmetric", False)),
            compact=compact,
        )

    @property
    def has_energy(self) -> bool:
        return self.energy is not None or isinstance(self.f, EnergyUpdate)

    def evaluate(self, z: Tensor) -> Evaluation:
        """Evaluate ``f`` and, if there is one, the energy at z (B, D)."""
        return self.point(z, *self.joint(z))

    def point(
        self, z: Tensor, value: Tensor, energy: Tensor | None = None, gradient: Tensor | None = None
    ) -> Evaluation:
        """The evaluation ``value`` = f(z), (B, D) both, with its residual and norms."""
        residual = value - z
        if self.mask is not None:
            zero = residual.new_zeros(())
            residual = torch.where(self.mask, residual, zero)
            value = torch.where(self.mask, value, zero)
            gradient = None if gradient is None else torch.where(self.mask, gradient, zero)
        norm, reference = norms(residual.detach(), value.detach())
        return Evaluation(z, residual, norm, reference, energy, gradient)

    def projected(self, z: Tensor) -> Tensor:
        return z

    def evaluate_first(self, z: Tensor) -> Evaluation:
        """:meth:`evaluate` at the start; raises ValueError if f works in place on its arguments."""
        tensors = [
            t for t in leaves_of(self.args) if isinstance(t, Tensor) and not t.is_inference()
        ]
        versions = [t._version for t in tensors]
        point = self.evaluate(z)
        if versions != [t._version for t in tensors]:
            raise ValueError(OVERWRITES.format("its inputs"))
        return point

    def joint(
        self, z: Tensor, energies: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(f(z), E(z), dE/dz)``; None for what there is not, or is not asked for."""
        state, energy, gradient = self.layout.tree(z), None, None
        version, cast = None if z.is_inference() else z._version, self.autocast is not None
        try:
            with torch.autocast(z.device.type, self.autocast) if cast else nullcontext():
                if energies and self.energy is None and isinstance(self.f, EnergyUpdate):
                    output, energy, gradient = self.f.joint(state, *self.args)
                else:
                    output = self.f(state, *self.args)
                    if energies and self.energy is not None:
                        energy = self.energy(state, *self.args)
                if version is not None and z._version != version:
                    raise ValueError(OVERWRITES.format("its input"))
                if energy is not None:
                    check_energy(energy, len(z))
                alone = isinstance(output, Tensor) and isinstance(state, Tensor)
                same = alone and output.shape == state.shape and output.dtype == state.dtype
                if not (same and output.device == state.device):
                    check_like(self.layout.ordered(output), state, "f(z)", "z0", cast=cast)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.batch:  # then f has most likely closed over the whole batch
                hint = _SHRUNK.format(z.shape[0]) + self.layout.scalars(self.batch)
                error.args = (f"{error}\n{hint}", *error.args[1:])
            raise
        gradient = None if gradient is None else self.layout.vector(gradient)
        return self.layout.vector(output).to(z.dtype), energy, gradient

    def image(self, z: Tensor) -> Tensor:
        """``f(z)`` (B, D), whatever the mask says."""
        return self.joint(z, energies=False)[0]

    def masked_map(self, z: Tensor) -> Tensor:
        """``f(z)`` where the mask is True, the constant z elsewhere; all of ``f(z)`` without mask."""
        if self.mask is None:
            return self.image(z)
        constant = z.detach()
        return torch.where(self.mask, self.image(torch.where(self.mask, z, constant)), constant)

    def rows(self, index: Tensor, batch: int) -> Problem:
        """The same problem on the rows ``index`` of a batch of ``batch``."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        args = take(self.args, index, batch)
        return replace(self, args=args, mask=mask, batch=self.batch or batch)

    def jacobian_product(self, z: Tensor) -> JacobianProduct:
        """``v -> J(z) v`` for vectors (B, D): one pullback where J is symmetric, else a pushforward.

        Raises RuntimeError where autograd finds no dependence on anything.
        """
        with recording(), twice_differentiable():
            point = ordinary(z).detach().requires_grad_()
            output = replace(self, args=ordinary(self.args)).masked_map(point)
            if not output.requires_grad:
                raise RuntimeError(
                    "f(z) is not differentiable in z (is it detached, or made of comparisons?), so it "
                    "has no Jacobian: use a solver that needs none, such as Anderson()"
                )
            if self.symmetric:
                return pullback(output, point)
            # Reverse over reverse: J v is the pullback of J^T weight with respect to weight.
            weight = torch.zeros_like(output).requires_grad_()
            image = gradients(output, [point], weight, create_graph=True)[0]
            return pullback(image, weight)


def check_energy(energy: Any, batch: int) -> None:
    """Raise TypeError or ValueError unless ``energy`` is a tensor of one number per sample."""
    if not isinstance(energy, Tensor):
        raise TypeError(f"energy must return a tensor of shape ({batch},), got {type(energy)}")
    if tuple(energy.shape) != (batch,):
        raise ValueError(
            f"energy must return one number per sample, shape ({batch},), got shape "
            f"{tuple(energy.shape)}; do not sum over the batch"
        )


OVERWRITES = (
    "f must not modify {} in place: it must return a new tensor (use z * 0.5 instead of "
    "z.mul_(0.5), ReLU() instead of ReLU(inplace=True), or call z.clone() first)"
)
_SHRUNK = (
    "f was called with the {} samples that are still being solved. If it closes over a tensor of "
    "the whole batch, pass that tensor in args=(...), or set compact=False."
)
