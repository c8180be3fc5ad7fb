"""Status and result of a solve, and the treatment of samples that did not converge."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from solvers.core.checks import require_choice
from solvers.core.messages import reduce_error, warn_user

POLICIES = ("warn", "raise", "ignore")
_LONGEST = 120  # characters of the shapes that ``repr`` shows


class Status(IntEnum):
    """How the solve of one sample ended; ``advice`` says what to try then.

    * ``CONVERGED``: the residual and the estimated error of the value are within the tolerance.
    * ``MAX_STEPS``: the maximum number of evaluations was reached.
    * ``STALLED``: in ``Tolerance.patience`` evaluations, 100 by default, neither the residual nor the energy
      fell, and the iterate did not keep moving in one direction.
    * ``DIVERGED``: the residual grew beyond bound; or, with an energy, the state moved away while
      the residual did not decrease, so the energy may be unbounded below.
    * ``NONFINITE``: no evaluation was finite.
    * ``INDEFINITE``: a matrix is not positive definite. :class:`solvers.CG` met a direction of
      non-positive curvature, or the response of the sites in :func:`solvers.adaptive_tap` lost its
      positive definiteness.
    * ``CONTRADICTORY``: hard constraints exclude all states of a site in
      :func:`solvers.belief_propagation`.
    * ``INCONSISTENT``: the tolerance was met during the solve, but not by the returned value when it was
      evaluated again with the whole batch.
    * ``STOPPED``: the rule ``stop`` of the call was True at the returned value, which need not meet the
      tolerance.
    """

    advice: str

    def __new__(cls, value: int, advice: str = "") -> Status:
        status = int.__new__(cls, value)
        status._value_, status.advice = value, advice
        return status

    CONVERGED = 0
    MAX_STEPS = 1, "raise max_steps, loosen the tolerance or use another solver"
    STALLED = 2, "the tolerance may lie below rounding, or the problem may be singular"
    DIVERGED = 3, "damp the iteration or use a safeguarded solver"
    NONFINITE = 4, "an input or an evaluation contained NaN or infinity"
    INDEFINITE = (
        5,
        "a matrix is not positive definite: use MINRES() instead of CG(), weaken the couplings of spins",
    )
    CONTRADICTORY = 6, "the given values, couplings and fields of -inf contradict each other"
    INCONSISTENT = (
        7,
        "evaluated with the whole batch, the returned value has another residual than in the solve: rows "
        "that influence each other are one sample (pass z[None] and their arguments alike), and the function "
        "must not change between calls; solvers.check_update(f, z, *args) examines it",
    )
    STOPPED = 8


class SolveWarning(UserWarning):
    """Warning that some samples did not converge (``on_failure="warn"``)."""


class SolveError(RuntimeError):
    """Error that some samples did not converge (``on_failure="raise"``), with the ``solution`` of all.

    It can be pickled (``multiprocessing``); the solution is then detached and moved to the CPU.
    """

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_error(self, self.solution)


@dataclass
class Trace:
    """History of a solve, one column per evaluation.

    Attributes:
        residual: (B, T) relative residual at each evaluated point; NaN after the sample ended.
        energy: (B, T) energy at the same points, or None without an energy.
        accepted: (B, T) bool, True if the evaluated point became the current iterate (a
            safeguarded solver may reject trial points), or None if every point was accepted.
        attempt: (B, T) int64, 0 at points of the solver and 1, 2, ... at those of the fallback solvers that
            :func:`solvers.fixed_point` and :func:`solvers.root` list, in that order; None if there were none.
            -1 where a sample made no evaluation between two attempts.
            Each attempt begins at the best iterate so far, whose energy may exceed that of the last step.
            Within an attempt the energy of accepted points never rises, up to rounding.
    """

    residual: Tensor
    energy: Tensor | None = None
    accepted: Tensor | None = None
    attempt: Tensor | None = None


@dataclass
class AdjointReport:
    """Report on the linear solve of the latest backward pass.

    Attributes:
        solution: detached :class:`Solution` of the adjoint system; None before the first backward pass.
        solves: number of adjoint systems solved so far.
    """

    solution: Solution | None = None
    solves: int = 0


@dataclass
class Solution:
    """Result of :func:`solvers.fixed_point` or :func:`solvers.solve_linear`.

    Attributes:
        value: best iterate, with the structure of the initial state.
        status: (B,) int64, values of :class:`Status`; ``statuses`` contains their names.
        residual: (B,) relative residual at ``value``:
            ``|f(z) - z| / |f(z)|`` for a fixed point, ``|b - A x| / |b|`` for a linear system.
        residual_norm: (B,) absolute residual at ``value``.
        steps: (B,) int64, number of solver iterations.
        evaluations: (B,) int64, number of evaluations of ``f`` or products with ``A``, including the
            inner products of Newton-Krylov.
        energy: (B,) energy at ``value``, or None.
        trace: history, if ``record=True``.
        adjoint: report of the backward pass of an implicit adjoint.
        error: (B,) estimated error ``|z* - value| / |z*|`` of the worst leaf, relative like the tolerance.
            It is an estimate from the steps of the solver, not a bound: a direction in which no step was
            taken is not seen. Infinite before the second step of a map, the first of an energy or a root;
            NaN for solvers of other packages, None for a linear system.
        bound: (B,) upper bound on the relative error ``|z* - value| / |value|``, where the energy has a known
            modulus of strong convexity: ``|dE/dz| / modulus``, apart from rounding in f. Otherwise None.

    Example:
        >>> import solvers
        >>> start = torch.tensor([[1.0], [3.0]])
        >>> solution = solvers.fixed_point(torch.sqrt, start, record=True)
        >>> solution.counts(), bool((solution.residual < 1e-4).all())
        ({'CONVERGED': 2}, True)
        >>> solution.statuses
        ['CONVERGED', 'CONVERGED']
    """

    value: Any
    status: Tensor
    residual: Tensor
    residual_norm: Tensor
    steps: Tensor
    evaluations: Tensor
    energy: Tensor | None = None
    trace: Trace | None = None
    adjoint: AdjointReport = field(default_factory=AdjointReport)
    error: Tensor | None = None
    bound: Tensor | None = None
    # (B, L) |dr| / |dz| of the last steps of each leaf, where the residual r is in units of its own
    _stiffness: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of_nothing(cls, value: Any, like: Tensor) -> Solution:
        """Return a converged solution for a state ``like`` (B, D) without samples or without numbers."""
        none = like.new_zeros(len(like), dtype=torch.promote_types(like.dtype, torch.float32))
        zeros = [none.clone() for _ in range(3)]
        counts = [none.long() for _ in range(3)]
        return cls(value, counts[0], zeros[0], zeros[1], counts[1], counts[2], error=zeros[2])

    def all_converged(self) -> bool:
        """Return whether every sample converged. The host reads this once from a CUDA device."""
        status = self.status
        version = -1 if status.is_inference() else status._version
        known = vars(self).get("_known")
        if known is None or known[0] is not status or known[1] != version:
            known = status, version, not bool(status.any())  # CONVERGED is 0
            vars(self)["_known"] = known
        return known[2]

    @property
    def converged(self) -> Tensor:
        """Whether each sample converged, (B,) bool; False if a rule stopped it."""
        return self.status == Status.CONVERGED

    def counts(self) -> dict[str, int]:
        """Return the number of samples per status that occurred."""
        number = torch.bincount(self.status, minlength=len(Status)).tolist()
        return {status.name: number[status] for status in Status if number[status]}

    @property
    def statuses(self) -> list[str]:
        """Names of the samples' statuses, such as "CONVERGED"."""
        return [Status(number).name for number in self.status.tolist()]

    def summary(self) -> str:
        """Return one line with the statuses, worst residual and error, median and maximum evaluations."""
        if not self.status.numel():
            return "no samples"
        statuses = ", ".join(f"{name} {number}" for name, number in self.counts().items())
        evaluations = self.evaluations
        return (
            f"{statuses} of {self.status.numel()}; worst relative residual "
            f"{self.residual.max().item():.2e}{self._worst_error()}; evaluations median "
            f"{evaluations.median().item()}, most {evaluations.max().item()}"
        )

    def _worst_error(self) -> str:
        """Return the part of the summary about errors."""
        bound = "" if self.bound is None else f" (at most {self.bound.max().item():.2e})"
        if self.error is None or bool(self.error.isnan().any()):
            return bound
        return f", estimated error {self.error.max().item():.2e}{bound}"

    def __repr__(self) -> str:
        """Return the summary and the shape of the value."""
        shown = repr(pytree.tree_map_only(Tensor, lambda t: tuple(t.shape), self.value))
        if len(shown) > _LONGEST:
            shown = f"{len(pytree.tree_leaves(self.value))} tensors"
        try:
            summary = self.summary()
        except Exception:  # tensors have no values inside torch.func transforms or a compiler
            summary = "values unknown"
        return f"{type(self).__name__}({summary}; value {shown})"


