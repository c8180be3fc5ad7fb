"""Find ``z = f(z)`` or ``F(z) = 0`` for a batch of samples and make the solution differentiable."""

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
from solvers.core.device import small_dtype
from solvers.core.layout import Layout, check_args, check_mask, leaves_of
from solvers.core.loop import ExternalSolver, Loop, Rule, Solver
from solvers.core.modes import (
    constant_weights,
    eager,
    in_transform,
    refuse_export,
    refuse_shapes,
    without_autocast,
)
from solvers.core.problem import EnergyUpdate, Problem, VectorProblem
from solvers.core.rows import Progress
from solvers.core.solution import (
    LARGE,
    Goal,
    Solution,
    Status,
    Tolerance,
    apply_policy,
    check_on_failure,
    criterion,
    read_tolerance,
)
from solvers.core.validate import count_solve, due, judge_again, refuse_change
from solvers.krylov import GMRES
from solvers.methods.anderson import Anderson
from solvers.methods.broyden import Broyden
from solvers.methods.iterate import iterate
from solvers.methods.lbfgs import LBFGS
from solvers.methods.newton import Newton
from solvers.methods.rescue import rescue
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
) -> Solution:
    """Solve ``z = f(z, *args)`` for every sample of a batch.

    A sample is solved where ``|f(z) - z| <= 1e-4 |f(z)|``, in float64 too: give ``tolerance=1e-10`` where
    more digits are wanted, and more ``max_steps`` with it.

    Args:
        f: map from a state to a state of the same structure, shapes and dtypes, each sample on its
            own; or an :class:`EnergyUpdate`, which brings its energy along.
        z0: initial state, a tensor (B, ...) or a pytree of them, any floating dtype. ``torch.zeros(3)``
            is the start of three problems of one unknown each; ``torch.zeros(3)[None]`` that of one
            problem of three.
        args: further inputs of ``f``, pytrees of tensors batched along dim 0, or one tensor. Finished samples
            leave the batch, so whatever is batched must come through here (or ``compact=False``).
            Tensors that all samples share (weights) belong into ``f`` itself; gradients reach them.
        solver: a :class:`Solver`, its class, or its name such as "anderson". None: ``LBFGS()`` where ``f``
            is a gradient step of an energy, else ``Anderson()``. Samples that these give up are tried again
            from their best iterate by plain steps and, if
            there is no energy, by Newton's method with finite differences; other solvers, or these
            when they are named, are left alone.
        tolerance: a sample has converged where ``|f(z) - z| <= max(atol, rtol |f(z)|)``. A number is
            ``rtol``. None:
            ``Tolerance()``, rtol 1e-4, where ``f`` computes in float32 or float64; where it computes in
            half precision, also by autocast, what it can meet: rtol 2e-2 in bfloat16, 1e-2 in float16;
            2e-3 where a CUDA device multiplies in TF32 (an estimate, not measured on a card yet).
        max_steps: evaluations of ``f`` per sample, an upper bound that is kept. A call of ``f`` is one
            evaluation for each sample that it is given; with ``compact=False``, for all of the batch, so
            that there are at most ``max_steps`` calls besides those of ``verify``. Products of Newton's
            method with the Jacobian count as evaluations; second attempts go on counting. The gradient is
            not counted:
            ``Implicit`` evaluates ``f`` once more, at the solution.
        adjoint: how gradients flow, by default ``Implicit()``; ``Unrolled``, ``Phantom``, ``OneStep``, also
            as a class or by name (``"unrolled"``); None: no gradient.
        energy: ``energy(z, *args) -> (B,)`` turns the safeguard on: no accepted step raises it.
        mask: (B, N) bool, False at masked tokens: they keep their initial value and enter no norm.
            Tokens are dim 1 of the leaves (B, N, ...) of at least three dimensions, or, where none has
            N there, of the leaves (B, N); other leaves count whole. Or a pytree structured like z0,
            for each leaf its mask (B, N), or None where it counts whole.
        record: keep the trace of residuals (and energies).
        on_failure: what to do about samples that did not converge: "warn", "raise" or "ignore".
        compact: let finished samples leave the batch; False where ``f`` closes over batched tensors.
        callback: called with a :class:`Progress` after every evaluation.
        states_at: numbers of evaluations, increasing, ``max_steps`` at most. ``Solution.states`` then has
            for each of them what this call would have returned with that ``max_steps``; where a sample
            had converged before, its solution. (Of Newton's method, the last iterate within it.) Their
            gradients are exact with ``Unrolled``. ``Phantom`` and ``OneStep`` differentiate their
            iterations from each state, and with ``Implicit``, whose equation holds at the solution
            alone, a state has the gradient that ``Implicit(states=...)`` says.
        verify: evaluate ``f`` once more, at the returned value and with the whole batch, and report the
            residual found there; samples that do not have the residual that the solve measured become
            INCONSISTENT. With ``Implicit`` gradients this evaluation is made in any case. Without, it costs
            one evaluation for every sample, which is not counted. None: in the first 8 solves of a function
            or layer and in one of 32 after them, unless the solve itself ended with all samples at their
            final values, and with ``compact=False`` where a sample failed; the first solve also repeats
            the evaluation at the start, which shows a function that changes from call to call.
        stop: a rule ``stop(z) -> (B,) bool``, asked after every evaluation. A sample for which it holds
            ends as STOPPED with that iterate, unless it has converged. The rule sees the states of the
            whole batch, also of samples that have ended. A sample that was stopped is no failure, and not
            ``converged`` either. ``Implicit`` differentiates it by the same formula, at an iterate where
            the equation does not hold; ``Unrolled()`` or ``Phantom()`` may suit it better.
        has_aux: ``f`` returns ``(f(z), aux)``. ``Solution.aux`` is that of the returned value, of one more
            evaluation, which is not counted. Its gradients pass through the value, the arguments and weights.
        bounds: ``(low, high)``, each a number, a tensor that broadcasts to a sample's state, or None.
            Solves ``z = P(f(z))`` with ``P(z) = min(max(z, low), high)``: for a gradient step of an energy,
            projected gradient descent to a point where the energy falls in no allowed direction.
            Coordinates that are held at a bound have implicit gradients of zero. Needs ``Forward`` or
            ``GradientDescent``; by default ``GradientDescent("auto")`` where there is an energy, else
            ``Forward()``.

    Returns:
        A :class:`Solution`; ``value`` is the best iterate seen, ``residual`` belongs to it.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument; for an ``f`` that
            works in place on its inputs, or draws random numbers.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> b = torch.tensor([[0.0], [1.0]], requires_grad=True)  # two samples
        >>> solution = fixed_point(lambda z, b: 0.5 * torch.cos(z) + b, torch.zeros(2, 1), (b,))
        >>> solution.value.sum().backward()  # implicit gradients: dz/db = 1 / (1 + sin(z) / 2)
        >>> solution.converged, solution.value.detach().flatten(), b.grad.flatten()
        (tensor([True, True]), tensor([0.4502, 1.1872]), tensor([0.8213, 0.6832]))

    ``torch.func.grad``, ``vjp``, ``jacrev`` and ``vmap`` may surround it, except with ``record``; ``jvp``
    only with ``Unrolled()``. Inside of these transforms ``Unrolled()`` needs ``solver=Forward(...)`` or
    ``Anderson(...)``; it makes ``max_steps`` evaluations for every sample, samples that have converged
    stand still, and there is no energy safeguard.
    """
    refuse_export("layer.unrolled(k) of a DEQ, or a loop of evaluations of f")
    refuse_shapes(z0)
    solver, tolerance = read_solver(solver), read_tolerance("tolerance", tolerance)
    adjoint = read_adjoint(adjoint)
    args = (args,) if isinstance(args, Tensor) else args
    automatic = solver is None and bounds is None
    if solver is None and bounds is not None:
        monitored = isinstance(f, EnergyUpdate) or energy is not None
        solver = GradientDescent("auto") if monitored else Forward()
    if solver is None:
        descends = isinstance(f, EnergyUpdate) and f.symmetric and energy is None
        solver = _LBFGS if descends else _ANDERSON
    states_at = _check_options(
        solver, max_steps, f, energy, record, compact, callback, on_failure, states_at, stop
    )
    require_flag("verify", verify, optional=True)
    require_callable("stop", stop, optional=True)
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
    _check_inputs(z0, layout, args, mask)
    start = layout.vector(z0).resolve_neg()  # C++ knows no sign yet to be flipped
    problem = Problem.of(f, energy, z0, args, mask, compact, layout)
    if bounds is not None:
        problem.bounds, problem.symmetric = _read_bounds(bounds, solver, layout, start), False
        start = problem.projected(start)
    goal = problem.goal = Goal(tolerance, start.dtype, problem.autocast, start.device)

    if start.numel() == 0:
        return _with_aux(_nothing(problem, start, adjoint), whole, args, adjoint)
    number = count_solve(f)
    rule = None if stop is None else Rule(stop, layout, start)
    solve = Solving(
        solver, automatic, goal, max_steps, record, callback, states_at, number, verify, rule
    )
    if adjoint is not None and torch.is_grad_enabled():
        solution = adjoint.solve(problem, start, solve, goal.tolerance)
    else:
        with torch.no_grad():
            solution = solve(problem, start.detach())
    if solution.value.untyped_storage().data_ptr() == start.untyped_storage().data_ptr():
        solution.value = solution.value.clone()  # the start was the solution; z0 stays the caller's
    _as_trees(solution, layout)
    what = goal.what + layout.scalars(len(start))
    what = what.replace("fixed-point", "root") if isinstance(f, _Root) else what
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
    value.symmetric = bool(getattr(f, "symmetric", False))
    return value


