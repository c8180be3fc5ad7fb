"""A numbered random case: what is drawn, what it says of itself, and what it found broken."""

from __future__ import annotations

import random
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

Choice = TypeVar("Choice")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Failure:
    """An invariant that does not hold in a case; ``case`` repeats exactly this one."""

    family: str
    case: int
    invariant: str
    message: str
    description: str

    def __str__(self) -> str:
        again = f'make fuzz ARGS="--family {self.family} --case {self.case}"'
        return f"{self.invariant}: {self.message}\n    {self.description}\n    {again}"


@dataclass
class Draw:
    """The random numbers of case ``number`` of a family, and the notes about what was drawn.

    Everything depends on the two alone: no other generator is used, torch's global one included.
    """

    family: str
    number: int
    notes: dict[str, str] = field(default_factory=dict)
    broken: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        seed = zlib.crc32(f"{self.family}:{self.number}".encode())
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def note(self, name: str, value: Any) -> Any:
        """Put ``value`` into the description and return it."""
        self.notes[name] = f"{value}"
        return value

    def choose(self, name: str, values: Sequence[Choice], weights: Any = None) -> Choice:
        """One of ``values``, noted."""
        value = self.random.choices(list(values), weights)[0]
        self.notes[name] = getattr(value, "__name__", None) or f"{value}"
        return value

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(dtype)

    def mask(self, *shape: int, share: float = 0.6) -> Tensor:
        """True with probability ``share``."""
        return torch.rand(shape, generator=self.generator) < share

    def expect(self, holds: Any, invariant: str, message: str) -> None:
        """Note that ``invariant`` is broken unless ``holds``."""
        if not bool(holds):
            self.broken.append((invariant, message))

    def expect_rows(self, holds: Tensor, invariant: str, **values: Tensor) -> None:
        """As :meth:`expect` for each sample (B,); the first broken one is told with its values."""
        if bool(holds.all()):
            return
        row = int((~holds).nonzero()[0])
        told = ", ".join(f"{name} {_told(value[row])}" for name, value in values.items())
        self.broken.append((invariant, f"sample {row} of {len(holds)}: {told}"))

    def failures(self) -> list[Failure]:
        description = ", ".join(f"{name} {value}" for name, value in self.notes.items())
        return [
            Failure(self.family, self.number, invariant, message, description)
            for invariant, message in self.broken
        ]


def _told(value: Tensor) -> str:
    return f"{value.item():.6g}" if value.numel() == 1 else f"{value.tolist()}"[:200]


Family = Callable[[Draw], None]  # draws one case, runs it and notes what is broken


def run_case(name: str, family: Family, number: int) -> list[Failure]:
    """The failures of one case; an exception that nobody expected is one of them."""
    draw = Draw(name, number)
    try:
        family(draw)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"
        draw.expect(False, "exceptions", f"{type(error).__name__} at {place}: {error}"[:400])
    return draw.failures()
