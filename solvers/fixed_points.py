"""Solve ``z = f(z)`` or ``F(z) = 0`` for a batch of samples, with a differentiable solution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.adjoints.kinds import Adjoint, Implicit, Unrolled, read_adjoint
from solvers.adjoints.transforms import refuse_in_transform, transformed_solution
from solvers.core.checks import (
    require_callable,
    require_count,
    require_finite,
    require_flag,
    require_increasing,
    require_kind,
)
from solvers.core.context import Weights, constant_weights, modules_of, sequence_number
from solvers.core.layout import Layout, check_args, check_like, leaves_of
from solvers.core.loop import ExternalSolver, Loop, Options, Solver
from solvers.core.modes import (
    eager,
    in_transform,
    refuse_export,
    refuse_shapes,
    without_autocast,
)
from solvers.core.problem import EnergyUpdate, Problem, RootUpdate, VectorProblem
from solvers.core.rows import Progress, small_dtype
from solvers.core.solution import (
    LARGE,
    Goal,
    Solution,
    Status,
    Tolerance,
    apply_policy,
    check_on_failure,
    read_tolerance,
)
from solvers.core.validate import count_solve, due, judge_again, mark_changed
from solvers.krylov import GMRES
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.fallback import solve_failed
from solvers.methods.iterate import iterate
from solvers.methods.lbfgs import LBFGS
from solvers.methods.newton import Newton
from solvers.methods.steps import Forward, GradientDescent

_DEFAULT_ADJOINT, _ANDERSON, _LBFGS = Implicit(), Anderson(), LBFGS()
_NEWTON, _BY_GMRES = Newton(), Implicit(GMRES())  # of roots
VANISHED = 1e-2  # |f(z)| against the first residual, below which the fixed point may be zero


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
    states_at: Sequence[int] = (),
    verify: bool | None = None,
    stop: Callable[[Any], Tensor] | None = None,
    has_aux: bool = False,
    bounds: tuple[Any, Any] | None = None,
    measure: Callable[[Any], Any] | None = None,
) -> Solution:
    """Solve ``z = f(z, *args)`` for every sample of a batch.

    By default a sample has converged if ``|f(z) - z| <= 1e-4 |f(z)|``, in float64, too. For more digits
    pass a smaller ``tolerance``, such as 1e-10, and a larger ``max_steps``.

    Args:
        f: map from a state to a state of the same structure, shapes and dtypes that treats samples
            independently, or an :class:`EnergyUpdate`, which includes its energy.
        z0: initial state, a floating-point tensor (B, ...) or a pytree of them. ``torch.zeros(3)`` starts
            three problems with one unknown each, ``torch.zeros(3)[None]`` one problem with three.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0, or one tensor. Finished samples
            leave the batch, so batched tensors must be passed here (or set ``compact=False``).
            ``f`` may close over tensors that all samples share, such as weights; they receive gradients.
        solver: a :class:`Solver`, its class, or its name such as "anderson". None: ``LBFGS()`` if ``f`` is a
            gradient step of an energy, else ``Anderson()``; samples that fail then continue from their best
            iterate with plain steps and, without an energy, with Newton's method. A solver that you
            name has no such fallback.
        tolerance: stopping criterion ``|f(z) - z| <= max(atol, rtol |f(z)|)``, a :class:`Tolerance` or a
            number, its ``rtol``. None chooses rtol by the precision in which ``f`` computes, including
            autocast: 1e-4 for float32 and float64, 2e-2 for bfloat16, 1e-2 for float16, and 2e-3 for
            TF32 on CUDA.
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
        states_at: increasing numbers of evaluations up to ``max_steps``. ``Solution.states`` contains for
            each the value that this call would have returned with that ``max_steps`` (for Newton's method,
            the last iterate within it). Their gradients are exact with ``Unrolled``. ``Phantom`` and
            ``OneStep`` differentiate their iterations from each state. With ``Implicit``, whose equation
            holds only at the solution, ``Implicit(states=...)`` chooses the gradient.
        verify: whether to evaluate ``f`` again at the returned value with the whole batch and report that
            residual. Samples whose residual differs from that of the solve become INCONSISTENT. With
            ``Implicit`` gradients this evaluation is made anyway. None: verify the first 8 solves of a
            function or layer and every 32nd after them, unless the last evaluation of the solve was at the
            returned value of all samples; with ``compact=False`` also if a sample failed. The first solve
            also repeats the evaluation at the start to detect a function that changes between calls.
        stop: rule ``stop(z) -> (B,) bool``, evaluated after every evaluation of ``f`` with the states of the
            whole batch, including samples that have finished. A sample for which it is True ends as
            STOPPED with that iterate, unless it has converged. STOPPED is not a failure, but ``converged``
            is False. With a rule, the value of every sample is its last iterate, and no sample stalls because
            its residual does not decrease. ``Implicit`` differentiates a stopped sample by the same formula,
            although the equation does not hold at that iterate; consider ``Unrolled()`` or ``Phantom()``.
        has_aux: whether ``f`` returns ``(f(z), aux)``. ``Solution.aux`` is the auxiliary output at the
            returned value, from one more evaluation, which does not count. Its gradients pass through the
            value, the arguments and the weights.
        bounds: ``(low, high)``, each a number, a tensor that broadcasts to the state of a sample, or None.
            Solves ``z = P(f(z))`` with ``P(z) = min(max(z, low), high)``. For a gradient step of an energy
            this is projected gradient descent. Coordinates at a bound have implicit gradients of zero.
            Needs ``Forward`` or ``GradientDescent``; the default is ``GradientDescent("auto")`` with an
            energy and ``Forward()`` without.

    Returns:
        A :class:`Solution` with the best iterate as ``value`` and its ``residual``.

    Raises:
        TypeError, ValueError: if an argument is invalid, or ``f`` modifies its inputs in place or
            draws random numbers.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> b = torch.tensor([[0.0], [1.0]], requires_grad=True)  # two samples
        >>> solution = fixed_point(lambda z, b: 0.5 * torch.cos(z) + b, torch.zeros(2, 1), (b,))
        >>> solution.value.sum().backward()  # implicit gradients: dz/db = 1 / (1 + sin(z) / 2)
        >>> solution.converged, solution.value.detach().flatten(), b.grad.flatten()
        (tensor([True, True]), tensor([0.4502, 1.1872]), tensor([0.8213, 0.6832]))

    The function supports ``torch.func.grad``, ``vjp``, ``jacrev`` and ``vmap`` without ``record``, and
    ``jvp`` with ``Unrolled()``. Inside these transforms ``Unrolled()`` needs ``solver=Forward(...)`` or
    ``Anderson(...)``; it makes ``max_steps`` evaluations for every sample, converged samples do not
    move, and there is no energy safeguard.
    """
    refuse_export("layer.unrolled(k) of a DEQ, or a loop of evaluations of f")
    refuse_shapes(z0)
    require_callable("f", f)
    require_callable("energy", energy, optional=True)
    require_callable("callback", callback, optional=True)
    require_callable("stop", stop, optional=True)
    require_count("max_steps", max_steps)
    require_flag("compact", compact)
    require_flag("record", record)
    require_flag("verify", verify, optional=True)
    check_on_failure(on_failure)
    states_at = require_increasing("states_at", states_at, high=max_steps, what="max_steps")
    tolerance, adjoint = read_tolerance("tolerance", tolerance), read_adjoint(adjoint)
    args = (args,) if isinstance(args, Tensor) else args
    monitored = isinstance(f, EnergyUpdate) or energy is not None
    minimises = isinstance(f, EnergyUpdate) and energy is None
    automatic = solver is None and bounds is None
    solver = read_solver(solver)
    if solver is None and bounds is not None:
        solver = GradientDescent("auto") if monitored else Forward()
    if solver is None:
        solver = _LBFGS if minimises and getattr(f, "symmetric", False) else _ANDERSON
    if solver.needs_energy and not minimises:
        raise ValueError(
            f"{type(solver).__name__} minimises an energy and needs its gradient: pass f as an "
            "EnergyUpdate, for example solvers.Descent(energy)"
        )
    if isinstance(solver, ExternalSolver) and (energy or record or callback or stop):
        raise ValueError(
            f"{solver!r} runs its own loop, without energy, record, callback and stop: remove them"
        )
    whole = f if require_flag("has_aux", has_aux) else None
    f = f if whole is None else without_aux(f)
    layout = Layout.of(z0, empty=True)
    if in_transform():
        if stop is not None or bounds is not None:
            raise RuntimeError("stop and bounds do not work inside of torch.func's transforms")
        solution = _transformed(
            f, energy, z0, args, mask, adjoint, record, solver=None if automatic else solver,
            tolerance=tolerance, max_steps=max_steps, on_failure=on_failure, compact=compact,
            callback=callback, states_at=states_at, verify=verify,
        )  # fmt: skip
        return _with_aux(solution, whole, args, adjoint)
    _check_inputs(z0, args)
    start = layout.vector(z0).resolve_neg()  # C++ knows no sign yet to be flipped
    problem = Problem.of(f, energy, z0, args, mask, compact, layout)
    problem.measure = measure
    if bounds is not None:
        problem.bounds, problem.symmetric = _read_bounds(bounds, solver, layout, start), False
        start = problem.projected(start)
    goal = problem.goal = Goal(tolerance, start.dtype, problem.autocast, start.device)
    if start.numel() == 0:
        return _with_aux(_nothing(problem, start, adjoint, states_at), whole, args, adjoint)
    options = Options(goal.tolerance, max_steps, record, callback, stop)
    solve = Solving(solver, automatic, goal, options, count_solve(f), verify)
    if adjoint is not None and torch.is_grad_enabled():
        # Each of several states is differentiated by a graph of its own.
        if not (isinstance(adjoint, Unrolled) or states_at):
            problem.weights = Weights(graded=True, start=sequence_number())
        solution = adjoint.solve(problem, start, solve)
    else:
        with torch.no_grad():
            solution = solve(problem, start.detach())
    if solution.value.untyped_storage().data_ptr() == start.untyped_storage().data_ptr():
        solution.value = solution.value.clone()  # the start was the solution; z0 stays the caller's
    _as_trees(solution, layout)
    what = goal.what + layout.scalars(len(start))
    what = what.replace("fixed-point", "root") if isinstance(f, RootUpdate) else what
    apply_policy(solution, on_failure, what, f, vanishing=goal.vanishing)
    return _with_aux(solution, whole, args, adjoint)


class _Value(partial[Any]):
    """``f`` without its auxiliary output; known by ``f`` where solves are counted and warnings are shown."""

    symmetric = False

    def __call__(self, *args: Any) -> Any:
        found = super().__call__(*args)
        if not isinstance(found, tuple) or len(found) != 2:
            raise TypeError(f"f must return (value, aux) with has_aux=True, got {type(found)}")
        return found[0]


def without_aux(f: Callable[..., Any]) -> Callable[..., Any]:
    """The map ``f(z, *args)[0]``."""
    if isinstance(f, EnergyUpdate):
        raise ValueError("has_aux=True is for plain maps, got an EnergyUpdate")
    value = _Value(f)
    vars(value)["symmetric"] = bool(getattr(f, "symmetric", False))
    return value


def _with_aux(
    solution: Solution, f: Callable[..., Any] | None, args: tuple[Any, ...], adjoint: Adjoint | None
) -> Solution:
    """The solution with the auxiliary output of ``f`` at its value; unchanged where f is None."""
    if f is not None:
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and adjoint is not None),
            constant_weights(modules_of(f), repeated=True),
        ):
            solution.aux = f(solution.value, *args)[1]
    return solution


def _read_bounds(
    bounds: Any, solver: Solver, layout: Layout, start: Tensor
) -> tuple[Tensor, Tensor]:
    """The bounds as vectors (D,)."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"bounds must be a pair (low, high), got {bounds!r}")
    # Their steps remain steps of descent when they are cut at bounds.
    if not isinstance(solver, (Forward, GradientDescent)):
        raise ValueError(f"bounds need solver=Forward(...) or GradientDescent(...), got {solver}")
    vectors = []
    for limit, none in zip(bounds, (-torch.inf, torch.inf), strict=True):
        try:
            limit = torch.as_tensor(none if limit is None else limit).to(start)
            if limit.dim():
                if not layout.spec.is_leaf():
                    raise ValueError("bounds must be numbers for a state of several tensors")
                limit = layout.vector(limit.expand(1, *layout.shapes[0]))[0]
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                "bounds must be numbers, or tensors that broadcast to the state of one sample, "
                f"{tuple(layout.shapes[0])}, got {bounds!r}"
            ) from error
        vectors.append(limit.expand(start.shape[1]))
    low, high = vectors
    if not bool((low <= high).all()):
        raise ValueError(f"bounds must be (low, high) with low <= high, got {bounds}")
    return low, high


