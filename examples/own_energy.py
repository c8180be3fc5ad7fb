"""Is an energy of your own a useful layer, compared with no layer, an encoder layer and EquilibriumBlock?

    python examples/own_energy.py        # four minutes

A network cuts the 8 x 8 digits of scikit-learn into 16 patches, adds the output of one layer to their
tokens, and classifies the mean of the tokens. Every row is trained at each learning rate on four fifths of
the training images. The rate with the best accuracy on the last fifth, averaged over seeds, is kept, and the
networks are trained again on all training images. The test images are used once, at the end: the energy is as
accurate as the encoder layer.
"""

import time
from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, run
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from implicit_attn import DEQ, EquilibriumBlock, apply_norm

DIM, HIDDEN, HEADS = 32, 64, 4
RATES = (1e-2, 3e-2)
DATA_SEED = 0  # of the split into training, validation and test images
NONE, OWN, ENCODER, BLOCK = (
    "no layer", "your own energy", "nn.TransformerEncoderLayer", "EquilibriumBlock"
)  # fmt: skip


class MyEnergy(nn.Module):
    r"""The energy of a state z, given tokens x: hidden units and attention that both contain the input.

    ``1/2 |z|^2 - 1/2 sum relu(W z + U x)^2 - sum_hi log sum_j exp((Q z + q x)_hi . k_hj)``, where the keys
    ``k_hj`` of head h are made of x and have length 1, and the spectral norms of W and Q are at most 0.7.
    Each of the last two terms therefore lowers the curvature by at most 0.49, and the energy is convex in z.
    """

    def __init__(self, dim: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.W, self.Q = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, dim, bias=False)
        self.U, self.q, self.k = nn.Linear(dim, hidden), nn.Linear(dim, dim), nn.Linear(dim, dim)
        apply_norm(self, "bound", target=0.7, only=("W", "Q"))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:  # (B, N, dim), (B, N, dim) -> (B,)
        hidden = F.relu(self.W(z) + self.U(x))
        queries = (self.Q(z) + self.q(x)).unflatten(-1, (self.heads, -1))
        keys = F.normalize(self.k(x).unflatten(-1, (self.heads, -1)), dim=-1)
        scores = torch.einsum("bihc,bjhc->bhij", queries, keys)
        squares = 0.5 * z.square().sum((1, 2)) - 0.5 * hidden.square().sum((1, 2))
        return squares - scores.logsumexp(-1).sum((1, 2))


class Residual(nn.Module):
    """``x + layer(x)``, where the layer minimises your own energy."""

    def __init__(self) -> None:
        super().__init__()
        self.deq = DEQ.from_energy(MyEnergy(DIM, HIDDEN, HEADS), init="zeros", tolerance=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.deq(x)


def make_encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, dropout=0.0, batch_first=True)


LAYERS: dict[str, Any] = {
    NONE: nn.Identity,
    OWN: Residual,
    ENCODER: make_encoder,
    BLOCK: lambda: EquilibriumBlock(DIM, HEADS, HIDDEN),
}


class Classifier(nn.Module):
    """Patches (B, 16, 4) with learned positions, one layer, and the logits of the mean of the tokens."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.embed = nn.Linear(4, DIM)
        self.position = nn.Parameter(0.5 * torch.randn(16, DIM))
        self.layer = LAYERS[name]()
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, 10)

    def forward(self, patches: Tensor) -> Tensor:
        tokens = self.layer(self.embed(patches) + self.position)
        return self.head(self.norm(tokens).mean(1))


def train_and_test(
    name: str, data: Sequence[Tensor], rate: float, seed: int, epochs: int
) -> dict[str, Any]:
    """Train on ``data`` = (train patches, test patches, train labels, test labels); return a row."""
    train, test, train_labels, test_labels = data
    torch.manual_seed(seed)
    model, start = Classifier(name), time.process_time()
    converged: list[Tensor] = []  # of every sample of every solve, in training and test
    deq: Any = getattr(model.layer, "deq", None)
    if deq is not None:
        deq.observer = lambda x, mask, solution: converged.append(solution.converged)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    steps = epochs * -(-len(train) // 64)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        for rows in torch.randperm(len(train)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(train[rows]), train_labels[rows]).backward()
            optimizer.step()
            schedule.step()
    seconds = time.process_time() - start
    model.eval()
    with torch.no_grad():
        right = (model(test).argmax(1) == test_labels).float().mean()
    return {
        "layer": name, "rate": rate, "seed": seed, "accuracy": 100 * float(right),
        "parameters": sum(each.numel() for each in model.layer.parameters()),
        "converged": 100 * float(torch.cat(converged).float().mean()) if converged else None,
        "seconds": seconds,
    }  # fmt: skip


def own_energy(
    seeds: tuple[int, ...] = (2, 3, 4, 5),  # random seeds, one training of each layer per seed
    epochs: int = 15,  # number of epochs of each training
) -> Result:
    digits: Any = load_digits()
    images = torch.tensor(digits.images[:, None], dtype=torch.float32) / 16
    patches, labels = F.unfold(images, 2, stride=2).mT, torch.tensor(digits.target)
    split: dict[str, Any] = {"random_state": DATA_SEED}
    data: Any = train_test_split(patches, labels, test_size=360, **split)
    choosing: Any = train_test_split(data[0], data[2], test_size=0.2, **split)
    bar = tqdm(total=len(LAYERS) * len(seeds) * (len(RATES) + 1), unit="training", disable=None)

    def trained(name: str, parts: Sequence[Tensor], rate: float) -> Table:
        bar.set_description(name)
        rows = []
        for seed in seeds:
            rows.append(train_and_test(name, parts, rate, seed, epochs))
            bar.update()
        return rows

    validation, test, summary = Table(), Table(), Table()
    for name in LAYERS:
        for rate in RATES:
            validation += trained(name, choosing, rate)
        means = {
            rate: sum(columns(validation, "accuracy", layer=name, rate=rate)[0]) for rate in RATES
        }
        test += trained(name, data, max(means, key=lambda rate: means[rate]))
    bar.close()
    for name in LAYERS:
        keys = ("accuracy", "seconds", "converged", "parameters", "rate")
        accuracy, seconds, converged, parameters, rate = columns(test, *keys, layer=name)
        summary.append({
            "layer": name, "accuracy": sum(accuracy) / len(accuracy),
            "least": min(accuracy), "most": max(accuracy), "parameters": parameters[0],
            "converged": None if converged[0] is None else sum(converged) / len(converged),
            "seconds": sum(seconds) / len(seconds), "rate": rate[0],
        })  # fmt: skip
    figure, axes = plt.subplots(figsize=(6.4, 3.4))
    for place, row in enumerate(summary):
        (points,) = columns(test, "accuracy", layer=row["layer"])
        color = "C0" if row["layer"] == OWN else "C4"
        axes.plot(points, [place] * len(points), "o", color=color, markersize=5, alpha=0.7)
        axes.plot(row["accuracy"], place, "|", color=color, markersize=24, markeredgewidth=3)
    axes.set_yticks(range(len(summary)), [row["layer"] for row in summary])
    axes.set(
        ylim=(len(summary) - 0.5, -0.5), xlabel="test accuracy (%): a dot for each seed; |: mean"
    )
    axes.set_title("8 x 8 digits, one layer")
    return {"summary": summary, "test": test, "validation": validation}, figure


if __name__ == "__main__":
    run(own_energy)
