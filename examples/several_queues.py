"""Solve the samples of a data set in several processes, each with a queue of its own.

    torchrun --nproc-per-node 2 examples/several_queues.py
    python examples/several_queues.py                 # one process, for comparison

A ``DistributedSampler`` gives each process a share of the data set. A solve does not communicate, so a
process that has finished its queue only waits for the others when the results are collected.
"""

import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from implicit_attn import DEQ

SIZE = 64  # numbers of a sample


class Map(nn.Module):
    """``z = g tanh(z A) B + x``; the gain g grows with x, so the numbers of evaluations differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Linear(SIZE, SIZE, bias=False),
            nn.Linear(SIZE, SIZE, bias=False),
        )

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        gain = 2.5 * x.square().mean(1, keepdim=True).clamp_max(1.0)
        return gain * self.second(torch.tanh(self.first(z))) + x


def data_set(samples: int) -> Tensor:
    """Samples of very different sizes."""
    x = torch.randn(samples, SIZE, generator=torch.Generator().manual_seed(0))
    return x * torch.logspace(-2, 0, samples)[torch.randperm(samples), None]


def solve(samples: int, slots: int) -> tuple[Tensor, Tensor, int]:
    """Return values and evaluations of all samples, and how many samples this process has solved."""
    torch.manual_seed(0)
    layer, x = DEQ.from_update(Map(), max_steps=400), data_set(samples)
    numbered = TensorDataset(torch.arange(samples), x)
    several = dist.is_initialized()
    sampler = DistributedSampler(numbered, shuffle=False) if several else None
    numbers = list[Tensor]()  # of the samples, in the order of this process

    def batches() -> Iterator[Tensor]:
        for number, batch in DataLoader(numbered, 32, sampler=sampler):
            numbers.append(number)
            yield batch

    value, evaluations = torch.zeros_like(x), torch.zeros(samples)
    for index, solution in layer.stream(batches(), slots=slots):
        place = torch.cat(numbers)[index]
        value[place], evaluations[place] = solution.value, solution.evaluations.float()
    solved = (evaluations > 0).float()
    own = int(solved.sum())
    if several:
        for result in (value, evaluations, solved):
            dist.all_reduce(result)
    # Where there are no equal shares, two processes solve the same few samples.
    return value / solved[:, None], evaluations / solved, own


def main(samples: int = 1000, slots: int = 64) -> None:
    """Solve ``samples`` with ``slots`` in each process."""
    rank, several = int(os.environ.get("RANK", 0)), "RANK" in os.environ  # under torchrun
    if several:
        # On CPUs. Whoever waits for a process that has died gives up after this time.
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        _, evaluations, own = solve(samples, slots)
    finally:
        if several:
            dist.destroy_process_group()
    print(f"process {rank} has solved {own} samples", flush=True)
    if rank == 0:
        mean, most = evaluations.mean().item(), int(evaluations.max())
        print(f"all {samples}: {mean:.1f} evaluations on average, {most} at most", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