# Not of a status, but of a residual that is as large as ever.
LARGE, MANY = 0.1, 20  # relative residual that has not fallen after so many evaluations
_BOUND = 'implicit_attn.apply_norm(module, "bound", target=0.9)'
_REPELS = (
    "the residual did not fall: solvers.check_update(f, z, *args) examines the map; if it is not a "
    f"contraction, more steps do not help: bound its weights with {_BOUND}, normalise the input, or damp "
    "the iteration with Anderson(damping=0.3); see docs/guide/failing.md, 'Look at the map'"
)
_VANISHING = (
    "|f(z)| vanishes with the residual, so the fixed point seems to be zero, where a relative tolerance "
    "cannot be met: set atol, for example Tolerance(rtol=1e-4, atol=1e-6)"
)
_NO_DESCENT = (
    "the residual did not fall: the energy may couple samples or have a wrong gradient (run "
    "implicit_attn.check_energy), or its weights may be too large: bound them with "
    f"{_BOUND}, or normalise the input; see docs/guide/failing.md"
)
_INFINITE = "the derivative of a finite energy may be infinite, as that of sqrt or norm at 0"


def check_on_failure(on_failure: str) -> None:
    """Raise ValueError unless ``on_failure`` is "warn", "raise" or "ignore"."""
    require_choice("on_failure", on_failure, POLICIES)


