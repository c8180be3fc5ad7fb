"""Random fixed points by every method: statuses, residuals and counts against float64."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

import solvers
from fuzz.cases import Draw
from fuzz.invariants import norms, same, valid
from fuzz.maps import IN_PLACE
from fuzz.problems import FixedPoint, draw_fixed_point
from solvers import Status
from solvers.torchdeq_bridge import TorchDEQ

SMALL = torch.float32  # norms are accumulated in float32 or wider


def check(draw: Draw) -> None:
    """One solve."""
    problem = draw_fixed_point(draw, energy=draw.chance(0.25))
    options = draw_options(draw, problem)
    graph = options["adjoint"] is not None and problem.dtype in (torch.float32, torch.float64)
    seen: list[Any] = []
    if draw.chance(0.1) and not isinstance(options["solver"], TorchDEQ):
        options["callback"] = seen.append
    inputs = (problem.z0, problem.args, problem.w)

    def solve() -> solvers.Solution:
        with torch.set_grad_enabled(graph):
            return solvers.fixed_point(problem.f, problem.z0, problem.args, **options)

    words = _words(problem, options["solver"])
    call = valid(draw, solve, inputs, allowed=solvers.SolveError, words=words)
    solution = call.result
    if isinstance(call.error, solvers.SolveError):
        solution = call.error.solution
        draw.expect(options["on_failure"] == "raise", "policy", "SolveError without being asked")
    if solution is None:
        return
    failed = not bool(solution.converged.all())
    raised = call.error is not None
    draw.expect(raised == (failed and options["on_failure"] == "raise"), "policy", "raise")
    warns = failed and options["on_failure"] == "warn"
    draw.expect(len(call.warned) == int(warns), "policy", f"{len(call.warned)} warnings")
    check_solution(draw, problem, solution, options)
    check_counts(draw, problem, solution, options, seen)
    if not raised and draw.chance(0.2):
        compare_alone(draw, problem, solution, options)


def _words(problem: FixedPoint, solver: Any) -> tuple[str, ...]:
    """What the message of an exception may hold: what may be refused instead of borne."""
    words = ("in-place", "in place") if problem.name in IN_PLACE else ()
    return (*words, "not differentiable") if isinstance(solver, solvers.Newton) else words


def draw_options(draw: Draw, problem: FixedPoint) -> dict[str, Any]:
    """Keyword arguments for ``fixed_point``, all of them good."""
    uniform = draw.random.uniform
    rtol = draw.note("rtol", draw.random.choice((1e-4, 1e-4, 1e-2, 0.1, 1e-7, 1e-12, 0.0)))
    atol = draw.note("atol", draw.random.choice((0.0, 0.0, 0.0, 1e-3, 1e-6)) * problem.scale)
    solver = draw.note("solver", draw_solver(draw, problem))
    unrolls = not isinstance(solver, (solvers.Newton, TorchDEQ))
    kinds = [None, None, None, solvers.Implicit(on_failure="ignore"), solvers.OneStep()]
    kinds += [solvers.Phantom(draw.random.randint(1, 4), uniform(0.1, 1.0))]
    kinds += [solvers.Unrolled()] if unrolls else []
    external = isinstance(solver, TorchDEQ)
    return {
        "solver": solver,
        "tolerance": solvers.Tolerance(rtol, atol),
        "max_steps": draw.note("max_steps", draw.random.choice((1, 2, 3, 7, 20, 20, 50, 50, 120))),
        "adjoint": draw.note("adjoint", draw.random.choice(kinds)),
        "mask": problem.mask,
        "record": draw.note("record", not external and draw.chance(0.3)),
        "compact": draw.note("compact", draw.chance(0.7)),
        "on_failure": draw.note("on_failure", draw.random.choice(("ignore", "warn", "raise"))),
    }


def draw_solver(draw: Draw, problem: FixedPoint) -> Any:
    """A solver with random options that suits the problem."""
    random, uniform = draw.random, draw.random.uniform
    memory = random.choice((1, 2, 3, 6, 10, 30))
    damping = random.choice((1.0, 1.0, uniform(0.05, 1.5)))
    linear = random.choice((None, None, solvers.GMRES(random.choice((1, 3, 20)))))
    kinds = [
        solvers.Forward(damping),
        solvers.Anderson(memory, damping, random.choice((1e-12, 1e-8, 0.0))),
        solvers.Broyden(max(memory, 2), damping),
        solvers.GradientDescent(uniform(0.1, 1.2)),
        solvers.GradientDescent(uniform(0.1, 1.0), momentum=uniform(0.1, 0.9), nesterov=True),
        solvers.GradientDescent("auto"),
        None,
    ]
    if problem.dtype in (torch.float32, torch.float64):
        kinds.append(solvers.Newton(linear, uniform(0.01, 0.9)))
        name = random.choice(("anderson", "broyden", "fixed_point_iter", "simple_fixed_point_iter"))
        # torchdeq's own algebra works on tensors of float32 and float64.
        kinds += [] if problem.potential else [TorchDEQ(name)]
    if problem.potential:
        kinds += [solvers.LBFGS(memory)] * 3
    return random.choice(kinds)


def check_solution(
    draw: Draw, problem: FixedPoint, solution: solvers.Solution, options: dict[str, Any]
) -> None:
    """Value, residual and status of every sample, recomputed in float64."""
    value, status = problem.vector(solution.value), solution.status
    specs = [pytree.tree_structure(t) for t in (solution.value, problem.z0)]
    leaves = [pytree.tree_leaves(t) for t in (solution.value, problem.z0)]
    kinds = [[(t.shape, t.dtype) for t in each] for each in leaves]
    draw.expect(specs[0] == specs[1] and kinds[0] == kinds[1], "structure", f"{kinds[0]}")
    draw.expect_rows(torch.isfinite(value).all(1), "finite value", value=value, status=status)
    if problem.free is not None:
        kept = (value == problem.vector(problem.z0)) | problem.free
        draw.expect_rows(kept.all(1), "masked tokens", value=value)
    residual, image, error = problem.exact(solution.value)
    size, reference = norms(residual), norms(image)
    reported, relative = solution.residual_norm.double(), solution.residual.double()
    tolerance, told = options["tolerance"], {"status": status, "reported": reported, "true": size}
    unit = max(torch.finfo(torch.promote_types(problem.dtype, SMALL)).eps, problem.eps)
    slack = 4 * (value.shape[1] + 8) * unit
    limit = (tolerance.rtol * reference).clamp_min(tolerance.atol)
    converged, known = solution.converged, torch.isfinite(reported)
    met = size <= limit * (1 + slack) + error * (1 + tolerance.rtol)
    draw.expect_rows(met | ~converged, "CONVERGED", limit=limit, error=error, **told)
    right = (reported - size).abs() <= error + slack * size
    # At the edge of a domain the value, exact in float64, may lie outside.
    draw.expect_rows(right | ~known | error.isnan(), "residual_norm", error=error, **told)
    ratio = size / reference
    right = (relative - ratio).abs() <= (error * (1 + ratio) / (reference - error)) + slack * ratio
    unclear = ~known | ~(reference > 10 * error) | error.isnan()
    draw.expect_rows(right | unclear, "residual", relative=relative, ratio=ratio, **told)
    clearly = (relative <= 0.999 * tolerance.rtol) | (reported <= 0.999 * tolerance.atol)
    # Below the normal numbers a relative residual means nothing.
    unclear = ~known | ~(reference > torch.finfo(problem.dtype).smallest_normal)
    if problem.potential:  # far from the start a residual may be small by growth alone
        unclear |= reference > 7 * problem.witness.first
    draw.expect_rows(converged | ~clearly | unclear, "missed", relative=relative, **told)
    draw.expect_rows(known | (status == Status.NONFINITE), "unknown residual", **told)
    witness = problem.witness
    if problem.potential is None:
        broken = (status == Status.NONFINITE) & ~witness.bad
        draw.expect_rows(~broken, "NONFINITE", largest=witness.largest, **told)
        grown = ~(witness.largest <= 1e5 * witness.first)
        diverged = (status == Status.DIVERGED) & ~grown & ~witness.bad
        draw.expect_rows(
            ~diverged, "DIVERGED", first=witness.first, largest=witness.largest, **told
        )


def check_counts(
    draw: Draw, problem: FixedPoint, solution: solvers.Solution, options: dict[str, Any],
    seen: list[Any],
) -> None:  # fmt: skip
    """Evaluations, steps and the trace."""
    most, evaluations = options["max_steps"], solution.evaluations
    told = {"status": solution.status, "evaluations": evaluations, "calls": problem.witness.calls}
    draw.expect_rows((evaluations >= 1) & (evaluations <= most), "max_steps", **told)
    spent = (solution.status != Status.MAX_STEPS) | (evaluations == most)
    draw.expect_rows(spent, "MAX_STEPS", **told)
    steps = solution.steps
    draw.expect_rows((steps >= 0) & (steps <= evaluations), "steps", steps=steps, **told)
    newton = isinstance(options["solver"], solvers.Newton)
    if problem.potential is None and not newton:
        calls = problem.witness.calls
        # Second attempts count a product with zero, of a residual that overflows, but make no call.
        idle = (solution.status == Status.DIVERGED).long()
        draw.expect_rows(calls + idle >= evaluations, "uncounted", **told)
        if options["adjoint"] is None:
            # Second attempts evaluate samples whose inner systems are solved along with the others.
            retried = options["solver"] is None and bool(calls.max() <= 5 * most)
            exact = retried or bool(calls.max() == evaluations.max())
            draw.expect(exact, "counted", f"{calls.max()} calls, {evaluations.max()} evaluations")
    if solution.energy is not None:
        finite = torch.isfinite(solution.energy) | (solution.status == Status.NONFINITE)
        draw.expect_rows(finite, "finite energy", energy=solution.energy, **told)
    trace = solution.trace
    draw.expect((trace is not None) == options["record"], "trace", f"{trace is not None}")
    if trace is not None:
        _check_trace(draw, solution, trace, newton or options["solver"] is None)
    if seen:
        counts = [progress.evaluation for progress in seen]
        again = options["solver"] is None  # samples tried again go on counting their own
        in_order = again or counts == list(range(1, len(counts) + 1))
        right = in_order and min(counts) >= 1 and max(counts) <= most
        draw.expect(right, "callback", f"{counts}")


def _check_trace(
    draw: Draw, solution: solvers.Solution, trace: solvers.Trace, products: bool
) -> None:
    """As many columns as evaluations, fewer where some are ``products``; energies that do not rise."""
    evaluations = solution.evaluations
    if solution.energy is None and bool(torch.isfinite(solution.residual).all()):
        columns, most = trace.residual.shape[1], int(evaluations.max())
        right = columns <= most if products else columns == most
        draw.expect(right, "trace", f"{columns} columns, {evaluations}")
    # Plain steps of a second attempt are judged by their residuals.
    if trace.energy is None or trace.accepted is None or products:
        return
    for row in range(len(evaluations)):
        taken = trace.energy[row][trace.accepted[row]].double()
        allowed = 8.5 * torch.finfo(trace.energy.dtype).eps * taken[:-1].abs()
        rise = taken[1:] - taken[:-1]
        worst = f"sample {row}: {taken.tolist()}"[:200]
        draw.expect((rise <= allowed).all(), "energy falls", worst)


def compare_alone(
    draw: Draw, problem: FixedPoint, solution: solvers.Solution, options: dict[str, Any]
) -> None:
    """A sample alone, with ``compact`` the other way round, ends as it does among others."""
    row = draw.note("alone", draw.random.randrange(len(solution.status)))

    def take(tree: Any) -> Any:
        return pytree.tree_map(lambda t: None if t is None else t[row : row + 1], tree)

    changed = {"record": False, "callback": None, "on_failure": "ignore", "adjoint": None}
    others = options | changed | {"compact": not options["compact"], "mask": take(problem.mask)}
    z0, args = take(problem.z0), take(problem.args)
    call = valid(
        draw, lambda: solvers.fixed_point(problem.f, z0, args, **others), (z0, args),
        words=_words(problem, options["solver"]),
    )  # fmt: skip
    alone = call.result
    if alone is None or isinstance(options["solver"], TorchDEQ):
        return  # torchdeq's Broyden judges whole batches
    values = [problem.vector(solution.value)[row], problem.vector(alone.value)[0]]
    told = f"{int(solution.status[row])} in the batch and {int(alone.status[0])} alone"
    fixed = type(options["solver"]) is solvers.Forward and problem.law.elementwise
    if fixed and problem.potential is None:
        # In half precision a loop over vectors may round otherwise than one over single numbers.
        close = torch.allclose(
            *values, rtol=64 * problem.eps, atol=64 * problem.eps * problem.scale
        )
        agree = same(*values) if problem.dtype in (torch.float32, torch.float64) else close
        equal = int(solution.status[row]) == int(alone.status[0]) and agree
        draw.expect(equal, "independence", f"{told}; values {values}"[:300])
    if problem.lipschitz is None or not bool(solution.converged[row] & alone.converged[0]):
        return
    rate = float(problem.lipschitz[row])
    if rate > 0.95:
        return
    residual, _, error = problem.exact(alone.value)
    reach = float(norms(residual)[0] + 2 * error[0]) + float(solution.residual_norm[row])
    apart = float(torch.linalg.vector_norm(values[0] - values[1]))
    draw.expect(
        apart <= 1.01 * reach / (1 - rate), "independence", f"{apart} > {reach}/(1 - {rate})"
    )
