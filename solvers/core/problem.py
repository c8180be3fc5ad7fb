"""A fixed-point problem on vectors (B, D), made of the user's functions on pytrees, and its Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from solvers.core.checks import require_instance, require_positive
from solvers.core.layout import Layout, check_like, leaves_of, take, tensors_of
from solvers.core.modes import autocast_dtype, ordinary, recording, twice_differentiable
from solvers.core.rows import Evaluation, norms, scaled_norm

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
        step_size: of a gradient step ``f(z) = z - step_size dE/dz``, whose residual is computed from the
            gradient itself; None for other maps.
        modulus: constant of strong convexity of the energy in z, (B,) or a number, where it is known: then
            ``|z - z*| <= |dE/dz| / modulus`` is reported as ``Solution.bound``. None otherwise.
    """

    symmetric: bool = False
    step_size: float | Tensor | None = None
    modulus: float | Tensor | None = None

    @abstractmethod
    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any | None]:
        """Return ``(f(z), E(z), dE/dz)``: like z, (B,), and like z or None if the gradient is unknown.

        With a ``step_size``, implicit gradients differentiate dE/dz where it has a graph, and otherwise f(z).
        """

    def __call__(self, z: Any, *args: Any) -> Any:
        return self.joint(z, *args)[0]


class RootUpdate:
    """The map ``z - F(z)`` of a system ``F(z) = 0``."""

    def __init__(self, function: Callable[..., Any], *, symmetric: bool = False) -> None:
        self.function, self.symmetric = function, symmetric

    def joint(self, z: Any, *args: Any) -> tuple[Any, Any]:
        """Return ``z - F(z)`` and ``F(z)``."""
        image = Layout.of(z).ordered(self.function(z, *args))
        try:
            check_like(image, z, "F(z)", "z0", cast=_in_autocast(z))
        except (TypeError, ValueError) as error:
            raise ValueError(f"F must return tensors like z0: {error}") from None
        return pytree.tree_map(torch.sub, z, image), image

    def __call__(self, z: Any, *args: Any) -> Any:
        return self.joint(z, *args)[0]


