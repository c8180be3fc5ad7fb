"""Random solves and linear systems, checked by invariants; ``run.py`` is the command.

Here: a numbered random case, what it found broken, and what must hold of any call.
"""

from __future__ import annotations

import random
import traceback
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import solvers

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
        again = f'make fuzz ARGS="--families {self.family} --first {self.case} --cases 1"'
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
        draw.expect(
            False, "exceptions", f"{type(error).__name__} at {_place(error)}: {error}"[:400]
        )
    return draw.failures()


def world() -> dict[str, Any]:
    """The global state that no call may change."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "cached()": getattr(parametrize, "_cache_enabled", 0),
        "cache": len(getattr(parametrize, "_cache", {})),
        "RNG": torch.get_rng_state().numpy().tobytes(),
    }


class Call:
    """Run ``function`` and check what it must leave alone.

    ``inputs`` is a pytree of tensors whose numbers must not change. The result is in ``result``, an
    exception in ``error``; ``warned`` are the package's own warnings (:class:`solvers.SolveWarning`).
    """

    def __init__(self, draw: Draw, function: Callable[[], Any], inputs: Any = ()) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        leaves = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        before = [t.detach().clone() for t in leaves]
        state = world()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.result = function()
            except Exception as error:
                self.error = error
        self.warned = [w for w in caught if issubclass(w.category, solvers.SolveWarning)]
        others = [
            w for w in caught
            if not issubclass(w.category, solvers.SolveWarning)
            and "mask leaves no token" not in str(w.message)  # which many cases do on purpose
        ]  # fmt: skip
        for warning in others[:1]:
            place = f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}"
            told = f"{warning.category.__name__} at {place}: {warning.message}"
            draw.expect(False, "warnings", told[:300])
        for name, new in world().items():
            draw.expect(state[name] == new, "global state", f"{name} was changed")
        for position, (old, new) in enumerate(zip(before, leaves, strict=True)):
            draw.expect(same(old, new), "inputs", f"input {position} was changed")


def same(left: Tensor, right: Tensor) -> bool:
    """Equal numbers, NaN counting as equal to NaN."""
    equal = (left == right) | ((left != left) & (right != right))
    return left.shape == right.shape and bool(equal.all())


def valid(
    draw: Draw, function: Callable[[], Any], inputs: Any = (), *, allowed: Any = (),
    words: tuple[str, ...] = (),
) -> Call:  # fmt: skip
    """A call with good arguments: any exception breaks an invariant.

    But for those of the types ``allowed``, and those whose message holds one of ``words``.
    """
    call = Call(draw, function, inputs)
    borne = isinstance(call.error, allowed or ()) or any(w in str(call.error) for w in words)
    if call.error is not None and not borne:
        told = f"{type(call.error).__name__} at {_place(call.error)}: {call.error}"
        draw.expect(False, "exceptions", told[:400])
    return call


def _place(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno}"


def norms(vectors: Tensor) -> Tensor:
    """Euclidean norms of rows (B, D) in float64, without overflow or underflow of squares."""
    wide = vectors.detach().double()
    largest = wide.abs().amax(1) if wide.shape[1] else wide.new_zeros(len(wide))
    scale = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return torch.linalg.vector_norm(wide / scale[:, None], dim=1) * scale