def apply_policy(
    solution: Solution, on_failure: str, what: str, f: object = None, *, vanishing: bool = False
) -> None:
    """Warn, raise (:class:`SolveError`) or do nothing about samples that neither converged nor were stopped.

    ``what`` was solved, the beginning of the message, such as ``"linear solve with CG()"``. The
    warning points at the user's line, names the class of the layer ``f``, and contains no numbers, so that
    Python shows it once.
    """
    if on_failure == "ignore" or solution.all_converged():
        return
    failures = [name for name in solution.counts() if name not in ("CONVERGED", "STOPPED")]
    if not failures:
        return
    told: list[str] = []  # where the residual has not fallen, more steps are no cure
    if vanishing:
        told = [_VANISHING]
    elif what.startswith("fixed-point solve") and "INCONSISTENT" not in failures:
        unsolved = [int(Status.MAX_STEPS), int(Status.STALLED), int(Status.DIVERGED)]
        same = torch.isin(solution.status, solution.status.new_tensor(unsolved))
        same = same & (solution.residual > LARGE) & (solution.evaluations >= MANY)
        if bool(same.any()):
            told = [_REPELS if solution.energy is None else _NO_DESCENT]
    replaced = ("MAX_STEPS", "DIVERGED") if told else ()
    advice = [Status[name].advice for name in failures if name not in replaced]
    if "DIVERGED" in failures and solution.energy is not None:
        advice.append("the energy may be unbounded below")
    if "NONFINITE" in failures and solution.energy is not None:
        advice.append(_INFINITE)
    advice += told
    head, tail = f"{what} left samples unconverged", f"({'; '.join(advice)})"
    if on_failure == "raise":
        raise SolveError(f"{head}: {solution.summary()} {tail}", solution)
    warn_user(f"{head}: {', '.join(failures)} {tail}", SolveWarning, f)
