r"""Log partition functions of coupled sites, by the three mean-field theories, and their derivatives.

With means m, cavity variances V, covariances C, couplings J, and the cavity fields
``h_i = x_i + sum_j J_ij m_j - V_i m_i``, all theories share::

    F(m, V) = sum_i log Z_i(h_i, V_i) + 1/2 sum_i m_i^T V_i m_i - 1/2 sum_ij m_i^T J_ij m_j

    naive      log Z = F(m, 0)
    second     log Z = F(m, V) - 1/2 sum_i tr(C_i V_i) + 1/4 sum_ij tr(J_ij C_j J_ji C_i)
    adaptive   log Z = F(m, V) - 1/2 log det(I + C (V - J))

Each is stationary in m, V and C at the solution of its theory. Its derivative along anything else is
therefore the partial one, which takes no adjoint solve::

    d log Z / dx_i = m_i,   d log Z / dJ_ij = m_i m_j^T + { 0 | C_i J_ij C_j | chi_ij }

"second" is the expansion of Plefka for sites of which V changes the weights alone (Ising, Potts), and agrees
with it to second order in J for others.

Source: Opper and Winther (2001), "Adaptive and self-averaging Thouless-Anderson-Palmer mean-field
theory for probabilistic modeling", https://doi.org/10.1103/PhysRevE.64.056131; Plefka (1982),
"Convergence condition of the TAP equation for the infinite-ranged Ising spin glass model",
https://doi.org/10.1088/0305-4470/15/6/035.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from solvers.adjoints.capture import Recorder
from solvers.core.checks import require_choice, require_instance
from solvers.core.jacobian import gradients
from solvers.core.layout import Layout
from solvers.core.modes import without_autocast
from solvers.spins.inputs import as_matrix, as_wide, check_inputs, with_symmetries, zero_masked
from solvers.spins.response import is_definite, log_det
from solvers.spins.sites import Site
from solvers.spins.theories import SpinState, cavity_field, no_variance, onsager_variance


def stationary_value(function: Callable[[Any, Any], Tensor], args: Any, state: Any) -> Tensor:
    """``function(args, state)`` (B,), differentiable as if its derivative by the state were 0.

    That is so where the function is stationary. Second derivatives go through the state. Both are
    pytrees of tensors, those of the state (B, ...).
    """
    layout = Layout.of(state)
    z = layout.vector(state)
    recorder = Recorder(cast("Any", _Functional(function, args, layout)))
    point, output = recorder.record(z)
    return _StationaryValue.apply((recorder.aliases, point, output), z, *recorder.inputs)


@dataclass
class _Functional:
    """What a recorder asks for: ``args``, which it replaces, and the map to evaluate."""

    function: Callable[[Any, Any], Tensor]
    args: Any
    layout: Layout

    def masked_map(self, z: Tensor) -> Tensor:
        """The value (B,) of the state as a matrix (B, D)."""
        return self.function(self.args, self.layout.tree(z))


# A recorded evaluation: aliases of the inputs, the state (B, D) and the value (B,) that it was made of.
Record = tuple[list[Tensor], Tensor, Tensor]


class _StationaryValue(torch.autograd.Function):
    """(state, inputs) -> the value, whose derivative by the state is zero and is not computed."""

    @staticmethod
    def forward(ctx: Any, record: Record, z: Tensor, *inputs: Tensor) -> Tensor:
        ctx.record = record
        ctx.save_for_backward(z, *inputs)
        return record[2].detach().clone()

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        (cotangent,), (aliases, _, output) = cotangents, ctx.record
        if torch.is_grad_enabled():
            results: Any = _PartialGradient.apply(ctx.record, cotangent, *ctx.saved_tensors)
        else:
            results = gradients(output, aliases, cotangent)
        return (None, None, *results)


class _PartialGradient(torch.autograd.Function):
    """(cotangent, state, inputs) -> gradients of the inputs; its derivative goes through the state too."""

    @staticmethod
    def forward(
        ctx: Any, record: Record, cotangent: Tensor, z: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.record = record
        ctx.save_for_backward(cotangent, z, *inputs)
        results = gradients(record[2], record[0], cotangent)
        pairs = zip(results, inputs, strict=True)
        return tuple(torch.zeros_like(t) if g is None else g for g, t in pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        aliases, point, output = ctx.record
        with torch.enable_grad():
            weight = ctx.saved_tensors[0].detach().requires_grad_()
            images = gradients(output, aliases, weight, create_graph=True)
            pairs = zip(images, cotangents, strict=True)
            terms = [(g * c).sum() for g, c in pairs if g is not None and g.requires_grad]
            if not terms:
                return (None,) * (len(aliases) + 3)
            results = gradients(sum(terms[1:], terms[0]), [weight, point, *aliases])
        return (None, *results)


ORDERS = ("naive", "second", "adaptive")
State = tuple[Tensor, Tensor, Tensor]  # means, cavity variances, covariances


def tap_log_partition(
    state: SpinState,
    field: Tensor,
    couplings: Tensor,
    site: Site,
    mask: Tensor | None = None,
    *,
    order: str = "adaptive",
) -> Tensor:
    """``log Z`` of coupled sites at the solution of a mean-field theory, differentiable.

    A gradient costs no adjoint solve: ``d log Z / dx = m``. It reaches field, couplings and the parameters
    of the site, also where ``state`` was computed without gradients; second derivatives go through
    ``state``. A pair counts once: its gradient holds ``(m_i m_j^T + ...) / 2`` in the block ``[i, j]``.

    Args:
        state: the solution of the theory, means (B, N, d) and cavity variances (B, N, d, d).
        field: ``x`` (B, N, d).
        couplings: ``J`` (N, N, d, d), as for :func:`solvers.adaptive_tap`.
        site: the sites' distribution.
        mask: (B, N) bool, False for masked sites, which are left out.
        order: the theory, "naive", "second" or "adaptive".

    Returns:
        (B,), at least float32; 0 without couplings and fields. Of order "adaptive" it is NaN, and adds
        nothing to gradients, in samples whose ``chi`` is not positive definite, as a solution's always is.

    Raises:
        TypeError, ValueError: for arguments that do not fit, naming the argument.

    Source: :mod:`solvers.spins.free_energy`.
    """
    require_choice("order", order, ORDERS)
    require_instance("site", site, Site, "a solvers.Site such as IsingSite()")
    check_inputs(couplings, field, mask)
    with without_autocast(field.device.type):
        mean, variance = (as_wide(t) for t in state)
        matrix = as_matrix(with_symmetries(couplings))
        h = cavity_field(mean, variance, as_wide(field), matrix, mask)
        covariance = zero_masked(site.covariance(h, variance), mask)
        results = (zero_masked(mean, mask), zero_masked(variance, mask), covariance)
        value, exists = free_energy(order, results, as_wide(field), matrix, site, mask)
        return torch.where(exists, value, torch.nan)


def free_energy(
    order: str, state: State, field: Tensor, matrix: Tensor, site: Site, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``log Z`` (B,) and where it exists (B,) bool; elsewhere it lacks the term with the determinant.

    ``state`` is zero at masked sites; ``matrix`` (n, n).
    """
    definite = torch.ones(len(field), dtype=torch.bool, device=field.device)
    if order == "adaptive":
        with torch.no_grad():
            definite = is_definite(state[2], state[1], matrix)

    def value(args: tuple[Tensor, Tensor], state: State) -> Tensor:
        mean, variance, covariance = state
        field, matrix = args
        flat = mean.flatten(1)
        if order == "naive":
            variance = no_variance(mean)
        h = cavity_field(mean, variance, field, matrix, None)
        own = zero_masked(site.log_partition(h, variance), mask).sum(1)
        found = own - (flat * (flat @ matrix)).sum(1) / 2
        if order == "naive":
            return found
        found = found + (mean * (variance @ mean.unsqueeze(-1)).squeeze(-1)).flatten(1).sum(1) / 2
        if order == "second":
            onsager = onsager_variance(covariance, matrix)
            return found + (covariance * (onsager / 4 - variance / 2)).flatten(1).sum(1)
        covariance = torch.where(definite[:, None, None, None], covariance, 0.0)
        return found - log_det(covariance, variance, matrix) / 2

    args, tracked = (field, matrix), torch.is_grad_enabled()
    return (stationary_value(value, args, state) if tracked else value(args, state)), definite