def _with_aux(
    solution: Solution, f: Callable[..., Any] | None, args: tuple[Any, ...], adjoint: Adjoint | None
) -> Solution:
    """The solution with the auxiliary output of ``f`` at its value; unchanged where f is None."""
    if f is not None:
        with (
            torch.set_grad_enabled(torch.is_grad_enabled() and adjoint is not None),
            constant_weights(repeated=True),
        ):
            solution.aux = f(solution.value, *args)[1]
    return solution


def _read_bounds(
    bounds: Any, solver: Solver, layout: Layout, start: Tensor
) -> tuple[Tensor, Tensor]:
    """The bounds as vectors (D,)."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"bounds must be a pair (low, high), got {bounds!r}")
    if not solver.projects:
        raise ValueError(f"bounds need solver=Forward(...) or GradientDescent(...), got {solver}")
    vectors = []
    for limit, none in zip(bounds, (-torch.inf, torch.inf), strict=True):
        limit = torch.as_tensor(none if limit is None else limit).to(start)
        if limit.dim():
            if not layout.spec.is_leaf():
                raise ValueError("bounds must be numbers for a state of several tensors")
            limit = layout.vector(limit.expand(1, *layout.shapes[0]))[0]
        vectors.append(limit.expand(start.shape[1]))
    low, high = vectors
    if not bool((low <= high).all()):
        raise ValueError(f"bounds must be (low, high) with low <= high, got {bounds}")
    return low, high


class _Root(partial[Any]):
    """The map ``z - F(z)``."""

    def __call__(self, z: Any, *args: Any) -> Any:
        image, spec = pytree.tree_flatten(super().__call__(z, *args))
        leaves, like = pytree.tree_flatten(z)
        shapes, wanted = ([getattr(t, "shape", None) for t in some] for some in (image, leaves))
        if spec != like or shapes != wanted:
            raise ValueError(f"F must return tensors like z0, of shapes {wanted}, got {shapes}")
        return pytree.tree_unflatten([a - b for a, b in zip(leaves, image, strict=True)], spec)


def root(
    F: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] | Tensor = (),
    *,
    solver: Solver | type[Solver] | str = _NEWTON,
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
        solver: by default Newton's method, which needs an F that autograd differentiates twice. The others,
            such as ``Anderson()``, need a derivative of F near 1.
        adjoint: by default ``Implicit(GMRES())``: with ``J = dF/dz`` and the gradient g of the loss by z it
            solves ``J^T u = g``; the gradient of an input is ``-(dF/dinput)^T u``.
        options: the other options of :func:`fixed_point`, except ``energy`` and ``has_aux``.

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
    return fixed_point(_Root(F), z0, args, solver=solver, adjoint=adjoint, **options)


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
    """The solution inside of a transform of ``torch.func``; ``options`` are the others of the call."""
    tolerance, compact = options["tolerance"], options["compact"]
    if isinstance(adjoint, Unrolled) and not (record or options["callback"]):
        solver = options["solver"]
        if type(solver) not in (Forward, Anderson) or adjoint.checkpoint:
            raise RuntimeError(
                "inside of torch.func's transforms adjoint=Unrolled() needs solver=solvers.Forward(...) "
                "or solvers.Anderson(...), whose steps look at no numbers, and checkpoint=False; got "
                f"solver={solver}, {adjoint}; or use Implicit(), Phantom() or OneStep()"
            )
        # The loop itself, every operation transformed; without the energy safeguard.
        problem = Problem.of(f, energy, z0, args, mask, compact)
        start, image = problem.layout.vector(z0), problem.masked_map
        plain = VectorProblem(image, Layout.of(start), (), None, mask=problem.mask, compact=False)
        allowed = criterion(tolerance, start.dtype, problem.autocast, device=start.device)[0]
        most, states_at = options["max_steps"], options["states_at"]
        with without_autocast(start.device.type):
            first = plain.evaluate(start)
            solution = Loop(plain, first, solver, allowed, most, states_at=states_at).run()
        _as_trees(solution, problem.layout)
        return solution
    refuse_in_transform(adjoint, record=record)
    # The same call, made where the tensors are ordinary ones.
    outside = partial(fixed_point, adjoint=None, **options)
    return transformed_solution(outside, adjoint, tolerance, compact, f, energy, z0, args, mask)


def _nothing(problem: Problem, start: Tensor, adjoint: Adjoint | None) -> Solution:
    """The solution of no numbers at all, with a graph to what ``f`` reads."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and adjoint is not None):
        value = problem.layout.tree(problem.masked_map(start))
    status = torch.zeros(len(start), dtype=torch.int64, device=start.device)
    none = torch.zeros(len(start), dtype=small_dtype(start.dtype), device=start.device)
    return Solution(
        value, status, none, none.clone(), steps=status.clone(), evaluations=status.clone()
    )


