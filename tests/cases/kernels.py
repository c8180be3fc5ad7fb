"""What the tests of all kernels share: sizes to try, errors, allocations; dense answers for Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_attn.kernels.bi_softmax import native
from solvers import native as library

# Scores bounded by norms, by nothing, with a causal mask; (limit, causal).
PATHS = {"bounded": (None, False), "unbounded": (1e9, False), "causal": (None, True),
         "unbounded, causal": (1e9, True)}  # fmt: skip
each_path = pytest.mark.parametrize(("limit", "causal"), PATHS.values(), ids=PATHS.keys())


def states(
    batch: int, heads: int, count: int, width: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """z, v (B, H, N, p) and a cotangent of the lse (B, H, N), float32."""
    generator = torch.Generator().manual_seed(count * 1000 + width)
    z = scale * torch.randn(batch, heads, count, width, generator=generator)
    v = torch.randn(batch, heads, count, width, generator=generator)
    return z, v, torch.randn(batch, heads, count, generator=generator)


def masks(batch: int, count: int) -> tuple[Tensor | None, Tensor, Tensor]:
    """None; some tokens masked; the same, and all of the first sample."""
    holes = torch.rand(batch, count, generator=torch.Generator().manual_seed(count)) > 0.4
    empty = holes.clone()
    empty[0] = False
    return None, holes, empty


def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package was installed without a compiler."""
    monkeypatch.setattr(library, "engine", lambda: None)


needs_engine = pytest.mark.skipif(library.engine() is None, reason="there is no native engine")
needs_cpp = pytest.mark.skipif(
    native._kernel() is None, reason="the engine has no kernel for this CPU"
)


def difference(value: Tensor, exact: Tensor) -> float:
    """Norm of the error by the norm of the exact value (by 1 where that is 0)."""
    assert torch.isfinite(value).all()
    return ((value.cpu().double() - exact).norm() / (exact.norm() or 1.0)).item()


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(output, Tensor):
                storage = output.untyped_storage()
                self.largest = max(self.largest, storage.nbytes() // output.element_size())
        return result


# --- problems for the Triton kernels of bi-softmax, and their dense answers ------------------------

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
    on_chip: bool | None = None  # whether Triton holds whole heads on the chip; None: as it chooses

    def __str__(self) -> str:
        plain = Case(self.tokens, self.width)
        others = {k: v for k, v in vars(self).items() if v != vars(plain)[k]}
        return "-".join(
            [f"N{self.tokens}", f"p{self.width}", *(f"{k}={v}" for k, v in others.items())]
        )

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
