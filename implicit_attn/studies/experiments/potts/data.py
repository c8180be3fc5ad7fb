"""Samples of sparse Potts models, from which couplings are to be recovered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

import solvers
from implicit_attn.studies.spins.graphs import bayes_npl, graph_potts, neighbours
from implicit_attn.studies.spins.models import SpinModel
from solvers.core.checks import require_count

SWEEPS = {"er-kron": 200}  # that model mixes slowest; after 60 sweeps the others have settled
USUAL_SWEEPS = 60

Made = TypeVar("Made")


@dataclass(frozen=True)
class PottsData:
    """Samples of a model that is known.

    Attributes:
        kind: of the model, one of ``GRAPHS``.
        model: that made the samples.
        train: (M, N) colours.
        test: (K, N) colours.
    """

    kind: str
    model: SpinModel
    train: Tensor
    test: Tensor

    @property
    def truth(self) -> Tensor:
        """The couplings (N, N, d, d), float64."""
        return self.model.couplings

    @property
    def edges(self) -> Tensor:
        """(N, N) bool, the pairs that are coupled."""
        return neighbours(self.model)

    @property
    def colours(self) -> int:
        return self.truth.shape[-1]

    @property
    def sites(self) -> int:
        return self.truth.shape[0]

    def bayes(self, samples: int | None = None) -> float:
        """Loss per site of the true conditionals on the first test samples; None: on all."""
        return bayes_npl(self.model, self.test[:samples])

    def first(self, samples: int) -> PottsData:
        """The same with fewer training samples.

        Raises:
            ValueError: there are not so many.
        """
        if require_count("samples", samples) > len(self.train):
            raise ValueError(f"samples must be at most {len(self.train)}, got {samples}")
        return replace(self, train=self.train[:samples])


def draw_data(
    kind: str,
    samples: int = 20_000,
    test: int = 5_000,
    *,
    seed: int = 0,
    sites: int = 20,
    colours: int = 10,
    sweeps: int | None = None,
) -> PottsData:
    """A random model and independent samples of it, each the end of a Gibbs chain of its own.

    Args:
        kind: of ``graph_potts``.
        samples, test: numbers of training and test samples.
        seed: of the model and of the chains.
        sites, colours: of the model.
        sweeps: of Gibbs sampling; None: 200 for "er-kron", 60 for the others.
    """
    generator = torch.Generator().manual_seed(seed)
    model = graph_potts(kind, generator, sites=sites, colours=colours)
    states = solvers.gibbs(
        model.couplings.float(),
        model.field.float(),
        site=model.site,
        sweeps=SWEEPS.get(kind, USUAL_SWEEPS) if sweeps is None else sweeps,
        chains=require_count("samples", samples) + require_count("test", test),
        generator=generator,
    )
    drawn = states.argmax(-1)
    return PottsData(kind, model, drawn[:samples], drawn[samples:])


def seeded(build: Callable[[], Made], seed: int) -> Made:
    """What ``build`` makes with weights drawn from ``seed`` alone; the random state is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()
