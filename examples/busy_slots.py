"""How many slots of a batch are at work: whole batches, and a queue whose slots are refilled.

    python examples/busy_slots.py

A few samples of a layer need many times the evaluations of the others. In whole batches most slots wait for
them; in a queue the next samples take the slots of those that have ended.
"""

from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import torch
from runner import Result, Table, run
from torch import Tensor

from implicit_attn import DEQ


class Calls:
    """The map ``z = g tanh(z A) B + x`` with a gain g for each sample, and how often it has been called."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        shape, scale = (2, size, size), size**-0.5
        self.first, self.second = scale * torch.randn(shape, generator=generator)
        self.number = 0

    def __call__(self, z: Tensor, x: Any) -> Tensor:
        self.number += 1
        return x["gain"] * (torch.tanh(z @ self.first) @ self.second) + x["bias"]


def at_work(entered: Tensor, evaluations: Tensor, calls: int) -> list[int]:
    """How many samples each call of the map is an evaluation for."""
    times = torch.arange(calls)
    return (
        ((times >= entered[:, None]) & (times < (entered + evaluations)[:, None])).sum(0).tolist()
    )


@torch.no_grad()
def busy_slots(
    samples: int = 1500,  # number of samples
    slots: int = 64,  # samples of a batch, and slots of the queue
    share: float = 0.05,  # share of hard samples
    gain: float = 1.3,  # gain of hard samples; 0.5 for the others
    size: int = 64,  # numbers of a state
    seed: int = 0,  # random seed
) -> Result:
    generator = torch.Generator().manual_seed(seed)
    f = Calls(size, generator)
    hard = torch.rand(samples, 1, generator=generator) < share
    x = {
        "gain": torch.where(hard, gain, 0.5),
        "bias": torch.randn(samples, size, generator=generator),
    }
    options: Any = {"max_steps": 300, "on_failure": "ignore", "verify": False}
    layer = DEQ.from_update(f, init=lambda x: torch.zeros_like(x["bias"]), **options)
    entered, evaluations = torch.zeros(2, samples, dtype=torch.int64)
    places = torch.arange(samples).split(slots)
    ways: dict[str, tuple[list[int], int]] = {}
    for place in places:
        entered[place] = f.number
        batch = {name: part[place] for name, part in x.items()}
        evaluations[place] = layer.solve(batch, adjoint=None).evaluations
    ways["whole batches"] = at_work(entered, evaluations, f.number), f.number
    f.number = 0

    def one_by_one() -> Iterator[Any]:
        for place in range(samples):
            entered[place] = f.number
            yield {name: part[place : place + 1] for name, part in x.items()}

    for index, solution in layer.stream(one_by_one(), slots=slots):
        evaluations[index] = solution.evaluations
    ways["queue"] = at_work(entered, evaluations, f.number), f.number
    table: Table = [
        {"way": name, "call": number, "busy": busy}
        for name, (row, _) in ways.items()
        for number, busy in enumerate(row)
    ]
    summary = [
        {"way": name, "calls": calls, "busy, %": 100 * sum(row) / calls / slots}
        for name, (row, calls) in ways.items()
    ]
    return {"slots": table, "summary": summary}, draw(ways, samples, slots, evaluations)


def draw(
    ways: dict[str, tuple[list[int], int]], samples: int, slots: int, evaluations: Tensor
) -> Any:
    """A panel for each way, on one scale of calls."""
    figure, panels = plt.subplots(len(ways), 1, figsize=(10, 4.8), sharex=True, sharey=True)
    mean, most = evaluations.double().mean().item(), int(evaluations.max())
    figure.suptitle(
        f"{samples} samples in {slots} slots; "
        f"a sample needs {mean:.0f} evaluations on average, and at most {most}"
    )
    for axes, (name, (busy, calls)) in zip(panels, ways.items(), strict=True):
        colour = "C1" if name == "queue" else "C0"
        axes.stairs(busy, fill=True, color=colour)
        axes.axvline(calls, color="black", linewidth=0.8, linestyle=":")
        share = 100 * sum(busy) / calls / slots
        axes.set_title(f"{name}: done after {calls} calls of the map, {share:.0f} % of the slots at work",
                       fontsize=11, loc="left")  # fmt: skip
        axes.set(ylabel="slots at work", ylim=(0, slots), xlim=(0, None))
    panels[-1].set_xlabel("calls of the map")
    return figure


if __name__ == "__main__":
    run(busy_slots)
