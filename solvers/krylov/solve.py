"""Batches of linear systems ``A x = b``, matrix-free, every sample on its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from solvers.core.checks import require_count
from solvers.core.layout import Layout, check_batched, check_leaves
from solvers.core.modes import eager
from solvers.core.rows import Progress
from solvers.core.solution import Solution, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.krylov.cg import CG
from solvers.krylov.gmres import GMRES
from solvers.krylov.loop import LinearLoop
from solvers.krylov.method import LinearSolver
from solvers.krylov.minres import MINRES
from solvers.krylov.product import Product

__all__ = ["CG", "GMRES", "MINRES", "LinearSolver", "solve_linear"]

_DEFAULT_SOLVER = CG()
_DEFAULT_TOLERANCE = Tolerance(rtol=1e-6)


@eager
def solve_linear(
    matvec: Callable[..., Any],
    b: Any,
    *,
    solver: LinearSolver = _DEFAULT_SOLVER,
    tolerance: Tolerance = _DEFAULT_TOLERANCE,
    max_steps: int = 100,
    x0: Any = None,
    args: tuple[Any, ...] = (),
    compact: bool = True,
    on_failure: str = "warn",
    record: bool = False,
    callback: Callable[[Progress], object] | None = None,
) -> Solution:
    """Solve ``A x = b`` for every sample of a batch, given products with ``A``.

    No gradient is recorded: the result is detached (``matvec`` may differentiate inside).

    Args:
        matvec: ``matvec(v, *args) -> A v``, of the structure, shapes and dtypes of ``v``; linear,
            and each sample on its own.
        b: right-hand sides, a tensor (B, ...) or a pytree of them, any floating dtype. Below
            float32 the products run in the dtype of ``b`` and everything else in float32.
        solver: ``CG()`` for symmetric positive definite matrices, ``MINRES()`` for symmetric ones,
            ``GMRES(restart)`` for all.
        tolerance: a sample has converged where ``|b - A x| <= max(atol, rtol |b|)``.
        max_steps: products with ``A`` per sample, those that check a residual included: an upper
            bound that is kept.
        x0: where to start, like ``b``; default zero. Costs one product, for the first residual.
        args: further inputs of ``matvec``, pytrees of tensors batched along dim 0. Finished samples
            leave the batch, so whatever is batched must come through here (or ``compact=False``).
            Tensors that all samples share belong into ``matvec`` itself.
        compact: let finished samples leave the batch once they are 1/16 of it; False where
            ``matvec`` closes over batched tensors (finished samples are then carried along).
        on_failure: what to do about samples that did not converge: "warn", "raise" or "ignore".
        record: keep the trace: column 0 is the relative residual at the start, each further column
            the one after one more product with ``A``, NaN where the sample took none.
        callback: called with a :class:`Progress` after every batch of products.

    Returns:
        A :class:`Solution`. ``value`` is the best iterate seen, always finite. ``steps`` counts the
        steps of the Krylov method, ``evaluations`` the products. ``residual`` belongs to ``value``:
        it is verified by a product with ``A`` whenever rounding could make the recurrence lie by
        more than about a tenth of it (or of the tolerance), and a sample that fails the check is
        taken up again from the true residual. A right-hand side that is zero is solved by zero, in
        no step; one that is not finite ends as NONFINITE with an infinite residual.

        Statuses: CONVERGED; MAX_STEPS; STALLED, the residual cannot be lowered (singular matrix,
        rounding, a cycle of GMRES that gained nothing); NONFINITE, NaN or infinity in ``b``, in
        ``x0`` or in a product; INDEFINITE, CG met a direction of non-positive curvature.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.
    """
    _check_options(matvec, solver, tolerance, max_steps, args)
    check_on_failure(on_failure)
    layout = Layout.of(b, "b")
    leaves = pytree.tree_leaves(b)
    batch, device = leaves[0].shape[0], leaves[0].device
    if sum(shape.numel() for shape in layout.shapes) == 0:
        raise ValueError("b must hold at least one number per sample, got none")
    for position, argument in enumerate(args):
        check_batched(argument, f"args[{position}]", batch, device, "b", "matvec")
    if x0 is not None:
        _check_start(x0, layout, batch, device)
    with torch.no_grad():
        product = Product(matvec, layout, args, batch)
        loop = LinearLoop(
            product, solver, tolerance, max_steps, compact=compact, record=record, callback=callback
        )
        start = None if x0 is None else layout.vector(x0)
        solution = loop.run(layout.vector(b), start)
        solution.value = layout.tree(solution.value)
    # Above this function is the wrapper of its decorator, above that the caller.
    apply_policy(solution, on_failure, f"linear solve with {solver}", stacklevel=4)
    return solution


def _check_options(
    matvec: object, solver: object, tolerance: object, max_steps: object, args: object
) -> None:
    if not callable(matvec):
        raise TypeError(f"matvec must be callable, got {type(matvec)}")
    if not isinstance(solver, LinearSolver):
        raise TypeError(f"solver must be CG(), MINRES() or GMRES(restart), got {solver!r}")
    if not isinstance(tolerance, Tolerance):
        raise TypeError(f"tolerance must be a solvers.Tolerance, got {tolerance!r}")
    require_count("max_steps", max_steps)
    if not isinstance(args, tuple):
        raise TypeError(f"args must be a tuple of inputs, got {type(args)}")


def _check_start(x0: Any, layout: Layout, batch: int, device: torch.device) -> None:
    """``x0`` has the structure, shapes, dtypes and device of ``b``."""
    leaves, spec = pytree.tree_flatten(x0)
    if spec != layout.spec:
        raise TypeError(f"x0 must have the structure of b, {layout.spec}, got {spec}")
    check_leaves(leaves, "x0")
    for leaf, shape, dtype in zip(leaves, layout.shapes, layout.dtypes, strict=True):
        if leaf.shape != (batch, *shape):
            raise ValueError(
                f"x0 must have shape {(batch, *shape)} like b, got {tuple(leaf.shape)}"
            )
        if leaf.dtype != dtype:
            raise TypeError(f"x0 must have dtype {dtype} like b, got {leaf.dtype}")
        if leaf.device != device:
            raise ValueError(f"x0 must be on {device} like b, got {leaf.device}")
