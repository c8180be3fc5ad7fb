"""The entry for linear systems: ``A x = b`` for a batch, from products with ``A``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_callable, require_count, require_flag, require_kind
from solvers.core.layout import Layout, check_args, leaves_of
from solvers.core.modes import eager
from solvers.core.rows import Progress
from solvers.core.solution import Solution, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance, read_tolerance
from solvers.krylov.cg import CG
from solvers.krylov.gmres import GMRES
from solvers.krylov.loop import LinearLoop
from solvers.krylov.method import LinearSolver
from solvers.krylov.minres import MINRES
from solvers.krylov.product import OneMinus, Product, System, check_like
from solvers.native.library import serves
from solvers.native.systems import fits, solve_systems

__all__ = ["CG", "GMRES", "LINEAR", "MINRES", "LinearSolver", "solve_linear"]

LINEAR = (CG, MINRES, GMRES)
_DEFAULT_SOLVER = CG()
_DEFAULT_TOLERANCE = Tolerance(rtol=1e-6)


@eager
def solve_linear(
    matvec: Callable[..., Any],
    b: Any,
    *,
    solver: LinearSolver | type[LinearSolver] | str = _DEFAULT_SOLVER,
    tolerance: Tolerance | float | None = None,
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
        matvec: ``matvec(v, *args) -> A v``, of the structure, shapes and dtypes of ``v``; linear in
            ``v``, and each sample by itself.
        b: right-hand sides, a tensor (B, ...) or a pytree of them, any floating dtype. Below
            float32 the products run in the dtype of ``b`` and everything else in float32.
        solver: ``CG()`` for symmetric positive definite matrices, ``MINRES()`` for symmetric ones,
            ``GMRES(restart)`` for all; or its class, or its name (``"gmres"``).
        tolerance: a sample has converged where ``|b - A x| <= max(atol, rtol |b|)``; a number is
            ``rtol``, None 1e-6.
        max_steps: largest number of products with ``A`` per sample, those that verify a residual
            included.
        x0: initial iterate, like ``b``; default zero. Costs one product, for the first residual.
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
        steps of the Krylov method, ``evaluations`` the products. ``residual`` belongs to ``value``.
        It is verified by a product with ``A`` wherever rounding could put the residual of the
        recurrence off by more than about a tenth of it (or of the tolerance); a sample that has not
        converged by its true residual is solved further from there. A right-hand side that is zero
        is solved by zero, in no step. One that is not finite ends as NONFINITE with an infinite
        residual.

        Statuses: CONVERGED; MAX_STEPS; STALLED, the residual cannot be lowered (singular matrix,
        rounding, a cycle of GMRES that gained nothing); NONFINITE, NaN or infinity in ``b``, in
        ``x0`` or in a product; INDEFINITE, CG met a direction of non-positive curvature.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> import torch, solvers
        >>> b = torch.tensor([[1.0, 2.0], [0.0, 4.0]])
        >>> weights = torch.tensor([2.0, 4.0])
        >>> solvers.solve_linear(lambda v: weights * v, b, solver=solvers.CG()).value
        tensor([[0.5000, 0.5000],
                [0.0000, 1.0000]])
    """
    require_callable("matvec", matvec)
    chosen: LinearSolver = require_kind("solver", solver, LinearSolver, LINEAR)
    tolerance = read_tolerance("tolerance", tolerance) or _DEFAULT_TOLERANCE
    require_count("max_steps", max_steps)
    require_flag("compact", compact)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    check_on_failure(on_failure)
    layout = Layout.of(b, "b")
    leaf = leaves_of(b)[0]
    check_args(args, len(leaf), leaf.device, "b", "matvec")
    if x0 is not None:
        check_like(x0, b, "x0", "b", ValueError)
    with torch.no_grad():
        observed = record or callback is not None or x0 is not None
        solution = None
        if not (observed or args or compact):
            solution = _in_engine(matvec, b, chosen, tolerance, max_steps)
        if solution is None:
            product = Product(matvec, layout, args, len(leaf))
            system = System(layout.vector(b).detach().to(product.dtype), tolerance)
            loop = LinearLoop(
                product,
                system,
                chosen,
                max_steps,
                compact=compact,
                record=record,
                callback=callback,
            )
            solution = loop.run(None if x0 is None else layout.vector(x0))
            solution.value = layout.tree(solution.value.to(layout.dtype))
    apply_policy(solution, on_failure, f"linear solve with {chosen}")
    return solution


def _in_engine(
    matvec: Callable[..., Any], b: Any, solver: LinearSolver, tolerance: Tolerance, max_steps: int
) -> Solution | None:
    """The solution by the native engine; None where that does not serve."""
    restart = solver.restart if isinstance(solver, GMRES) else None
    if type(solver) not in (CG, GMRES) or not (
        isinstance(b, Tensor) and b.dim() == 2 and serves(b)
    ):
        return None
    if not fits(b, restart):
        return None
    one_minus = isinstance(matvec, OneMinus)
    product = matvec.image if one_minus else matvec
    return solve_systems(product, b, restart, tolerance, max_steps, one_minus=one_minus)
