"""Solve ``z = f(z)`` or ``F(z) = 0`` for a batch of samples, with a differentiable solution."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from solvers.adjoint import Adjoint, Implicit, Unrolled, read_adjoint
from solvers.core.argument_names import hint_names
from solvers.core.checks import (
    require_callable,
    require_finite,
    require_flag,
    require_kind,
    require_options,
)
from solvers.core.layout import Layout, check_args, leaves_of
from solvers.core.loop import ExternalSolver, Options, Solver
from solvers.core.modes import eager, outside_inference, require_numbers, without_autocast
from solvers.core.problem import EnergyUpdate, Problem, RootUpdate
from solvers.core.rows import Evaluation, Progress, scaled_norm
from solvers.core.solution import LARGE, Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Goal, Tolerance, read_tolerance
from solvers.core.verify import verify as verify_value
from solvers.krylov import GMRES, MINRES
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.dispatch import run_solver
from solvers.methods.fallback import solve_failed
from solvers.methods.lbfgs import LBFGS
from solvers.methods.newton import Newton
from solvers.methods.steps import Forward, GradientDescent

_DEFAULT_ADJOINT, _ANDERSON, _LBFGS = Implicit(), Anderson(), LBFGS()
_NEWTON, _BY_GMRES, _BY_MINRES = Newton(), Implicit(GMRES()), Implicit(MINRES())  # of roots
VANISHED = 1e-2  # |f(z)| against the first residual, below which the fixed point may be zero


@hint_names
@eager
def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] | Tensor = (),
    *,
    solver: Solver | type[Solver] | str | None = None,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 50,
    adjoint: Adjoint | type[Adjoint] | str | None = _DEFAULT_ADJOINT,
    energy: Callable[..., Tensor] | None = None,
    mask: Any = None,
    record: bool = False,
    on_failure: str = "warn",
    compact: bool = True,
    callback: Callable[[Progress], object] | None = None,
    verify: bool = True,
    stop: Callable[[Any], Tensor] | None = None,
    measure: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solve ``z = f(z, *args)`` for every sample of a batch.

    By default a sample has converged if the residual ``|f(z) - z|`` and the estimated error ``|z* - z|`` are
    at most ``1e-4 |f(z)|``, in float64, too. The error is estimated as ``|f(z) - z| max_j |dz_j| / |dr_j|``
    from the last ten steps dz and changes of the residual dr, after more than ten evaluations also from their
    combinations; it is an estimate, not a bound. The scale
    ``|f(z)|`` counts only as far as it does not exceed that of the start by far, unless the residual has
    fallen to a hundredth. For more digits pass a smaller ``tolerance``, such as 1e-10, and a larger
    ``max_steps``.

    Args:
        f: map from a state to a state of the same structure, shapes and dtypes that treats samples
            independently, or an :class:`EnergyUpdate`, which includes its energy. Rows that influence each
            other are one sample: pass ``z[None]``. :func:`solvers.check_update` examines a map.
        z0: initial state, a floating-point tensor (B, ...) or a pytree of them. ``torch.zeros(3)`` starts
            three problems with one unknown each, ``torch.zeros(3)[None]`` one problem with three.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0, or one tensor. Finished samples
            leave the batch, so batched tensors must be passed here (or set ``compact=False``).
            ``f`` may close over tensors that all samples share, such as weights; they receive gradients.
        solver: a :class:`Solver`, its class, or its name such as "anderson". None: ``LBFGS()`` if ``f`` is a
            gradient step of an energy, else ``Anderson()``; samples that stall or diverge are then solved
            again from their best iterate by ``Broyden()``, ``Newton()`` and ``Forward()``, or by
            ``GradientDescent("auto")`` if there is an energy. A solver that you name has no such fallback.
        tolerance: largest residual and estimated error, ``max(atol, rtol |f(z)|)`` each: a
            :class:`Tolerance` or a number, its ``rtol``. The residual of a gradient step of an energy has
            units of its own, so there only the error counts, against ``max(atol, rtol |z|)``, or with rtol =
            0 only the residual, against atol. Each leaf of a pytree must meet the tolerance by its own norm.
            None chooses rtol by the precision in which ``f`` computes, including autocast: 1e-4 for
            float32 and float64, 2e-2 for bfloat16, 1e-2 for float16, and 2e-3 for TF32 on CUDA.
        max_steps: maximum number of evaluations of ``f`` per sample. Each call of ``f`` counts for the
            samples in its batch; with ``compact=False`` this is the whole batch, so ``f`` is called at
            most ``max_steps`` times. Jacobian products of Newton's method and evaluations of a fallback
            count; those of ``verify`` and of the gradient do not.
        adjoint: how gradients are computed: ``Implicit()`` (default), ``Unrolled``, ``Phantom`` or
            ``OneStep``, as an instance, a class or a name (``"unrolled"``); None for no gradient.
        energy: ``energy(z, *args) -> (B,)``, which no accepted step may increase.
        mask: (B, N) bool, False at masked tokens, which keep their initial value and enter no norm.
            Tokens are dim 1 of the leaves (B, N, ...) with at least three dimensions or, if there are
            none, of the leaves (B, N); other leaves are not masked. Alternatively, a pytree with the
            structure of z0 whose leaves are masks (B, N) or None.
        record: whether to keep the trace of residuals and energies.
        on_failure: "warn", "raise" or "ignore" samples that did not converge.
        compact: whether finished samples leave the batch; False if ``f`` closes over batched tensors.
        callback: function of a :class:`Progress`, called after every evaluation.
        verify: whether to evaluate ``f`` again at the returned value with the whole batch and report that
            residual. This evaluation does not count. It is free where the last evaluation of the solve was
            exactly that, and where ``Implicit`` or another adjoint makes it anyway. A sample that had
            converged becomes INCONSISTENT if the residual exceeds twice the tolerance and twice the
            residual in the solve.
        stop: rule ``stop(z) -> (B,) bool``, evaluated after every evaluation of ``f`` with the states of the
            whole batch, including samples that have finished. A sample for which it is True ends as
            STOPPED with that iterate, unless it has converged. STOPPED is not a failure, but ``converged``
            is False. With a rule, the value of every sample is its last iterate, and no sample stalls because
            its residual does not decrease. ``Implicit`` differentiates a stopped sample by the same formula,
            although the equation does not hold at that iterate; consider ``Unrolled()`` or ``Phantom()``.
        measure: ``measure(z)``, a tensor (B, ...) or a pytree of them, that is compared in the place of z: a
            readout, one leaf in its own units, or a normalised state. The residual is then
            ``|measure(f(z)) - measure(z)|``, and the error and the scale are those of the measure.

    Returns:
        A :class:`Solution` with the best iterate as ``value`` and its ``residual``: that of the smallest
        residual, or of an energy that did not converge the lowest one.

    Raises:
        TypeError, ValueError: if an argument is invalid, or ``f`` modifies its inputs in place.
        RuntimeError: inside of a transform of ``torch.func``, and for exporters and meta tensors, which
            ``layer.unrolled(k)`` of a DEQ supports.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> b = torch.tensor([[0.0], [1.0]], requires_grad=True)  # two samples
        >>> solution = fixed_point(lambda z, b: 0.5 * torch.cos(z) + b, torch.zeros(2, 1), (b,))
        >>> solution.value.sum().backward()  # implicit gradients: dz/db = 1 / (1 + sin(z) / 2)
        >>> solution.converged, solution.value.detach().flatten(), b.grad.flatten()
        (tensor([True, True]), tensor([0.4502, 1.1872]), tensor([0.8213, 0.6832]))
    """
    require_numbers(z0)
    require_callable("f", f)
    args, layout = (args,) if isinstance(args, Tensor) else args, Layout.of(z0)
    check_inputs(z0, args, "F" if isinstance(f, RootUpdate) else "f")
    return solve_checked(
        f, z0, layout, args, solver=solver, tolerance=tolerance, max_steps=max_steps, adjoint=adjoint,
        energy=energy, mask=mask, record=record, on_failure=on_failure, compact=compact, callback=callback,
        verify=verify, stop=stop, measure=measure,
    )  # fmt: skip


