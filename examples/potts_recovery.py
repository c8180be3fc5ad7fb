"""Which models find the couplings of a sparse Potts model in its samples?

    python examples/potts_recovery.py                                       # half a minute
    python examples/potts_recovery.py --data tree --methods linear sink sink-long softmax-4 potts
    python examples/potts_recovery.py --sites 20 --colours 10 --samples 20000 --test 5000 --masked 800 \
        --batch 512 --dim 48 --tested 1000 --few                                  # full size, minutes

Methods: factored attention by its rows, also with heads or longer training (linear, softmax-16, sink-long),
the Potts model itself by pseudo-likelihood (potts), and transformers on masked tokens: vanilla (1 layer),
vanilla-3, fixed (one layer, 3 times) and recycled (one layer, 2 to 4 times at random). A transformer's
couplings are its categorical Jacobian, what setting site j does to the logits of site i.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, NamedTuple

import couplings as potts
import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure
from runner import Table, columns, run
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.models import FactoredAttention, PottsModel, SharedTransformer
from implicit_attn.models import fit_pseudolikelihood as fit
from implicit_attn.studies import SpinModel
from implicit_attn.training import Recipe

FACTORED = re.compile(r"(linear|softmax|sink)(-(\d+))?(-long)?")
TRANSFORMERS = {  # layers, recycles, their label
    "vanilla": (1, 1, "vanilla, 1 layer"),
    "vanilla-3": (3, 1, "vanilla, 3 layers"),
    "fixed": (1, 3, "recycled, T = 3"),
    "recycled": (1, 3, "recycled, T in 2..4"),
}
METHODS = ("linear", "softmax", "potts", *TRANSFORMERS)
RECYCLES = (1, 2, 3, 4, 6, 8)
COLORS = ("C0", "C1", "C2", "C3", "#7b4fa3", "#8c6d46", "C4")


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


class Data(NamedTuple):
    """Samples (M, N) for training and the test, and the model that made them."""

    model: SpinModel
    train: Tensor
    test: Tensor


class Effort(NamedTuple):
    steps: int
    masked: int
    batch: int
    dim: int
    tested: int
    seed: int
    l2: float = 2e-5  # penalty of the Potts model


class Found(NamedTuple):
    label: str
    couplings: Tensor  # (N, N, d, d)
    model: Any
    row: dict[str, Any]
    test: Tensor  # sequences that the loss is measured on


def draw_data(kind: str, samples: int, test: int, sites: int, colours: int, seed: int) -> Data:
    """Independent samples, each the end of a Gibbs chain of its own."""
    generator = torch.Generator().manual_seed(seed)
    model = potts.graph_potts(kind, generator, sites=sites, colours=colours)
    sweeps = 200 if kind == "er-kron" else 60  # that model mixes slowest
    states = solvers.gibbs(
        model.couplings.float(), model.field.float(), site=model.site, sweeps=sweeps,
        chains=samples + test, generator=generator,
    )  # fmt: skip
    drawn = states.argmax(-1)
    return Data(model, drawn[:samples], drawn[samples:])


def recover(method: str, data: Data, effort: Effort) -> Found:
    """Fit a method to the training samples."""
    sites, colours = data.train.shape[1], data.model.couplings.shape[-1]
    match, test = FACTORED.fullmatch(method), data.test
    torch.manual_seed(effort.seed)
    if method in TRANSFORMERS:
        test = data.test[: effort.tested]
        layers, times, label = TRANSFORMERS[method]
        model: Any = MaskedTransformer(sites, colours, effort.dim, layers=layers, iterations=times)
        train_masked(model, data.train, colours, effort, (2, 4) if method == "recycled" else None)
        couplings = potts.categorical_jacobian(model, data.test[:12], colours, mask=colours)
        loss = masked_loss(model, test, colours)
        status = "max_steps" if math.isfinite(loss) else "nonfinite"
    else:
        if match is not None:
            heads, rows = int(match[3] or 1), match[1]
            label = f"factored, {heads} {rows} head{'s' * (heads > 1)}{', long' * bool(match[4])}"
            model = FactoredAttention(sites, colours, heads, rows)
            options: Any = {"rate": 0.1, "steps": effort.steps}
            if match[4]:  # heads with a sink converge slowly
                options = {"rate": 0.2, "batch": 1000, "steps": 5 * effort.steps // 2}
            status = fit(model, data.train, solver="adam", seed=effort.seed, **options).status
            couplings = model.couplings().detach()
        elif method == "potts":
            label, model = "Potts, pseudo-likelihood", PottsModel(sites, colours)
            status = fit(model, data.train, effort.l2, steps=40).status
            couplings = model.couplings.weight.detach()
        else:
            raise ValueError(f"methods: {method!r} is unknown, see the first lines of the file")
        with torch.no_grad():
            loss = model.pseudo_likelihood(test).item()
    edges, scores = potts.neighbours(data.model), potts.contact_scores(couplings)
    row = {
        "method": label, "parameters": sum(p.numel() for p in model.parameters()),
        "coupling_error": potts.coupling_error(couplings, data.model.couplings),
        "precision": potts.contact_precision(scores, edges),
        "excess": loss - potts.bayes_npl(data.model, test), "status": status,
    }  # fmt: skip
    return Found(label, couplings, model, row, test)


def train_masked(
    model: nn.Module, train: Tensor, colours: int, effort: Effort, times: tuple[int, int] | None
) -> None:
    """Steps of Adam; batches are drawn with repetition, and one token d a sequence hides its site.

    The expected loss is the negative log pseudo-likelihood per site.
    """
    options: Any = {"weight_decay": 0.0, "optimizer": "adam", "iterations": times}
    recipe = Recipe(1, effort.batch, 3e-3, seed=effort.seed, **options)
    adam, generator = recipe.build_optimizer(model), torch.Generator().manual_seed(effort.seed)
    for step in range(effort.masked):
        adam.param_groups[0]["lr"] = recipe.rate_at(step / effort.masked)
        drawn = recipe.draw_iterations(generator)
        answers = train[torch.randint(len(train), (effort.batch,), generator=generator)]
        place = torch.rand(answers.shape, generator=generator).topk(1, dim=1).indices
        tokens = answers.scatter(1, place, colours)
        outputs = model(tokens) if drawn is None else model(tokens, iterations=drawn)
        hidden = tokens == colours
        loss = F.cross_entropy(outputs[hidden], answers[hidden])
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()


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
    data: Literal["er-kron", "er-general", "tree", "ring4"] = "er-kron",
    samples: int = 5000,
    test: int = 1000,
    methods: tuple[str, ...] = METHODS,
    few: tuple[int, ...] = (200, 1000),
    steps: int = 500,
    masked: int = 400,
    batch: int = 128,
    dim: int = 32,
    tested: int = 300,
    sites: int = 12,
    colours: int = 5,
    seed: int = 0,
) -> tuple[dict[str, Table], Figure]:
    """Couplings of a sparse Potts model from samples: factored attention, Potts, transformers.

    Args:
        data: the model.
        samples: for training.
        test: samples of the test, at most as many as for training.
        methods: such as linear, sink-long, softmax-16, potts, vanilla, vanilla-3, fixed, recycled.
        few: numbers of samples of further fits, of a linear head and the Potts model.
        steps: of factored attention.
        masked: steps of transformers.
        batch: sequences of a step of transformers.
        dim: features of their tokens.
        tested: test sequences of transformers.
        sites: N.
        colours: d.
        seed: of the model, its samples and the fits.
    """
    drawn = draw_data(data, samples, min(test, samples), sites, colours, seed)
    effort = Effort(steps, masked, batch, dim, tested, seed)
    found = [recover(method, drawn, effort) for method in methods]
    fewer: Table = []
    numbers = sorted({*(number for number in few if number < samples), samples}) if few else []
    for method in ("linear", "potts"):
        for number in numbers:
            # Few samples need a stronger penalty of the many couplings of a Potts model.
            strong = effort._replace(l2=2e-5 * max(1.0, math.sqrt(20_000 / number)))
            row = recover(method, drawn._replace(train=drawn.train[:number]), strong).row
            kept = {key: row[key] for key in ("method", "coupling_error", "precision", "status")}
            fewer.append({"samples": number, **kept})
    edges, recycles, curves = potts.neighbours(drawn.model), Table(), Table()
    for method, each in zip(methods, found, strict=True):
        if method in ("fixed", "recycled"):
            bayes = potts.bayes_npl(drawn.model, each.test)
            for number in RECYCLES:
                excess = masked_loss(each.model, each.test, colours, number) - bayes
                recycles.append({"method": each.label, "recycles": number, "excess": excess})
        shares = potts.roc_curve(potts.contact_scores(each.couplings), edges)
        for wrong, right in zip(*(share.tolist() for share in shares), strict=True):
            curves.append({"method": each.label, "false_share": wrong, "true_share": right})
    tables = {"methods": [{"data": data, **each.row} for each in found], "few": fewer}
    tables |= {"recycles": recycles, "roc": curves}
    title = f"Couplings of a Potts model from samples: {sites} sites, {colours} colours, {data}, "
    bayes = potts.bayes_npl(drawn.model, drawn.test)
    title += f"{samples} samples, loss of the truth {bayes:.3f} nats a site"
    figure = draw(title, drawn.model.couplings, found, tables)
    return {name: table for name, table in tables.items() if table}, figure


def draw(title: str, truth: Tensor, found: list[Found], tables: dict[str, Table]) -> Figure:
    fewer = tables["few"]
    labels = dict.fromkeys([each.label for each in found] + [row["method"] for row in fewer])
    looks = {
        name: {"color": COLORS[n % len(COLORS)], "linestyle": ("-", "--", ":", "-.")[n % 4]}
        for n, name in enumerate(labels)
    }
    figure, (top, (few, roc, recycles)) = plt.subplots(2, 3, figsize=(13, 8))
    figure.suptitle(title)
    true = potts.contact_scores(truth)
    pictures = [("true couplings", true)]
    order = sorted(found, key=lambda each: each.row["coupling_error"])
    for each in {order[0].label: order[0], order[-1].label: order[-1]}.values():
        label = f"{each.label}\nerror {each.row['coupling_error']:.2f}"
        pictures.append((label, potts.contact_scores(each.couplings)))
    for axes, (label, norms) in zip(top, pictures, strict=False):
        axes.imshow(norms.numpy(), vmin=0, vmax=float(true.max()))
        axes.set_title(label, fontsize=10)
        axes.set(xlabel="site j", ylabel="site i")
        axes.locator_params(integer=True)
    figure.colorbar(top[0].images[0], ax=list(top), label="strength of a pair: norm of its block")
    for axes in top[len(pictures) :]:
        axes.set_axis_off()
    for method in dict.fromkeys(row["method"] for row in fewer):
        color, names = looks[method]["color"], ("samples", "coupling_error", "precision")
        samples, errors, shares = columns(fewer, *names, method=method)
        few.plot(samples, errors, color=color, marker="o", label=method)
        few.plot(samples, shares, color=color, marker="s", linestyle=":")
        few.set(xscale="log", xlabel="training samples")
        few.set_xticks(samples, [str(number) for number in samples])
    few.minorticks_off()
    few.set_ylim(0, 1.3 * max([1.0, *(row["coupling_error"] for row in fewer)]))
    few.set_title("error of the couplings ●, precision of the pairs ■", fontsize=10)
    for each in found:
        points = columns(tables["roc"], "false_share", "true_share", method=each.label)
        roc.plot(*points, label=each.label, linewidth=2, **looks[each.label])
    roc.plot([0, 1], [0, 1], color="C4", linewidth=0.8)
    roc.set(xlabel="share of false pairs found", ylabel="share of true pairs found")
    roc.set_title("ROC of the pairs, ranked by strength", fontsize=10)
    for each in sorted(found, key=lambda each: "recycled" not in each.label):
        numbers, excess = columns(tables["recycles"], "recycles", "excess", method=each.label)
        if numbers:
            least, color = [max(value, 1e-4) for value in excess], looks[each.label]["color"]
            recycles.plot(numbers, least, marker="o", color=color, label=each.label)
        else:
            height = max(each.row["excess"], 1e-4)
            recycles.axhline(height, label=each.label, **looks[each.label])
    recycles.set(xlabel="recycles T of the layer", yscale="log")
    recycles.set_ylabel("loss above that of the truth (nats a site)")
    recycles.set_title("loss of masked sites against recycles", fontsize=10)
    recycles.set_ylim(bottom=recycles.get_ylim()[0] / 20)  # room for the legend below all lines
    roc.legend(fontsize=8, loc="lower right")
    recycles.legend(fontsize=7, loc="lower center", ncols=2)
    if fewer:
        few.legend(fontsize=8, loc="upper center")
    return figure


if __name__ == "__main__":
    run(potts_recovery)