def _as_trees(solution: Solution, layout: Layout) -> None:
    """Give the value and the states (B, D) of a solution the structure of the initial state."""
    solution.value = layout.tree(solution.value)
    if solution.states is not None:  # several may be one state, or the value
        solution.states = tuple(layout.tree(each.value.clone()) for each in solution.states)


def _check_options(
    solver: Solver, max_steps: int, f: object, energy: object, record: object, compact: object,
    callback: object, on_failure: str, states_at: Any, stop: object,
) -> tuple[int, ...]:  # fmt: skip
    """Check the options; the numbers of ``states_at`` as a tuple."""
    require_callable("f", f)
    require_callable("energy", energy, optional=True)
    require_count("max_steps", max_steps)
    if solver.needs_energy and not (isinstance(f, EnergyUpdate) and energy is None):
        raise ValueError(
            f"{type(solver).__name__} minimises an energy and needs its gradient: pass f as an "
            "EnergyUpdate, for example solvers.Descent(energy)"
        )
    require_flag("compact", compact)
    require_flag("record", record)
    require_callable("callback", callback, optional=True)
    check_on_failure(on_failure)
    numbers = require_increasing("states_at", states_at, high=max_steps, what="max_steps")
    given = {"energy": energy is not None, "record": record, "callback": callback, "stop": stop}
    unknown = [name for name, value in given.items() if value]
    if isinstance(solver, ExternalSolver) and unknown:
        raise ValueError(
            f"{solver!r} has a loop of its own, which knows no {unknown}: leave them out"
        )
    return numbers