def root(
    F: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] | Tensor = (),
    *,
    solver: Solver | type[Solver] | str | None = None,
    adjoint: Adjoint | type[Adjoint] | str | None = _BY_GMRES,
    **options: Any,
) -> Solution:
    """Solve ``F(z, *args) = 0`` for every sample of a batch, as the fixed point of ``z - F(z)``.

    The statuses are those of :func:`fixed_point`. A sample is solved where
    ``|F(z)| <= max(atol, rtol |z - F(z)|)`` with rtol 1e-4: scale F so that its derivative is of the order
    of 1, or give ``tolerance=Tolerance(0.0, atol)``, as is needed for a root at zero.

    Args:
        F: map from a state to a state of the same structure and shapes, each sample on its own.
        z0: initial state, a tensor (B, ...) or a pytree of them.
        args: further inputs of ``F``, batched along dim 0.
        solver: None for Newton's method, which needs an F that autograd differentiates twice, or with bounds
            for ``Forward()``. All but Newton's method need a derivative of F near 1.
        adjoint: by default ``Implicit(GMRES())``: with ``J = dF/dz`` and the gradient g of the loss by z it
            solves ``J^T u = g``; the gradient of an input is ``-(dF/dinput)^T u``.
        options: the other options of :func:`fixed_point`, except ``energy`` and ``has_aux``. With ``bounds``
            a solution has F = 0, or lies at a bound where -F points outside.

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
    if wrong := sorted({"energy", "has_aux"} & set(options)):
        raise TypeError(f"root takes no {wrong}")
    if solver is None and options.get("bounds") is None:
        solver = _NEWTON
    return fixed_point(RootUpdate(F), z0, args, solver=solver, adjoint=adjoint, **options)


def _transformed(
    f: Callable[..., Any],
    energy: Callable[..., Tensor] | None,
    z0: Any,
    args: tuple[Any, ...],
    mask: Any,
    adjoint: Adjoint | None,
    record: bool,
    **options: Any,
) -> Solution:
    """Return the solution inside a ``torch.func`` transform."""
    tolerance, compact = options["tolerance"], options["compact"]
    if isinstance(adjoint, Unrolled) and not (record or options["callback"]):
        solver = options["solver"]
        if type(solver) not in (Forward, Anderson) or adjoint.checkpoint:
            raise RuntimeError(
                "inside torch.func transforms adjoint=Unrolled() needs solver=solvers.Forward(...) or "
                f"solvers.Anderson(...) and checkpoint=False, got solver={solver}, {adjoint}; use them, or "
                "Implicit(), Phantom() or OneStep()"
            )
        raise RuntimeError("dropped")
    refuse_in_transform(adjoint, record=record)
    # The same call, made where the tensors are ordinary ones.
    outside = partial(fixed_point, adjoint=None, **options)
    return transformed_solution(outside, adjoint, tolerance, compact, f, energy, z0, args, mask)


def _nothing(
    problem: Problem, start: Tensor, adjoint: Adjoint | None, states_at: Sequence[int]
) -> Solution:
    """Return the solution of an empty state, with a graph to the tensors that ``f`` reads."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and adjoint is not None):
        value = problem.layout.tree(problem.masked_map(start))
    status = torch.zeros(len(start), dtype=torch.int64, device=start.device)
    none = torch.zeros(len(start), dtype=small_dtype(start.dtype), device=start.device)
    solution = Solution(
        value, status, none, none.clone(), steps=status.clone(), evaluations=status.clone()
    )
    if states_at:
        solution.states = tuple(pytree.tree_map(torch.clone, value) for _ in states_at)
    return solution


