"""A fixed-point problem on vectors (B, D), made of the user's functions on pytrees, and its Jacobian."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from solvers.core.checks import require_instance, require_positive
from solvers.core.context import Weights, modules_of
from solvers.core.layout import Layout, check_like, leaves_of, take
from solvers.core.modes import autocast_dtype, ordinary, recording, twice_differentiable
from solvers.core.rows import Evaluation, norms
from solvers.core.solution import Goal
from solvers.core.validate import (
    OVERWRITES,
    check_energy,
    constant_inputs,
    constant_norms,
    random_state,
    refuse_forward_mode,
    refuse_random,
)

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
    try:
        return list(torch.autograd.grad(output, variables, cotangent, **options))
    except RuntimeError as error:
        if "leaf node was passed" in str(error):  # by hooks of torch's ModuleTracker
            error.args = (f"{error}\n{_TRACKED}",)
        raise


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
        step_size: step size of a gradient step ``f(z) = z - step_size dE/dz``, whose residual is computed from
            the gradient itself; None for other maps.
    """

    symmetric: bool = False
    # Of a gradient step ``f(z) = z - step_size dE/dz`` the step size; None for other maps.
    step_size: float | Tensor | None = None

    @abstractmethod
    def joint(self, z: Any, *args: Any) -> tuple[Any, Tensor, Any | None]:
        """Return ``(f(z), E(z), dE/dz)``: like z, (B,), and like z or None if the gradient is unknown."""

    def __call__(self, z: Any, *args: Any) -> Any:
        return self.joint(z, *args)[0]


