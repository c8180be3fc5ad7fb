"""Autocast: on around the user's function, off in the solvers' own algebra."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """The autocast state of the caller."""

    device: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def now(cls, device: str) -> Autocast:
        if not torch.amp.is_autocast_available(device):
            return cls(device, torch.float32, False)
        enabled = torch.is_autocast_enabled(device)
        return cls(device, torch.get_autocast_dtype(device), enabled)

    def restored(self) -> AbstractContextManager[object]:
        """The caller's state again, inside :func:`without_autocast`."""
        if not self.enabled:
            return nullcontext()
        return torch.autocast(self.device, dtype=self.dtype, enabled=True)


def without_autocast(device: str) -> AbstractContextManager[object]:
    """Autocast off; free where it is off already."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
