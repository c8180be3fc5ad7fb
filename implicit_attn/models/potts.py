"""Potts models and factored attention, trained by pseudo-likelihood."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from implicit_attn.energies.spins import Couplings
from implicit_attn.energies.tokens import check_tensor
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_instance,
    require_integers,
    require_nonnegative,
    require_positive,
)


class ConditionalModel(nn.Module, ABC):
    """Base class of models for the colour of every site given the colours of the other sites.

    ``p(s_i = a | rest) = softmax_a(x_i^a + f_i^a(s))``, where ``f_i`` must not depend on ``s_i``, so that
    one evaluation gives the logits of all sites. A subclass defines f as :meth:`interaction` and a
    measure of its size as :meth:`penalty`.

    Args:
        sites: number of sites N >= 2.
        colours: number of colours d >= 2.
    """

    def __init__(self, sites: int, colours: int) -> None:
        super().__init__()
        self.sites = require_count("sites", sites, low=2)
        self.colours = require_count("colours", colours, low=2)
        self.field = nn.Parameter(torch.zeros(sites, colours))

    @abstractmethod
    def interaction(self, states: Tensor) -> Tensor:
        """Return the contribution of other sites to the logits, (B, N, d), for states (B, N, d)."""

    @abstractmethod
    def penalty(self) -> Tensor:
        """Return a scalar sum of squares without the fields, which a fit multiplies by ``l2``."""

    def logits(self, s: Tensor) -> Tensor:
        """Return logits (B, N, d) of every site given the others.

        Args:
            s: colours (B, N), integers in 0 .. d - 1; or one-hot or mean states (B, N, d).
        """
        return self.field + self.interaction(self.one_hot(s))

    def forward(self, s: Tensor) -> Tensor:
        return self.logits(s)

    def pseudo_likelihood(self, s: Tensor) -> Tensor:
        r"""Return the scalar negative log pseudo-likelihood per site, in nats.

        It is ``- 1/(B N) sum_mu sum_i log p(s_i^mu | rest)``, the mean over samples and sites. The loss of
        one random masked site is an unbiased estimate of it.
        """
        states = self.one_hot(s)
        logits = self.field + self.interaction(states)
        return -(states * torch.log_softmax(logits, -1)).sum(-1).mean()

    def check_states(self, s: Tensor) -> Tensor:
        """Return ``s`` if it is valid for :meth:`logits`, else raise ValueError."""
        n, d = self.sites, self.colours
        if isinstance(s, Tensor) and s.is_floating_point():
            return check_tensor("s", s, "B N d", finite=False, N=n, d=d)
        return require_integers("s", s, (n,), high=d - 1)

    def one_hot(self, s: Tensor) -> Tensor:
        """Convert colours (B, N) to one-hot states (B, N, d) of the model's dtype; states are checked."""
        if self.check_states(s).is_floating_point():
            return s.to(self.field.dtype)
        states = self.field.new_zeros(*s.shape, self.colours)
        return states.scatter_(2, s.long().unsqueeze(2), 1.0)


class PottsModel(ConditionalModel):
    r"""``P(s) ~ exp(sum_i x_i^{s_i} + 1/2 sum_{i != j} J_ij^{s_i s_j})``, with learned J and x.

    The conditionals are exact, and linear in the parameters::

        p(s_i = a | rest) = softmax_a(x_i^a + sum_{j != i} J_ij^{a s_j})

    so the negative log pseudo-likelihood is convex, and its minimum recovers the couplings of a Potts
    model from enough samples. Terms of ``J_ij`` that depend on only one of the two colours are equivalent
    to fields: compare couplings after ``zero_sum`` of ``implicit_attn.energies.spins``. All parameters are
    initially 0. ``J_ij^{ab} = J_ji^{ba}`` always.

    Args:
        sites, colours: numbers of sites N and of colours d.

    Attributes:
        couplings: :class:`Couplings`; ``couplings.weight`` is J (N, N, d, d).
        field: x (N, d).

    Source: Besag, "Statistical analysis of non-lattice data" (1975),
    https://doi.org/10.2307/2987782, for the pseudo-likelihood; Ekeberg et al., "Improved contact
    prediction in proteins" (2013), https://arxiv.org/abs/1211.1281, for Potts models.
    """

    def __init__(self, sites: int, colours: int) -> None:
        super().__init__(sites, colours)
        self.couplings = Couplings(sites, colours)
        nn.init.zeros_(self.couplings.free)

    def interaction(self, states: Tensor) -> Tensor:
        """Return ``sum_j J_ij^{a s_j}``, (B, N, d)."""
        return self.couplings(states)

    def penalty(self) -> Tensor:
        """Return ``sum_ij |J_ij|^2 / 2``, in which every pair counts once."""
        return self.couplings.free.square().sum()

    def energy(self, s: Tensor) -> Tensor:
        """Return ``-log P(s)`` up to the log partition function, (B,)."""
        states = self.one_hot(s)
        return -((self.field + 0.5 * self.couplings(states)) * states).sum((1, 2))

    def extra_repr(self) -> str:
        return f"sites={self.sites}, colours={self.colours}"


