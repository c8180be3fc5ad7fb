"""Devices in one process that pass messages explicitly, each of which is counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Message = tuple[Tensor, ...]


@dataclass
class Network:
    """``devices`` in a ring; a message is a tuple of tensors, and costs the bytes that they hold."""

    devices: int
    sent: list[int] = field(init=False)  # bytes by each device
    rounds: int = field(init=False, default=0)  # messages that each device waited for in turn

    def __post_init__(self) -> None:
        self.sent = [0] * self.devices

    def shift(self, messages: Sequence[Message]) -> list[Message]:
        """Each device sends its message to the next one of the ring, all at once."""
        for device, message in enumerate(messages):
            self.sent[device] += sum(part.numel() * part.element_size() for part in message)
        self.rounds += 1
        return [messages[device - 1] for device in range(self.devices)]

    def add(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum over devices, known to all (an all-reduce by a ring of scattered pieces)."""
        size = parts[0].numel() * parts[0].element_size()
        for device in range(self.devices):
            self.sent[device] += math.ceil(2 * (self.devices - 1) / self.devices * size)
        self.rounds += 2 * (self.devices - 1)
        return torch.stack(list(parts)).sum(0)


def places(tokens: int, devices: int, zigzag: bool) -> list[Tensor]:
    """Which tokens (n,) each device holds: neighbours, or one piece from each end of the sequence.

    With ``zigzag`` every device has early and late tokens, so that causal rounds cost all the same.

    Raises:
        ValueError: the tokens do not fall into equal pieces.
    """
    pieces = 2 * devices if zigzag else devices
    if tokens % pieces:
        raise ValueError(f"tokens must be a multiple of {pieces} here, got {tokens}")
    cut = torch.arange(tokens).chunk(pieces)
    if not zigzag:
        return list(cut)
    return [torch.cat((cut[k], cut[pieces - 1 - k])) for k in range(devices)]


def scatter(whole: Tensor, where: Sequence[Tensor], dim: int = 2) -> list[Tensor]:
    """The parts of ``whole`` that the devices hold."""
    return [whole.index_select(dim, index) for index in where]


def gather(parts: Sequence[Tensor], where: Sequence[Tensor], dim: int = 2) -> Tensor:
    """The whole of which the devices hold parts, in its own order."""
    order = torch.cat(list(where)).argsort()
    return torch.cat(list(parts), dim).index_select(dim, order)
