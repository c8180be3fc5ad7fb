"""A bi-softmax problem as the kernels want it: strides, padding, constants of the compilation."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from implicit_attn.kernels.bi_softmax.triton.gradient import gradient_kernel
from implicit_attn.kernels.bi_softmax.triton.tables import WIDEST_SPLIT, Tiles, tiles

INTERPRETED = not isinstance(gradient_kernel, triton.JITFunction)
LOG2E = math.log2(math.e)
# Scores within this bound need neither a maximum nor a shift: exp(60) N stays in float32.
MODERATE = 60.0
# Offsets inside a tile are of 32 bits.
_LARGEST_ROW_STRIDE = 1 << 23


@dataclass(frozen=True)
class Problem:
    """Everything but the kernels' own arguments. ``keep`` (B, N) uint8, ``extent`` (B,) int32."""

    z: Tensor
    beta: float
    keep: Tensor | None
    extent: Tensor | None
    causal: bool
    bounded: bool

    @property
    def heads(self) -> int:
        return self.z.shape[0] * self.z.shape[1]

    @property
    def tokens(self) -> int:
        return self.z.shape[2]

    @property
    def scale(self) -> float:
        return self.beta * LOG2E

    @property
    def shares(self) -> bool:
        """Whether the weights of a pair are ``exp(S) (a_i + a_j)`` with ``a = exp(-L)``, stored."""
        return self.bounded and not self.causal

    @cached_property
    def padded_width(self) -> int:
        return max(16, int(triton.next_power_of_2(self.z.shape[3])))

    @cached_property
    def capability(self) -> int:
        """Major version of the device; 0: interpreted."""
        return 0 if INTERPRETED else torch.cuda.get_device_capability(self.z.device)[0]

    @property
    def boost(self) -> int:
        """Weights of float16 are held ``2^boost`` times larger, as small ones would be lost."""
        return 14 if self.z.dtype == torch.float16 else 0

    def tiles(self, kernel: str) -> Tiles:
        return tiles(kernel, self.padded_width, self.z.element_size(), self.capability)

    def even(self, *sizes: int) -> bool:
        return self.extent is None and all(self.tokens % size == 0 for size in sizes)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """What every kernel is specialised on."""
        split = self.z.dtype == torch.float32 and self.padded_width <= WIDEST_SPLIT
        return {
            "WIDTH": self.padded_width,
            "PRECISION": "tf32x3" if split and not INTERPRETED else "ieee",
            "UPCAST": INTERPRETED and self.z.dtype == torch.bfloat16,
            "HAS_EXTENT": self.extent is not None,
            "enable_fp_fusion": self.bounded,
        }

    @property
    def even_width(self) -> bool:
        return self.padded_width == self.z.shape[3]

    @property
    def pads(self) -> tuple[Tensor, Tensor]:
        """``keep`` and ``extent``, or any tensor in their place: the kernel does not read it."""
        stand_in = self.z
        return (
            stand_in if self.keep is None else self.keep,
            stand_in if self.extent is None else self.extent,
        )


def readable(x: Tensor) -> Tensor:
    """``x``, or a copy, with contiguous rows and offsets that fit."""
    fits = x.stride(3) == 1 and x.stride(2) <= _LARGEST_ROW_STRIDE
    return x if fits or x.shape[3] == 1 else x.contiguous()


def device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be that of ``x``."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def extent_of(mask: Tensor) -> Tensor:
    """(B,) int32: one more than the index of the last token that counts; 0 where none does."""
    positions = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)
    return (positions * mask).amax(1).to(torch.int32)
