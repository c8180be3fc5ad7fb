"""The sublayers of a language model, and how their weights begin."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.models.attention.causal import AttentionForm
from solvers.core.checks import require_count, require_number

SCALE = 0.02  # standard deviation of weights at the start, as in GPT-2


class AttentionBranch(nn.Module):
    """``u(z) = dropout(attention(LN(z)))``; keys and values of ``LN(memory)`` where that is given."""

    def __init__(self, dim: int, attention: AttentionForm, dropout: float) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), attention
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        held = None if memory is None else self.norm(memory)
        return self.dropout(self.attention(self.norm(z), held))


class FeedForwardBranch(nn.Module):
    """``u(z) = dropout(W_b gelu(W_a LN(z) + b_a) + b_b)``, each token by itself."""

    def __init__(self, dim: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, require_count("hidden", hidden))
        self.narrow = nn.Linear(hidden, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, *, memory: Tensor | None = None) -> Tensor:
        return self.dropout(self.narrow(F.gelu(self.widen(self.norm(z)))))


def check_dropout(dropout: float) -> float:
    """A share of values that are dropped, in [0, 1)."""
    if require_number("dropout", dropout, low=0.0, high=1.0) == 1.0:
        raise ValueError("dropout must be < 1, got 1.0")
    return dropout


def draw_weights(model: nn.Module, outputs: Iterable[nn.Linear], sublayers: int) -> None:
    """Weights from N(0, 0.02^2), biases 0, those of ``outputs`` divided by ``sqrt(sublayers)``.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2, 2019).
    """
    for part in model.modules():
        if isinstance(part, (nn.Linear, nn.Embedding)):
            nn.init.normal_(part.weight, std=SCALE)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for part in outputs:
        nn.init.normal_(part.weight, std=SCALE * sublayers**-0.5)


def output_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers at the ends of the branches."""
    found = []
    for part in model.modules():
        if isinstance(part, AttentionBranch):
            found.append(part.attention.output)
        elif isinstance(part, FeedForwardBranch):
            found.append(part.narrow)
    return found
