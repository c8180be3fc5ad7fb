"""The entry: find ``z = f(z)`` for a batch and make the answer differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import require_count
from solvers.core.failures import check_on_failure, report
from solvers.core.layout import Layout, check_batched, check_leaves
from solvers.core.loop import Loop
from solvers.core.modes import Autocast, constant_weights, eager, without_autocast
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.rows import Progress
from solvers.core.solution import Solution
from solvers.core.solver import ExternalSolver, Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.lbfgs import LBFGS

_DEFAULT_TOLERANCE = Tolerance()
_DEFAULT_ADJOINT = Implicit()


@eager
def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver | None = None,
    tolerance: Tolerance = _DEFAULT_TOLERANCE,
    max_steps: int = 50,
    adjoint: Adjoint | None = _DEFAULT_ADJOINT,
    energy: Callable[..., Tensor] | None = None,
    mask: Tensor | None = None,
    record: bool = False,
    on_failure: str = "warn",
    compact: bool = True,
    callback: Callable[[Progress], object] | None = None,
) -> Solution:
    """Solve ``z = f(z, *args)`` for every sample of a batch.

    Args:
        f: map from a state to a state of the same structure, shapes and dtypes, each sample on its
            own; or an :class:`EnergyUpdate`, which brings its energy along.
        z0: initial state, a tensor (B, ...) or a pytree of them, any floating dtype.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0. Finished samples
            leave the batch, so whatever is batched must come through here (or ``compact=False``).
            Tensors that all samples share (weights) belong into ``f`` itself; gradients reach them.
        solver: default ``LBFGS()`` where ``f`` is a gradient step of an energy, else ``Anderson()``.
        tolerance: a sample has converged where ``|f(z) - z| <= max(atol, rtol |f(z)|)``.
        max_steps: evaluations of ``f`` per sample, an upper bound that is kept.
        adjoint: how gradients flow (``Implicit``, ``Unrolled``, ``Phantom``, ``OneStep``); None: no
            gradient.
        energy: ``energy(z, *args) -> (B,)`` turns the safeguard on: no accepted step raises it.
        mask: (B, N) bool, tokens that count; the others keep their initial value.
        record: keep the trace of residuals (and energies).
        on_failure: what to do about samples that did not converge: "warn", "raise" or "ignore".
        compact: let finished samples leave the batch; False where ``f`` closes over batched tensors.
        callback: called with a :class:`Progress` after every evaluation.

    Returns:
        A :class:`Solution`; ``value`` is the best iterate seen, ``residual`` belongs to it.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.
    """
    solver = _choose(solver, f, energy)
    options: dict[str, Any] = {"compact": compact, "record": record, "callback": callback}
    _check_options(solver, tolerance, max_steps, adjoint, f, energy, options)
    check_on_failure(on_failure)
    layout = Layout.of(z0)
    args = _check_inputs(z0, args, mask)
    start = layout.vector(z0)
    symmetric = bool(getattr(f, "symmetric", False))
    problem = Problem(f, layout, args, energy, mask, symmetric)
    problem.compact = compact
    problem.autocast = Autocast.now(start.device.type)

    def solve(target: Problem, vector: Tensor) -> Solution:
        # Weights stand still during a solve: parametrised ones are computed once. The solver's own
        # algebra keeps its precision under autocast; f gets it back (Problem._run).
        with constant_weights(), without_autocast(vector.device.type):
            if isinstance(solver, ExternalSolver):
                return solver.run(target, vector, tolerance, max_steps)
            return Loop(target, solver, tolerance, max_steps, **options).run(vector)

    differentiate = adjoint is not None and torch.is_grad_enabled()
    if adjoint is not None and differentiate:
        solution = adjoint.solve(problem, start, solve, tolerance)
    else:
        with torch.no_grad():
            solution = solve(problem, start.detach())
    solution.value = layout.tree(solution.value)
    report(solution, on_failure, "fixed-point solve", stacklevel=4)
    return solution


def _choose(
    solver: Solver | None, f: Callable[..., Any], energy: Callable[..., Tensor] | None
) -> Solver:
    if solver is not None:
        return solver
    descends = isinstance(f, EnergyUpdate) and f.symmetric and energy is None
    return LBFGS() if descends else Anderson()


def _check_options(
    solver: object,
    tolerance: object,
    max_steps: object,
    adjoint: object,
    f: object,
    energy: object,
    options: dict[str, Any],
) -> None:
    if not callable(f):
        raise TypeError(f"f must be callable, got {type(f)}")
    if energy is not None and not callable(energy):
        raise TypeError(f"energy must be callable or None, got {type(energy)}")
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a solvers.Solver such as Anderson(), got {solver!r}")
    if not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a solvers.Tolerance, got {tolerance!r}")
    if adjoint is not None and not isinstance(adjoint, Adjoint):
        raise TypeError(f"adjoint must be a solvers.Adjoint or None, got {adjoint!r}")
    require_count("max_steps", max_steps)
    for name in ("compact", "record"):
        if not isinstance(options[name], bool):
            raise TypeError(f"{name} must be True or False, got {options[name]!r}")
    if options["callback"] is not None and not callable(options["callback"]):
        raise TypeError(f"callback must be callable or None, got {options['callback']!r}")
    unwatched = [name for name in ("record", "callback") if options[name]]
    if isinstance(solver, ExternalSolver) and energy is not None:
        raise ValueError(
            f"{solver!r} has a loop of its own, which takes no energy: leave energy out"
        )
    if isinstance(solver, ExternalSolver) and unwatched:
        raise ValueError(f"{solver!r} has a loop of its own, which knows no {unwatched}")
    if solver.needs_energy and not (isinstance(f, EnergyUpdate) and energy is None):
        raise ValueError(
            f"{type(solver).__name__} minimises an energy and needs its gradient: pass f as an "
            "EnergyUpdate, for example solvers.Descent(energy)"
        )


def _check_inputs(z0: Any, args: Any, mask: Tensor | None) -> tuple[Any, ...]:
    """Batch sizes, devices and finiteness of everything that comes in."""
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of inputs, got {type(args)}")
    leaves = pytree.tree_leaves(z0)
    check_leaves(leaves, "z0")
    batch, device = leaves[0].shape[0], leaves[0].device
    for position, argument in enumerate(args):
        name = f"args[{position}]"
        check_batched(argument, name, batch, device, "z0", "f")
        for leaf in pytree.tree_leaves(argument):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                _check_finite(leaf, name)
    for leaf in leaves:
        _check_finite(leaf, "z0")
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
            raise TypeError(f"mask must be a bool tensor (B, N), got {mask!r}")
        check_batched(mask, "mask", batch, device, "z0", "f")
        if not any(t.dim() > 1 and t.shape[1] == mask.shape[1] for t in leaves):
            shapes = [tuple(t.shape) for t in leaves]
            raise ValueError(f"mask has {mask.shape[1]} tokens, which no leaf of z0 has: {shapes}")
    return args


def _check_finite(leaf: Tensor, name: str) -> None:
    """Non-finite input is the caller's mistake; on a GPU asking would wait for the device."""
    if leaf.device.type != "cpu" or bool(torch.isfinite(leaf.detach().sum())):
        return
    if leaf.dim() == 0:
        raise ValueError(f"{name} must be finite, got {leaf.item()}")
    bad = ~torch.isfinite(leaf.detach()).reshape(leaf.shape[0], -1).all(1)
    if bool(bad.any()):
        rows = torch.nonzero(bad).flatten().tolist()
        raise ValueError(f"{name} must be finite, got NaN or infinity in samples {rows[:10]}")