class Descent(EnergyUpdate):
    """Gradient step ``f(z) = z - step_size dE/dz`` of an energy function, by autograd.

    Args:
        energy: ``energy(z, *args) -> (B,)``.
        step_size: positive number; it does not change the stationary points.
        modulus: constant of strong convexity of the energy in z, if it is known: solutions then have a
            ``Solution.bound``.

    Raises:
        ValueError: if the energy does not return one number per sample or does not depend on z.
    """

    symmetric = True

    def __init__(
        self, energy: Callable[..., Tensor], step_size: float = 1.0, *, modulus: float | None = None
    ) -> None:
        require_instance("energy", energy, Callable, "callable")
        self.energy = energy
        self.modulus = None if modulus is None else require_positive("modulus", modulus)
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
                options: Any = {"create_graph": outer, "allow_unused": True}
                parts = torch.autograd.grad(value.sum(), points, **options)
        if all(part is None for part in parts):
            raise ValueError(
                "energy must be a differentiable function of z, got a result without a graph"
            )
        pairs = zip(points, parts, strict=True)
        found = [torch.zeros_like(t) if g is None else g for t, g in pairs]
        step_size: Any = self.step_size
        steps = [t - step_size * g for t, g in zip(points, found, strict=True)]
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
    measure: Callable[[Any], Any] | None = None  # of a state: what is judged of it
    given: tuple[Any, ...] | None = None  # what a rule to stop is shown of the rows; None: ``args``

    @classmethod
    def of(
        cls, f: Callable[..., Any], energy: Callable[..., Tensor] | None, z0: Any, args: tuple[Any, ...],
        mask: Any, compact: bool, layout: Layout | None = None,
    ) -> Problem:  # fmt: skip
        """The problem of a call of :func:`solvers.fixed_point` with these arguments."""
        layout, first = layout or Layout.of(z0), leaves_of(z0)[0]
        vector = None if mask is None else layout.mask_vector(mask, first)
        autocast, symmetric = autocast_dtype(first.device.type), getattr(f, "symmetric", False)
        return cls(f, layout, args, autocast, energy, vector, bool(symmetric), compact)

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_of(self.args)

    @property
    def shown(self) -> tuple[Any, ...]:
        """What a rule to stop is shown of the rows, besides their states."""
        return self.args if self.given is None else self.given

    def __post_init__(self) -> None:
        own = self.energy is None and isinstance(self.f, EnergyUpdate)
        self.has_energy = own or self.energy is not None
        # The step size, if f is a gradient step of an energy.
        self.gradient_step: Any = self.f.step_size if own else None  # type: ignore[attr-defined]
        # Whether the residual is in units of its own: that of an energy's gradient step, or of a root.
        self.unit_free = isinstance(self.f, RootUpdate) or self.gradient_step is not None

    def evaluate(self, z: Tensor) -> Evaluation:
        """Evaluate ``f`` and, if there is one, the energy at z (B, D)."""
        return self.point(z, *self.joint(z))

    def point(
        self, z: Tensor, value: Tensor, energy: Tensor | None = None, gradient: Tensor | None = None
    ) -> Evaluation:
        """The evaluation ``value`` = f(z), (B, D) both, with its residual and norms.

        For a root, ``gradient`` is F(z).
        """
        residual, scale = self.residual(z, value, gradient), z if self.unit_free else value
        gradient = None if isinstance(self.f, RootUpdate) else gradient
        if self.mask is not None:
            zero = residual.new_zeros(())
            residual, scale = (torch.where(self.mask, t, zero) for t in (residual, scale))
            gradient = None if gradient is None else torch.where(self.mask, gradient, zero)
        if self.measure is None:
            sizes = self.layout.sizes
            size, reference = norms(residual.detach(), scale.detach(), sizes)
            return Evaluation(z, residual, size, reference, energy, gradient, sizes)
        # A small residual in units of its own would be lost in the sum with z, so it is enlarged there.
        enlarged, factor = value, residual.new_ones(())
        if self.unit_free:
            small = torch.finfo(z.dtype).eps ** 0.5 * scaled_norm(scale.detach())
            factor = (small / scaled_norm(residual.detach())).clamp_min(1.0)
            factor = factor.where(factor < torch.inf, 1.0).to(z.dtype)[:, None]
            enlarged = z + factor * residual
        view, image, sizes = self._measured(z, enlarged)
        seen = (image - view) / factor
        size, reference = norms(seen, view if self.unit_free else image, sizes)
        finite = torch.isfinite(residual.detach()).all(1, keepdim=True)
        size = size.where(finite, torch.inf)
        return Evaluation(z, residual, size, reference, energy, gradient, sizes, view, seen)

    def residual(self, z: Tensor, value: Tensor, gradient: Tensor | None) -> Tensor:
        """``f(z) - z`` (B, D), from F(z) or from the ``gradient`` if f is a root's map or a gradient step.

        The difference of ``value`` = f(z) to z would be rounded to the size of z. It is taken all the same
        where only ``value`` has a graph.
        """
        graph = gradient is None or gradient.requires_grad or not value.requires_grad
        if gradient is None or not self.unit_free or not graph:
            return value - z
        return -gradient if isinstance(self.f, RootUpdate) else gradient * -self.gradient_step

    def constant_step(self) -> Problem:
        """This problem with a step size that is a number, as it does not move the solution."""
        if isinstance(self.gradient_step, Tensor):
            self.gradient_step = self.gradient_step.detach()
        return self

    def _measured(self, z: Tensor, value: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """What the measure shows of z and f(z), (B, M) each, and the sizes of its parts."""
        assert self.measure is not None
        shown = []
        with torch.no_grad():
            for state in (z.detach(), value.detach()):
                parts = pytree.tree_leaves(self.measure(self.layout.tree(state)))
                for part in parts:
                    if not isinstance(part, Tensor) or part.dim() == 0 or len(part) != len(z):
                        got = tuple(part.shape) if isinstance(part, Tensor) else type(part)
                        raise ValueError(
                            f"measure must return tensors of batch size {len(z)} along dim 0, got {got}"
                        )
                shown.append([part.reshape(len(z), -1) for part in parts])
        sizes = tuple(part.shape[1] for part in shown[0]) if len(shown[0]) > 1 else ()
        return torch.cat(shown[0], 1), torch.cat(shown[1], 1), sizes

    def evaluate_first(self, z: Tensor) -> Evaluation:
        """:meth:`evaluate` at the start; raises ValueError if f works in place on its arguments."""
        tensors = [t for t in self.tensors if not t.is_inference()]
        version = attrgetter("_version")  # which changes in place raise
        versions = list(map(version, tensors))
        point = self.evaluate(z)
        if versions != list(map(version, tensors)):
            raise ValueError(OVERWRITES.format(self.called, "its inputs"))
        return point

    def joint(
        self, z: Tensor, energies: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``(f(z), E(z), dE/dz)``; None for what there is not, or is not asked for.

        For a root the last one is F(z).
        """
        shape, energy, gradient = self.layout.only, None, None
        state = self.layout.tree(z) if shape is None else z.reshape(len(z), *shape)
        version, cast = None if z.is_inference() else z._version, self.autocast is not None
        try:
            with torch.autocast(z.device.type, self.autocast) if cast else nullcontext():
                if energies and self.energy is None and isinstance(self.f, EnergyUpdate):
                    output, energy, gradient = self.f.joint(state, *self.args)
                elif energies and isinstance(self.f, RootUpdate):
                    output, gradient = self.f.joint(state, *self.args)
                else:
                    output = self.f(state, *self.args)
                    if energies and self.energy is not None:
                        energy = self.energy(state, *self.args)
                if version is not None and z._version != version:
                    raise ValueError(OVERWRITES.format(self.called, "its input"))
                if energy is not None:
                    check_energy(energy, len(z))
                same = (
                    isinstance(output, Tensor) and isinstance(state, Tensor)
                    and output.shape == state.shape and output.dtype == state.dtype
                    and output.device == state.device
                )  # fmt: skip
                if not same:
                    check_like(self.layout.ordered(output), state, "f(z)", "z0", cast=cast)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.batch:  # then f has most likely closed over the whole batch
                hint = _SHRUNK.format(self.called, z.shape[0]) + self.layout.scalars(self.batch)
                error.args = (f"{error}\n{hint}", *error.args[1:])
            raise
        gradient = None if gradient is None else self.layout.vector(gradient).to(z.dtype)
        value = (
            output.reshape(z.shape) if same and shape is not None else self.layout.vector(output)
        )
        return value.to(z.dtype), energy, gradient

    @property
    def called(self) -> str:
        """What the user's function is called in messages."""
        return "F" if isinstance(self.f, RootUpdate) else "f"

    def image(self, z: Tensor) -> Tensor:
        """``f(z)`` (B, D), whatever the mask says."""
        return self.joint(z, energies=False)[0]

    def masked_map(self, z: Tensor) -> Tensor:
        """``f(z)`` where the mask is True, the constant z elsewhere; all of ``f(z)`` without mask."""
        return self.masked_joint(z, energies=False)[0]

    def differentiated(self, z: Tensor) -> Tensor:
        """What derivatives are taken of: ``f(z)``, or the residual where it is in units of its own.

        In small units the difference of the Jacobian of ``f`` to the identity would be lost in rounding.
        """
        return self.masked_joint(z, self.unit_free)[1]

    def masked_joint(self, z: Tensor, energies: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """:meth:`masked_map`, that or with ``energies`` the residual, and what this was computed from.

        The derivative of the residual is that of :meth:`masked_map` minus the identity. It is computed from
        F(z) or from a gradient.
        """
        constant, free = z.detach(), z
        if self.mask is not None:
            free = torch.where(self.mask, z, constant)
        image, _, gradient = self.joint(free, energies)
        output = self.residual(free, image, gradient) if energies else image
        if self.mask is not None:
            image = torch.where(self.mask, image, constant)
            output = torch.where(self.mask, output, constant - z) if energies else image
        return image, output, gradient

    def rows(self, index: Tensor, batch: int) -> Problem:
        """The same problem on the rows ``index`` of a batch of ``batch``."""
        mask = None if self.mask is None else self.mask.index_select(0, index)
        args, given = take((self.args, self.given), index, batch)
        return replace(self, args=args, given=given, mask=mask, batch=self.batch or batch)

    def linearized(self, z: Tensor) -> JacobianProduct:
        """``v -> (I - J(z)) v`` for vectors (B, D): one pullback where J is symmetric, else a pushforward.

        Raises RuntimeError where autograd finds no dependence on anything.
        """
        with recording(), twice_differentiable():
            point, output = self._recorded(z)
            product = pullback(output, point)
            if not self.symmetric:
                # Reverse over reverse: J v is the pullback of J^T weight with respect to weight.
                weight = torch.zeros_like(output).requires_grad_()
                image = gradients(output, [point], weight, create_graph=True)[0]
                product = pullback(image, weight)
            return minus_identity(product, self.unit_free, output.dtype)

    def matrix(self, z: Tensor) -> Tensor:
        """``I - J(z)`` (B, D, D) at z (B, D), by one vector-Jacobian product a row.

        Raises RuntimeError where autograd finds no dependence on anything.
        """
        with recording():
            point, output = self._recorded(z)
            product = minus_identity(pullback(output, point), self.unit_free, output.dtype)
            units = torch.eye(z.shape[1], dtype=output.dtype, device=z.device)
            return torch.stack([product(unit.expand_as(output)) for unit in units], 1).detach()

    def _recorded(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z (B, D) as a leaf, and :meth:`differentiated` recorded from it."""
        point = ordinary(z).detach().requires_grad_()
        output = replace(self, args=ordinary(self.args)).differentiated(point)
        if not output.requires_grad:
            raise RuntimeError(
                "f(z) is not differentiable in z (is it detached, or made of comparisons?), so it "
                "has no Jacobian: use a solver that needs none, such as Anderson()"
            )
        return point, output


def minus_identity(
    product: JacobianProduct, unit_free: bool, dtype: torch.dtype
) -> JacobianProduct:
    """``v -> (I - J) v`` from a product in ``dtype`` with J or, where it is ``unit_free``, with ``J - I``."""

    def apply(v: Tensor) -> Tensor:
        image = product(v.to(dtype)).to(v.dtype)
        return -image if unit_free else v - image

    return apply


def _in_autocast(z: Any) -> bool:
    return torch.is_autocast_enabled(pytree.tree_leaves(z)[0].device.type)


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
    "{} must not modify {} in place: it must return a new tensor (use z * 0.5 instead of "
    "z.mul_(0.5), ReLU() instead of ReLU(inplace=True), or call z.clone() first)"
)
_SHRUNK = (
    "{0} was called with the {1} samples that are still being solved. If it closes over a tensor of "
    "the whole batch, pass that tensor in args=(...), or set compact=False. If args contain a tensor that "
    "all samples share, let {0} close over it instead."
)
