"""Find ``z = f(z)`` for a batch of samples and make the solution differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import require_callable, require_count, require_flag, require_instance
from solvers.core.layout import Layout, check_args, check_batched
from solvers.core.loop import Loop
from solvers.core.modes import autocast_dtype, constant_weights, eager, without_autocast
from solvers.core.problem import EnergyUpdate, Problem
from solvers.core.rows import Progress
from solvers.core.solution import Solution, apply_policy, check_on_failure
from solvers.core.solver import ExternalSolver, Solver
from solvers.core.tolerance import Tolerance
from solvers.methods.anderson import Anderson
from solvers.methods.lbfgs import LBFGS
from solvers.methods.rescue import rescue

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
            Samples that these give up are tried again from their best iterate by plain steps and, if
            there is no energy, by Newton's method with finite differences; other solvers, or these
            when they are named, are left alone.
        tolerance: a sample has converged where ``|f(z) - z| <= max(atol, rtol |f(z)|)``.
        max_steps: evaluations of ``f`` per sample, an upper bound that is kept.
        adjoint: how gradients flow (``Implicit``, ``Unrolled``, ``Phantom``, ``OneStep``); None: no
            gradient.
        energy: ``energy(z, *args) -> (B,)`` turns the safeguard on: no accepted step raises it.
        mask: (B, N) bool, False at masked tokens: they keep their initial value and enter no norm.
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
    automatic = solver is None
    if solver is None:
        descends = isinstance(f, EnergyUpdate) and f.symmetric and energy is None
        solver = LBFGS() if descends else Anderson()
    _check_options(solver, tolerance, max_steps, adjoint, f, energy)
    require_flag("compact", compact)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    if isinstance(solver, ExternalSolver):
        _check_external(solver, energy=energy is not None, record=record, callback=callback)
    check_on_failure(on_failure)
    layout = Layout.of(z0)
    _check_inputs(z0, args, mask)
    start = layout.vector(z0)
    problem = Problem(
        f,
        layout,
        args,
        autocast_dtype(start.device.type),
        energy=energy,
        mask=None if mask is None else layout.mask_vector(mask),
        symmetric=bool(getattr(f, "symmetric", False)),
        compact=compact,
    )

    def solve(target: Problem, vector: Tensor) -> Solution:
        # Parametrised weights are constant during a solve and computed once. The solver's own algebra
        # runs without autocast, which Problem restores around f.
        with constant_weights(), without_autocast(vector.device.type):
            if isinstance(solver, ExternalSolver):
                return solver.run(target, vector, tolerance, max_steps)
            options = (tolerance, max_steps, record, callback)
            solution = _first_attempt(target, vector, solver, *options)
            return rescue(target, solution, *options) if automatic else solution

    if adjoint is not None and torch.is_grad_enabled():
        solution = adjoint.solve(problem, start, solve, tolerance)
    else:
        with torch.no_grad():
            solution = solve(problem, start.detach())
    solution.value = layout.tree(solution.value)
    # Above this function is the wrapper of its decorator, above that the caller.
    apply_policy(solution, on_failure, "fixed-point solve", stacklevel=4)
    return solution


def _first_attempt(
    problem: Problem,
    start: Tensor,
    solver: Solver,
    tolerance: Tolerance,
    max_steps: int,
    record: bool,
    callback: Callable[[Progress], object] | None,
) -> Solution:
    first = problem.evaluate(start)
    loop = Loop(problem, first, solver, tolerance, max_steps, record, callback)
    del first  # the loop frees it when it has moved on
    return loop.run()


def _check_options(
    solver: Any, tolerance: object, max_steps: object, adjoint: object, f: object, energy: object
) -> None:
    require_callable("f", f)
    require_callable("energy", energy, optional=True)
    require_instance("solver", solver, Solver, "a solvers.Solver such as Anderson()")
    require_instance("tolerance", tolerance, Tolerance, "a solvers.Tolerance")
    require_instance("adjoint", adjoint, Adjoint, "a solvers.Adjoint", optional=True)
    require_count("max_steps", max_steps)
    if solver.needs_energy and not (isinstance(f, EnergyUpdate) and energy is None):
        raise ValueError(
            f"{type(solver).__name__} minimises an energy and needs its gradient: pass f as an "
            "EnergyUpdate, for example solvers.Descent(energy)"
        )


def _check_external(solver: ExternalSolver, **options: object) -> None:
    unknown = [name for name, given in options.items() if given]
    if unknown:
        raise ValueError(
            f"{solver!r} has a loop of its own, which knows no {unknown}: leave them out"
        )


def _check_inputs(z0: Any, args: tuple[Any, ...], mask: Tensor | None) -> None:
    """Batch sizes, devices and finiteness of everything that comes in."""
    leaves = pytree.tree_leaves(z0)
    batch, device = leaves[0].shape[0], leaves[0].device
    check_args(args, batch, device, "z0", "f")
    named = {"z0": z0, **{f"args[{position}]": value for position, value in enumerate(args)}}
    for name, tree in named.items():
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                _check_finite(leaf, name)
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() != 2:
            raise TypeError(f"mask must be a bool tensor (B, N), got {mask!r}")
        check_batched(mask, "mask", batch, device, "z0", "f")
        if not any(t.dim() > 1 and t.shape[1] == mask.shape[1] for t in leaves):
            shapes = [tuple(t.shape) for t in leaves]
            raise ValueError(f"mask has {mask.shape[1]} tokens, which no leaf of z0 has: {shapes}")


def _check_finite(leaf: Tensor, name: str) -> None:
    """Raise ValueError for NaN or infinity; not on a GPU, where asking would wait for the device."""
    if leaf.device.type != "cpu" or bool(torch.isfinite(leaf.detach().sum())):
        return
    if leaf.dim() == 0:
        raise ValueError(f"{name} must be finite, got {leaf.item()}")
    bad = ~torch.isfinite(leaf.detach()).reshape(leaf.shape[0], -1).all(1)
    if bool(bad.any()):
        rows = torch.nonzero(bad).flatten().tolist()
        raise ValueError(f"{name} must be finite, got NaN or infinity in samples {rows[:10]}")
