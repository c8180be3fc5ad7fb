"""What tokens do from iteration to iteration: energies, effective rank and angle; of spins their couplings.

    python examples/study_geometry.py                            # Hyper-SET on the digits
    python examples/study_geometry.py --weights mnist-hyperset   # the figures 5 and 6 of its paper
    python examples/study_geometry.py --weights mnist-spins      # the couplings of 17 spins

For a layer of your own call implicit_attn.studies.geometry.
"""

from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, open_subject, run

from implicit_attn import studies
from implicit_attn.models import SpinClassifier

SHARE = 0.35  # of the couplings, the strongest, that are drawn as lines


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


def study_geometry(
    weights: str = "digits-hyperset",  # a file, or a name of shipped weights
    samples: int = 256,  # test samples, at most
    iterations: int | None = None,  # how many (default: as in training)
) -> Result:
    subject = open_subject(weights, samples)
    if isinstance(subject.model, SpinClassifier):
        with torch.no_grad():
            norms = subject.model.attention.couplings.site_norms()
            right = (subject.model(subject.inputs).argmax(1) == subject.targets).double().mean()
        rows = [
            {"site": i, **{str(j): x for j, x in enumerate(row)}}
            for i, row in enumerate(norms.tolist())
        ]
        accuracy = [{"samples": len(subject.inputs), "accuracy": right.item()}]
        return {"couplings": rows, "accuracy": accuracy}, draw_couplings(norms)
    found = studies.geometry(subject, iterations=iterations)
    return found.tables, found.plot(f"{subject.title}\n{len(subject.inputs)} test samples")


if __name__ == "__main__":
    run(study_geometry)
