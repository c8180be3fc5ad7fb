r"""Belief propagation: marginals of coupled Potts sites, exact on trees.

With the sums ``h_i = x_i + sum_k nu_{k -> i}`` of the messages (:mod:`solvers.spins.belief_messages`)
and the cavity fields ``c`` of both ends of a pair::

    p_i(a) ~ exp(h_i(a)),     p_ij(a, b) ~ exp(c_{i -> j}(a) + J_ij(a, b) + c_{j -> i}(b))

    log Z = sum_i (1 - n_i) log Z_i + sum_(ij) log Z_ij        n_i neighbours of i

where ``Z_i`` and ``Z_ij`` are the sums of these weights. log Z is stationary in the messages at a fixed
point, so that its derivatives are the partial ones: ``d log Z / dx_i = p_i``, ``d log Z / dJ_ij = p_ij``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from solvers.adjoints.kinds import Adjoint, Implicit, read_adjoint
from solvers.core.checks import (
    require_count,
    require_flag,
    require_instance,
    require_number,
    require_positive,
)
from solvers.core.modes import eager, without_autocast
from solvers.core.solution import Solution, Status, apply_policy, check_on_failure
from solvers.core.tolerance import Tolerance
from solvers.fixed_points import fixed_point
from solvers.methods.forward import Forward
from solvers.spins.belief_messages import (
    Evidence,
    Graph,
    Messages,
    Sample,
    gather_evidence,
    where_left,
)
from solvers.spins.free_energy import stationary_value
from solvers.spins.inputs import (
    as_wide,
    check_field,
    check_like_field,
    check_mask,
    check_values,
    read_given,
    read_start,
    usual_tolerance,
    with_symmetries,
    zero_masked,
)

SUM = 1e-3  # by which the probabilities of a clamped site may miss 1


def _check_model(couplings: Any, field: Any, edges: Any, mask: Any) -> None:
    """-inf is allowed. On a GPU this waits for the device once a solve."""
    _, sites, states = check_field(field)
    if edges is not None:
        _check_edges(edges, sites, field.device)
    pairs = (sites, sites) if edges is None else (len(edges),)
    check_like_field("couplings", couplings, field, (*pairs, states, states))
    check_mask(mask, field)
    check_values(couplings, field, forbidding=True)


def _check_edges(edges: Any, sites: int, device: torch.device) -> None:
    """Pairs (E, 2) of different sites, each once."""
    if not isinstance(edges, Tensor) or edges.dtype != torch.int64 or edges.device != device:
        what = (edges.dtype, edges.device) if isinstance(edges, Tensor) else type(edges)
        raise TypeError(f"edges must be an int64 tensor (E, 2) on {device} like field, got {what}")
    if edges.dim() != 2 or edges.shape[1] != 2:
        raise ValueError(f"edges must have the shape (E, 2), got {tuple(edges.shape)}")
    first, second = edges.amin(1), edges.amax(1)
    if bool(((first < 0) | (second >= sites)).any()):
        raise ValueError(
            f"edges must hold sites 0 .. {sites - 1}, got {int(first.min())} .. {int(second.max())}"
        )
    if bool((first == second).any()):
        raise ValueError("edges must join two different sites, got a site with itself")
    if len((first * sites + second).unique()) < len(edges):
        raise ValueError("edges must hold every pair once, in one direction, got one twice")


def read_clamped(given: Any, field: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """``given`` as for :func:`solvers.belief_propagation`, without masked sites."""
    if given is None:
        return None
    values, where = read_given(given, field)
    seen = values.detach()[where]
    if bool((seen < 0).any()) or bool(((seen.sum(-1) - 1).abs() > SUM).any()):
        raise ValueError(
            "given must hold probabilities of the d states at the clamped sites, such as one-hot values"
        )
    where = where if mask is None else where & mask
    return zero_masked(values, where), where


class Beliefs(NamedTuple):
    """What :func:`solvers.belief_propagation` finds.

    Attributes:
        mean: (B, N, d), the marginals ``p_i(a)``: means of one-hot spins.
        messages: the logarithms of the messages, (B, N, N, d) with ``[i, j]`` the one from j into i,
            or (B, E, 2, d) with ``[e, k]`` the one into the site ``edges[e, k]``. Their mean over the
            states that hard constraints leave is 0, and 0 stands at the others.
        log_partition: (B,) ``log Z``, at least float32, or None where it was not asked for.
    """

    mean: Tensor
    messages: Tensor
    log_partition: Tensor | None = None


def marginals(
    step: Messages, messages: Tensor, sample: Sample, clamped: tuple[Tensor, Tensor] | None
) -> Tensor:
    """(B, N, d): of clamped sites their values, of masked ones and without consistency zero."""
    evidence = sample.evidence
    field = evidence.field + step.graph.gather(messages)
    own = zero_masked(torch.softmax(where_left(field, evidence.states), 2), sample.free)
    if clamped is not None:
        own = torch.where(clamped[1].unsqueeze(2), clamped[0], own)
    return torch.where(sample.consistent[:, None, None], own, 0.0)


def bethe_log_partition(
    step: Messages, messages: Tensor, evidence: Evidence, free: Tensor | None
) -> Tensor:
    """``log Z`` (B,) of the free sites."""
    graph = step.graph
    own = evidence.field + graph.gather(messages)
    sites = torch.logsumexp(where_left(own, evidence.states), 2)  # (B, N)
    cavities = step.cavity_fields(messages, evidence)
    raw, top = step.raw(cavities, evidence)
    raw = where_left(raw + top, evidence.messages)
    back = where_left(cavities, evidence.cavities).index_select(1, graph.reverse)
    pairs = (raw + back)[:, graph.forward]  # (B, E, d)
    if evidence.live is None:
        degrees = torch.bincount(graph.target, minlength=graph.sites).to(own.dtype)
        values = torch.logsumexp(pairs, 2)
    else:  # dead edges may have no state with a weight, whose gradient would be NaN
        here = evidence.live[:, graph.forward]
        degrees = graph.gather(evidence.live.unsqueeze(2).to(own.dtype)).squeeze(2)
        values = torch.logsumexp(torch.where(here.unsqueeze(2), pairs, 0.0), 2)
        values = torch.where(here, values, 0.0)
    return zero_masked((1 - degrees) * sites, free).sum(1) + values.sum(1)


_DEFAULT_ADJOINT = Implicit()


@eager
def belief_propagation(
    couplings: Tensor,
    field: Tensor,
    *,
    edges: Tensor | None = None,
    given: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    damping: float = 0.5,
    tolerance: Tolerance | float | None = None,
    max_steps: int = 500,
    bound: float | None = None,
    adjoint: Adjoint | type[Adjoint] | str | None = _DEFAULT_ADJOINT,
    start: Beliefs | None = None,
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
        damping: of the steps ``nu + damping (f(nu) - nu)``, in (0, 1]. With 1, trees are solved in as many
            steps as their longest path.
        tolerance: of the messages; None: rtol 1e-10 in float64, 1e-5 in float32, 1e-2 in half precision.
        max_steps: parallel steps per sample, an upper bound.
        bound: with hard constraints, messages may run away to certainty, at a rate that never meets a
            tolerance. Logarithms of one message differ by ``bound`` at most. None: what no message
            exceeds on a tree. Much smaller values, such as 30, make such solves faster.
        adjoint: as for :func:`solvers.fixed_point`; None: no gradients.
        start: an earlier result for the same graph, whose messages are where the solve starts, taken as
            constants. None: all states weigh the same.
        log_partition: return the Bethe approximation of ``log Z`` too, the logarithm of the plain sum
            over all states (that of :func:`solvers.adaptive_tap` is less by ``log d`` a free site, since
            the prior is normalised there). Clamped sites count with their energy alone. Its gradient is
            that of the model at the solution, the marginals of sites and pairs, at no adjoint solve.
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
    require_flag("log_partition", log_partition)
    _check_model(couplings, field, edges, mask)
    check_on_failure(on_failure)
    require_number("damping", damping, low=0.0, high=1.0, closed=False)
    if bound is not None:
        require_positive("bound", bound)
    require_count("max_steps", max_steps)  # also where there is no edge and nothing to solve
    adjoint = read_adjoint(adjoint)
    options = {
        "solver": Forward(damping=damping),
        "tolerance": usual_tolerance(tolerance, field.dtype),
        "max_steps": max_steps,
        "adjoint": adjoint,
        "record": record,
        "on_failure": "ignore",
    }
    tracked = adjoint is not None and torch.is_grad_enabled()
    with torch.set_grad_enabled(tracked), without_autocast(field.device.type):
        x = as_wide(field)
        graph, blocks, allowed = _pairs(as_wide(couplings), edges, x.shape[1])
        clamped = read_clamped(given, x, mask)
        sample = gather_evidence(graph, blocks, allowed, x, mask, clamped, bound)
        evidence, widest = sample.evidence, sample.evidence.bound
        step = Messages.of(graph, blocks, allowed, 0.0 if widest is None else float(widest.max()))
        # As they are normalised, also where an earlier result knew less or more.
        first = where_left(_read_start(start, graph, x), evidence.messages)
        first = step.normalised(first, evidence)
        solve = fixed_point if graph.number else _nothing_to_solve
        solution = solve(step, first, (evidence,), **options)
        messages = solution.value
        mean = marginals(step, messages, sample, clamped)
        log_z = _log_partition(step, messages, sample) if log_partition else None
        packed = graph.packed(messages).to(field.dtype)
        solution.value = Beliefs(mean.to(field.dtype), packed, log_z)
    impossible = ~sample.consistent
    solution.status = torch.where(impossible, int(Status.CONTRADICTORY), solution.status)
    solution.residual = torch.where(impossible, math.inf, solution.residual)
    solution.residual_norm = torch.where(impossible, math.inf, solution.residual_norm)
    apply_policy(solution, on_failure, "belief propagation")
    return solution


def _pairs(
    couplings: Tensor, edges: Tensor | None, sites: int
) -> tuple[Graph, Tensor, Tensor | None]:
    """The graph, ``J`` (2E, d, d) of every edge, finite, and the pairs of states (2E, d, d) bool that
    are allowed; None: all."""
    if edges is None:
        couplings = with_symmetries(couplings)
        # Without couplings a message is uniform, but its derivative is not zero.
        coupled = torch.ones_like(couplings[..., 0, 0], dtype=torch.bool)
        if not couplings.requires_grad:
            coupled = (couplings != 0).any(3).any(2)
        graph = Graph.of(torch.nonzero(coupled.triu(1)), sites, listed=False)
    else:
        graph = Graph.of(edges, sites, listed=True)
    blocks = graph.blocks(couplings)
    allowed = blocks.detach() > -math.inf
    if bool(allowed.all()):
        return graph, blocks, None
    return graph, torch.where(allowed, blocks, 0.0), allowed


def _read_start(start: Any, graph: Graph, field: Tensor) -> Tensor:
    """Messages (B, 2E, d) of an earlier result, or zeros."""
    batch, _, states = field.shape
    if start is None:
        return field.new_zeros(batch, graph.number, states)
    require_instance("start", start, Beliefs, "a solvers.Beliefs")
    shape = graph.packed_shape(batch, states)
    return graph.unpacked(read_start("start.messages", start.messages, shape, field))


def _log_partition(step: Messages, messages: Tensor, sample: Sample) -> Tensor:
    """(B,), -inf in samples that are not consistent."""

    def value_of(args: tuple[Evidence, Tensor | None], messages: Tensor) -> Tensor:
        return bethe_log_partition(step, messages, *args)

    args = (sample.evidence, sample.free)
    tracked = torch.is_grad_enabled() and step.graph.number > 0
    value = stationary_value(value_of, args, messages) if tracked else value_of(args, messages)
    return torch.where(sample.consistent, value + sample.energy, -math.inf)


def _nothing_to_solve(step: Messages, start: Tensor, args: Any, **options: Any) -> Solution:
    """Of sites without any edge."""
    zeros = start.new_zeros(len(start))
    counts = torch.zeros(len(start), dtype=torch.long, device=start.device)
    status = torch.full_like(counts, int(Status.CONVERGED))
    return Solution(start, status, zeros, zeros.clone(), counts, counts.clone())
