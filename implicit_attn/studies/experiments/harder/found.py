"""What the experiment on rings finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from implicit_attn.studies.tables import Table

TABLES = ("sizes", "curves", "adaptive", "stops", "needed")


@dataclass
class Found:
    """Tables of one training or of many.

    Attributes:
        sizes: rows with model, seed, size, parameters, evaluations, solved, accuracy.
        curves: rows with method, size, seed and those of ``iteration_curve``.
        adaptive: rows with method, size, seed and those of ``adaptive_curve``.
        stops: rows with method, size, seed, rtol, difficulty, samples, evaluations.
        needed: rows with size, seed and those of ``needed_by_difficulty``.
        picture: for the first seed (iterations, positions): where an answer of one ring is right.
    """

    sizes: Table = field(default_factory=list)
    curves: Table = field(default_factory=list)
    adaptive: Table = field(default_factory=list)
    stops: Table = field(default_factory=list)
    needed: Table = field(default_factory=list)
    picture: Tensor | None = None

    def add(self, other: Found) -> None:
        """Append the rows of another; the picture that came first stays."""
        for name in TABLES:
            getattr(self, name).extend(getattr(other, name))
        self.picture = other.picture if self.picture is None else self.picture

    def as_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        picture = None if self.picture is None else self.picture.long().tolist()
        return {name: getattr(self, name) for name in TABLES} | {"picture": picture}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Found:
        """From ``as_plain``. KeyError or TypeError where that is not what it is."""
        picture = plain["picture"]
        drawn = None if picture is None else torch.tensor(picture).bool()
        return cls(*(list(plain[name]) for name in TABLES), picture=drawn)
