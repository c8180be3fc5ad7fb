"""Random fixed-point problems: a map on states of any structure, dtype and scale, with a witness."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import solvers
from fuzz.cases import DTYPES, Draw
from fuzz.maps import IN_PLACE, LIPSCHITZ, MAPS, POTENTIALS, Map

POWERS = {torch.float64: 400, torch.float32: 100, torch.bfloat16: 100, torch.float16: 7}
FACTORS = ("contraction", "weak", "one", "expansive", "minus", "huge", "mixed")


@dataclass
class Witness:
    """What the calls of ``f`` have shown of every sample."""

    calls: Tensor  # (B,) int64
    bad: Tensor  # (B,) bool: an output or a point was not finite, or so large that its norm is not
    largest: Tensor  # (B,) of the residual norms
    first: Tensor  # (B,) max of residual and reference norm at the first call
    most: float  # the largest number that every leaf of the state holds

    @classmethod
    def of(cls, batch: int, most: float) -> Witness:
        zero = torch.zeros(batch, dtype=torch.float64)
        return cls(zero.long(), zero.bool(), zero.clone(), zero.clone(), most)

    def see(self, names: Tensor, z: Tensor, value: Tensor) -> None:
        """One call of ``f`` for the samples ``names`` (n,) at z (n, D)."""
        wide, image = z.detach().double(), value.detach().double()
        limit = torch.finfo(torch.promote_types(z.dtype, torch.float32)).max ** 0.5 / 10
        # A residual beyond the range of the dtype is infinite there, and so is a norm too large.
        gap = (image - wide).abs()
        far = ~(gap <= min(limit, self.most)) | ~(image.abs() <= min(limit, self.most))
        self.bad[names] |= far.any(1)
        size = torch.linalg.vector_norm(gap, dim=1)
        reference = torch.linalg.vector_norm(image, dim=1)
        self.first[names] = torch.where(
            self.calls[names] == 0, torch.maximum(size, reference), self.first[names]
        )
        self.largest[names] = torch.maximum(self.largest[names], size.nan_to_num(torch.inf))
        self.calls[names] += 1


@dataclass
class FixedPoint:
    """``z = f(z, s, b, names, mask)``: arguments for ``solvers.fixed_point`` and the truth about it."""

    f: Callable[..., Any]
    z0: Any
    args: tuple[Any, ...]
    mask: Tensor | None
    law: Map
    w: Tensor
    scale: float  # a power of two: f(z) = scale law(z / scale)
    dtype: torch.dtype  # of the vector that the solver works on
    eps: float  # the coarsest unit of a leaf
    narrow: bool  # a leaf is float16
    free: Tensor | None  # (B, D) bool, False at masked coordinates
    witness: Witness
    name: str
    potential: str | None = None
    lipschitz: Tensor | None = None  # (B,) bound where one is known
    energy: Callable[..., Tensor] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def vector(self, state: Any) -> Tensor:
        """(B, D) float64."""
        leaves = pytree.tree_leaves(state)
        return torch.cat([t.detach().double().reshape(len(t), -1) for t in leaves], 1)

    def exact(self, value: Any) -> tuple[Tensor, Tensor, Tensor]:
        """In float64 at ``value``: the residual and f, (B, D), and a bound on errors of both, (B,)."""
        z = self.vector(value)
        s, b = (t.detach().double() for t in self.args[:2])
        w, c = self.w.double(), self.scale
        inside = z / c if self.free is None else torch.where(self.free, z / c, 0.0)
        image = c * (self.law.exact or self.law.f)(inside.clone(), s, b, w)
        terms = (c * self.law.terms(inside, s, b, w)).abs() + image.abs() + z.abs()
        # Products may flush subnormal numbers to zero; float16, with few others, does not.
        low = 2.0**-24 if self.narrow else torch.finfo(self.dtype).smallest_normal
        error = (z.shape[1] + 8) * self.eps * terms + 8 * low * (1 + s.abs()) * max(c, 1.0)
        residual = image - z
        if self.free is not None:
            image, residual, error = (
                torch.where(self.free, t, 0.0) for t in (image, residual, error)
            )
        return residual, image, torch.linalg.vector_norm(error, dim=1)


def _sizes(draw: Draw) -> tuple[list[tuple[int, ...]], str]:
    """Shapes of the leaves without the batch, and the kind of structure."""
    kind = draw.choose("state", ("matrix", "tokens", "tuple", "dict", "number"), (5, 3, 1, 1, 0.5))
    if kind == "number":
        return [()], kind
    if kind == "matrix":
        return [(draw.random.choice((1, 1, 2, 3, 5, 8, 16, 40)),)], kind
    first = (draw.random.randint(2, 4), draw.random.randint(1, 3))
    if kind == "tokens":
        return [first], kind
    second = draw.random.choice([(5,), (0,), (7, 2), ()])
    return [first, second], kind


def _structure(kind: str, leaves: list[Tensor]) -> Any:
    if kind == "tuple":
        return tuple(leaves)
    return {"b": leaves[0], "a": leaves[1]} if kind == "dict" else leaves[0]


def _factors(draw: Draw, batch: int) -> Tensor:
    """``s`` (B, 1): one kind for all samples, or another for each."""
    kind = draw.choose("factors", FACTORS, (5, 2, 1, 2, 1, 1, 3))

    def one(kind: str) -> float:
        u = draw.random.random()
        values = {"contraction": 0.7 * u, "weak": 0.7 + 0.29 * u, "one": 1.0, "minus": -1.2 * u}
        values |= {"expansive": 1 + 3 * u, "huge": 10 ** (1 + 3 * u)}
        return values[kind]

    kinds = [kind if kind != "mixed" else draw.random.choice(FACTORS[:-1]) for _ in range(batch)]
    return torch.tensor([[one(kind)] for kind in kinds], dtype=torch.float64)


def _matrix(draw: Draw, size: int) -> Tensor:
    """``w`` (D, D) of spectral norm at most 1."""
    kind = draw.choose("w", ("any", "symmetric", "definite", "orthogonal", "rank one", "zero"))
    w = draw.normal(size, size)
    if kind == "symmetric":
        w = w + w.T
    elif kind == "definite":
        w = w @ w.T
    elif kind == "orthogonal":
        w = torch.linalg.qr(w).Q
    elif kind == "rank one":
        w = w[:, :1] @ w[:1]
    elif kind == "zero":
        return 0 * w
    return w / torch.linalg.matrix_norm(w, 2).clamp_min(1e-300)


def draw_fixed_point(draw: Draw, energy: bool) -> FixedPoint:
    """A problem; with ``energy`` ``f`` is a ``Descent``."""
    shapes, kind = _sizes(draw)
    batch = draw.note("B", draw.random.randint(1, 9))
    shapes_noted = draw.note("shapes", shapes)
    dtypes = [draw.choose("dtype", DTYPES, (4, 5, 1, 1))] * len(shapes)
    if len(shapes_noted) == 2 and draw.chance(0.2):
        dtypes[1] = draw.choose("second dtype", DTYPES)
    dtype = dtypes[0] if len(dtypes) == 1 else torch.promote_types(*dtypes)
    eps = max(torch.finfo(each).eps for each in dtypes)
    power = min(POWERS[each] for each in dtypes)
    power = min(power, 10) if energy else power
    scale = 2.0 ** draw.note("log2 scale", draw.random.randint(-power, power) * draw.chance(0.3))
    size = sum(prod(shape) for shape in shapes)
    name = draw.choose("potential", list(POTENTIALS)) if energy else draw.choose("map", list(MAPS))
    law = POTENTIALS[name].map if energy else MAPS[name]
    s, w = _factors(draw, batch).to(dtype), _matrix(draw, size).to(dtype)
    b = draw.normal(batch, size, dtype=dtype)
    if name in ("sqrt", "log"):
        b = b + 2 * draw.choose("shift", (0, 1))
    start = scale * (draw.normal(batch, size) + (name == "log") + (name == "sqrt"))
    if draw.chance(0.1):
        start = 0 * draw.note("start", 0) * start
    parts = start.split([prod(shape) for shape in shapes], 1)
    leaves = [t.reshape(batch, *sh).to(dt) for t, sh, dt in zip(parts, shapes, dtypes, strict=True)]
    mask = None
    if kind in ("tokens", "tuple", "dict") and draw.chance(0.25):
        mask = draw.note("mask", draw.mask(batch, shapes[0][0]))
    free = None if mask is None else _free(mask, shapes)
    witness = Witness.of(batch, min(torch.finfo(each).max for each in dtypes))
    z0 = _structure(kind, leaves)
    spec = pytree.tree_structure(z0)

    def inner(vector: Tensor, mask: Tensor | None) -> Tensor:
        # Only one who owns its numbers may work in place: here the state that the solver hands over.
        own = scale == 1.0 and mask is None and name in IN_PLACE
        z = vector if own else vector / scale
        return z if mask is None else torch.where(_free(mask, shapes), z, 0.0)

    def f(z: Any, s: Tensor, b: Tensor, names: Tensor, mask: Tensor | None) -> Any:
        tensors = pytree.tree_leaves(z)
        vector = [t.reshape(len(t), -1).to(dtype) for t in tensors]
        joined = vector[0] if len(vector) == 1 else torch.cat(vector, 1)
        seen = joined.detach().clone()
        value = law.f(inner(joined, mask), s, b, w)
        value = value if scale == 1.0 else value * scale
        witness.see(names, seen, value)
        pieces = value.split([prod(shape) for shape in shapes], 1)
        pieces = [
            t.reshape(len(t), *sh).to(dt) for t, sh, dt in zip(pieces, shapes, dtypes, strict=True)
        ]
        return pytree.tree_unflatten(pieces, spec)

    def density(z: Any, s: Tensor, b: Tensor, names: Tensor, mask: Tensor | None) -> Tensor:
        tensors = [t.reshape(len(t), -1).to(dtype) for t in pytree.tree_leaves(z)]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
        each = POTENTIALS[name].density(inner(joined, mask), s, b, w)
        if mask is not None:
            each = torch.where(_free(mask, shapes), each, 0.0)
        # The gradient by z is then scale d density: a unit step in units of the scale.
        return each.sum(1) * scale * scale

    problem = FixedPoint(
        solvers.Descent(density) if energy else f, z0, (s, b, torch.arange(batch), mask), mask, law,
        w, scale, dtype, eps, torch.float16 in dtypes, free, witness, name,
        potential=name if energy else None,
    )  # fmt: skip
    if name in LIPSCHITZ and not energy:
        problem.lipschitz = (0 if name == "constant" else s.double().abs()[:, 0]) + 0 * s[:, 0]
    return problem


def _free(mask: Tensor, shapes: list[tuple[int, ...]]) -> Tensor:
    """(B, D) bool of a token mask (B, N) that belongs to the first leaf."""
    parts = [mask[:, :, None].expand(-1, -1, shapes[0][1]).reshape(len(mask), -1)]
    parts += [mask.new_ones(len(mask), prod(shape)) for shape in shapes[1:]]
    return torch.cat(parts, 1)
