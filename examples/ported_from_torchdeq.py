"""Do two models of torchdeq's zoo train the same way with this package, and what do the solves cost?

    python examples/ported_from_torchdeq.py            # three seeds
    python examples/ported_from_torchdeq.py --example digits --seeds 1

language is a DEQ-Transformer on characters of Python's help topics, trained with weight norm, variational
dropout and a Jacobian penalty. digits is a multiscale model of scikit-learn's digits whose state is a pair
of feature maps. Both libraries solve ``z = cell(z, x)`` with the same cell, weights and random numbers.

A row of the table is the median over seeds. "evaluations" and "products" (with the transposed Jacobian) are
medians over the steps, counted at the cell per sample; "residual" is the median of the largest residual in
the batch. "differs" is the largest relative difference of a loss from torchdeq's at the same step. The losses
agree to 0.21 %, and this package takes as many evaluations to within one and fewer products.

Source: Bai, Kolter, Koltun (2019), https://arxiv.org/abs/1909.01377 and (2020),
https://arxiv.org/abs/2006.08656; Geng, Kolter, "TorchDEQ" (2023), https://arxiv.org/abs/2310.18605.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torchdeq import get_deq, reset_deq
from torchdeq.dropout import VariationalDropout1d
from torchdeq.loss import jac_reg
from torchdeq.norm import apply_norm as their_apply_norm

from implicit_attn import DEQ
from implicit_attn.data import load_digits, load_text
from implicit_attn.regularization import VariationalDropout, apply_norm, dropout_seeds
from solvers import Implicit, Tolerance

Batch = tuple[Tensor, Tensor]  # inputs and targets
HEADER = "engine     loss at 1    at 10    last  differs  evaluations  products  residual"


@dataclass
class Options:
    """Options of the solves and of the training."""

    tol: float = 1e-3  # relative tolerance of the solves
    max_steps: int = 60  # maximum number of evaluations of a forward or backward solve
    steps: int = 50  # number of training steps
    rate: float = 1e-3  # learning rate


# The cells.


class Block(nn.Module):
    """``z <- f(z, u)``: causal attention with u added to queries, keys and values, then an MLP.

    Shapes: z (B, T, d), u (B, T, 3 d).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.norm_attention, self.norm_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.dropout = VariationalDropout(0.1, shared=1)  # the same features of all tokens
        for part in (self.qkv, self.out, self.up, self.down):
            nn.init.normal_(part.weight, std=0.02)  # small, so that the untrained block contracts

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        parts = (self.qkv(z) + u).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        # The penalty needs second derivatives, which the fused attention does not have.
        scores = query @ key.mT / query.shape[-1] ** 0.5
        later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        attended = scores.masked_fill(later, -torch.inf).softmax(-1) @ value
        z = self.norm_attention(z + self.dropout(self.out(attended.transpose(1, 2).flatten(2))))
        return self.norm_mlp(z + self.dropout(self.down(F.relu(self.up(z)))))


normed = partial(nn.GroupNorm, 2)  # batch norm would couple the samples of a batch


class Residual(nn.Module):
    """``relu(norm(z + norm(W2 relu(W1 z) + u)))`` at one resolution, W 3 x 3 convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(normed(channels) for _ in range(2))

    def forward(self, z: Tensor, u: Tensor) -> Tensor:
        branch = self.norms[0](self.second(F.relu(self.first(z))) + u)
        return F.relu(self.norms[1](z + branch))


class TwoScales(nn.Module):
    """``(fine, coarse) <- f((fine, coarse), u)``: a block at each resolution, then both fused.

    Shapes: fine (B, C, 8, 8), coarse (B, 2 C, 4, 4), and u is such a pair too.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fine, self.coarse = Residual(channels), Residual(2 * channels)
        self.up = nn.Conv2d(2 * channels, channels, 1, bias=False)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.norm_fine, self.norm_coarse = normed(channels), normed(2 * channels)
        for part in self.modules():
            if isinstance(part, nn.Conv2d):
                nn.init.normal_(part.weight, std=0.05)
        for norm in (self.norm_fine, self.norm_coarse):
            nn.init.constant_(norm.weight, 0.2)  # small beside u: the untrained map contracts

    def forward(self, z: Sequence[Tensor], u: Batch) -> Batch:
        fine, coarse = self.fine(z[0], u[0]), self.coarse(z[1], u[1])
        up = F.interpolate(self.up(coarse), scale_factor=2.0, mode="nearest")
        down = self.down(fine)
        return F.relu(self.norm_fine(fine + up)), F.relu(self.norm_coarse(coarse + down))


