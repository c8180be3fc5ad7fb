"""The entry for linear systems: ``A x = b`` for a batch, from products with ``A``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from solvers.core.checks import require_callable, require_count, require_flag, require_instance
from solvers.core.guards.native import native_steps
from solvers.core.layout import Layout, check_args, leaves_of
from solvers.core.modes import eager
from solvers.core.rows import Progress
from solvers.core.solution import Solution, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.krylov.cg import CG
from solvers.krylov.gmres import GMRES
from solvers.krylov.in_native import solve_in_native
from solvers.krylov.loop import GAP, HALVED, LinearLoop
from solvers.krylov.method import LinearSolver
from solvers.krylov.minres import MINRES
from solvers.krylov.product import OneMinus, Product, System, check_like
from solvers.native.systems import Limits, fits

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
    scale_x0: bool = False,
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
            ``GMRES(restart)`` for all.
        tolerance: a sample has converged where ``|b - A x| <= max(atol, rtol |b|)``; tensors
            (B,) in it are tolerances of each sample.
        max_steps: largest number of products with ``A`` per sample, those that verify a residual
            included.
        x0: initial iterate, like ``b``; default zero. Costs one product, for the first residual.
        scale_x0: multiply the initial iterate of each sample by the number that makes its residual
            least, so that it is never worse than zero; without a further product.
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
    require_instance("solver", solver, LinearSolver, "CG(), MINRES() or GMRES(restart)")
    require_instance("tolerance", tolerance, Tolerance, "a solvers.Tolerance")
    require_count("max_steps", max_steps)
    require_flag("compact", compact)
    require_flag("scale_x0", scale_x0)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    check_on_failure(on_failure)
    layout = Layout.of(b, "b")
    leaf = leaves_of(b)[0]
    check_args(args, len(leaf), leaf.device, "b", "matvec")
    tolerance.check_batch("tolerance", len(leaf))
    if x0 is not None:
        check_like(x0, b, "x0", "b", ValueError)
    with torch.no_grad():
        observed = record or callback is not None or x0 is not None
        if isinstance(matvec, OneMinus) and not (observed or args or compact):
            found = _in_native(matvec, b, solver, tolerance, max_steps)
            if found is not None:
                return found
        product = Product(matvec, layout, args, len(leaf))
        system = System(layout.vector(b).detach().to(product.dtype), tolerance)
        loop = LinearLoop(
            product, system, solver, max_steps, compact=compact, record=record, callback=callback
        )
        solution = loop.run(None if x0 is None else layout.vector(x0), scale_x0)
        solution.value = layout.tree(solution.value.to(layout.dtype))
    apply_policy(solution, on_failure, f"linear solve with {solver}")
    return solution


def _in_native(
    matvec: OneMinus, b: Any, solver: LinearSolver, tolerance: Tolerance, max_steps: int
) -> Solution | None:
    """The solution by C++ where that is wanted and solves every sample; None: by the loop, from the start."""
    restart = solver.restart if isinstance(solver, GMRES) else None
    flat = isinstance(b, Tensor) and b.dim() == 2 and b.dtype in (torch.float32, torch.float64)
    if type(solver) not in (CG, GMRES) or not flat or not fits(b, restart):
        return None
    steps = native_steps(b)
    if steps is None:
        return None
    limits = Limits(tolerance.rtol, tolerance.atol, GAP, HALVED, trusting=True)
    return solve_in_native(matvec.image, b.detach(), limits, restart, max_steps, steps)
