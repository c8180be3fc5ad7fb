"""What the attention kernels share about their arguments: checks, masking, the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from implicit_attn.kernels.operators import differentiated, has_tangent, transformed
from solvers.core import modes

Options = ParamSpec("Options")
Result = TypeVar("Result")

# exp of scores within this bound, and sums of them over any number of tokens, stay in float32.
LARGEST_EXPONENT = 60.0


@dataclass(frozen=True)
class Choice:
    """What ``explain`` returns: a backend's name, such as "reference", and why, in words."""

    backend: str
    reason: str


def dense_for_transforms(*tensors: Tensor) -> Choice | None:
    """The dense formula where only it can be differentiated as the caller does; else None."""
    if modes.exporting():
        return Choice("reference", "inside torch.export, whose programs hold stock operators alone")
    if any(has_tangent(tensor) for tensor in tensors):
        return Choice("reference", "only the dense formula knows forward-mode differentiation")
    if differentiated():
        return Choice("reference", "inside torch.func.grad, which takes the dense formula apart")
    return None


def check_arguments(z: Tensor, beta: float | Tensor, mask: Tensor | None) -> None:
    """``z`` (B, H, N, p) floating, ``beta`` > 0, ``mask`` (B, N) bool, or an error that says so."""
    if not z.is_floating_point():
        raise TypeError(f"z must be of a floating dtype, got {z.dtype}")
    if z.dim() != 4:
        raise ValueError(f"z must have the shape (B, H, N, p), got {tuple(z.shape)}")
    check_beta(beta)
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be of dtype bool, got {mask.dtype}")
    expected = (z.shape[0], z.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"mask must have the shape (B, N) = {expected}, got {tuple(mask.shape)}")


def check_queries(query: Tensor, key: Tensor, beta: float | Tensor, mask: Tensor | None) -> None:
    """``query`` (B, H, N, p), ``key`` (B, H, M, p), ``mask`` (B, M), or an error that says so."""
    if not query.is_floating_point() or key.dtype != query.dtype:
        raise TypeError(
            f"query and key must be of one floating dtype, got {query.dtype} and {key.dtype}"
        )
    matrices = query.dim() == key.dim() == 4
    if not matrices or query.shape[:2] != key.shape[:2] or query.shape[3] != key.shape[3]:
        raise ValueError(
            "query and key must have the shapes (B, H, N, p) and (B, H, M, p), got "
            f"{tuple(query.shape)} and {tuple(key.shape)}"
        )
    check_beta(beta)
    expected = (key.shape[0], key.shape[2])
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != expected):
        raise ValueError(
            f"mask must be a bool tensor (B, M) = {expected}, got {mask.dtype} {tuple(mask.shape)}"
        )


def check_beta(beta: float | Tensor) -> None:
    """An inverse temperature > 0, of one element, or an error that says what came."""
    if isinstance(beta, Tensor):
        if beta.numel() != 1 or not beta.is_floating_point():
            raise ValueError(
                "beta must be a number or a floating tensor of one element, got "
                f"{beta.dtype} {tuple(beta.shape)}"
            )
        # Its value is looked at only where that waits for no device.
        known = beta.device.type == "cpu" and not traced(beta)
        if not known:
            return
        beta = float(beta.detach())
    if isinstance(beta, (str, bytes, list, tuple)) or beta is None:
        raise TypeError(f"beta must be a number or a tensor of one element, got {beta!r}")
    if not beta > 0:
        raise ValueError(f"beta must be > 0, got {beta!r}")


def by_rescaling(beta: float | Tensor) -> Tensor | None:
    """``beta`` as a tensor without dimensions where a derivative by it may be asked for, else None.

    The backends take numbers. As ``beta Z Z^T = Y Y^T`` for ``Y = beta^(1/2) Z``, whatever depends on
    ``beta`` follows from the same function of Y at one, and autograd finds its derivative.
    """
    if not isinstance(beta, Tensor):
        return None
    recorded = torch.is_grad_enabled() and beta.requires_grad
    return beta.reshape(()) if recorded or traced(beta) else None


def traced(tensor: Tensor) -> bool:
    """Whether a transform or a compiler stands between us and the number in ``tensor``."""
    return torch.compiler.is_compiling() or transformed() or has_tangent(tensor)


def rescaled(x: Tensor, root: Tensor) -> Tensor:
    """``root x`` in float32 or wider: rounded to half precision it would give other scores."""
    return x.to(wide_dtype(x)) * root


def check_vector(z: Tensor, v: Tensor, lse: Tensor | None) -> None:
    """``v`` like ``z``, and ``lse`` (B, H, N) where given, or an error that says what came."""
    if v.shape != z.shape or v.dtype != z.dtype or v.device != z.device:
        raise ValueError(
            f"v must be like z, {tuple(z.shape)} {z.dtype} on {z.device}, "
            f"got {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    if lse is not None and (lse.shape != z.shape[:3] or lse.device != z.device):
        raise ValueError(
            f"lse must have the shape (B, H, N) = {tuple(z.shape[:3])} on {z.device}, "
            f"got {tuple(lse.shape)} on {lse.device}"
        )


def within_exponent(limit: float | None) -> bool:
    """Whether ``exp`` needs no row maximum, given a bound on the absolute scores."""
    return limit is not None and limit <= LARGEST_EXPONENT


def wide_dtype(z: Tensor) -> torch.dtype:
    """float32 for half precision, else the dtype of ``z``."""
    return torch.promote_types(z.dtype, torch.float32)


def zero_masked(z: Tensor, mask: Tensor | None) -> Tensor:
    """``z`` (B, H, N, p) with zeros at the masked tokens, whatever they held."""
    return z if mask is None else z.masked_fill(~mask[:, None, :, None], 0.0)


def exact_if_alone(lse: Tensor, own: Tensor, mask: Tensor | None) -> Tensor:
    """``lse`` (B, H, N), and in samples with a single counted token its own scores, (B, H, N) too.

    ``log exp S`` has the rounding of 1, not that of S: noise in the energy of a small state. Two
    tokens or more have an ``lse`` of about log 2 at least, where scores are small.
    """
    if mask is not None:
        return torch.where((mask.sum(1) <= 1)[:, None, None], own, lse)
    return own if lse.shape[2] == 1 else lse


def without_autocast(
    function: Callable[Concatenate[Tensor, Options], Result],
) -> Callable[Concatenate[Tensor, Options], Result]:
    """``function`` with autocast off on the device of its first argument.

    Autocast would round the scores of float32 tokens to half precision, and the lse with them.
    """

    @wraps(function)
    def wrapped(first: Tensor, *args: Options.args, **kwargs: Options.kwargs) -> Result:
        with modes.without_autocast(first.device.type):
            return function(first, *args, **kwargs)

    return wrapped
