"""Which models find the couplings of a sparse Potts model from its samples?

    python examples/potts_recovery.py                                   # half a minute
    python examples/potts_recovery.py --data tree --methods linear sink sink-long softmax-4 potts
    python examples/potts_recovery.py --sites 20 --colours 10 --samples 20000 --test 5000 --masked 800 \
        --batch 512 --dim 48 --tested 1000 --few                                  # full size, minutes

Methods: factored attention by the kind of its rows, with an optional number of heads or longer training
(linear, softmax-16, sink-long), the Potts model itself by pseudo-likelihood (potts), and transformers trained
on masked tokens: vanilla (1 layer), vanilla-3, fixed (one layer, 3 times) and recycled (one layer, 2 to 4
times at random). The couplings of a transformer are its categorical Jacobian, the effect of setting site j
on the logits of site i. One linear head of factored attention needs the fewest samples, and one softmax head
misses a third of the pairs.
"""

import math
import re
from typing import Any, Literal, NamedTuple

import couplings as potts
import matplotlib.pyplot as plt
import torch
from options import Recipe
from runner import Result, Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.models import FactoredAttention, PottsModel, SharedTransformer
from implicit_attn.models import fit_pseudolikelihood as fit
from implicit_attn.studies import SpinModel

FACTORED = re.compile(r"(linear|softmax|sink)(-(\d+))?(-long)?")
TRANSFORMERS = {  # layers, recycles, their label
    "vanilla": (1, 1, "vanilla, 1 layer"),
    "vanilla-3": (3, 1, "vanilla, 3 layers"),
    "fixed": (1, 3, "recycled, T = 3"),
    "recycled": (1, 3, "recycled, T in 2..4"),
}
METHODS = ("linear", "softmax", "potts", *TRANSFORMERS)
RECYCLES = (1, 2, 3, 4, 6, 8)
ADAM: dict[str, Any] = {"weight_decay": 0.0, "optimizer": "adam"}


