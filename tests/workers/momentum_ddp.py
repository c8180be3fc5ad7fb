"""DistributedDataParallel around steps with momentum, in a process of its own: python THIS FILE MEETING.

The group of processes is not taken down: its destructor may wait for a thread of it that waits for
Python's lock.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from implicit_attn.updates import DescentStep


class Stack(nn.Module):
    def __init__(self, method: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double() for _ in range(5)]
        self.steps: nn.ModuleList = nn.ModuleList(DescentStep(each, method) for each in branches)

    def forward(self, z: Tensor) -> Tensor:
        p = None
        for step in self.steps:
            z, p = step(z, p)
        return z


def main(meeting: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    for method in ("gain", "momentum", "nesterov"):
        model = DistributedDataParallel(Stack(method))
        for _ in range(2):  # the second one raises where a parameter had no part in the first
            model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        assert all(each.grad is not None for each in model.parameters())
        print(method, "trained", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
