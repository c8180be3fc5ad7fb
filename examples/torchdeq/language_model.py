"""The DEQ-Transformer of torchdeq's model zoo, small: a language model of one block in equilibrium.

    python examples/torchdeq/language_model.py --engine ours    # or torchdeq, or bridge: see engines.py

The block is a post-norm transformer block whose weights serve all iterations. The embedded characters
enter each of them through queries, keys and values (input injection). Training has what the zoo's has: an
implicit gradient, weight norm, variational dropout, and a penalty on the Jacobian. The text is that of
Python's help topics, which needs no download, or ``--text`` for another one.

Source: Bai, Kolter, Koltun, "Deep Equilibrium Models" (2019), https://arxiv.org/abs/1909.01377; Geng,
Kolter, "TorchDEQ" (2023), https://arxiv.org/abs/2310.18605.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import tyro
from engines import Metered, Record, engine, train
from engines import Options as Shared
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.data import HELP, TextData, load_text
from implicit_attn.regularization import VariationalDropout


@dataclass(kw_only=True)
class Options(Shared):
    """A language model of one block in equilibrium."""

    text: str = HELP  # its name, or a path
    dim: int = 64
    heads: int = 4
    length: int = 48  # characters that the model sees
    batch: int = 16
    dropout: float = 0.1
    penalty: float = 0.1  # weight of the penalty of the Jacobian


class Block(nn.Module):
    """``z <- f(z, u)``: causal attention with u added to queries, keys and values, then an MLP.

    Shapes: z (B, T, d), u (B, T, 3 d).
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = VariationalDropout(dropout, shared=1)  # the same features of all tokens
        for part in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(part.weight, std=0.02)  # small, so that the untrained block contracts

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        parts = (self.qkv(z) + u).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        # Dense: the penalty needs second derivatives, which the fused attention does not have.
        scores = query @ key.mT / query.shape[-1] ** 0.5
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        attended = self.out((weights @ value).transpose(1, 2).flatten(2))
        z = self.norm_attention(z + self.dropout(attended))
        return self.norm_mlp(z + self.dropout(self.down(F.relu(self.up(z)))))


class LanguageModel(nn.Module):
    """Embedding, equilibrium block, head: characters (B, T) -> logits (B, T, V)."""

    def __init__(self, vocabulary: int, options: Options) -> None:
        super().__init__()
        dim = options.dim
        self.embedding = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(0.02 * torch.randn(options.length, dim))
        self.inject, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, vocabulary)
        self.meter = Metered(Block(dim, options.heads, options.dropout))
        self.solved = engine(options, self.meter, lambda u: u.new_zeros(*u.shape[:2], dim))
        self.weight = options.penalty

    def losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross entropy of the next characters in nats, and the weighted penalty."""
        u = self.inject(self.embedding(inputs) + self.positions)
        z = self.solved(u)
        self.reached = self.solved.residual(z, u)
        loss = F.cross_entropy(self.head(z).flatten(0, 1), targets.flatten())
        return loss, self.weight * self.solved.penalty(z, u.detach())


def run(options: Options, report: int = 10) -> Record:
    """Train for ``options.steps`` steps; the weights and the batches are those of ``options.seed``."""
    data: TextData = load_text(options.text)
    torch.manual_seed(options.seed)
    model = LanguageModel(len(data.alphabet), options)
    generator = torch.Generator().manual_seed(options.seed)

    def batch() -> tuple[Tensor, Tensor]:
        last = len(data.train) - options.length
        begins = torch.randint(last, (options.batch,), generator=generator)
        windows = data.train[begins[:, None] + torch.arange(options.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    return train(model, batch, options, report)


if __name__ == "__main__":
    run(tyro.cli(Options))