def solve_checked(
    f: Callable[..., Any], z0: Any, layout: Layout, args: tuple[Any, ...], *, solver: Any, tolerance: Any,
    max_steps: int, adjoint: Any, mask: Any, record: bool, on_failure: str, compact: bool, callback: Any,
    verify: bool, stop: Any, measure: Any, energy: Any = None,
) -> Solution:  # fmt: skip
    """:func:`fixed_point` of a state with its layout, and of inputs that have been checked."""
    require_options(
        {"energy": energy, "callback": callback, "stop": stop, "measure": measure},
        {"compact": compact, "record": record, "verify": verify},
        {"max_steps": max_steps},
    )
    check_on_failure(on_failure)
    tolerance, adjoint = read_tolerance("tolerance", tolerance), read_adjoint(adjoint)
    solver, automatic = choose_solver(f, energy, solver)
    if isinstance(solver, ExternalSolver) and (energy or record or callback or stop):
        raise ValueError(
            f"{solver!r} runs its own loop, without energy, record, callback and stop: remove them"
        )
    start = layout.vector(z0).resolve_neg()  # C++ knows no sign yet to be flipped
    problem = Problem.of(f, energy, z0, args, mask, compact, layout)
    problem.measure = measure
    goal = Goal(tolerance, start.dtype, problem.autocast, start.device)
    graded = adjoint is not None and torch.is_grad_enabled()
    if start.numel() == 0:
        return nothing(problem, start, graded)
    unrolled = graded and isinstance(adjoint, Unrolled)
    options = Options(goal.tolerance, max_steps, record, callback, stop=stop)
    cached = graded and parametrize._cache_enabled > 0
    solution, last = _solve(problem, start, solver, automatic, goal, options, unrolled, cached)

    def check(point: Evaluation, among: Tensor | None = None) -> None:
        verify_value(solution, point, goal, problem.unit_free, among)

    if graded and adjoint is not None:
        checks = check if verify else None
        solution.value = adjoint.attach(problem, start, solution, goal, checks)
    elif verify:
        with torch.no_grad(), without_autocast(start.device.type):
            check(problem.evaluate(solution.value) if last is None else last())
    set_bound(solution, f)
    if solution.value.untyped_storage().data_ptr() == start.untyped_storage().data_ptr():
        solution.value = solution.value.clone()  # the start was the solution; z0 stays the caller's
    solution.value = layout.tree(solution.value)
    what = goal.what + layout.scalars(len(start))
    what = what.replace("fixed-point", "root") if isinstance(f, RootUpdate) else what
    apply_policy(solution, on_failure, what, f, vanishing=goal.vanishing)
    return solution


