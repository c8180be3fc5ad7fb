"""Associative recall: which value stood beside this key?"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.learns.task import Task

PAIRS, KEYS, VALUES = 16, 32, 16
SEQUENCES, TEST_SEQUENCES = 8000, 2000
ASKED = VALUES  # the value of a token that asks


class PairEmbedding(nn.Module):
    """Tokens (B, N, d) of pairs (B, N, 2) int64 of a key and a value: the sum of two vectors."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, dim), nn.Embedding(VALUES + 1, dim)

    def forward(self, pairs: Tensor) -> Tensor:
        return self.key(pairs[..., 0]) + self.value(pairs[..., 1])


def recall(limit: int | None = None) -> Task:
    """A token that asks for a key, then 16 pairs of different keys with any values, in 17 tokens.

    The class is the value beside that key. Every sequence draws its own pairs, so nothing can be
    learned by heart, and the token that asks says nothing about the answer. Positions mean nothing.
    """
    train = sequences(SEQUENCES if limit is None else limit, seed=1)
    return Task(
        VALUES, *train, *sequences(TEST_SEQUENCES, seed=2), PairEmbedding,
        ("query",), places=False, pixels=False, epochs=10,
    )  # fmt: skip


def sequences(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs (count, 17, 2) int64, the asking one first, and the values (count,) that are asked for."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.rand(count, KEYS, generator=draw).argsort(dim=1)[:, :PAIRS]
    values = torch.randint(VALUES, (count, PAIRS), generator=draw)
    which = torch.randint(PAIRS, (count, 1), generator=draw)
    question = torch.stack([keys.gather(1, which), torch.full_like(which, ASKED)], dim=-1)
    pairs = torch.cat([question, torch.stack([keys, values], dim=-1)], dim=1)
    return pairs, values.gather(1, which).squeeze(1)
