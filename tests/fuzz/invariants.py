"""What must hold of any call: its exceptions, its warnings, its inputs and the state of torch."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

import solvers
from fuzz.cases import Draw


def world() -> tuple[Any, ...]:
    """The global state that no call may change."""
    cache = getattr(parametrize, "_cache", {})
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_num_threads(),
        getattr(parametrize, "_cache_enabled", 0),
        len(cache),
        torch.get_rng_state().numpy().tobytes(),
    )


NAMES = ("grad mode", "inference mode", "default dtype", "autocast", "threads", "cached()",
         "cache", "RNG")  # fmt: skip


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
        others = [w for w in caught if not issubclass(w.category, solvers.SolveWarning)]
        for warning in others[:1]:
            place = f"{warning.filename.rsplit('/', 1)[-1]}:{warning.lineno}"
            told = f"{warning.category.__name__} at {place}: {warning.message}"
            draw.expect(False, "warnings", told[:300])
        for name, old, new in zip(NAMES, state, world(), strict=True):
            draw.expect(old == new, "global state", f"{name} was changed")
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