def choose_solver(
    f: Callable[..., Any], energy: Callable[..., Tensor] | None, solver: Any
) -> tuple[Solver, bool]:
    """Return the solver, and whether it is the default one for ``f``, which has second attempts."""
    minimises, automatic = isinstance(f, EnergyUpdate) and energy is None, solver is None
    solver = read_solver(solver)
    if solver is None and isinstance(f, RootUpdate):
        solver = _NEWTON
    elif solver is None:
        solver = _LBFGS if minimises and getattr(f, "symmetric", False) else _ANDERSON
    if solver.needs_energy and not minimises:
        raise ValueError(
            f"{type(solver).__name__} minimises an energy and needs its gradient: pass an "
            "EnergyUpdate to fixed_point, for example solvers.Descent(energy)"
        )
    return solver, automatic


def set_bound(solution: Solution, f: object) -> None:
    """Set the bound on the error of a solution (B, D), where the energy of f has a known modulus."""
    modulus: Any = getattr(f, "modulus", None)
    if modulus is None:
        return
    value = solution.value.detach()
    size = scaled_norm(value).clamp_min(torch.finfo(value.dtype).tiny)
    step_size: Any = getattr(f, "step_size", None) or 1.0  # |dE/dz| = |f(z) - z| / step_size
    solution.bound = solution.residual_norm / (step_size * modulus) / size


def _solve(
    problem: Problem, start: Tensor, solver: Solver, automatic: bool, goal: Goal, options: Options,
    unrolled: bool, cached: bool,
) -> tuple[Solution, Callable[[], Evaluation] | None]:  # fmt: skip
    """Solve from ``start`` (B, D); also return the last evaluation if it was at the returned value.

    The solver's own algebra runs without autocast, which :class:`Problem` restores around f, and outside of
    inference mode, whose tensors do not count changes in place. If the solver was chosen automatically,
    failed samples are solved again.

    Args:
        unrolled: whether all evaluations are recorded.
        cached: whether the first one is, because ``parametrize.cached()`` keeps the weights that it reads.
    """
    autocast_off = without_autocast(start.device.type)
    with outside_inference(), torch.set_grad_enabled(unrolled), autocast_off:
        start = start if unrolled else start.detach()
        if isinstance(solver, ExternalSolver):
            solution = solver.run(problem, start, options)
            return (solve_failed(problem, solution, options) if automatic else solution), None
        with goal.watching(), torch.set_grad_enabled(unrolled or cached):
            points = [problem.evaluate_first(start)]
        if cached and not unrolled:
            points = [points[0].detached()]
        _refuse_forward_mode(points[0].residual)
        first = points[0].norm.detach()
        options = replace(options, tolerance=goal.tolerance, precision=goal.precision)
        # Popped, so that the loop can free it when it has moved on.
        solution, last = run_solver(problem, points.pop(), solver, options)
        if solution.all_converged():
            return solution, last
        if automatic:
            solution = solve_failed(problem, solution, options)
        if not solution.all_converged():
            # |f(z)| that has fallen to nothing with the residual belongs to a fixed point at zero.
            reference = solution.residual_norm / solution.residual
            fallen = (solution.status == Status.MAX_STEPS) | (solution.status == Status.STALLED)
            fallen = fallen & (solution.residual > LARGE) & (reference < VANISHED * first)
            goal.vanishing = bool(fallen.any())
        return solution, None


