"""Variational dropout: one mask for all evaluations of a solve.

The mask is a function of a random seed per sample and of the position in the tensor. The seeds are inputs of
the solve, so the mask is the same at every evaluation, in the adjoint, in a recomputed (checkpointed)
evaluation and after other samples have left the batch, for any shape of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from solvers.core.checks import require_count, require_number
from solvers.core.context import CONTEXT, within
from solvers.core.modes import in_transform

_WORD = 0xFFFFFFFF  # 32-bit arithmetic in int64


class VariationalDropout(nn.Module):
    r"""Dropout ``h m / (1 - p)`` with a mask m that is drawn once per solve.

    ``nn.Dropout`` inside an update draws a new mask at every evaluation, so there is no fixed point. This
    module may be used anywhere in the update of a :class:`implicit_attn.DEQ`, or in an energy that is
    differentiated automatically: on the state, on hidden units, on features of ``prepare``. Each sample has
    its own mask, drawn from torch's global generator at the start of a solve and shared by all evaluations
    of the solve and its derivatives. In evaluation mode nothing is dropped.

    The layer detects the module only if it is an attribute of a module in the update. Two such modules in
    an update have different masks; a module that is called twice uses the same mask. With dropout in an
    energy, the layer descends the energy of the thinned network.

    In a function for :func:`solvers.fixed_point`, draw the seeds before the solve and pass them through
    ``args``::

        seeds = dropout_seeds(len(z0), z0.device)
        solvers.fixed_point(lambda z, x, seeds: f(dropout(z, seeds), x), z0, (x, seeds))

    Args:
        p: probability of dropping an entry, in [0, 1).
        shared: dimensions along which the mask is constant: for tensors (B, N, d), ``1`` drops the same
            features of all tokens, ``-1`` whole tokens.

    Shapes: ``h`` (B, ...) -> (B, ...); ``seeds`` (B,) int64.

    Raises:
        RuntimeError: if it is called in training mode without seeds.
        ValueError: raised by the DEQ if the solve does not call the module, as for closed-form gradients.

    Example:
        >>> class Cell(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.linear, self.dropout = nn.Linear(4, 4), VariationalDropout(0.1)
        ...
        ...     def forward(self, z, x):
        ...         return 0.5 * torch.tanh(self.linear(self.dropout(z))) + x
        >>> from implicit_attn import DEQ
        >>> DEQ.from_update(Cell())(torch.zeros(2, 3, 4)).shape
        torch.Size([2, 3, 4])

    Source: Gal, Ghahramani, "A Theoretically Grounded Application of Dropout in Recurrent Neural Networks"
    (2016), https://arxiv.org/abs/1512.05287; for equilibrium models Bai, Kolter, Koltun, "Deep Equilibrium
    Models" (2019), https://arxiv.org/abs/1909.01377.
    """

    def __init__(self, p: float = 0.5, *, shared: int | Iterable[int] = ()) -> None:
        super().__init__()
        self.p = require_number("p", p, low=0.0, high=1.0)
        if p == 1:
            raise ValueError("p must be < 1, got 1")
        dims = (shared,) if isinstance(shared, int) else tuple(shared)
        for dim in dims:
            require_count("shared", dim, low=-64)
            if dim == 0:
                raise ValueError("shared must not contain 0: every sample has its own mask")
        self.shared = dims

    @property
    def active(self) -> bool:
        """Whether the module drops anything in its current mode."""
        return self.training and self.p > 0

    def forward(self, h: Tensor, seeds: Tensor | None = None) -> Tensor:
        """Return ``h`` with the mask applied, or ``h`` itself in evaluation mode."""
        if not self.active:
            return h
        if seeds is not None:
            return h * self.mask(h, seeds, 0)
        current = CONTEXT.masks
        if current is None or id(self) not in current[0].numbers:
            raise RuntimeError(
                "VariationalDropout in training mode takes its mask from the solve of a DEQ, but no solve "
                "registered it: make it an attribute of a module in the update or energy (not of a "
                "closure), call eval(), or pass seeds=dropout_seeds(batch)"
            )
        masks, given = current
        return h * masks.mask(self, h, given)

    def mask(self, h: Tensor, seeds: Tensor, number: int) -> Tensor:
        """Return ``m / (1 - p)`` with the dtype and shape of ``h``, 1 in the shared dimensions.

        ``number`` distinguishes modules with the same seeds.
        """
        if h.dim() == 0 or h.shape[0] != seeds.shape[0]:
            raise ValueError(
                f"h must have the batch size of the state, {seeds.shape[0]}, along dim 0, got shape "
                f"{tuple(h.shape)}"
            )
        shape = list(h.shape)
        for dim in self.shared:
            if not -h.dim() < dim < h.dim():
                raise ValueError(f"shared must suit the shape {tuple(h.shape)} of h, got {dim}")
            shape[dim] = 1
        with torch.no_grad():
            words = _words(seeds, number, math.prod(shape[1:]))
            kept = words >= round(self.p * 2**32)
            return (kept.to(h.dtype) / (1 - self.p)).reshape(shape)

    def extra_repr(self) -> str:
        return f"p={self.p}" + (f", shared={self.shared}" if self.shared else "")


def dropout_seeds(batch: int, device: torch.device | str | None = None) -> Tensor:
    """Draw a seed per sample, (batch,) int64, from torch's global generator of the device."""
    require_count("batch", batch)
    with torch.inference_mode(False):
        return torch.randint(2**62, (batch,), device=device)


class SolveMasks:
    """The masks of a solve for the modules of an update that are active.

    Only the latest mask of each module is stored, for the current samples.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        active = [m for m in modules if isinstance(m, VariationalDropout) and m.active]
        self.numbers = {id(module): number for number, module in enumerate(active)}
        # The seeds, their version and the mask that they gave: a queue writes new seeds over old ones.
        self.known: dict[Any, tuple[Tensor, int, Tensor]] = {}
        self.called: set[int] = set()  # numbers

    def within(self, seeds: Tensor) -> AbstractContextManager[None]:
        """Within the context, the modules called in this thread drop by these seeds."""
        return within(masks=(self, seeds))

    def mask(self, module: VariationalDropout, h: Tensor, seeds: Tensor) -> Tensor:
        number = self.numbers[id(module)]
        self.called.add(number)
        if in_transform():  # its tensors must not be stored
            return module.mask(h, seeds, number)
        key = number, h.shape[1:], h.dtype
        known = self.known.get(key)
        version = seeds._version
        if (
            known is None
            or known[0] is not seeds
            or known[1] != version
            or h.shape[:1] != seeds.shape
        ):
            with torch.inference_mode(False):
                known = seeds, version, module.mask(h, seeds, number)
            self.known[key] = known
        return known[2]

    def require_called(self, update: nn.Module) -> None:
        """Raise ValueError if a module of the update was not called in the solve."""
        if len(self.called) == len(self.numbers):
            return
        uncalled = {key for key, number in self.numbers.items() if number not in self.called}
        if not any(_is_compiled(module) for module in update.modules()):
            idle = [name for name, module in update.named_modules() if id(module) in uncalled]
            raise ValueError(
                f"VariationalDropout in the update must be called during the solve, but {idle} was not: an "
                "energy with a closed-form gradient does not apply dropout; use nn.Dropout on the layer's "
                "input or output, or remove it"
            )


def _is_compiled(module: nn.Module) -> bool:
    """Return whether the module was compiled, whose code may not call others after the first time."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _words(seeds: Tensor, number: int, count: int) -> Tensor:
    """Return (B, count) numbers in [0, 2^32), a function of seed, ``number`` and position."""
    first = _mix(seeds + ((number + 1) * 0x85EBCA6B & _WORD))
    second = _mix((seeds >> 31) ^ first)
    place = torch.arange(count, device=seeds.device) * 0x9E3779B1
    return _mix(_mix(place + first[:, None]) ^ second[:, None])


def _mix(word: Tensor) -> Tensor:
    """Permute the 32-bit numbers so that every bit depends on every other.

    Source: Wellons, "Prospecting for Hash Functions" (2018), https://nullprogram.com/blog/2018/07/31/.
    """
    word = word & _WORD
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _WORD
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _WORD
    return word ^ (word >> 16)
