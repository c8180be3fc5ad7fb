"""What is trained on small rings: an equilibrium, transformers of fixed depth, a single iteration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from implicit_attn.data.tasks.instances import Instances
from implicit_attn.data.tasks.ring_parity import draw_rings
from implicit_attn.models.grids.equilibrium_ring import EquilibriumRing
from implicit_attn.models.grids.layered_ring import LayeredRing
from implicit_attn.training.grids.drawn import train_on_drawn
from implicit_attn.training.recipe import Recipe
from solvers.core.checks import require_count

EQUILIBRIUM = "equilibrium"
SAME_PARAMETERS = "transformer, equal parameters"
SAME_DEPTH = "transformer, equal evaluations"
ALWAYS = "same block, iterations not random"
ONCE = "one iteration"
MAJORITY = "majority class"
FEATURES, CLASSES = 2, 2
LAYERS = 4  # of the transformer of equal parameters


@dataclass(frozen=True)
class Settings:
    """Sizes and effort.

    Attributes:
        size: of the largest rings in training, an even number; the smallest have ``size / 2 - 2``, at
            least 2. Iterations of training are drawn from ``size .. 2 size``.
        steps: batches of the equilibrium; transformers get twice its evaluations of a block.
        batch: instances of a batch.
        tests: instances of each size that models are measured on.
        dim, heads: of the equilibrium.
    """

    size: int = 16
    steps: int = 200
    batch: int = 64
    tests: int = 100
    dim: int = 32
    heads: int = 4

    def __post_init__(self) -> None:
        for name in ("size", "steps", "batch", "tests", "dim", "heads"):
            require_count(name, getattr(self, name), low=4 if name == "size" else 1)

    @property
    def least(self) -> int:
        return max(2, self.size // 2 - 2)

    @property
    def trained(self) -> int:
        """Most iterations of a batch in training."""
        return 2 * self.size

    @property
    def depth(self) -> int:
        """Mean iterations in training: the layers of the transformer of equal evaluations."""
        return 3 * self.size // 2

    def draw(self, number: int, generator: torch.Generator) -> Instances:
        """A batch of rings of one random size."""
        size = int(torch.randint(self.least, self.size + 1, (), generator=generator))
        return draw_rings(number, size, generator=generator)


@dataclass(frozen=True)
class Contender:
    """How a model is made and trained.

    Attributes:
        build: makes it.
        steps: of its training.
        rate: its learning rate.
        iterations: of its training; None: its depth is fixed.
        evaluations: blocks that it applies, where the depth is fixed.
    """

    build: Callable[[], nn.Module]
    steps: int
    rate: float
    iterations: int | tuple[int, int] | None = None
    evaluations: int = 1

    def train(self, settings: Settings, seed: int, advance: Callable[[int], object]) -> Any:
        """The trained model; the global random state is left as it was."""
        recipe = Recipe(
            epochs=self.steps,
            batch=settings.batch,
            rate=self.rate,
            warmup=0.1,
            seed=seed,
            iterations=self.iterations,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        train_on_drawn(model, settings.draw, recipe, advance=advance)
        return model


def contenders(settings: Settings) -> dict[str, Contender]:
    """By name. Data and blocks are the same for all; the transformers train for twice the evaluations.

    The transformer of equal parameters has layers of half the width, of which all positions see each
    other; that of equal evaluations has as many layers of the equilibrium's width as the equilibrium
    makes evaluations in training, each with its own weights and as local as the equilibrium's block.
    ``ALWAYS`` is the equilibrium's block, trained with the mean number of iterations every time.
    """
    dim, heads, depth, steps = settings.dim, settings.heads, settings.depth, settings.steps
    shape = (FEATURES, CLASSES)

    def ring(iterations: int) -> EquilibriumRing:
        return EquilibriumRing(*shape, dim, heads, iterations=iterations)

    return {
        EQUILIBRIUM: Contender(
            lambda: ring(settings.trained), steps, 3e-3, (settings.size, settings.trained)
        ),
        SAME_DEPTH: Contender(
            lambda: LayeredRing(*shape, dim, heads, layers=depth, reach=1),
            2 * steps,
            2e-3,
            evaluations=depth,
        ),
        SAME_PARAMETERS: Contender(
            lambda: LayeredRing(*shape, dim // 2, heads, layers=LAYERS),
            2 * steps * depth // LAYERS,
            3e-3,
            evaluations=LAYERS,
        ),
        ALWAYS: Contender(lambda: ring(depth), steps, 3e-3, depth, evaluations=depth),
        ONCE: Contender(lambda: ring(1), 2 * steps, 3e-3, 1),
    }
