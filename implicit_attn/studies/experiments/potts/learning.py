"""Rules that learn the couplings of a small Potts model, whose likelihood can be enumerated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.models import PottsModel, fit_pseudolikelihood
from implicit_attn.studies.experiments.experiment import Advance
from implicit_attn.studies.experiments.potts.data import seeded
from implicit_attn.studies.spins.measures import coupling_error
from implicit_attn.studies.spins.models import SpinModel, random_potts
from implicit_attn.studies.tables import Table, median_and_band
from implicit_attn.training import contrastive_divergence, fit_exact_likelihood
from solvers.core.checks import require_count

BATCH, CHAINS = (
    2000,
    1000,
)  # samples of a step of CD; chains of PCD, which sees all data in every step
TRACED = 20  # points of the curves against steps
ENOUGH = 500  # L-BFGS steps: few samples leave directions in which the likelihood is nearly flat


class Rule(NamedTuple):
    """``fit(model, states, seed, steps, watch)`` changes the model and returns the status.

    ``watch`` is called after steps.
    """

    name: str
    fit: Callable[..., str]
    sampled: bool = False  # learns by Gibbs sampling, step by step


def _divergence(sweeps: int, persistent: bool) -> Callable[..., str]:
    def fit(model: PottsModel, states: Tensor, seed: int, steps: int, watch: Any) -> str:
        return contrastive_divergence(
            model,
            states,
            sweeps=sweeps,
            persistent=persistent,
            chains=CHAINS if persistent else None,
            steps=steps,
            batch=4000 if persistent else 2000,
            rate=0.1,
            seed=seed,
            watch=watch,
        ).status

    return fit


def _by_likelihood(model: PottsModel, states: Tensor, *ignored: object) -> str:
    return fit_exact_likelihood(model.double(), states, l2=1e-5, steps=ENOUGH).status


def _by_pseudolikelihood(model: PottsModel, states: Tensor, *ignored: object) -> str:
    return fit_pseudolikelihood(model.double(), states, l2=1e-5, steps=ENOUGH).status


RULES = (
    Rule("exact likelihood", _by_likelihood),
    Rule("pseudo-likelihood", _by_pseudolikelihood),
    Rule("CD-1", _divergence(1, False), sampled=True),
    Rule("PCD-1", _divergence(1, True), sampled=True),
)


def sample_exactly(model: SpinModel, number: int, generator: torch.Generator) -> Tensor:
    """(number, N, d) independent one-hot samples of a Potts model with d^N configurations, float32."""
    _, sites, dim = model.field.shape
    states = F.one_hot(torch.cartesian_prod(*[torch.arange(dim)] * sites), dim).double()
    acting = model.field[0] + 0.5 * torch.einsum("ijab,kjb->kia", model.couplings, states)
    weights = (acting * states).sum((1, 2)).softmax(0)
    return states[torch.multinomial(weights, number, replacement=True, generator=generator)].float()


def compare_rules(
    samples: Sequence[int],
    *,
    sites: int = 6,
    colours: int = 3,
    scale: float = 0.8,
    seeds: int = 3,
    steps: int = 800,
    advance: Advance = lambda what: None,
) -> tuple[Table, Table]:
    """Errors of the couplings against the number of samples, and against the steps of sampling rules.

    Rules that learn by sampling take seconds and see the largest number of samples alone. The true
    couplings of all pairs are ``N(0, scale^2)``, without fields; samples are drawn exactly.

    Args:
        samples: their numbers, each at least 1.
        sites, colours: N and d; d^N configurations are enumerated.
        scale: of the couplings, > 0.
        seeds: models; each with samples of its own.
        steps: of the rules that sample.
        advance: called with the name of each part.

    Returns:
        - a row for each rule and number of samples: ``rule``, ``samples``, ``error`` (median over the
          models) with ``error_10`` and ``error_90``, and ``gap``, the largest ``|error - error of the
          exact likelihood|`` of a model, and ``status``, all that the fits ended with;
        - a row for each sampling rule and step: ``rule``, ``step``, ``error`` and its band.

    Raises:
        ValueError, TypeError: for numbers out of range.
    """
    require_count("seeds", seeds)
    require_count("steps", steps)
    counts = sorted({require_count("samples", number) for number in samples})
    errors: dict[tuple[str, int], list[float]] = {}
    statuses: dict[tuple[str, int], list[str]] = {}
    traces: dict[tuple[str, int], list[float]] = {}
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        drawn = scale * math.sqrt(sites)
        truth = random_potts(sites, colours, drawn, generator, field_scale=0.0)
        states = sample_exactly(truth, counts[-1], generator)
        for number in counts:
            for rule in RULES:
                if rule.sampled and number < counts[-1]:
                    continue
                advance(f"model {seed + 1}, {number} samples, {rule.name}")
                model = seeded(partial(PottsModel, sites, colours), seed)
                trace: dict[int, float] = {}
                watch = _watch(model, truth.couplings, steps, trace)
                status = rule.fit(model, states[:number], seed, steps, watch)
                statuses.setdefault((rule.name, number), []).append(status)
                error = coupling_error(model.couplings.weight.detach(), truth.couplings)
                errors.setdefault((rule.name, number), []).append(error)
                for step, value in trace.items() if rule.sampled else ():
                    traces.setdefault((rule.name, step), []).append(value)
    table = [
        {"rule": rule, "samples": number, **median_and_band("error", torch.tensor(values))}
        | {"gap": _gap(values, errors[RULES[0].name, number])}
        | {"status": " ".join(sorted(set(statuses[rule, number])))}
        for (rule, number), values in errors.items()
    ]
    by_step = [
        {"rule": rule, "step": step, **median_and_band("error", torch.tensor(values))}
        for (rule, step), values in traces.items()
    ]
    return table, by_step


def _gap(values: list[float], exact: list[float]) -> float:
    return max(abs(value - best) for value, best in zip(values, exact, strict=True))


def _watch(
    model: PottsModel, truth: Tensor, steps: int, trace: dict[int, float]
) -> Callable[[int, float], None]:
    """Keeps the error at every ``steps / TRACED``-th step."""
    every = max(1, steps // TRACED)

    def watch(step: int, gradient: float) -> None:
        if step % every == 0:
            trace[step] = coupling_error(model.couplings.weight.detach(), truth)

    return watch
