"""Problems for the Triton kernels of bi-softmax, and their dense answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@dataclass(frozen=True)
class Case:
    tokens: int
    width: int
    batch: int = 1
    heads: int = 2
    dtype: torch.dtype = torch.float32
    mask: str = "none"  # "none", "random", "rows" (a sample without tokens), "padding"
    causal: bool = False
    normalised: bool = True  # rows of norm sqrt(p), and a limit to say so
    scale: float = 1.0  # of the rows
    strided: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        flags = [f"N{self.tokens}", f"p{self.width}", str(self.dtype).removeprefix("torch.")]
        flags += [self.mask] if self.mask != "none" else []
        flags += ["causal"] if self.causal else []
        flags += [] if self.normalised else [f"scale{self.scale:g}"]
        flags += ["strided"] if self.strided else []
        flags += [f"{name}={value}" for name, value in self.options.items()]
        return "-".join(flags)

    @property
    def beta(self) -> float:
        return self.width**-0.5

    @property
    def limit(self) -> float | None:
        return 1.01 * self.beta * self.width * self.scale**2 if self.normalised else None


@dataclass(frozen=True)
class Problem:
    """``z`` and ``v`` (B, H, N, p), ``cotangent`` (B, H, N); NaN at masked tokens."""

    z: Tensor
    v: Tensor
    cotangent: Tensor
    mask: Tensor | None


def problem_of(case: Case, device: str, seed: int = 0) -> Problem:
    generator = torch.Generator().manual_seed(seed + 1000 * case.tokens + case.width)
    shape = (case.batch, case.heads, case.tokens, case.width)
    z = torch.randn(shape, generator=generator)
    if case.normalised:
        z = z / z.square().mean(-1, keepdim=True).sqrt()
    v = torch.randn(shape, generator=generator)
    cotangent = torch.randn(shape[:3], generator=generator)
    mask = None
    if case.mask == "padding":
        lengths = torch.randint(0, case.tokens + 1, (case.batch,), generator=generator)
        mask = torch.arange(case.tokens) < lengths[:, None]
    elif case.mask != "none":
        mask = torch.rand(case.batch, case.tokens, generator=generator) < 0.6
        if case.mask == "rows":
            mask[0] = False
    z, v = (z * case.scale).to(case.dtype), v.to(case.dtype)
    if mask is not None:
        z = z.masked_fill(~mask[:, None, :, None], torch.nan)
        v = v.masked_fill(~mask[:, None, :, None], torch.nan)
    z, v = _laid_out(z.to(device), case.strided), _laid_out(v.to(device), case.strided)
    mask = None if mask is None else mask.to(device)
    return Problem(z, v, cotangent.to(device), mask)


def _laid_out(x: Tensor, strided: bool) -> Tensor:
    """The same numbers as they lie after a projection of (B, N, d), with a gap after each head."""
    if not strided:
        return x
    batch, heads, tokens, width = x.shape
    room = x.new_full((batch, tokens, heads, width + 8), torch.nan)
    view = room[..., :width].transpose(1, 2)
    view.copy_(x)
    return view


def dense(
    case: Case, problem: Problem, dtype: torch.dtype = torch.float64, cotangent: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, lse and Hessian-vector product (with the cotangent's term), on the CPU."""
    z, v = problem.z.cpu().to(dtype), problem.v.cpu().to(dtype)
    allowed = torch.ones(case.tokens, case.tokens, dtype=torch.bool)
    allowed = allowed.tril() if case.causal else allowed
    counts = torch.ones(case.batch, case.tokens, dtype=torch.bool)
    counts = counts if problem.mask is None else problem.mask.cpu()
    allowed = (allowed & counts[:, None, :] & counts[:, :, None])[:, None]
    z = z.masked_fill(~counts[:, None, :, None], 0.0)
    v = v.masked_fill(~counts[:, None, :, None], 0.0)
    scores = (case.beta * z @ z.mT).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(~counts[:, None], 0.0)
    weights = (scores - lse[..., None]).exp()
    tangent = case.beta * (v @ z.mT + z @ v.mT)
    mean = (weights * tangent).sum(-1, keepdim=True)
    tilted = weights * (tangent - mean)
    product = (weights + weights.mT) @ v + (tilted + tilted.mT) @ z
    if cotangent:
        across = problem.cotangent.cpu().to(dtype)[..., None] * weights
        product = product + case.beta * (across + across.mT) @ z
    return (weights + weights.mT) @ z, lse, product


def relative(value: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of what is expected."""
    scale = expected.norm().item()
    return (value.cpu().double() - expected).norm().item() / (scale if scale > 0 else 1.0)
