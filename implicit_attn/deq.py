"""The deep-equilibrium layer: the fixed point of an update, or the minimum of an energy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import solvers
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.heads.inputs import expand_pairs
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.simple import FunctionEnergy
from implicit_attn.updates.gradient_step import EnergyStep, GradientStep
from implicit_attn.updates.update import FunctionUpdate, Update
from solvers.core.checks import require_count, require_flag, require_instance
from solvers.core.guards.randomness import refuse_drawing_modules
from solvers.core.modes import eager, in_transform
from solvers.core.solution import check_on_failure

OPTIONS = ("solver", "tolerance", "max_steps", "adjoint", "on_failure", "compact")


class DEQ(nn.Module):
    """Deep-equilibrium layer: its output is the fixed point ``z* = f(z*, x)`` of an update f.

    The forward pass finds z* of every sample with a solver instead of applying a number of layers. The
    backward pass differentiates the equation at z* (implicit function theorem): with the incoming
    gradient g it solves the linear system ``u = g + (df/dz)^T u`` and returns ``(df/dx)^T u``, and
    likewise for the parameters. Its memory does not grow with the number of iterations.

    Args:
        update: f, an :class:`Update`; or an :class:`Energy`, for ``GradientStep(energy)``.
        solver: a ``solvers.Solver``; None: L-BFGS for gradient steps with one step size, else
            Anderson.
        tolerance: ``solvers.Tolerance``, for each sample; None: ``Tolerance()``, but in half precision
            and under autocast what f can meet (:func:`solvers.fixed_point`).
        max_steps: maximal number of evaluations of f for each sample.
        adjoint: how gradients are computed, ``solvers.Implicit()`` by default; None: no gradients.
        init: the initial state: "input" (``update.initial(x)``, for most updates x), "zeros" (like x),
            or a function ``x -> z0``.
        on_failure: what to do about samples that do not converge: "warn", "raise" or "ignore".
        compact: let finished samples leave the batch; False where the update holds batched tensors.

    Shapes: ``x`` (B, N, d) -> (B, N, d), or any pytree of tensors (B, ...) that the update takes.
    ``mask`` (B, N) bool is False at masked tokens: they keep their initial state, influence no other
    token and are left out of the residual.

    Attributes:
        last: the :class:`solvers.Solution` of the latest solve without its value: status, residual and
            evaluations of each sample, and ``last.adjoint.solution`` after a backward pass.

        evaluations_before: evaluations that a module around the layer has made of an initial state which
            it hands over, 0 by default; ``last`` counts them with those of the solve.

    Example:
        >>> layer = DEQ(BiSoftmaxAttention(64, heads=4) + ReLUFeedForward(64, 128) + Quadratic())
        >>> z = layer(x)  # (B, N, 64)
        >>> layer.solve(x, max_steps=200).status

    Source: Bai, Kolter, Koltun, "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377.
    """

    def __init__(
        self,
        update: Update | Energy,
        *,
        solver: solvers.Solver | None = None,
        tolerance: solvers.Tolerance | None = None,
        max_steps: int = 50,
        adjoint: solvers.Adjoint | None = solvers.Implicit(),  # noqa: B008 (immutable)
        init: str | Callable[[Any], Any] = "input",
        on_failure: str = "warn",
        compact: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(update, Energy):
            update = GradientStep(update)
        if not isinstance(update, Update):
            raise TypeError(
                "update must be an Update or an Energy (wrap plain functions by DEQ.from_update or "
                f"DEQ.from_energy), got {type(update)}"
            )
        if not callable(init) and init not in ("input", "zeros"):
            raise ValueError(f'init must be "input", "zeros" or a function of x, got {init!r}')
        self.update = update
        require_instance("solver", solver, solvers.Solver, "a solvers.Solver", optional=True)
        require_instance("adjoint", adjoint, solvers.Adjoint, "a solvers.Adjoint", optional=True)
        require_instance(
            "tolerance", tolerance, solvers.Tolerance, "a solvers.Tolerance", optional=True
        )
        self.solver, self.tolerance, self.adjoint = solver, tolerance, adjoint
        self.max_steps = require_count("max_steps", max_steps)
        check_on_failure(on_failure)
        self.init, self.on_failure = init, on_failure
        self.compact = require_flag("compact", compact)
        self.last: solvers.Solution | None = None
        self.evaluations_before = 0

    @classmethod
    def from_energy(
        cls, function: Callable[..., Tensor], *, step_size: float = 1.0, **options: Any
    ) -> DEQ:
        """The layer of an energy ``function(z)`` or ``function(z, x)`` -> (B,); options of ``DEQ``."""
        return cls(GradientStep(FunctionEnergy(function), step_size), **options)

    @classmethod
    def from_update(
        cls, function: Callable[..., Any], *, symmetric: bool = False, **options: Any
    ) -> DEQ:
        """The layer of an update ``function(z)`` or ``function(z, x)``; options of ``DEQ``."""
        return cls(FunctionUpdate(function, symmetric=symmetric), **options)

    def forward(self, x: Any, mask: Tensor | None = None, **options: Any) -> Any:
        """The fixed point for the input ``x``, of the structure of the initial state.

        ``options`` are those of :meth:`solve`, except ``states_at``.
        """
        if "states_at" in options:
            raise TypeError("states_at is an option of solve, whose solution has the states")
        return self.solve(x, mask, **options).value

    @eager
    def solve(
        self,
        x: Any,
        mask: Tensor | None = None,
        *,
        z0: Any = None,
        record: bool = False,
        callback: Callable[[solvers.Progress], object] | None = None,
        states_at: Sequence[int] = (),
        **options: Any,
    ) -> solvers.Solution:
        """The :class:`solvers.Solution`, whose ``value`` has the same gradients as ``forward``'s.

        Args:
            x, mask: as for the layer.
            z0: initial state, instead of that of ``init``.
            record: keep the trace of residuals and energies.
            callback: called after every evaluation.
            states_at: numbers of evaluations after which ``Solution.states`` has the state, with a
                gradient; see :func:`solvers.fixed_point`.
            options: solver, tolerance, max_steps, adjoint, on_failure or compact, for this solve only.

        Raises:
            TypeError, ValueError: for arguments that do not fit, naming the argument.
            solvers.SolveError: if ``on_failure="raise"`` and a sample did not converge.
        """
        unknown = sorted(set(options) - set(OPTIONS))
        if unknown:
            raise TypeError(f"unknown options {unknown}; solve takes {list(OPTIONS)}")
        x = _check_inputs(x, mask, self.update, z0)
        prepared = self.update.prepare(x, mask=mask)
        start = self._initial(x, prepared) if z0 is None else z0
        if prepared is not x:  # the solver will not see x itself
            _check_batched(x, start)
        elif not _prepares(self.update):  # else the module may serve there, once a solve
            refuse_drawing_modules(self.update, "the update")
        given, spec = _flat(prepared)
        chosen: dict[str, Any] = {name: getattr(self, name) for name in OPTIONS} | options
        solution = solvers.fixed_point(
            (_MonitoredMap if self.update.monitored else _Map)(self.update, self, spec),
            start,
            (given, mask),
            mask=mask,
            record=record,
            callback=callback,
            states_at=states_at,
            **chosen,
        )
        if not in_transform():  # a transform's tensors are good only within it
            spent = solution.evaluations + self.evaluations_before
            self.last = replace(solution, value=None, states=None, evaluations=spent)
        return solution

    def extra_repr(self) -> str:
        return f"solver={self.solver}, tolerance={self.tolerance}, max_steps={self.max_steps}"

    def _initial(self, x: Any, prepared: Any) -> Any:
        if callable(self.init):
            return self.init(x)
        kind = type(self.update)
        own = kind.initial is not Update.initial or kind.start is not Update.start
        if self.init == "input" and own:
            return self.update.start(x, prepared)
        if not isinstance(x, Tensor):
            raise TypeError(
                f"x must be a tensor where init={self.init!r}, got {type(x)}; give init a function "
                "x -> z0"
            )
        return x if self.init == "input" else torch.zeros_like(x)


def _prepares(update: nn.Module) -> bool:
    """Whether a part of the update has a ``prepare`` of its own."""
    return any(
        isinstance(part, Update)
        and not isinstance(part, EnergyStep)  # which asks its energy
        and type(part).prepare is not Update.prepare
        for part in update.modules()
    )


def _check_inputs(x: Any, mask: Tensor | None, update: nn.Module, z0: Any = None) -> Any:
    """Check shapes, finiteness and, without autocast, the dtype: that of the parameters.

    Finiteness is checked on the CPU only: on a GPU the check would wait for the device.

    Returns:
        ``x``, with a matrix of pairs for all samples expanded to one for each of them.
    """
    if mask is not None and (
        not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2
    ):
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(f"mask must be a bool tensor (B, N), got {what}")
    wanted = {p.dtype for p in update.parameters() if p.is_floating_point()}
    leaves = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.dim() == 0 or leaf.shape[0] == 0:
            raise ValueError(
                f"x must have a batch dimension (B, ...) and hold at least one sample, got shape "
                f"{tuple(leaf.shape)}"
            )
        if not leaf.is_floating_point():
            continue
        kind = leaf.device.type
        if kind == "cpu" and leaf.dim() > 1 and not in_transform():
            bad = ~torch.isfinite(leaf.detach()).flatten(1).all(1)
            if bool(bad.any()):
                rows = torch.nonzero(bad).flatten().tolist()
                raise ValueError(f"x must be finite, got NaN or infinity in samples {rows[:10]}")
        if len(wanted) == 1 and leaf.dtype not in wanted and not torch.is_autocast_enabled(kind):
            raise TypeError(
                f"x must have the dtype of the layer's parameters, {next(iter(wanted))}, got "
                f"{leaf.dtype}; convert one of them with .to()"
            )
    return _batched(x, leaves, mask, z0)


def _batched(x: Any, leaves: list[Tensor], mask: Tensor | None, z0: Any) -> Any:
    """``x`` with a matrix of pairs for all samples expanded to one for each; the mask has as many.

    A tensor of two dimensions may be such a matrix, so the number of samples is that of a deeper one.
    """
    starts = [leaf for leaf in pytree.tree_leaves(z0) if isinstance(leaf, Tensor) and leaf.dim()]
    deep = [leaf for leaf in leaves if leaf.dim() > 2] or starts
    if deep:
        x = expand_pairs(x, deep[0].shape[0])
    elif mask is not None:
        x = expand_pairs(x, mask.shape[0])
        deep = [leaf for leaf in pytree.tree_leaves(x) if isinstance(leaf, Tensor)]
    if mask is not None and deep and mask.shape[0] != deep[0].shape[0]:
        raise ValueError(
            f"mask must be batched like x, {deep[0].shape[0]} samples, got shape {tuple(mask.shape)}"
        )
    return x


def _check_batched(x: Any, start: Any) -> None:
    """Tensors of three dimensions or more in ``x`` have one sample for each of the initial state.

    A matrix may be a pattern for all samples, such as pairs (N, N), of which each gets its own.
    """
    leaves = [leaf for leaf in pytree.tree_leaves(start) if isinstance(leaf, Tensor)]
    if not leaves or leaves[0].dim() == 0:
        return  # for the solver to say
    batch = leaves[0].shape[0]
    for leaf in pytree.tree_leaves(x):
        if isinstance(leaf, Tensor) and leaf.dim() > 2 and leaf.shape[0] != batch:
            raise ValueError(
                f"x must be batched along dim 0 like the initial state ({batch} samples), got shape "
                f"{tuple(leaf.shape)}"
            )


def _flat(prepared: Any) -> tuple[Any, Any]:
    """The tensors of what was prepared, through which solvers go often, and how they belong together.

    What is no deep tree stays as it is, with None for the other part.
    """
    if not isinstance(prepared, Prepared):
        return prepared, None
    leaves, spec = pytree.tree_flatten(prepared)
    return tuple(leaves), spec


class _Map:
    """An update as the function ``f(z, x, mask)`` that ``solvers.fixed_point`` takes."""

    def __init__(self, update: Update, layer: DEQ, spec: Any) -> None:
        self.update, self.symmetric = update, update.symmetric
        self.layer = layer  # named by warnings
        self.spec = spec

    def __call__(self, z: Any, x: Any, mask: Tensor | None) -> Any:
        return self.update(z, self.whole(x), mask=mask)

    def whole(self, x: Any) -> Any:
        """What was prepared, from the tensors in it."""
        return x if self.spec is None else pytree.tree_unflatten(list(x), self.spec)


class _MonitoredMap(_Map, solvers.EnergyUpdate):
    """A monitored update as a ``solvers.EnergyUpdate``."""

    def joint(self, z: Any, x: Any, mask: Tensor | None) -> tuple[Any, Tensor, Any | None]:  # type: ignore[override]
        return self.update.joint(z, self.whole(x), mask=mask)