def _as_trees(solution: Solution, layout: Layout) -> None:
    """Give the value and the states (B, D) of a solution the structure of the initial state."""
    solution.value = layout.tree(solution.value)
    if solution.states is not None:  # several may be one state, or the value
        solution.states = tuple(layout.tree(each.value.clone()) for each in solution.states)


def _check_inputs(z0: Any, args: tuple[Any, ...]) -> None:
    """Check batch sizes, devices and finiteness of the inputs."""
    first = leaves_of(z0)[0]
    check_args(args, len(first), first.device, "z0", "f")
    named = {"z0": z0, **{f"args[{position}]": value for position, value in enumerate(args)}}
    for name, tree in named.items():
        for leaf in leaves_of(tree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                require_finite(name, leaf)


@dataclass(frozen=True)
class Solving:
    """How :func:`solvers.fixed_point` solves a problem.

    ``automatic``: the solver was chosen automatically, so failed samples are solved again. ``number``: how
    often this function was solved before. Parametrised weights are computed once and constant during a solve.
    The solver's own algebra runs without autocast, which :class:`Problem` restores around f.
    """

    solver: Solver
    automatic: bool
    goal: Goal
    options: Options
    number: int
    verify: bool | None

    def __call__(self, problem: Problem, start: Tensor, *, verify: bool = True) -> Solution:
        """Return the solution (B, D) from ``start`` (B, D), without gradients.

        ``verify=False``: the caller evaluates the returned value again.
        """
        solver, goal, options, first, last = self.solver, self.goal, self.options, None, None
        weights = constant_weights(problem.modules, problem.weights)
        with weights, without_autocast(start.device.type):
            if isinstance(solver, ExternalSolver):
                solution = tried = solver.run(problem, start, options)
            else:
                with goal.watching():
                    points = [problem.evaluate_first(start)]
                first = points[0].norm.detach()
                options = replace(options, tolerance=goal.tolerance, precision=goal.precision)
                # Popped, so that the loop can free it when it has moved on.
                tried, last = iterate(
                    problem, points.pop(), solver, options, automatic=self.automatic
                )
                coupled = self._may_be_coupled(problem)
                looks = coupled and last is None and self.verify is not False
                if looks and int(tried.evaluations.max()) + 2 < options.max_steps:
                    again = problem.evaluate(tried.value)
                    last, options = lambda: again, replace(options, max_steps=options.max_steps - 1)
                # Without ``verify`` the caller judges the value once more anyway.
                if last is not None and (verify or coupled):
                    judge_again(tried, last(), options.tolerance, goal.precision, converged=True)
                    if coupled:
                        self._solve_together(problem, tried, options)
                solution = solve_failed(problem, tried, options) if self.automatic else tried
            problem.check_last(solution.value)
            # The last evaluation was one of the returned value, with all samples, where all have
            # converged: of the others another iterate is the best.
            seen = last is not None and solution is tried and self.verify is None
            seen = seen and solution.all_converged()
            with torch.no_grad():
                self._verify(problem, start.detach(), first, solution, verify and not seen)
        return solution

    def _may_be_coupled(self, problem: Problem) -> bool:
        """Return whether samples that influence each other are solved as one system.

        This is supported with ``compact=False`` only, where the samples stay in the batch.
        """
        others = problem.has_energy or problem.bounds is not None or self.options.stop is not None
        alone = problem.compact or problem.mask is not None or others
        return not (alone or torch.is_grad_enabled())

    def _solve_together(self, problem: Problem, solution: Solution, options: Options) -> None:
        """Continue with all samples as one system if they influence each other."""
        left = options.max_steps - int(solution.evaluations.max())
        wrong = solution.status == Status.INCONSISTENT
        if left < 2 or not bool(wrong.any()):
            return
        shape, start = solution.value.shape, solution.value.view(1, -1)
        whole = VectorProblem(lambda z: problem.image(z.view(shape)).view(1, -1), Layout.of(start))
        each = replace(options.tolerance, rtol=options.tolerance.rtol / len(wrong) ** 0.5)
        found, _ = iterate(whole, whole.evaluate(start), self.solver, Options(each, left - 1))
        solution.value = found.value.view(shape)
        solution.status = found.status.expand(len(wrong)).clone()
        point = problem.evaluate(solution.value)
        solution.residual, solution.residual_norm = point.relative(), point.norm
        solution.evaluations = solution.evaluations.max() + 1 + found.evaluations.expand(len(wrong))
        solution.steps = solution.evaluations.clone()
        # The whole batch may have converged by its norm while a small sample has not.
        judge_again(solution, point, options.tolerance, self.goal.precision)

    def _verify(
        self,
        problem: Problem,
        start: Tensor,
        first: Tensor | None,
        solution: Solution,
        verify: bool,
    ) -> None:
        """Evaluate again at the returned value and, in the first solve of a function, at the start."""
        goal = self.goal
        if first is not None and not solution.all_converged():
            # |f(z)| that has fallen to nothing with the residual belongs to a fixed point at zero.
            reference = solution.residual_norm / solution.residual
            fallen = (solution.status == Status.MAX_STEPS) | (solution.status == Status.STALLED)
            fallen = fallen & (solution.residual > LARGE) & (reference < VANISHED * first)
            goal.vanishing = bool(fallen.any())
        wanted = due(self.number, self.verify)
        # With compact=False rows that influence each other are meant to be there, and some have failed.
        failed = not problem.compact and self.verify is None and not solution.all_converged()
        if verify and (wanted or failed):
            point = problem.evaluate(solution.value.detach())
            judge_again(solution, point, goal.tolerance, goal.precision)
        if wanted and first is not None and (self.number == 0 or self.verify):
            mark_changed(solution, problem.evaluate(start), first, goal.precision)


KINDS = (Anderson, Broyden, Forward, GradientDescent, LBFGS, Newton)


def read_solver(value: Any, *, name: str = "solver") -> Solver | None:
    """Return a :class:`solvers.Solver` from an instance, a class or a name; None stays None."""
    return require_kind(name, value, Solver, KINDS, optional=True)
