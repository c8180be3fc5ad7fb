"""What does attention learn whose weights descend the same free energy as its states, without a task?

    python examples/local_learning.py        # half a minute

The patches of a digit are tokens, and one state per digit descends its energy among them. By the local rule
the weights descend this energy too; only a linear readout uses labels. The energy falls to its lower bound,
where all states are alike, so the accuracy falls to chance. Fixed random weights classify 44 % of the test
digits, weights trained by back-propagation 90 to 93 %, depending on rounding.

Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers", https://arxiv.org/abs/2511.00907,
algorithms 1 to 3.
"""

import math
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, run
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import ImageData, load_digits

FIXED, LOCAL, BACKWARD = RULES = ("fixed weights", "local rule", "back-propagation")
DIM, TEMPERATURE, STEP = 32, 4.0, 0.5  # d of tokens and states, T, eta
DEPTH = 5  # steps of the states in back-propagation, from zero
RECORDS = 20  # measurements in a training
TEST_STEPS = 50  # most steps of the states of test images


def attention(z: Tensor, h: Tensor, W: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the keys ``k = W h`` and the scores (B, N, M) of states z (B, N, d) among tokens h (B, M, d).

    The free energy of a state is ``F_i = -T log sum_j exp(-|z_i - k_j|^2 / (2T))``. With the weights P of
    the softmax its gradients are local ::

        dF/dz = z - sum_j P_j k_j,    dF/dW = -sum_j P_j (z - k_j) h_j^T
    """
    keys = h @ W.mT
    # The term of |z|^2 is constant in a row, and left out.
    return keys, (z @ keys.mT - 0.5 * keys.square().sum(-1).unsqueeze(-2)) / TEMPERATURE


def energy(z: Tensor, h: Tensor, W: Tensor) -> Tensor:
    """Return the mean of F_i."""
    _, scores = attention(z, h, W)
    return (0.5 * z.square().sum(-1) - TEMPERATURE * torch.logsumexp(scores, dim=-1)).mean()


def energy_by_state(z: Tensor, h: Tensor, W: Tensor) -> Tensor:
    """Return dF_i/dz_i, differentiable."""
    keys, scores = attention(z, h, W)
    return z - torch.softmax(scores, dim=-1) @ keys


@torch.no_grad()
def energy_by_weights(z: Tensor, h: Tensor, W: Tensor) -> Tensor:
    """Return the gradient of the sum of F_i with respect to W."""
    keys, scores = attention(z, h, W)
    weights = torch.softmax(scores, dim=-1)
    pulled = weights.mT @ z - weights.sum(-2).unsqueeze(-1) * keys
    return -torch.einsum("bmp,bmd->pd", pulled, h)


def states(h: Tensor, W: Tensor, steps: int, z: Tensor | None = None) -> Tensor:
    """Return the states (B, 1, d) after ``steps`` steps from z, or from zero."""
    z = h.new_zeros(len(h), 1, DIM) if z is None else z
    for _ in range(steps):
        z = z - STEP * energy_by_state(z, h, W)
    return z


def spread(z: Tensor) -> float:
    """Return the root mean square distance of states (B, N, d) from their mean."""
    flat = z.flatten(0, 1)
    return (flat - flat.mean(0)).square().sum(1).mean().sqrt().item()


def learn(data: ImageData, rule: str, epochs: int, seed: int) -> Table:
    """Each state makes one step an epoch and is kept; the local rule moves W at these states.

    Back-propagation runs DEPTH steps from zero instead, in batches.
    """
    g = torch.Generator().manual_seed(seed)
    patches = [F.unfold(images, 2, stride=2).mT for images in (data.train_images, data.test_images)]
    embed, place = torch.randn(4, DIM, generator=g) / 2, torch.randn(16, DIM, generator=g)
    tokens, test_tokens = (each @ embed + place for each in patches)
    g = torch.Generator().manual_seed(seed + 1)
    W = torch.randn(DIM, DIM, generator=g) / DIM**0.5
    readout = (0.1 * torch.randn(DIM, data.classes, generator=g)).requires_grad_()
    adam = torch.optim.Adam([readout] + ([W.requires_grad_()] if rule == BACKWARD else []), 0.02)
    decay = torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, epochs)

    def descend(z: Tensor, labels: Tensor) -> None:
        adam.zero_grad()
        F.cross_entropy(z[:, 0] @ readout, labels).backward()
        adam.step()

    z, table = states(tokens, W, 0), Table()
    for epoch in range(1, epochs + 1):
        if rule == BACKWARD:
            for rows in torch.randperm(len(tokens), generator=g).split(128):
                descend(states(tokens[rows], W, DEPTH), data.train_labels[rows])
        else:
            z = states(tokens, W, 1, z)
            if rule == LOCAL:
                W = W - 0.1 / len(z) * energy_by_weights(z, tokens, W)
            descend(z, data.train_labels)
        decay.step()
        if epoch % math.ceil(epochs / RECORDS) == 0 or epoch in (1, epochs):
            with torch.no_grad():
                steps = DEPTH if rule == BACKWARD else min(epoch, TEST_STEPS)
                z = states(tokens, W, steps) if rule == BACKWARD else z
                right = (states(test_tokens, W, steps)[:, 0] @ readout).argmax(
                    1
                ) == data.test_labels
                row: dict[str, Any] = {"rule": rule, "epoch": epoch, "spread": spread(z)}
                row |= {"free_energy": energy(z, tokens, W).item()}
                table.append(row | {"test_accuracy": right.float().mean().item()})
    return table


def local_learning(
    epochs: int = 200,  # epochs of the local rule and of fixed weights
    passes: int = 60,  # epochs of back-propagation
    seed: int = 0,  # random seed of embeddings, weights and batches
) -> Result:
    data, table = load_digits(), Table()
    for rule in RULES:
        table += learn(data, rule, passes if rule == BACKWARD else epochs, seed)
    ends = [*{row["rule"]: row for row in table}.values()]  # the last row of each rule

    figure, axes = plt.subplots(1, 3, figsize=(13, 4), dpi=90)
    figure.suptitle("Attention that learns by a local rule, on 8 x 8 digits")
    titles = {"free_energy": "mean free energy", "spread": "spread of the states"}
    titles |= {"test_accuracy": "test accuracy"}
    for panel, (key, title) in zip(axes, titles.items(), strict=True):
        for rule, color in zip(RULES, ("C4", "C3", "C0"), strict=True):
            line = columns(table, "epoch", key, rule=rule)
            panel.plot(*line, color=color, label=rule, linewidth=1.8)
        panel.set(title=title, xlabel="epoch")
    axes[0].axhline(-TEMPERATURE * math.log(16), color="C4", linestyle=":", label="lower bound")
    axes[0].legend(frameon=False)
    axes[1].set_yscale("log")
    chance = axes[2].axhline(0.1, color="C4", linestyle="--")
    axes[2].legend([chance], ["chance"], frameon=False, loc="center right")
    axes[2].set_ylim(0, 1)
    return {"ends": ends, "digits": table}, figure


if __name__ == "__main__":
    run(local_learning)
