"""The entry for belief propagation: marginals of coupled Potts sites, exact on trees."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit
from solvers.core.checks import (
    require_count,
    require_flag,
    require_instance,
    require_number,
    require_positive,
)
from solvers.core.layout import Layout
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.solver import Solver
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.forward import Forward
from solvers.spins.belief.beliefs import Beliefs, BetheFreeEnergy, marginals, pair_marginals
from solvers.spins.belief.checks import check_model, read_clamped
from solvers.spins.belief.evidence import Clamped, Sample, gather_evidence, where_left
from solvers.spins.belief.graph import Graph
from solvers.spins.belief.messages import Messages
from solvers.spins.inputs import as_wide, read_betas, with_symmetries
from solvers.spins.stationary import stationary_value

_DEFAULT_ADJOINT = Implicit()
_RTOL = {torch.float64: 1e-10, torch.float32: 1e-5}  # half precision: 1e-2
DAMPING = 0.5


@eager
def belief_propagation(
    couplings: Tensor,
    field: Tensor,
    *,
    edges: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    inverse_temperature: float | Sequence[float] = 1.0,
    damping: float | None = None,
    solver: Solver | None = None,
    tolerance: Tolerance | None = None,
    max_steps: int = 500,
    bound: float | None = None,
    adjoint: Adjoint | None = _DEFAULT_ADJOINT,
    start: Beliefs | None = None,
    pairs: bool = False,
    log_partition: bool = False,
    record: bool = False,
    on_failure: str = "warn",
) -> Solution:
    r"""Marginals and free energies of coupled Potts sites by belief propagation.

    For sites with d states, ``P(s) ~ exp(sum_i x_i(s_i) + sum_{i<j} J_ij(s_i, s_j))``, messages are
    sent along all edges at once until they no longer change::

        c_{j -> i}(b) = x_j(b) + sum_{k != i} nu_{k -> j}(b)
        nu_{j -> i}(a) = log sum_b exp(J_ij(a, b) + c_{j -> i}(b)) - (its mean over a)

    Then ``p_i(a) ~ exp(x_i(a) + sum_k nu_{k -> i}(a))``. That is exact where the sites that are neither
    clamped nor masked form a tree or several. With loops it is an approximation (a stationary point of
    the Bethe free energy), which need be neither unique nor stable. An Ising model is the case d = 2.

    Couplings and fields may be ``-inf``: such states and pairs of states are forbidden. What that rules
    out for certain is found first, for every sample; the messages weigh what is left, in logarithms.

    Args:
        couplings: ``J`` (N, N, d, d), zero blocks ``J_ii``, ``J_ij^{ab} = J_ji^{ba}``; every pair is an
            edge, though pairs of zero blocks take time only where a gradient is asked for. Or (E, d, d)
            of the pairs ``edges``, rows for the states of the first site. No NaN, no ``+inf``.
        field: ``x`` (B, N, d), dtype and device like ``couplings``.
        edges: (E, 2) int64, each pair once. None: couplings of all pairs.
        given: a pair of values (B, N, d) and of bools (B, N): where True, the site is clamped. It keeps
            its value, one-hot or probabilities s of its states, and acts on the others as a field
            ``sum_b J_ij(a, b) s_j(b)``. Free sites may hold any value, also NaN.
        mask: (B, N) bool, False for masked sites: they influence no other, their results are zero.
        inverse_temperature: ``beta`` > 0 that multiplies couplings and fields. Several are a schedule of
            annealing: a solve at each, in that order, which starts from the messages before it. Results
            and gradients are those of the last, ``steps`` and ``evaluations`` of all; ``max_steps``
            holds for each.
        damping: of steps ``nu + damping (f(nu) - nu)``, in (0, 1]. None: 0.5. With 1, trees are solved
            in as many steps as their longest path.
        solver: another method, such as ``Anderson()``, instead of damped steps.
        tolerance: of the messages; None: rtol 1e-10 in float64, 1e-5 in float32, 1e-2 in half precision.
        max_steps: parallel steps per sample, an upper bound.
        bound: with hard constraints, messages may run away to certainty, at a rate that never meets a
            tolerance. Logarithms of one message differ by ``bound`` at most. None: what no message
            exceeds on a tree. Much smaller values, such as 30, make such solves faster.
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients.
        start: an earlier result for the same graph, whose messages are where the solve starts, taken as
            constants. None: all states weigh the same.
        pairs: return the pair marginals too.
        log_partition: return the Bethe approximation of ``log Z`` too, the logarithm of the plain sum
            over all states (that of :func:`solvers.adaptive_tap` is less by ``log d`` a free site, since
            the prior is normalised there). Clamped sites count with their energy alone. Its gradient is
            that of the model at the solution, ``d log Z / dx = beta p``, at no adjoint solve.
        record: keep the trace of residuals.
        on_failure: "warn", "raise" or "ignore" about samples that did not converge.

    Returns:
        A :class:`Solution` whose ``value`` is a :class:`Beliefs`, without NaN; ``residual`` is that of
        the messages. ``Status.CONTRADICTORY``: what is given and what is forbidden leave no state to
        some site. Then there is no distribution: all marginals are zero and ``log Z`` is ``-inf``, the
        residual infinite. Contradictions that only a search would find are not detected; the sample
        then converges to meaningless beliefs, or to none.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.
        SolveError: if ``on_failure="raise"`` and a sample did not converge.

    Example:
        >>> chain = torch.tensor([[0, 1], [1, 2]])
        >>> repel = -2.0 * torch.eye(3).expand(2, 3, 3)
        >>> solution = belief_propagation(repel, torch.randn(4, 3, 3), edges=chain)
        >>> solution.value.mean.shape
        torch.Size([4, 3, 3])

    Source: Pearl (1988), "Probabilistic Reasoning in Intelligent Systems",
    https://doi.org/10.1016/C2009-0-27609-4; Yedidia, Freeman and Weiss (2005), "Constructing
    free-energy approximations and generalized belief propagation algorithms",
    https://doi.org/10.1109/TIT.2005.850085, for the free energy.
    """
    require_flag("pairs", pairs)
    require_flag("log_partition", log_partition)
    betas = read_betas(inverse_temperature)
    check_model(couplings, field, edges, mask)
    check_on_failure(on_failure)
    if bound is not None:
        require_positive("bound", bound)
    # Also where there is no edge and nothing to solve.
    require_count("max_steps", max_steps)
    require_instance("tolerance", tolerance, Tolerance, "a solvers.Tolerance", optional=True)
    require_instance("adjoint", adjoint, Adjoint, "a solvers.Adjoint", optional=True)
    options = {
        "solver": _read_solver(solver, damping),
        "tolerance": Tolerance(_RTOL.get(field.dtype, 1e-2)) if tolerance is None else tolerance,
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    tracked = adjoint is not None and torch.is_grad_enabled()
    with torch.set_grad_enabled(tracked), without_autocast(field.device.type):
        model = _Model.of(couplings, field, edges, mask, given, bound, options)
        model_start = model.read_start(start)
        solution = _anneal(model, model_start, betas, pairs, log_partition)
    apply_policy(solution, on_failure, "belief propagation")
    return solution


def _anneal(
    model: _Model, start: Tensor, betas: tuple[float, ...], pairs: bool, log_partition: bool
) -> Solution:
    """The solution at the last inverse temperature, after those at the earlier ones."""
    steps = evaluations = 0
    for beta in betas[:-1]:
        with torch.no_grad():
            earlier = model.solve(beta, start)[0]
        start = earlier.value
        steps, evaluations = steps + earlier.steps, evaluations + earlier.evaluations
    solution, step, sample = model.solve(betas[-1], start)
    solution.steps, solution.evaluations = (
        solution.steps + steps,
        solution.evaluations + evaluations,
    )
    solution.value = model.beliefs(solution.value, step, sample, pairs, log_partition)
    impossible = ~sample.consistent
    solution.status = torch.where(impossible, int(Status.CONTRADICTORY), solution.status)
    solution.residual = torch.where(impossible, math.inf, solution.residual)
    solution.residual_norm = torch.where(impossible, math.inf, solution.residual_norm)
    return solution


@dataclass(frozen=True)
class _Model:
    """A checked model, at least float32, and the options of :func:`solvers.fixed_point`."""

    graph: Graph
    blocks: Tensor  # (2E, d, d), finite
    allowed: Tensor | None  # (2E, d, d) bool, None: everything
    field: Tensor
    mask: Tensor | None
    clamped: Clamped | None
    bound: float | None
    dtype: torch.dtype
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        couplings: Tensor,
        field: Tensor,
        edges: Tensor | None,
        mask: Tensor | None,
        given: Any,
        bound: float | None,
        options: dict[str, Any],
    ) -> _Model:
        wide, x = as_wide(couplings), as_wide(field)
        if edges is None:
            wide = with_symmetries(wide)
            # Without couplings a message is uniform, but its derivative is not zero.
            coupled = torch.ones_like(wide[..., 0, 0], dtype=torch.bool)
            if not wide.requires_grad:
                coupled = (wide != 0).any(3).any(2)
            graph = Graph.of_matrix(coupled)
        else:
            graph = Graph.of_list(edges, x.shape[1])
        blocks = graph.blocks(wide)
        allowed = blocks.detach() > -math.inf
        hard = not bool(allowed.all())
        return cls(
            graph,
            torch.where(allowed, blocks, 0.0) if hard else blocks,
            allowed if hard else None,
            x,
            mask,
            read_clamped(given, x, mask),
            bound,
            field.dtype,
            options,
        )

    def solve(self, beta: float, start: Tensor) -> tuple[Solution, Messages, Sample]:
        """Messages (B, 2E, d) at an inverse temperature, and what they were found with."""
        blocks, field = self.blocks, self.field
        if beta != 1:
            blocks, field = beta * blocks, beta * field
        sample = gather_evidence(
            self.graph, blocks, self.allowed, field, self.mask, self.clamped, self.bound
        )
        bound = sample.evidence.bound
        step = Messages.of(
            self.graph, blocks, self.allowed, 0.0 if bound is None else float(bound.max())
        )
        if self.graph.number == 0:
            return _nothing_to_solve(start), step, sample
        # As they are normalised, also where an earlier result knew less or more.
        first = step.normalised(where_left(start, sample.evidence.messages), sample.evidence)
        return fixed_point(step, first, (sample.evidence,), **self.options), step, sample

    def beliefs(
        self, messages: Tensor, step: Messages, sample: Sample, pairs: bool, log_partition: bool
    ) -> Beliefs:
        """Of solved messages (B, 2E, d)."""
        evidence, clamped = sample.evidence, self.clamped
        mean = marginals(step, messages, sample, clamped)
        both = pair_marginals(step, messages, evidence, mean).to(self.dtype) if pairs else None
        if both is not None:
            there = sample.consistent.view(-1, *[1] * (both.dim() - 1))
            both = torch.where(there, both, 0.0)
        log_z = None
        if log_partition:
            log_z = _log_partition(step, messages, sample)
        packed = self.graph.packed(messages).to(self.dtype)
        return Beliefs(mean.to(self.dtype), packed, both, log_z)

    def read_start(self, start: Any) -> Tensor:
        """Messages (B, 2E, d) of an earlier result, or zeros."""
        batch, _, states = self.field.shape
        if start is None:
            return self.field.new_zeros(batch, self.graph.number, states)
        require_instance("start", start, Beliefs, "a solvers.Beliefs")
        shape = self.graph.packed_shape(batch, states)
        if tuple(start.messages.shape) != shape:
            raise ValueError(
                f"start.messages must have the shape {shape}, got {tuple(start.messages.shape)}"
            )
        if start.messages.device != self.field.device:
            raise TypeError(
                f"start.messages must be on {self.field.device}, got {start.messages.device}"
            )
        if not bool(start.messages.isfinite().all()):
            raise ValueError("start.messages must be finite, got NaN or infinity")
        return self.graph.unpacked(start.messages.detach().to(self.field.dtype))


def _log_partition(step: Messages, messages: Tensor, sample: Sample) -> Tensor:
    """(B,), -inf in samples that are not consistent."""
    functional = BetheFreeEnergy((sample.evidence, sample.free), step)
    if torch.is_grad_enabled() and step.graph.number > 0:
        functional.layout = Layout.of(messages)
        value = stationary_value(functional, functional.layout.vector(messages))
    else:
        value = functional(messages)
    return torch.where(sample.consistent, value + sample.energy, -math.inf)


def _nothing_to_solve(start: Tensor) -> Solution:
    """Of sites without any edge."""
    zeros = start.new_zeros(len(start))
    counts = torch.zeros(len(start), dtype=torch.long, device=start.device)
    status = torch.full_like(counts, int(Status.CONVERGED))
    return Solution(start, status, zeros, zeros.clone(), counts, counts.clone())


def _read_solver(solver: Solver | None, damping: float | None) -> Solver:
    if damping is not None:
        require_number("damping", damping, low=0.0, high=1.0, closed=False)
    if solver is None:
        return Forward(damping=DAMPING if damping is None else damping)
    require_instance("solver", solver, Solver, "a solvers.Solver such as Anderson()")
    if damping is not None:
        raise ValueError(
            f"damping is of the steps without a solver, got damping={damping} and {solver}"
        )
    return solver
