"""The policy ``on_failure``: what happens when samples of a solve did not converge."""

from __future__ import annotations

import warnings

from solvers.core.solution import Solution, SolveError, SolveWarning, Status

POLICIES = ("warn", "raise", "ignore")

_ADVICE = {
    Status.MAX_STEPS: "raise max_steps, loosen the tolerance or use another solver",
    Status.STALLED: "the tolerance may lie below rounding, or the problem may be singular",
    Status.DIVERGED: "damp the iteration or use a safeguarded solver",
    Status.NONFINITE: "an input or an evaluation held NaN or infinity",
    Status.INDEFINITE: "a matrix is not positive definite: use MINRES() instead of CG(), weaken the "
    "couplings of spins",
}


def check_on_failure(on_failure: str) -> None:
    """Raise ValueError unless ``on_failure`` is "warn", "raise" or "ignore"."""
    if on_failure not in POLICIES:
        raise ValueError(f"on_failure must be one of {POLICIES}, got {on_failure!r}")


def report(solution: Solution, on_failure: str, what: str, *, stacklevel: int = 3) -> None:
    """Apply the policy to a finished solve; nothing happens where every sample has converged.

    Args:
        solution: the finished solve.
        on_failure: "warn" (:class:`SolveWarning`), "raise" (:class:`SolveError`, which carries
            ``solution``) or "ignore".
        what: what was solved, the beginning of the message, such as ``"linear solve with CG()"``.
        stacklevel: of the warning; the default points at the caller of the caller.

    Raises:
        SolveError: under "raise", if a sample has not converged.
        ValueError: if ``on_failure`` is none of the three.
    """
    check_on_failure(on_failure)
    if on_failure == "ignore" or bool(solution.converged.all()):
        return
    advice = [_ADVICE[Status[name]] for name in solution.counts() if name != "CONVERGED"]
    message = f"{what} left samples unconverged: {solution.summary()} ({'; '.join(advice)})"
    if on_failure == "raise":
        raise SolveError(message, solution)
    warnings.warn(message, SolveWarning, stacklevel=stacklevel)