class Metered(nn.Module):
    """A cell that counts for how many samples it is evaluated, and its derivative multiplied.

    All calls are counted, whatever made them, so the counts mean the same for every library.
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.forward_rows = self.backward_rows = 0

    def forward(self, z: Any, x: Any) -> Any:
        image = self.cell(z, x)
        first = image if isinstance(image, Tensor) else image[0]
        self.forward_rows += len(first)
        if first.requires_grad:
            first.register_hook(self._multiplied)
        return image

    def _multiplied(self, cotangent: Tensor) -> None:
        self.backward_rows += len(cotangent)


# The engines: each is called with x, and tells the penalty ``|J|_F^2 / D``, estimated at the solution held
# fixed, and the largest ``|f(z) - z| / |f(z)|`` of the batch.


class ByTorchDEQ(nn.Module):
    """The cell solved by torchdeq: weight norm, one dropout mask a solve, implicit gradient."""

    def __init__(self, options: Options, cell: Metered, start: Callable[[Any], Any]) -> None:
        super().__init__()
        tol, most = options.tol, options.max_steps
        their_apply_norm(cell, "weight_norm")
        for name, part in list(cell.named_modules()):
            if isinstance(part, VariationalDropout):
                cell.set_submodule(name, SameMasks(part))
        self.cell, self.start = cell, start
        self.deq = get_deq(
            core="indexing", ift=True, f_solver="anderson", b_solver="broyden",
            f_tol=tol, b_tol=tol, f_stop_mode="rel", b_stop_mode="rel",
            f_max_iter=most, b_max_iter=most,
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        reset_deq(self.cell)  # weights computed anew, another dropout mask
        several = not isinstance(start := self.start(x), Tensor)
        states, _ = self.deq(lambda *z: self.cell(z if several else z[0], x), start)
        return states[-1]

    def penalty(self, z: Tensor, x: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        return jac_reg(self.cell(z, x), z)

    @torch.no_grad()
    def residual(self, z: Any, x: Any) -> float:
        image = self.cell.cell(z, x)  # not counted; torchdeq's own is that of another point
        return float((_rows(image) - _rows(z)).norm(dim=1).div(_rows(image).norm(dim=1)).max())


def _rows(z: Any) -> Tensor:
    """A state as a matrix, a row for each sample."""
    return torch.cat([leaf.flatten(1) for leaf in ([z] if isinstance(z, Tensor) else z)], dim=1)


class SameMasks(VariationalDropout1d):
    """torchdeq's dropout, with masks drawn as ours are, so that both libraries drop the same."""

    def __init__(self, ours: VariationalDropout) -> None:
        super().__init__(ours.p)
        self.ours = ours

    def reset_mask(self, x: Tensor) -> None:
        self.mask = self.ours.mask(x, dropout_seeds(len(x)), 0)