class MaskedTransformer(nn.Module):
    """Tokens (B, N) of d colours, d itself for a masked one -> logits of their colours (B, N, d).

    The embeddings of colour and position are summed, pass ``layers`` pre-norm layers, each applied
    ``iterations`` times, a LayerNorm and an affine readout. More than one iteration recycles the layers.

    Source: the masked-token models of Rende, Gerace, Laio, Goldt (2024),
    https://arxiv.org/abs/2304.07235; recycling as in Dehghani et al., "Universal Transformers"
    (2019), https://arxiv.org/abs/1807.03819.
    """

    def __init__(self, sites: int, colours: int, dim: int, **recurrence: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(colours + 1, dim)
        self.positions = nn.Parameter(torch.empty(sites, dim))
        self.backbone = SharedTransformer(dim, 4, 2 * dim, **recurrence)
        self.norm, self.readout = nn.LayerNorm(dim), nn.Linear(dim, colours)
        nn.init.normal_(self.positions)

    def forward(self, tokens: Tensor, *, iterations: int | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions
        return self.readout(self.norm(self.backbone(x, iterations=iterations)))


class Found(NamedTuple):
    label: str
    couplings: Tensor  # (N, N, d, d)
    model: Any
    row: dict[str, Any]
    test: Tensor  # sequences that the loss is measured on


def recover(
    method: str, truth: SpinModel, train: Tensor, test: Tensor, *, steps: int, masked: int, batch: int,
    dim: int, tested: int, seed: int, l2: float = 2e-5,
) -> Found:  # fmt: skip
    """Fit a method to the training samples (M, N); ``l2`` is the penalty of the Potts model."""
    sites, colours = train.shape[1], truth.couplings.shape[-1]
    match = FACTORED.fullmatch(method)
    torch.manual_seed(seed)
    if method in TRANSFORMERS:
        layers, times, label = TRANSFORMERS[method]
        model: Any = MaskedTransformer(sites, colours, dim, layers=layers, iterations=times)
        drawn = (2, 4) if method == "recycled" else None
        recipe = Recipe(epochs=masked, batch=batch, rate=3e-3, seed=seed, random_iterations=drawn)
        train_masked(model, train, recipe.fill(ADAM))
        couplings = potts.categorical_jacobian(model, test[:12], colours, mask=colours)
        test = test[:tested]
        loss = masked_loss(model, test, colours)
        status = "max_steps" if math.isfinite(loss) else "nonfinite"
    else:
        if match is not None:
            heads, rows = int(match[3] or 1), match[1]
            label = f"factored, {heads} {rows} head{'s' * (heads > 1)}{', long' * bool(match[4])}"
            model = FactoredAttention(sites, colours, heads, rows)
            options: Any = {"rate": 0.1, "steps": steps}
            if match[4]:  # heads with a sink converge slowly
                options = {"rate": 0.2, "batch": 1000, "steps": 5 * steps // 2}
            status = fit(model, train, solver="adam", seed=seed, **options).status
            couplings = model.couplings().detach()
        elif method == "potts":
            label, model = "Potts, pseudo-likelihood", PottsModel(sites, colours)
            status = fit(model, train, l2, steps=40).status
            couplings = model.couplings.weight.detach()
        else:
            raise ValueError(f"methods: {method!r} is unknown, see the first lines of the file")
        with torch.no_grad():
            loss = model.pseudo_likelihood(test).item()
    edges, scores = potts.neighbours(truth), potts.contact_scores(couplings)
    row = {
        "method": label, "parameters": sum(p.numel() for p in model.parameters()),
        "coupling_error": potts.coupling_error(couplings, truth.couplings),
        "precision": potts.contact_precision(scores, edges),
        "excess": loss - potts.bayes_npl(truth, test), "status": status,
    }  # fmt: skip
    return Found(label, couplings, model, row, test)


def train_masked(model: MaskedTransformer, train: Tensor, recipe: Recipe) -> None:
    """Batches are drawn with repetition, and one token d a sequence hides its site.

    The expected loss is the negative log pseudo-likelihood per site.
    """

    def loss(generator: torch.Generator) -> Tensor:
        drawn = recipe.draw_iterations(generator)
        chosen = torch.randint(len(train), (recipe.batch or 1,), generator=generator)
        answers = train[chosen]
        place = torch.rand(answers.shape, generator=generator).topk(1, dim=1).indices
        tokens = answers.scatter(1, place, model.readout.out_features)
        outputs, hidden = model(tokens, iterations=drawn), tokens != answers
        return F.cross_entropy(outputs[hidden], answers[hidden])

    recipe.descend(model, loss)


@torch.no_grad()
def masked_loss(
    model: nn.Module, test: Tensor, colours: int, iterations: int | None = None, batch: int = 4000
) -> float:
    """Per site of the sequences (M, N), each site masked in its turn: -log pseudo-likelihood."""
    model.eval()
    sites, total = test.shape[1], 0.0
    options = {} if iterations is None else {"iterations": iterations}
    for part in test.split(max(1, batch // sites)):
        answers = part.repeat_interleave(sites, dim=0)  # (B N, N), site after site of a sample
        hidden = torch.eye(sites, dtype=torch.bool).repeat(len(part), 1)
        logits = model(answers.masked_fill(hidden, colours), **options)
        total += F.cross_entropy(logits[hidden], answers[hidden], reduction="sum").item()
    return total / test.numel()


def potts_recovery(
    data: Literal["er-kron", "er-general", "tree", "ring4"] = "er-kron",  # kind of the Potts model
    samples: int = 5000,  # number of training samples
    test: int = 1000,  # number of test samples, at most that of training samples
    methods: tuple[str, ...] = METHODS,  # methods to compare, as listed above
    few: tuple[int, ...] = (200, 1000),  # smaller numbers of samples for linear and potts
    steps: int = 500,  # training steps of factored attention
    masked: int = 400,  # training steps of transformers
    batch: int = 128,  # batch size of transformers
    dim: int = 32,  # number of features of a transformer's tokens
    tested: int = 300,  # number of test sequences of transformers
    sites: int = 12,  # number of sites N
    colours: int = 5,  # number of colours d
    seed: int = 0,  # random seed of the model, its samples and the fits
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    truth = potts.graph_potts(data, generator, sites=sites, colours=colours)
    states = solvers.gibbs(  # independent samples, each the end of a chain of its own
        truth.couplings.float(), truth.field.float(), site=truth.site, generator=generator,
        sweeps=200 if data == "er-kron" else 60, chains=samples + min(test, samples),
    ).argmax(-1)  # fmt: skip
    train, asked = states[:samples], states[samples:]
    effort: Any = {"steps": steps, "masked": masked, "batch": batch, "dim": dim, "tested": tested}
    effort["seed"] = seed
    found = [recover(method, truth, train, asked, **effort) for method in methods]
    fewer, recycles = Table(), Table()
    numbers = sorted({*(number for number in few if number < samples), samples}) if few else []
    for method in ("linear", "potts"):
        for number in numbers:
            # Few samples need a stronger penalty of the many couplings of a Potts model.
            l2 = 2e-5 * max(1.0, math.sqrt(20_000 / number))
            row = recover(method, truth, train[:number], asked, l2=l2, **effort).row
            fewer.append({"samples": number} | row)
    for method, each in zip(methods, found, strict=True):
        for number in RECYCLES if method in ("fixed", "recycled") else ():
            excess = masked_loss(each.model, each.test, colours, number)
            excess -= potts.bayes_npl(truth, each.test)
            recycles.append({"method": each.label, "recycles": number, "excess": excess})
    tables = {"methods": [{"data": data, **each.row} for each in found], "few": fewer}
    tables["recycles"] = recycles

    figure, (*top, axes) = plt.subplots(1, 4, figsize=(16, 4.2), width_ratios=(1, 1, 1, 1.2))
    title = f"Couplings of a Potts model from {samples} samples"
    figure.suptitle(f"{title}: {sites} sites, {colours} colours, {data}")
    pictures = {"true couplings": potts.contact_scores(truth.couplings)}
    order = sorted(found, key=lambda each: each.row["coupling_error"])
    for each in (order[0], order[-1]):
        label = f"{each.label}\nerror {each.row['coupling_error']:.2f}"
        pictures[label] = potts.contact_scores(each.couplings)
    highest = float(pictures["true couplings"].max())
    for panel, (label, norms) in zip(top, pictures.items(), strict=False):
        panel.imshow(norms.numpy(), vmin=0, vmax=highest)
        panel.set_title(label, fontsize=10)
        panel.set(xlabel="site j", ylabel="site i")
        panel.locator_params(integer=True)
    figure.colorbar(top[0].images[0], ax=top, shrink=0.8, label="strength of a pair")
    for color, method in zip(
        ("C0", "C1"), dict.fromkeys(row["method"] for row in fewer), strict=False
    ):
        for key, style in (("coupling_error", "o-"), ("precision", "s:")):
            line = columns(fewer, "samples", key, method=method)
            label = f"{method}: {key.replace('coupling_', '')}"
            axes.plot(*line, style, color=color, label=label)
    axes.set(xscale="log", xlabel="training samples", ylim=(0, None))
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_title("error of the couplings, precision of the pairs", fontsize=10)
    axes.set_visible(bool(fewer))
    if fewer:
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return {name: table for name, table in tables.items() if table}, figure


if __name__ == "__main__":
    run(potts_recovery)