def _check_inputs(z0: Any, layout: Layout, args: tuple[Any, ...], mask: Any) -> None:
    """Batch sizes, devices and finiteness of everything that comes in."""
    first = leaves_of(z0)[0]
    batch, device = first.shape[0], first.device
    check_args(args, batch, device, "z0", "f")
    named = {"z0": z0, **{f"args[{position}]": value for position, value in enumerate(args)}}
    for name, tree in named.items():
        for leaf in leaves_of(tree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                require_finite(name, leaf)
    if mask is not None:
        check_mask(mask, layout, batch, device)


@dataclass(frozen=True)
class Solving:
    """How :func:`solvers.fixed_point` solves a problem, with its options.

    ``automatic``: nobody has named the solver, so that samples which it gives up are tried again. ``number``:
    of the solves of this function before. Parametrised weights are constant during a solve and computed once.
    The solver's own algebra runs without autocast, which :class:`Problem` restores around f.
    """

    solver: Solver
    automatic: bool
    goal: Goal
    max_steps: int
    record: bool
    callback: Callable[[Progress], object] | None
    states_at: Sequence[int]
    number: int
    verify: bool | None
    rule: Rule | None = None

    def __call__(self, problem: Problem, start: Tensor, *, verify: bool = True) -> Solution:
        """The solution (B, D) from ``start`` (B, D), without gradients of its own.

        ``verify``: the returned value is evaluated once more where that is due, else the caller does so.
        """
        with constant_weights(), without_autocast(start.device.type):
            if isinstance(self.solver, ExternalSolver):
                first, last, tolerance = None, None, self.goal.tolerance
                solution = self.solver.run(
                    problem, start, tolerance, self.max_steps, self.states_at
                )
                status = solution.status
            else:
                with self.goal.watching():
                    evaluated = [problem.evaluate_first(start)]
                tolerance, first = self.goal.tolerance, evaluated[0].norm.detach()
                # Popped, so that the loop can free it when it has moved on.
                solution, last = iterate(
                    problem, evaluated.pop(), self.solver, tolerance, self.max_steps, self.record,
                    self.callback, self.states_at, self.rule,
                )  # fmt: skip
                most = self.max_steps
                looks = last is None and self.verify is not False and self._may_be_coupled(problem)
                if looks and int(solution.evaluations.max()) + 2 < most:
                    last, most = problem.exact(problem.evaluate(solution.value)), most - 1
                if last is not None:
                    judge_again(solution, last, tolerance, self.goal.precision, converged=True)
                    self._solve_together(problem, solution, tolerance, most)
                status = solution.status
                if self.automatic:
                    options = (most, self.record, self.callback, self.states_at, self.rule)
                    rescue(problem, solution, tolerance, *options)
            problem.check_last(solution.value)
            with torch.no_grad():
                # The last evaluation was one of the returned value, with all samples, where all have
                # converged: of the others another iterate is the best.
                seen = last is not None and solution.status is status and not bool(status.any())
                seen = seen and self.verify is None
                self._verify(problem, start.detach(), first, solution, verify and not seen)
        return solution

    def _may_be_coupled(self, problem: Problem) -> bool:
        """Whether samples that influence each other are to be solved as one system."""
        others = problem.has_energy or problem.bounds is not None or self.rule is not None
        alone = problem.compact or problem.mask is not None or others
        return not (alone or torch.is_grad_enabled())

    def _solve_together(
        self, problem: Problem, solution: Solution, tolerance: Tolerance, most: int
    ) -> None:
        """Go on with all samples as one system where they turn out to influence each other.

        That is meant by ``compact=False`` alone: the samples stay in the batch.
        """
        left = most - int(solution.evaluations.max())
        wrong = solution.status == Status.INCONSISTENT
        if not self._may_be_coupled(problem) or left < 2 or not bool(wrong.any()):
            return
        shape, start = solution.value.shape, solution.value.view(1, -1)
        whole = VectorProblem(
            lambda z: problem.image(z.view(shape)).view(1, -1), Layout.of(start), (), None
        )
        each = replace(tolerance, rtol=tolerance.rtol / len(wrong) ** 0.5)
        found, _ = iterate(whole, whole.evaluate(start), self.solver, each, left - 1)
        solution.value = found.value.view(shape)
        solution.status = found.status.expand(len(wrong)).clone()
        point = problem.evaluate(solution.value)
        solution.residual, solution.residual_norm = point.relative(), point.norm
        solution.evaluations = solution.evaluations.max() + 1 + found.evaluations.expand(len(wrong))
        solution.steps = solution.evaluations.clone()
        # The whole batch may have converged by its norm while a small sample has not.
        judge_again(solution, point, tolerance, self.goal.precision)

    def _verify(
        self,
        problem: Problem,
        start: Tensor,
        first: Tensor | None,
        solution: Solution,
        verify: bool,
    ) -> None:
        """Look again at the returned value and, in the first solve of a function, at the start."""
        if first is not None and bool(solution.status.any()):
            # |f(z)| that has fallen to nothing with the residual belongs to a fixed point at zero.
            reference = solution.residual_norm / solution.residual
            fallen = (solution.status == Status.MAX_STEPS) | (solution.status == Status.STALLED)
            fallen = fallen & (solution.residual > LARGE) & (reference < VANISHED * first)
            self.goal.vanishing = bool(fallen.any())
        wanted = due(self.number, self.verify)
        precision = self.goal.precision
        # With compact=False rows that influence each other are meant to be there, and some have failed.
        failed = not problem.compact and self.verify is None and bool(solution.status.any())
        if verify and (wanted or failed):
            point = problem.exact(problem.evaluate(solution.value.detach()))
            judge_again(solution, point, self.goal.tolerance, precision)
        if wanted and first is not None and (self.number == 0 or self.verify):
            refuse_change(
                solution, lambda: problem.exact(problem.evaluate(start)), first, precision
            )


KINDS = (Anderson, Broyden, Forward, GradientDescent, LBFGS, Newton)


def read_solver(value: Any, *, name: str = "solver") -> Solver | None:
    """A :class:`solvers.Solver` with its defaults where its class or name is given; None stays None."""
    return require_kind(name, value, Solver, KINDS, optional=True)