class ByOurs(nn.Module):
    """The cell as a layer of this package; nothing has to be reset."""

    def __init__(self, options: Options, cell: Metered, start: Callable[[Any], Any]) -> None:
        super().__init__()
        apply_norm(cell)
        most = options.max_steps
        self.layer = DEQ.from_update(
            cell, init=start, tolerance=Tolerance(options.tol), max_steps=most,
            adjoint=Implicit(max_steps=most),
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def penalty(self, z: Tensor, x: Tensor) -> Tensor:
        return self.layer.jacobian_penalty(z.detach(), x).mean()

    def residual(self, z: Any, x: Any) -> float:
        assert self.layer.last is not None
        return float(self.layer.last.residual.max())


ENGINES: dict[str, Any] = {"torchdeq": ByTorchDEQ, "ours": ByOurs}

# The models around the cells.


class LanguageModel(nn.Module):
    """Embedding, equilibrium block, head: characters (B, T) -> logits (B, T, V)."""

    def __init__(
        self, engine: str, options: Options, *, dim: int = 64, heads: int = 4, length: int = 48,
        batch: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        data = load_text()
        self.text, self.size, self.length = data.train, batch, length
        self.embedding = nn.Embedding(len(data.alphabet), dim)
        self.positions = nn.Parameter(0.02 * torch.randn(length, dim))
        self.inject, self.head = nn.Linear(dim, 3 * dim), nn.Linear(dim, len(data.alphabet))
        self.meter = Metered(Block(dim, heads))
        self.solved = ENGINES[engine](options, self.meter, lambda u: u.new_zeros(*u.shape[:2], dim))

    def batch(self, generator: torch.Generator) -> Batch:
        last = len(self.text) - self.length
        begins = torch.randint(last, (self.size,), generator=generator)
        windows = self.text[begins[:, None] + torch.arange(self.length + 1)]
        return windows[:, :-1], windows[:, 1:]

    def losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mean cross entropy of the next characters in nats, the weighted penalty, and the residual."""
        u = self.inject(self.embedding(inputs) + self.positions)
        z = self.solved(u)
        loss = F.cross_entropy(self.head(z).flatten(0, 1), targets.flatten())
        residual = self.solved.residual(z, u)
        return loss, 0.1 * self.solved.penalty(z, u.detach()), residual


class Classifier(nn.Module):
    """Stem, two resolutions in equilibrium, a linear head: images (B, 1, 8, 8) -> logits (B, 10)."""

    def __init__(
        self, engine: str, options: Options, *, channels: int = 12, batch: int = 32
    ) -> None:
        super().__init__()
        self.data, self.size = load_digits(), batch
        self.stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), normed(channels))
        self.halve = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.head = nn.Linear(channels + 16 * 2 * channels, 10)
        self.meter = Metered(TwoScales(channels))
        solver = ENGINES[engine]
        self.solved = solver(options, self.meter, lambda u: tuple(map(torch.zeros_like, u)))

    def batch(self, generator: torch.Generator) -> Batch:
        number = len(self.data.train_labels)
        chosen = torch.randint(number, (self.size,), generator=generator)
        return self.data.train_images[chosen], self.data.train_labels[chosen]

    def losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, float, float]:
        """Mean cross entropy in nats, no penalty, and the residual."""
        fine = self.stem(inputs)
        u = fine, self.halve(fine)
        z = self.solved(u)
        features = torch.cat([z[0].mean((2, 3)), z[1].flatten(1)], dim=1)
        return F.cross_entropy(self.head(features), targets), 0.0, self.solved.residual(z, u)


EXAMPLES = {"language": LanguageModel, "digits": Classifier}


Record = dict[str, list[float]]  # losses, forward, backward, residuals: a number for each step


def train(example: str, engine: str, options: Options, seed: int = 0, **sizes: int) -> Record:
    """Run steps of Adam; the seed fixes the weights and the batches."""
    torch.manual_seed(seed)
    model: Any = EXAMPLES[example](engine, options, **sizes)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    record: Record = {"losses": [], "forward": [], "backward": [], "residuals": []}
    for step in range(options.steps):
        inputs, targets = model.batch(generator)
        torch.manual_seed(step)  # the same masks and random vectors for every engine
        model.meter.forward_rows = model.meter.backward_rows = 0
        loss, penalty, residual = model.losses(inputs, targets)
        optimizer.zero_grad()
        (loss + penalty).backward()
        calls = (
            rows / len(inputs) for rows in (model.meter.forward_rows, model.meter.backward_rows)
        )
        for values, new in zip(record.values(), (loss.item(), *calls, residual), strict=True):
            values.append(new)
        optimizer.step()
    return record


def middle(records: Sequence[Record], key: str) -> float:
    return median(median(each[key]) for each in records)


def row(name: str, records: Sequence[Record], reference: Sequence[Record]) -> str:
    """Return a line of the table."""
    pairs = zip(records, reference, strict=True)
    losses = [pair for a, b in pairs for pair in zip(a["losses"], b["losses"], strict=True)]
    differs = max(abs(mine - other) / abs(other) for mine, other in losses)
    last = len(records[0]["losses"])
    shown = (median(each["losses"][min(n, last) - 1] for each in records) for n in (1, 10, last))
    return (
        f"{name:9s}  {'{:9.4f}{:9.4f}{:9.4f}'.format(*shown)} {100 * differs:6.2f} % "
        f"{middle(records, 'forward'):11.1f} {middle(records, 'backward'):9.1f}   "
        f"{middle(records, 'residuals'):.1e}"
    )


def main(
    options: tyro.conf.OmitArgPrefixes[Options],
    example: tuple[Literal["language", "digits"], ...] = ("language", "digits"),
    seeds: int = 3,
) -> None:
    """Both ported models by both libraries: losses, evaluations, residuals."""
    torch.set_num_threads(1)
    for title in example:
        print(title, HEADER, sep="\n")
        found: dict[str, list[Record]] = {}
        for engine in ENGINES:
            found[engine] = [train(title, engine, options, seed) for seed in range(seeds)]
            print(row(engine, found[engine], found["torchdeq"]), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