def _refuse_forward_mode(value: Tensor) -> None:
    """Raise NotImplementedError for a forward-mode tangent, which the solve would drop."""
    active = getattr(forward_ad, "_current_level", -1) >= 0
    if active and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            "forward-mode differentiation through a fixed point is not implemented; use "
            "reverse mode (backward, torch.autograd.grad)"
        )


@partial(hint_names, passed=fixed_point)
def root(
    F: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] | Tensor = (),
    *,
    solver: Solver | type[Solver] | str | None = None,
    adjoint: Adjoint | type[Adjoint] | str | None = _BY_GMRES,
    symmetric: bool = False,
    **options: Any,
) -> Solution:
    """Solve ``F(z, *args) = 0`` for every sample of a batch, as the fixed point of ``z - F(z)``.

    The statuses are those of :func:`fixed_point`. A sample has converged where the estimated error
    ``|z* - z|`` is at most ``max(atol, rtol |z|)`` with rtol 1e-4. With ``tolerance=Tolerance(0.0, atol)`` it
    has converged where ``|F(z)| <= atol``.

    Args:
        F: map from a state to a state of the same structure and shapes, each sample on its own.
        z0: initial state, a tensor (B, ...) or a pytree of them.
        args: further inputs of ``F``, batched along dim 0.
        solver: None for Newton's method, followed by Anderson's and Broyden's for samples that stall or
            diverge. Newton's method needs an F that autograd differentiates, twice for more than 30 unknowns.
            The other solvers work best where the derivative of F is near 1.
        adjoint: by default ``Implicit(GMRES())``: with ``J = dF/dz`` and the gradient g of the loss by z it
            solves ``J^T u = g``; the gradient of an input is ``-(dF/dinput)^T u``. With ``symmetric`` the
            default is ``Implicit(MINRES())``.
        symmetric: whether ``dF/dz`` is symmetric, as that of the gradient of a function. Newton's method and
            the adjoint then use MINRES, and a product with the Jacobian takes one pass backward. For a
            preconditioner M of ``dF/dz`` pass ``solver=Newton(MINRES(preconditioner=M))`` and
            ``adjoint=Implicit(MINRES(preconditioner=M))``, or CG for a positive definite derivative.
        options: the other options of :func:`fixed_point`, except ``energy``.

    Raises:
        TypeError, ValueError, SolveError: as :func:`fixed_point`; ValueError where F returns other shapes.

    Example:
        >>> a = torch.tensor([[2.0], [9.0]], requires_grad=True)
        >>> solution = root(lambda z, a: z**2 - a, torch.ones(2, 1), (a,))
        >>> solution.value.sum().backward()  # dz/da = 1 / (2 z)
        >>> solution.converged, solution.value.detach().flatten(), a.grad.flatten()
        (tensor([True, True]), tensor([1.4142, 3.0000]), tensor([0.3536, 0.1667]))
    """
    require_callable("F", F)
    if "energy" in options:
        raise TypeError("root takes no energy")
    if require_flag("symmetric", symmetric) and adjoint is _BY_GMRES:
        adjoint = _BY_MINRES
    f = RootUpdate(F, symmetric=symmetric)
    return fixed_point(f, z0, args, solver=solver, adjoint=adjoint, **options)


def nothing(problem: Problem, start: Tensor, graded: bool) -> Solution:
    """Return the solution of an empty state, with a graph to the tensors that ``f`` reads."""
    with torch.set_grad_enabled(graded):
        value = problem.layout.tree(problem.masked_map(start))
    return Solution.of_nothing(value, start)


def check_inputs(z0: Any, args: tuple[Any, ...], home: str = "f") -> None:
    """Check batch sizes, devices and finiteness of the inputs of the function ``home``."""
    state = leaves_of(z0)
    check_args(args, len(state[0]), state[0].device, "z0", home)
    require_finite("z0", *state)
    for position, argument in enumerate(args):
        require_finite(f"args[{position}]", *leaves_of(argument))


KINDS = (Anderson, Broyden, Forward, GradientDescent, LBFGS, Newton)


def read_solver(value: Any, *, name: str = "solver") -> Solver | None:
    """Return a :class:`solvers.Solver` from an instance, a class or a name; None stays None."""
    return require_kind(name, value, Solver, KINDS, optional=True)
