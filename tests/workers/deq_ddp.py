"""One of two processes that train a model with a DEQ layer under DistributedDataParallel.

    python tests/workers/deq_ddp.py RANK WORLD STORE_FILE RESULT_FILE

Writes its parameters after every step, and the gradients of the first one.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cases.deq import DIM, make, tokens

STEPS, SAMPLES = 3, 6
LAYERS = ("gradient", "update")


def build() -> nn.Module:
    layers = [make(name, seed) for seed, name in enumerate(LAYERS)]
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, DIM).double(), *layers, nn.Linear(DIM, 1).double())


def batch(step: int) -> Tensor:
    return tokens(batch=SAMPLES, dim=3, seed=step)


def train(model: nn.Module, part: slice) -> list[dict[str, Tensor]]:
    """Parameters after each step; before them the gradients of the first step."""
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    history: list[dict[str, Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step)[part]
        (model(x) - x.sum(-1, keepdim=True).sin()).square().mean().backward()
        if step == 0:
            history.append({n: _gradient(p).clone() for n, p in plain.named_parameters()})
        optimizer.step()
        history.append({n: p.detach().clone() for n, p in plain.named_parameters()})
    return history


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def main() -> None:
    rank, world, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    share = SAMPLES // world
    model = DistributedDataParallel(build())
    torch.save(train(model, slice(rank * share, (rank + 1) * share)), result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
