"""Deep supervision: the states of a layer after segments of plain iteration, each with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from implicit_attn.energies.energy import map_tree
from solvers.core.checks import require_count, require_flag


def supervised_states(
    layer: Any,
    x: Any,
    segments: int,
    steps: int | Sequence[int],
    *,
    grad: int = 1,
    detach: bool = True,
    mask: Tensor | None = None,
    z0: Any = None,
) -> Iterator[Any]:
    """Return the iterator of the DEQ ``layer`` that :meth:`implicit_attn.DEQ.supervised` documents."""
    require_count("segments", segments)
    lengths = [steps] * segments if isinstance(steps, int) else list(steps)
    if len(lengths) != segments:
        raise ValueError(
            f"steps must be a number or one per segment ({segments}), got {len(lengths)} numbers"
        )
    require_count("grad", grad)
    for length in lengths:
        if require_count("steps", length) < grad:
            raise ValueError(f"steps must be >= grad={grad}, got {length}")
        if not require_flag("detach", detach) and length > grad:
            raise ValueError(
                f"detach=False needs gradients through all evaluations of a segment, grad={length}, "
                f"got grad={grad}"
            )
    return _states(layer, x, lengths, grad, detach, mask, z0)


def _states(
    layer: Any, x: Any, lengths: list[int], grad: int, detach: bool, mask: Tensor | None, z: Any
) -> Iterator[Any]:
    for length in lengths:
        # Each segment prepares its input again, because an optimizer may have changed the weights.
        z = layer.unrolled(length, window=grad)(x, mask, z0=z)
        yield z
        if detach:
            z = map_tree(Tensor.detach, z)