class RootUpdate:
    """The map ``z - F(z)`` of a system ``F(z) = 0``, whose residual is -F itself."""

    symmetric = False

    def __init__(self, function: Callable[..., Any], symmetric: bool = False) -> None:
        self.original, self.symmetric = function, symmetric

    def function(self, z: Any, *args: Any) -> Any:
        """Return ``F(z, *args)``, checked to be like z."""
        image = Layout.of(z).ordered(self.original(z, *args))
        try:
            check_like(image, z, "F(z)", "z0", cast=torch.is_autocast_enabled())
        except (TypeError, ValueError) as error:
            raise ValueError(f"F must return tensors like z0: {error}") from None
        return image

    def __call__(self, z: Any, *args: Any) -> Any:
        return pytree.tree_map(torch.sub, z, self.function(z, *args))


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
    bounds: tuple[Tensor, Tensor] | None = None  # (D,) each, onto which f is projected
    symmetric: bool = False  # the Jacobian of f is symmetric
    compact: bool = True  # rows may be taken out
    # How a recorded evaluation ``function(z)`` is made, where not by a plain call.
    recorder: Callable[[Callable[[Tensor], Any], Tensor], Any] | None = None
    batch: int = 0  # samples before rows were taken out; 0 if none were
    random: Any = None  # states of the random generators before the first evaluation
    goal: Goal | None = None  # of the call of fixed_point
    modules: list[nn.Module] = field(default_factory=list)  # that f may call
    weights: Weights | None = None  # that the solve shares with what differentiates it
    traced: bool = (
        False  # within a transform of torch.func, where tensors do not show their numbers
    )
    measure: Callable[[Any], Any] | None = None  # of a state: what is judged of it

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
            modules=modules_of(f),
        )

    @property
    def has_energy(self) -> bool:
        return self.energy is not None or isinstance(self.f, EnergyUpdate)

    @property
    def gradient_step(self) -> float | Tensor | None:
        """The step size if f is a gradient step of an energy."""
        return (
            self.f.step_size if isinstance(self.f, EnergyUpdate) and self.energy is None else None
        )

    @property
    def unit_free(self) -> bool:
        """Whether the residual is in units of its own: that of an energy's gradient step, or of a root."""
        return self.gradient_step is not None or isinstance(self.f, RootUpdate)

    def evaluate(self, z: Tensor) -> Evaluation:
        """Evaluate ``f`` and, if there is one, the energy at z (B, D)."""
        return self.point(z, *self.joint(z))

    def point(
        self,
        z: Tensor,
        value: Tensor,
        energy: Tensor | None = None,
        gradient: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Evaluation:
        """The evaluation ``value`` = f(z), (B, D) both, with its residual and norms.

        The residual of a root, and that of a gradient step, are not rounded to the size of z.
        """
        if self.gradient_step is not None and gradient is not None:
            residual = gradient * -self.gradient_step
        residual = value - z if residual is None else residual
        if self.bounds is not None and gradient is not None:
            low, high = self.bounds  # what pushes against a bound is no force
            held = ((z <= low) & (gradient > 0)) | ((z >= high) & (gradient < 0))
            gradient = gradient.masked_fill(held, 0)
        if self.mask is not None:
            zero = residual.new_zeros(())
            residual = torch.where(self.mask, residual, zero)
            value = torch.where(self.mask, value, zero)
            gradient = None if gradient is None else torch.where(self.mask, gradient, zero)
        scale = z if self.unit_free else value
        if self.unit_free and self.mask is not None:
            scale = torch.where(self.mask, z, residual.new_zeros(()))
        view, seen = None, None
        if self.measure is None:
            sizes = self.layout.sizes
            size, reference = norms(residual.detach(), scale.detach(), sizes)
        else:
            view, image, sizes = self._measured(z, value)
            seen = image - view
            size, reference = norms(seen, view if self.unit_free else image, sizes)
            size = size.where(torch.isfinite(residual.detach()).all(1, keepdim=True), torch.inf)
        return Evaluation(z, residual, size, reference, energy, gradient, sizes, view, seen)

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

    def projected(self, z: Tensor) -> Tensor:
        """z (B, D) within the bounds; masked coordinates, and all without bounds, stay."""
        if self.bounds is None:
            return z
        inside = torch.clamp(z, *self.bounds)
        return inside if self.mask is None else torch.where(self.mask, inside, z)

    def evaluate_first(self, z: Tensor) -> Evaluation:
        """:meth:`evaluate` at the caller's own tensors, whatever f does to them.

        Raises:
            ValueError: if f works in place on its inputs, which keep their numbers, draws random
                numbers that its value or energy depends on, or normalises over the batch.
        """
        self.random = random_state(z.device)
        with constant_inputs(z, self.args), constant_norms(self.modules):
            point = self.evaluate(z)
        refuse_forward_mode(point.residual)
        if random_state(z.device) != self.random:
            refuse_random(self.evaluate, point)
        return point

    def check_last(self, z: Tensor) -> None:
        """Raise ValueError where random numbers change f at the solution.

        At the start they may not: dropout leaves zeros alone, and ``RReLU`` draws below zero only.
        """
        if self.random is not None and random_state(z.device) != self.random:
            with torch.no_grad():
                refuse_random(self.evaluate, self.evaluate(z.detach()))

    def joint(self, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """``(f(z), E(z), dE/dz, f(z) - z)``; None for what there is not, or is not known by itself."""
        return self._run(self._call, z)

    def image(self, z: Tensor) -> Tensor:
        """``f(z)`` (B, D), whatever the mask says."""
        return self._run(partial(self._call, energies=False), z)[0]

    def masked_map(self, z: Tensor) -> Tensor:
        """``f(z)`` where the mask is True, the constant z elsewhere; all of ``f(z)`` without mask."""
        if self.mask is None:
            return self.image(z)
        constant = z.detach()
        return torch.where(self.mask, self.image(torch.where(self.mask, z, constant)), constant)

    def _run(self, function: Callable[[Tensor], Any], z: Tensor) -> Any:
        try:
            mode: Any = nullcontext()
            if self.autocast is not None:
                mode = torch.autocast(z.device.type, self.autocast)
            with mode:
                if self.recorder is not None and torch.is_grad_enabled():
                    return self.recorder(function, z)
                if torch.is_inference_mode_enabled():  # which refuses to change tensors of its own
                    with torch.inference_mode(False), torch.no_grad():
                        return function(z)
                version = z._version
                result = function(z)
                if z._version != version:
                    raise ValueError(OVERWRITES.format("its input"))
                return result
        except (RuntimeError, ValueError, IndexError) as error:
            if "Inplace update to inference tensor" in str(error):
                raise ValueError(OVERWRITES.format("its input")) from error
            if self.batch:  # then f has most likely closed over the whole batch
                hint = _SHRUNK.format(z.shape[0]) + self.layout.scalars(self.batch)
                error.args = (f"{error}\n{hint}", *error.args[1:])
            raise

    def _call(
        self, z: Tensor, energies: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        tree, energy, gradient = self.layout.tree(z), None, None
        if isinstance(self.f, RootUpdate):
            residual = -self.layout.vector(self.f.function(tree, *self.args)).to(z.dtype)
            return z + residual, None, None, residual
        if energies and isinstance(self.f, EnergyUpdate) and self.energy is None:
            output, energy, gradient = self.f.joint(tree, *self.args)
        else:
            output = self.f(tree, *self.args)
            if energies and self.energy is not None:
                energy = self.energy(tree, *self.args)
        if energy is not None:
            check_energy(energy, len(z))
        gradient = None if gradient is None else self.layout.vector(gradient)
        alone = isinstance(output, Tensor) and isinstance(tree, Tensor)
        same = alone and output.shape == tree.shape and output.dtype == tree.dtype
        if not (same and output.device == tree.device):
            cast = self.autocast is not None
            check_like(self.layout.ordered(output), tree, "f(z)", "z0", cast=cast)
        value = self.layout.vector(output).to(z.dtype)
        return value if self.bounds is None else self.projected(value), energy, gradient, None

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


class VectorProblem(Problem):
    """A map of vectors (B, D), made here, of which nothing need be asked."""

    def joint(self, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.f(z), None, None, None

    def image(self, z: Tensor) -> Tensor:
        return self.f(z)


_TRACKED = (
    "FlopCounterMode and ModuleTracker cannot follow the backward pass of Implicit() where a module is "
    "called with a weight, as parametrizations are: count with adjoint=OneStep() or Phantom(), or "
    "layer.unrolled(k)"
)
_SHRUNK = (
    "f was called with the {} samples that are still being solved. If it closes over a tensor of "
    "the whole batch, pass that tensor in args=(...), or set compact=False."
)
