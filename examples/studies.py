"""Studies of trained models: how they converge, what more iterations do, whether they depend on their start.

    python examples/studies.py convergence      # every solver on one layer: residual, energy, evaluations
    python examples/studies.py extrapolation    # 1 to 4 times the iterations of training
    python examples/studies.py paths            # where a layer ends from zero and from random starts
    python examples/studies.py geometry         # energies, rank and angle of the tokens in every iteration
    python examples/studies.py geometry --weights mnist-spins    # the couplings of 17 spins
    python examples/studies.py tradeoff         # layers against iterations, trained in a minute or two

--weights takes names of shipped weights and files that train_images.py writes. For a layer of your own call
the functions of implicit_attn.studies.
"""

import shutil
import sys
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from image_tasks import Classification
from options import Run
from runner import Result, Table, open_subject, rows_of, run
from torch.nn import functional as F
from training import Training

from implicit_attn import studies
from implicit_attn.data import load
from implicit_attn.models import SpinClassifier, build_model

SHARE = 0.35  # of the couplings, the strongest, that are drawn as lines


def figure_of(found: Any, subject: Any) -> Any:
    return found.plot(f"{subject.title}\n{len(subject.inputs)} test samples")


def convergence(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 64,  # test samples, at most
    rtol: float | None = None,  # tolerance of the costs (default: of the training)
    max_steps: int = 100,  # evaluations per sample
    spectra: int = 2,  # samples whose Jacobian is studied
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.convergence(subject, rtol=rtol, max_steps=max_steps, spectra=spectra)
    curves: Table = []
    for name, curve in found.curves.items():
        steps, median = torch.tensor(curve.evaluations), curve.residual.median(0).values
        curves += rows_of({"evaluations": steps, "residual": median}, solver=name)
    return {"curves": curves, "costs": found.costs}, figure_of(found, subject)


def extrapolation(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 1000,  # test samples, at most
    factor: int = 4,  # up to so many times the iterations of training
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.extrapolation(subject, factor=factor)
    return {"curves": found.curves, "reach": found.reach}, figure_of(found, subject)


def paths(
    weights: str = "digits-hyperset-equilibrium",  # a file, or a name of shipped weights
    samples: int = 128,  # test samples, at most
    starts: int = 2,  # random starts
) -> Result:
    subject = open_subject(weights, samples)
    found = studies.paths(subject, starts=starts)
    return {"summary": found.summary}, figure_of(found, subject)


def geometry(
    weights: str = "digits-hyperset",  # a file, or a name of shipped weights
    samples: int = 256,  # test samples, at most
    iterations: int | None = None,  # how many (default: as in training)
) -> Result:
    subject = open_subject(weights, samples)
    if not isinstance(subject.model, SpinClassifier):
        found = studies.geometry(subject, iterations=iterations)
        means = {f"{name}_energy": energy.mean(1) for name, energy in found.energies.items()}
        means |= {"rank": found.rank.mean(1), "angle": found.angle.mean(1)}
        steps = {"iteration": torch.arange(len(found.rank))}
        return {"means": rows_of(steps | means)}, figure_of(found, subject)
    with torch.no_grad():
        norms = subject.model.attention.couplings.site_norms()
        accuracy = subject.judge(subject.model(subject.inputs))
    rows = [
        {"site": i, **{str(j): x for j, x in enumerate(row)}}
        for i, row in enumerate(norms.tolist())
    ]
    return {"couplings": rows, "accuracy": [accuracy]}, draw_couplings(norms)


def draw_couplings(norms: Any) -> Any:
    """The norms (N, N) as a matrix, and the strongest as lines between the sites at their positions."""
    figure, (matrix, graph) = plt.subplots(1, 2, figsize=(9.5, 4.2))
    image = matrix.imshow(norms)
    matrix.set(xlabel="site j (0: class token)", ylabel="site i", title="Couplings")
    figure.colorbar(image, ax=matrix, label="$|J_{ij}|$ (Frobenius)", shrink=0.8)
    side = round((len(norms) - 1) ** 0.5)
    places = [(-1.4, (side - 1) / 2)] + [(float(k % side), k // side) for k in range(side * side)]
    rows, columns = torch.triu_indices(len(norms), len(norms), 1)
    strengths = norms[rows, columns]
    least, widest = strengths.quantile(1 - SHARE), strengths.max()
    for i, j, value in zip(rows.tolist(), columns.tolist(), strengths, strict=True):
        if value >= least:
            relative = float(value / widest)
            look: Any = {"linewidth": 4 * relative**2, "alpha": 0.75 * relative}
            line = zip(places[i], places[j], strict=True)
            graph.plot(*line, color="C1" if i == 0 else "C0", **look)
    graph.scatter(*zip(*places, strict=True), s=90, color=["C1"] + ["C0"] * side**2, zorder=3)
    graph.annotate("class\ntoken", places[0], (0, -30), textcoords="offset points", ha="center")
    graph.invert_yaxis()
    graph.set_aspect("equal")
    graph.set_axis_off()
    graph.set_title(f"Strongest {100 * SHARE:.0f} % of the couplings,\nsites at their positions")
    return figure


def tradeoff(
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits",
    depth: int = 12,  # layers times iterations
    epochs: int = 6,  # of each training
    rate: float = 4e-3,  # largest learning rate
    seeds: int = 1,  # trainings of each
    limit: int | None = None,  # use only so many training images
    weights: Path = Path("runs/tradeoff/weights"),  # replaced by every call
) -> Result:
    images = load(data).first(limit)
    _, channels, size, _ = images.train_images.shape
    shape = {"image_size": size, "channels": channels, "classes": images.classes, "patch": 2}
    small = {"name": "hyperset", "dim": 32, "heads": 2, "time_dim": 32, "initial_step": 0.1}
    numbers = [k for k in range(1, depth + 1) if depth % k == 0]
    table: Table = []
    for number in numbers:
        for seed in range(seeds):
            backbone = {**small, "layers": number, "iterations": depth // number}
            built = {"kind": "image-classifier", **shape, "readout": "tokens", "backbone": backbone}
            torch.manual_seed(seed)
            model = build_model(built)
            folder = weights / f"{number}x{depth // number}-seed{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            options = Run(epochs=epochs, batch=64, rate=rate, seed=seed, accelerator="cpu").fill({})
            task = Classification(images, len(images.test_labels), augment=False)
            training = Training(options, model, task, {"data": data, "model": built}, folder)
            training.run()
            with torch.no_grad():
                parts = [model.eval()(part) for part in images.test_images.split(256)]
            table.append({
                "layers": number, "iterations": depth // number, "seed": seed,
                "parameters": sum(p.numel() for p in model.parameters()),
                "loss": F.cross_entropy(torch.cat(parts), images.test_labels).item(),
                "accuracy": 100 * training.history[-1]["test_accuracy"],
                "seconds": sum(row["seconds"] for row in training.history),
            })  # fmt: skip
    figure, panels = plt.subplots(1, 3, figsize=(13, 4))
    labels = {"accuracy": "accuracy (test, %)", "loss": "loss (test)", "parameters": "parameters"}
    for axes, (key, label) in zip(panels, labels.items(), strict=True):
        places = [numbers.index(row["layers"]) for row in table]
        axes.plot(places, [row[key] for row in table], "o", color="C0")
        names = [f"{number} x {depth // number}" for number in numbers]
        axes.set_xticks(range(len(names)), names)
        axes.set(xlabel="layers x iterations of each", ylabel=label)
    return {"table": table}, figure


if __name__ == "__main__":
    every = (convergence, extrapolation, paths, geometry, tradeoff)
    chosen = {study.__name__: study for study in every}
    if sys.argv[1:2] == [] or sys.argv[1] not in chosen:
        raise SystemExit(f"{__doc__}\nName one of: {', '.join(chosen)}")
    run(chosen[sys.argv[1]], sys.argv[2:])
