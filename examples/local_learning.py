"""Attention that learns by a local rule, compared with fixed random weights and back-propagation.

The weights W of an attention layer descend the same free energy as its states, without a signal from the
task; only a linear readout uses labels. For digits, one state per sample descends its energy among the
patches. For text, all tokens of a window move in parallel, each among the previous ones.

Source: Ren, Ouyang, Tang, Liu, "Transformers as Intrinsic Optimizers", https://arxiv.org/abs/2511.00907,
algorithms 1 to 3.
"""

import math
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, columns, legend_below, run
from torch import Tensor
from torch.nn import functional as F

from implicit_attn.data import HELP, ImageData, TextData, load_digits, load_text, ngram_loss

FIXED, LOCAL, BACKWARD = RULES = ("fixed weights", "local rule", "back-propagation")
DIM, TEMPERATURE, STEP = 32, 4.0, 0.5  # d of tokens and states, T, eta
RECORDS = 20  # measurements on the way
DEPTH, TEST_STEPS = 5, 50  # of digits: steps of back-propagation; most steps of a measurement
LENGTH, LOOPS = 32, 4  # of text: tokens of a window; steps of all of them


class Energy(NamedTuple):
    r"""Free energies of single tokens z (B, N, d) among tokens h (B, M, d) that are held ::

        F_i = -T log sum_j exp(-|W1 z_i - W2 h_j|^2 / (2T))

    With ``q = W1 z``, ``k = W2 h``, weights P and ``m = sum_j P_j k_j`` the gradients are local ::

        dF/dz = W1^T (q - m),   dF/dW1 = (q - m) z^T,   dF/dW2 = -sum_j P_j (q - k_j) h_j^T

    ``causal``: token i sees ``j <= i`` only.
    """

    causal: bool = False

    def scores(self, z: Tensor, h: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and the scores (B, N, M), without a term that is constant in a row."""
        q, k = z @ query.mT, h @ key.mT
        scores = q @ k.mT - 0.5 * k.square().sum(-1).unsqueeze(-2)
        if self.causal:
            earlier = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~earlier, -torch.inf)
        return q, k, scores / TEMPERATURE

    def value(self, z: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The mean of F_i."""
        q, _, scores = self.scores(z, h, query, key)
        energy = -TEMPERATURE * torch.logsumexp(scores, dim=-1)
        return (energy + 0.5 * q.square().sum(-1)).mean()

    def by_state(self, z: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """dF_i/dz_i, differentiable."""
        q, k, scores = self.scores(z, h, query, key)
        return (q - torch.softmax(scores, dim=-1) @ k) @ query

    @torch.no_grad()
    def by_weights(self, z: Tensor, h: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the sum of F_i by W1 and W2."""
        q, k, scores = self.scores(z, h, query, key)
        weights = torch.softmax(scores, dim=-1)
        pulled = weights.mT @ q - weights.sum(-2).unsqueeze(-1) * k
        by_query = torch.einsum("bnp,bnd->pd", q - weights @ k, z)
        return by_query, -torch.einsum("bmp,bmd->pd", pulled, h)


def floor(tokens: int, causal: bool) -> float:
    """The lower bound of the mean elastic energy, ``-T log M``, where all tokens are alike."""
    counts = torch.arange(1 if causal else tokens, tokens + 1, dtype=torch.float64)
    return -TEMPERATURE * counts.log().mean().item()


def spread(z: Tensor) -> float:
    """Root mean square distance of states (B, N, d) from their mean."""
    flat = z.flatten(0, 1)
    return (flat - flat.mean(0)).square().sum(1).mean().sqrt().item()


def learner(readout: Tensor, rate: float, steps: int, *weights: Tensor, by: float) -> Any:
    """Adam on the readout, and on the weights that are learned, and rates that fall linearly to zero."""
    groups: list[Any] = [{"params": [readout.requires_grad_()], "lr": rate}]
    groups += [{"params": [each.requires_grad_()], "lr": by} for each in weights]
    adam = torch.optim.Adam(groups)
    return adam, torch.optim.lr_scheduler.LinearLR(adam, 1.0, 0.0, steps)


def descend(adam: torch.optim.Adam, outputs: Tensor, targets: Tensor) -> None:
    adam.zero_grad()
    F.cross_entropy(outputs, targets).backward()
    adam.step()


def learn_digits(data: ImageData, rule: str, epochs: int, seed: int) -> Table:
    """Each sample's state makes one step an epoch and lasts; the local rule moves W at these states.

    Back-propagation runs DEPTH steps from zero instead, in batches.
    """
    energy, unit = Energy(), torch.eye(DIM)  # W1
    g = torch.Generator().manual_seed(seed)
    patches = [F.unfold(images, 2, stride=2).mT for images in (data.train_images, data.test_images)]
    embed, place = torch.randn(4, DIM, generator=g) / 2, torch.randn(16, DIM, generator=g)
    tokens, test_tokens = (each @ embed + place for each in patches)
    g = torch.Generator().manual_seed(seed + 1)
    key = torch.randn(DIM, DIM, generator=g) / DIM**0.5
    readout = 0.1 * torch.randn(DIM, data.classes, generator=g)
    learned = [key] if rule == BACKWARD else []
    adam, decay = learner(readout, 0.02, epochs, *learned, by=0.02)

    def states(tokens: Tensor, steps: int, z: Tensor | None = None) -> Tensor:
        z = tokens.new_zeros(len(tokens), 1, DIM) if z is None else z
        for _ in range(steps):
            z = z - STEP * energy.by_state(z, tokens, unit, key)
        return z

    z, table = states(tokens, 0), []
    for epoch in range(1, epochs + 1):
        if rule == BACKWARD:
            for rows in torch.randperm(len(tokens), generator=g).split(128):
                found = states(tokens[rows], DEPTH)
                descend(adam, found[:, 0] @ readout, data.train_labels[rows])
        else:
            z = states(tokens, 1, z)
            if rule == LOCAL:
                key = key - 0.1 / len(z) * energy.by_weights(z, tokens, unit, key)[1]
            descend(adam, z[:, 0] @ readout, data.train_labels)
        decay.step()
        if epoch % math.ceil(epochs / RECORDS) == 0 or epoch in (1, epochs):
            with torch.no_grad():
                steps = DEPTH if rule == BACKWARD else min(epoch, TEST_STEPS)
                z = states(tokens, steps) if rule == BACKWARD else z
                logits, tests = z[:, 0] @ readout, states(test_tokens, steps)[:, 0] @ readout
                table.append({
                    "rule": rule, "epoch": epoch, "free_energy": energy.value(z, tokens, unit, key).item(),
                    "spread": spread(z), "loss": F.cross_entropy(logits, data.train_labels).item(),
                    "accuracy": (logits.argmax(1) == data.train_labels).float().mean().item(),
                    "test_accuracy": (tests.argmax(1) == data.test_labels).float().mean().item(),
                })  # fmt: skip
    return table


def learn_text(data: TextData, rule: str, steps: int, seed: int, loops: int = LOOPS) -> Table:
    """Predict the next symbol after ``loops`` steps of all tokens; the local rule learns at their ends."""
    energy, symbols = Energy(causal=True), len(data.alphabet)
    g = torch.Generator().manual_seed(seed)
    embedding = torch.randn(symbols, DIM, generator=g)
    key, query = (w.clone() for w in torch.randn(2, DIM, DIM, generator=g) / DIM**0.5)
    readout = 0.1 * torch.randn(DIM, symbols, generator=g)
    learned = [query, key] if rule == BACKWARD else []
    adam, decay = learner(readout, 0.1, steps, *learned, by=0.01)

    def windows(ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        held = ids[starts[:, None] + torch.arange(LENGTH + 1)]
        return held[:, :-1], held[:, 1:].flatten()

    def loop(inputs: Tensor) -> Tensor:
        z = embedding[inputs]
        for _ in range(loops):
            z = z - STEP * energy.by_state(z, z, query, key)
        return z

    last = len(data.validation) - LENGTH - 1
    tested, answers = windows(data.validation, torch.linspace(0, last, 256).long())
    table = []
    for step in range(steps + 1):
        if step > 0:
            starts = torch.randint(len(data.train) - LENGTH, (32,), generator=g)
            inputs, targets = windows(data.train, starts)
            z = loop(inputs)
            descend(adam, (z @ readout).flatten(0, 1), targets)
            if rule == LOCAL:
                by_query, by_key = energy.by_weights(z, z, query, key)
                key = key - 0.3 / inputs.numel() * by_key
                query = query - 0.3 / inputs.numel() * by_query
            decay.step()
        if step % math.ceil(steps / RECORDS) == 0 or step == steps:
            with torch.no_grad():
                z = loop(tested)
                loss = F.cross_entropy((z @ readout).flatten(0, 1), answers).item()
                value = energy.value(z, z, query, key).item()
            row = {"rule": rule, "step": step, "free_energy": value, "spread": spread(z)}
            table.append(row | {"loss": loss})
    return table


def local_learning(
    epochs: int = 200,  # epochs on digits of the local rule and of fixed weights
    passes: int = 60,  # epochs on digits of back-propagation
    steps: int = 400,  # training steps on the text
    text: str = HELP,  # text: python-help, austen, or the path of a UTF-8 file
    seed: int = 0,  # random seed of embeddings, weights and batches
) -> Result:
    images, words = load_digits(), load_text(text)
    tables: dict[str, Table] = {"digits": [], "text": []}
    for rule in RULES:
        rounds = passes if rule == BACKWARD else epochs
        tables["digits"] += learn_digits(images, rule, rounds, seed)
        tables["text"] += learn_text(words, rule, steps, seed)
    tables["text-token"] = learn_text(words, FIXED, steps, seed, loops=0)
    ends: Table = []
    for task, name in {
        "digits": "digits",
        "text": "text",
        "text, no attention": "text-token",
    }.items():
        measure = "loss" if "text" in name else "test_accuracy"
        for row in {row["rule"]: row for row in tables[name]}.values():  # the last of each rule
            new = {"task": task} | {key: row[key] for key in ("rule", "free_energy", "spread")}
            ends.append(new | {"measure": measure.replace("_", " "), "value": row[measure]})
    bars = {"without attention": ends[-1]["value"], "counts of pairs": ngram_loss(words, 2)}
    digits, text_rows = tables["digits"], tables["text"]

    figure, axes = plt.subplots(2, 3, figsize=(13, 7.4), dpi=90)
    title = "Attention that learns by a local rule"
    figure.suptitle(f"{title}: free energy, spread of the states, what is learned")
    rows = ((digits, "epoch", "test_accuracy", "digits"), (text_rows, "step", "loss", words.name))
    for panels, (table, unit, measure, data) in zip(axes, rows, strict=True):
        for panel, key in zip(panels, ("free_energy", "spread", measure), strict=True):
            for rule, color in zip(RULES, ("C4", "C3", "C0"), strict=True):
                line = columns(table, unit, key, rule=rule)
                panel.plot(*line, color=color, label=rule, linewidth=1.8)
            panel.set(xlabel=unit, ylabel=key.replace("_", " "))
        bound = floor(16, False) if table is digits else floor(LENGTH, True)
        panels[0].axhline(bound, color="C4", linestyle=":", label="lower bound")
        panels[0].set_title(f"{data}: mean free energy")
        panels[1].set_title("spread of the states")
    legend_below(figure, axes[0, 0], 4)
    axes[0, 1].set_yscale("log")
    axes[0, 2].axhline(0.1, color="C4", linestyle=":")
    axes[0, 2].set(title="test accuracy (dotted: chance)", ylim=(0, 1))
    losses = axes[1, 2]
    styles = zip(bars.values(), (":", "--"), strict=True)
    bounds = [losses.axhline(value, color="C1", linestyle=style) for value, style in styles]
    losses.legend(bounds, list(bars), fontsize=9, loc="upper right")
    # The untrained start would hide the differences at the end.
    heights = [*(row["loss"] for row in text_rows if row["step"] > 0), *bars.values()]
    losses.set_title("validation loss, nats a symbol")
    losses.set_ylim(min(heights) - 0.1, max(heights) + 0.3)
    return {"ends": ends, **tables}, figure


if __name__ == "__main__":
    run(local_learning)
