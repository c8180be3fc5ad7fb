"""One function per launch, which fills the tensors given for results; no tensor is empty here."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton.arguments import LaunchArguments, in_units
from implicit_attn.kernels.bi_softmax.triton.gradient import causal_columns_kernel, gradient_kernel
from implicit_attn.kernels.bi_softmax.triton.hvp import curvature_kernel
from implicit_attn.kernels.bi_softmax.triton.row_sums import (
    causal_rows_kernel,
    lse_kernel,
    mean_kernel,
)
from implicit_attn.kernels.bi_softmax.triton.single_tile import (
    small_gradient_kernel,
    small_hvp_kernel,
)
from implicit_attn.kernels.bi_softmax.triton.triangle import (
    triangle_kernel,
    triangle_lse_kernel,
    triangle_mean_kernel,
)

# Slots of partial sums a head, at most; and programs enough to fill a large card.
MOST_SLICES, PROGRAMS = 32, 1024


def launch(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """``args`` are tensors, numbers and None; ``options`` constants, and what the compiler is told."""
    kernel[(programs,)](*args, **options)


def _ceil(total: int, part: int) -> int:
    return -(-total // part)


def parts(tokens: int) -> tuple[int, int]:
    """Rows of the two parts of a single tile; the second may be none."""
    first = max(16, int(triton.next_power_of_2(tokens)))
    half = first // 2
    rest = tokens - half
    if half >= 32 and (rest <= half // 2 or first > 64):
        return half, max(16, int(triton.next_power_of_2(rest)))
    return first, 0


def _single_tile_options(given: LaunchArguments, unit: int) -> dict[str, Any]:
    first, second = parts(given.tokens)
    options = {"UNIT": unit, "FIRST": first, "SECOND": second, "CAUSAL": given.causal}
    options |= {"BOUNDED": given.by_reciprocals, "BOOST": given.boost}
    return options | given.constants(given.tiles("single tile"))


def single_tile_gradient(given: LaunchArguments, out: Tensor, lse: Tensor) -> None:
    """``(P + P^T) Z`` and ``L``."""
    z, unit = given.z, given.unit()
    args = (
        z, given.keep, lse, out, z.shape[1], given.tokens, z.shape[3] // unit,
        given.scale, *in_units(z, unit),
    )  # fmt: skip
    launch(small_gradient_kernel, given.heads, args, _single_tile_options(given, unit))


def single_tile_hvp(
    given: LaunchArguments, v: Tensor, cotangent: Tensor | None, out: Tensor
) -> None:
    """``H V``."""
    z, unit = given.z, given.unit(v)
    args = (
        z, v, given.keep, cotangent, out, z.shape[1], given.tokens,
        z.shape[3] // unit, given.scale, given.beta, *in_units(z, unit), *in_units(v, unit),
    )  # fmt: skip
    launch(small_hvp_kernel, given.heads, args, _single_tile_options(given, unit))


def row_lse(given: LaunchArguments, lse: Tensor, normaliser: Tensor) -> None:
    """``L`` from all tiles; ``normaliser``: ``exp(-L)`` if scores are bounded, else ``L`` in base 2."""
    unit = given.unit()
    blocks, options = given.by_rows("lse", unit)
    args = (
        given.z, given.keep, given.extent, lse, normaliser, *given.sizes(blocks, unit),
        *in_units(given.z, unit),
    )  # fmt: skip
    launch(lse_kernel, given.heads * blocks, args, options | {"BOUNDED": given.bounded})


def slices_of(heads: int, blocks: int) -> int:
    """Slices of a head: two blocks each at least, as the largest alone takes as long as such a pair."""
    return min(_ceil(blocks, 2), MOST_SLICES, _ceil(PROGRAMS, heads))


def _triangle(given: LaunchArguments, v: Tensor | None) -> tuple[Tensor, int, int]:
    """Slots of partial sums, their number a head, and the block."""
    shape = given.tiles("triangle" if v is None else "tangents")
    tangent, v = v is not None, given.z if v is None else v
    slices = slices_of(given.heads, _ceil(given.tokens, shape.rows))
    slots = torch.empty(
        (given.heads * slices, given.tokens), dtype=torch.float32, device=given.z.device
    )
    unit = given.unit(v)
    args = (
        given.z, v, given.keep, given.extent, slots, *given.sizes(slices, unit),
        *in_units(given.z, unit), *in_units(v, unit),
    )  # fmt: skip
    options = {"UNIT": unit, "TANGENT": tangent, "BLOCK": shape.rows, **given.even(shape)}
    launch(triangle_kernel, given.heads * slices, args, options | given.constants(shape))
    return slots, slices, shape.rows


def _second_phase(given: LaunchArguments, block: int) -> dict[str, Any]:
    return {"BLOCK": block, "BOOST": given.boost, "num_warps": 4, "enable_fp_fusion": True}


def triangle_lse(given: LaunchArguments, lse: Tensor, reciprocals: Tensor) -> None:
    """``L`` and ``exp(-L)`` from half of the tiles."""
    slots, slices, block = _triangle(given, None)
    blocks = _ceil(given.tokens, block)
    args = (
        slots, given.keep, given.extent, lse, reciprocals, given.z.shape[1], given.tokens, blocks,
        slices,
    )  # fmt: skip
    launch(triangle_lse_kernel, given.heads * blocks, args, _second_phase(given, block))


def triangle_mean(
    given: LaunchArguments,
    v: Tensor,
    lse: Tensor,
    cotangent: Tensor | None,
    mean: Tensor,
    reciprocals: Tensor,
) -> None:
    """``r`` and ``exp(-L)`` from half of the tiles."""
    slots, slices, block = _triangle(given, v)
    blocks = _ceil(given.tokens, block)
    args = (
        slots, given.keep, given.extent, lse, cotangent, mean, reciprocals, given.z.shape[1],
        given.tokens, blocks, slices, given.beta,
    )  # fmt: skip
    launch(triangle_mean_kernel, given.heads * blocks, args, _second_phase(given, block))


def row_mean(
    given: LaunchArguments, v: Tensor, cotangent: Tensor | None, mean: Tensor, normaliser: Tensor
) -> None:
    """``r`` from all tiles that the mask leaves; ``normaliser`` as from ``row_lse``."""
    unit = given.unit(v)
    blocks, options = given.by_rows("mean", unit)
    args = (
        given.z, v, given.keep, given.extent, cotangent, mean, normaliser,
        *given.sizes(blocks, unit), given.beta, *in_units(given.z, unit), *in_units(v, unit),
    )  # fmt: skip
    options |= {"CAUSAL": given.causal, "BOUNDED": given.by_reciprocals}
    launch(mean_kernel, given.heads * blocks, args, options)


def gradient(given: LaunchArguments, normaliser: Tensor, out: Tensor) -> None:
    """``(P + P^T) Z``; ``normaliser`` as from ``row_lse``."""
    unit = given.unit()
    blocks, options = given.by_rows("gradient", unit)
    peaks = normaliser if given.bounded else normaliser.amax(-1)
    args = (
        given.z, given.keep, given.extent, normaliser, peaks, out, *given.sizes(blocks, unit),
        *in_units(given.z, unit),
    )  # fmt: skip
    launch(gradient_kernel, given.heads * blocks, args, options | {"BOUNDED": given.bounded})


def causal_gradient(given: LaunchArguments, lse: Tensor, normaliser: Tensor, out: Tensor) -> None:
    """A pass over the rows, which also finds ``L``, then one over the columns."""
    z, unit = given.z, given.unit()
    blocks, options = given.by_rows("causal", unit)
    rows = torch.empty(z.shape, dtype=torch.float32, device=z.device)
    programs, padding = given.heads * blocks, (z, given.keep, given.extent)
    numbers = (*given.sizes(blocks, unit), *in_units(z, unit))
    launch(causal_rows_kernel, programs, (*padding, lse, normaliser, rows, *numbers), options)
    launch(causal_columns_kernel, programs, (*padding, normaliser, rows, out, *numbers), options)


def curvature(
    given: LaunchArguments, v: Tensor, normaliser: Tensor, mean: Tensor, out: Tensor
) -> None:
    """``H V`` from ``r`` and the normaliser that came with it."""
    unit = given.unit(v)
    blocks, options = given.by_rows("curvature" if given.by_reciprocals else "free curvature", unit)
    shifted = not given.by_reciprocals and not given.causal
    peaks = normaliser.amax(-1) if shifted else normaliser
    args = (
        given.z, v, given.keep, given.extent, normaliser, mean, peaks, out,
        *given.sizes(blocks, unit), given.beta, *in_units(given.z, unit), *in_units(v, unit),
    )  # fmt: skip
    options |= {"BOUNDED": given.by_reciprocals, "CAUSAL": given.causal}
    launch(curvature_kernel, given.heads * blocks, args, options)