ROWS = ("sink", "softmax", "linear")


class FactoredAttention(ConditionalModel):
    r"""Self-attention whose weights depend only on positions and whose values depend only on colours.

    With weights ``A^h`` (N, N), zero on the diagonal, and values ``V^h`` (d, d) of head h::

        logits_i = x_i + sum_h sum_j A^h_ij V^h S_j,    that is    J_ij = sum_h A^h_ij V^h

    This is a Potts model of rank H: J rearranged as a matrix (N^2, d^2) is a sum over the heads. J is not
    symmetric, because the conditionals of the sites are learned independently; ``zero_sum`` of
    ``implicit_attn.energies.spins`` averages both directions. If all colours are equivalent at every site, as
    for the digits of Sudoku, freeze the fields (``model.field.requires_grad_(False)``), which would overfit.

    Args:
        sites, colours, heads: numbers N, d and H.
        rows: how weights follow from scores ``a^h_ij``. "softmax": ``A^h_ij = softmax_{j != i}(a^h_ij)``,
            so ``sum_j J_ij`` is the same matrix for all sites, which excludes couplings of both signs and
            graphs with unequal degrees. "sink": with an additional key with score 0 and value 0, so that
            rows sum to at most 1. "linear": ``A^h_ij = a^h_ij``.
        power: 1, or 2 to square the mixed values, which adds terms of three sites::

            logits_i = x_i + sum_h W^h (sum_j A^h_ij V^h S_j)^2

    Attributes:
        scores: a (H, N, N); the diagonal has no effect.
        values: V (H, d, d); initially 0 with ``power=1``.
        output: W (H, d, d), initially 0, or None with ``power=1``.
        field: x (N, d).

    Source: Rende, Gerace, Laio, Goldt, "Mapping of attention mechanisms to a generalized Potts model"
    (2024), https://arxiv.org/abs/2304.07235, for one softmax head; Bhattacharya et al., "Interpreting
    Potts and Transformer Protein Models Through the Lens of Simplified Attention" (2022),
    https://doi.org/10.1142/9789811250477_0004, for several.
    """

    output: nn.Parameter | None

    def __init__(
        self, sites: int, colours: int, heads: int = 1, rows: str = "sink", power: int = 1
    ) -> None:
        super().__init__(sites, colours)
        self.heads = require_count("heads", heads)
        self.rows = require_choice("rows", rows, ROWS)
        self.power = require_count("power", power)
        if power > 2:
            raise ValueError(f"power must be 1 or 2, got {power}")
        self.scores = nn.Parameter(torch.empty(heads, sites, sites))
        self.values = nn.Parameter(torch.empty(heads, colours, colours))
        squares = nn.Parameter(torch.empty(heads, colours, colours)) if power == 2 else None
        self.register_parameter("output", squares)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the scores of one head to 0, and draw those of several from N(0, 1), or N(0, 1/N^2) if linear.

        A single head with uniform rows recovers the graph from fewer samples than with random scores.
        Several heads must differ.
        """
        # Linear scores are the weights themselves, so they get the size of softmax weights.
        many = 0.0 if self.heads == 1 else 1.0
        nn.init.normal_(self.scores, std=1.0 / self.sites if self.rows == "linear" else many)
        nn.init.zeros_(self.field)
        if self.output is None:
            nn.init.zeros_(self.values)
        else:
            nn.init.normal_(self.values, std=self.colours**-0.5)
            nn.init.zeros_(self.output)

    def attention(self) -> Tensor:
        """Return the weights A (H, N, N), zero on the diagonal."""
        own = torch.eye(self.sites, dtype=torch.bool, device=self.scores.device)
        if self.rows == "linear":
            return self.scores.masked_fill(own, 0.0)
        scores = self.scores.masked_fill(own, float("-inf"))
        if self.rows == "softmax":
            return torch.softmax(scores, -1)
        sink = scores.new_zeros(self.heads, self.sites, 1)
        return torch.softmax(torch.cat([scores, sink], -1), -1)[..., :-1]

    def couplings(self) -> Tensor:
        """Return ``J_ij = sum_h A^h_ij V^h``, (N, N, d, d), which is not symmetric, for ``power=1``."""
        if self.power != 1:
            raise ValueError("power must be 1 for pair couplings, got 2")
        return torch.einsum("hij,hab->ijab", self.attention(), self.values)

    def interaction(self, states: Tensor) -> Tensor:
        """Return the sum over the heads, (B, N, d)."""
        n, d = self.sites, self.colours
        if self.output is None and self.heads * (n + d) > n * d:
            # For many heads one product with J, N^2 d^2 per sample, is cheaper than H N d (N + d).
            matrix = self.couplings().transpose(1, 2).reshape(n * d, n * d)
            return (states.flatten(1) @ matrix.mT).view(states.shape)
        values = torch.einsum("bjc,hac->bhja", states, self.values)
        mixed = self.attention() @ values
        if self.output is None:
            return mixed.sum(1)
        return torch.einsum("bhir,har->bia", mixed.square(), self.output)

    def penalty(self) -> Tensor:
        """Return ``sum_ij |J_ij|^2 / 2`` of the couplings, or ``sum |V|^2 + |W|^2`` with ``power=2``."""
        if self.output is not None:
            return self.values.square().sum() + self.output.square().sum()
        weights, values = self.attention().flatten(1), self.values.flatten(1)
        return 0.5 * ((weights @ weights.mT) * (values @ values.mT)).sum()

    def extra_repr(self) -> str:
        return (
            f"sites={self.sites}, colours={self.colours}, heads={self.heads}, rows={self.rows!r}, "
            f"power={self.power}"
        )


SOLVERS = ("lbfgs", "adam")
SCHEDULES = ("one-cycle", "constant")
LBFGS_MEMORY = 20

Watch = Callable[[int, float], None]
Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True)
class PseudoLikelihoodFit:
    """Report on a fit.

    Attributes:
        status: "converged" (L-BFGS: the gradient met the tolerance), "max_steps", "stalled" (L-BFGS: no
            step along the search direction decreased the loss) or "nonfinite" (a loss or gradient is not
            finite: the parameters are restored).
        losses: objective at each evaluation: with "lbfgs" on all data, including trial steps of the line
            search; with "adam" on each batch before its step.
        steps: number of steps.
        gradient: largest entry of the objective's gradient at the end, relative to that at the start;
            NaN with "adam", which does not measure it.
    """

    status: str
    losses: tuple[float, ...]
    steps: int
    gradient: float = math.nan


@torch.enable_grad()
def fit_pseudolikelihood(
    model: ConditionalModel,
    data: Tensor,
    l2: float = 0.0,
    solver: str = "lbfgs",
    *,
    steps: int | None = None,
    rate: float | None = None,
    schedule: str | None = None,
    batch: int | None = None,
    tolerance: float | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    watch: Watch | None = None,
) -> PseudoLikelihoodFit:
    """Minimise ``model.pseudo_likelihood(data) + l2 model.penalty()`` over the model's parameters.

    L-BFGS uses all data at every evaluation and minimises the convex loss of a :class:`PottsModel`. Adam
    uses batches and suits models with a product of parameters.

    Args:
        model: model to fit, which is changed in place.
        data: (M, N) integer colours, or one-hot states (M, N, d).
        l2: weight >= 0 of the penalty; the loss is per site.
        solver: "lbfgs" or "adam".
        steps: maximum number of steps; None for 40 of L-BFGS or 500 of Adam.
        rate: maximum learning rate of Adam; None for 0.05.
        schedule: schedule of Adam's rate, "one-cycle" or "constant"; None for "one-cycle".
        batch: batch size of Adam, drawn without replacement within an epoch; None for 2000.
        tolerance: tolerance of L-BFGS for the largest entry of the gradient, relative to the start; None
            for 1e-5.
        augment: ``augment(batch, generator) -> batch``, applied to each batch of Adam.
        seed: seed of Adam's batches and of ``augment``.
        watch: function ``watch(step, loss)``, called after each step of Adam.

    Raises:
        TypeError, ValueError: if an argument is invalid or belongs to the other solver, no parameter of
            the model requires a gradient, or a sample of the data has another shape or colour.

    Source: Besag (1975), https://doi.org/10.2307/2987782.
    """
    require_instance("model", model, ConditionalModel, "a ConditionalModel")
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        raise ValueError("model must have a parameter that requires a gradient, got none")
    model.check_states(data)
    require_nonnegative("l2", l2)
    require_count("seed", seed, low=0)
    of_adam = {
        "rate": rate,
        "schedule": schedule,
        "batch": batch,
        "augment": augment,
        "watch": watch,
    }
    lbfgs = require_choice("solver", solver, SOLVERS) == "lbfgs"
    for name, value in (of_adam if lbfgs else {"tolerance": tolerance}).items():
        if value is not None:
            other = "adam" if lbfgs else "lbfgs"
            raise ValueError(f"{name}={value!r} needs solver={other!r}, got solver={solver!r}")
    limit = require_count("steps", (40 if lbfgs else 500) if steps is None else steps)
    kept = copy.deepcopy(model.state_dict())
    if lbfgs:
        small = require_positive("tolerance", 1e-5 if tolerance is None else tolerance)
        fit = _run_lbfgs(model, parameters, model.one_hot(data), l2, limit, small)
    else:
        require_callable("augment", augment, optional=True)
        require_callable("watch", watch, optional=True)
        size = min(require_count("batch", 2000 if batch is None else batch), len(data))
        chosen = require_choice(
            "schedule", "one-cycle" if schedule is None else schedule, SCHEDULES
        )
        largest = require_positive("rate", 0.05 if rate is None else rate)
        optimizer = torch.optim.Adam(parameters, largest)
        batches = _batches(model, data, size, augment, seed)
        fit = _run_adam(model, optimizer, batches, l2, limit, chosen, watch)
    if fit.status == "nonfinite":
        model.load_state_dict(kept)
    return fit


def _objective(model: ConditionalModel, states: Tensor, l2: float) -> Tensor:
    loss = model.pseudo_likelihood(states)
    return loss + l2 * model.penalty() if l2 else loss


def _batches(
    model: ConditionalModel, data: Tensor, size: int, augment: Augment | None, seed: int
) -> Iterator[Tensor]:
    """Yield one-hot batches of the data, each sample once per epoch, in the order of a generator."""
    generator, order = torch.Generator().manual_seed(seed), torch.empty(0, dtype=torch.long)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(data), generator=generator)])
        chosen, order = order[:size], order[size:]
        batch = data[chosen.to(data.device)]
        yield model.one_hot(batch if augment is None else augment(batch, generator))


def _run_adam(
    model: ConditionalModel, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], l2: float,
    limit: int, schedule: str, watch: Watch | None,
) -> PseudoLikelihoodFit:  # fmt: skip
    scheduler = None
    if schedule == "one-cycle":
        largest = optimizer.param_groups[0]["lr"]
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, largest, total_steps=limit)
    losses: list[float] = []
    for step in range(1, limit + 1):
        optimizer.zero_grad()
        loss = _objective(model, next(batches), l2)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if watch is not None:
            watch(step, losses[-1])
    finite = all(bool(each.isfinite().all()) for each in model.parameters())
    status = "max_steps" if finite and all(map(math.isfinite, losses)) else "nonfinite"
    return PseudoLikelihoodFit(status, tuple(losses), limit)


def _run_lbfgs(
    model: ConditionalModel, parameters: list[nn.Parameter], states: Tensor, l2: float, limit: int,
    tolerance: float,
) -> PseudoLikelihoodFit:  # fmt: skip
    losses: list[float] = []

    def measure(x: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the objective and its gradient at the parameters x."""
        parts = torch.from_numpy(x).split([each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data.copy_(part.view_as(parameter))
        loss = _objective(model, states, l2)
        slopes = torch.autograd.grad(loss, parameters, materialize_grads=True)
        losses.append(float(loss.detach()))
        return losses[-1], parameters_to_vector(slopes).double().cpu().numpy()

    start = parameters_to_vector(parameters).detach().double().cpu().numpy()
    first = float(np.abs(measure(start)[1]).max())
    options = {
        "maxiter": limit, "maxfun": 25 * limit, "maxcor": LBFGS_MEMORY, "ftol": 0.0,
        "gtol": tolerance * first,
    }  # fmt: skip
    from scipy.optimize import minimize  # not needed by those who load weights

    found: Any = minimize(measure, start, jac=True, method="L-BFGS-B", options=options)
    end = float(np.abs(measure(found.x)[1]).max())
    relative = end / first if first > 0 else 0.0
    if not math.isfinite(relative):
        status = "nonfinite"
    elif relative <= tolerance:
        status = "converged"
    else:
        status = "max_steps" if found.nit >= limit else "stalled"
    return PseudoLikelihoodFit(status, tuple(losses), found.nit, relative)
