"""Train one model of equilibrium layers in several processes with DistributedDataParallel or FSDP2.

    torchrun --nproc-per-node 2 examples/scale_out.py --engine fsdp --accumulate 2
    python examples/scale_out.py                      # one process, for comparison

Each process solves for its own samples. The numbers of evaluations may differ, because a solve does not
communicate. Losses and weights are those of one process with the whole batch.
"""

import contextlib
import os
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from implicit_attn import EquilibriumBlock
from implicit_attn.models import EquilibriumTransformer, ImageClassifier

SIZE, CLASSES = 8, 4


def build(seed: int = 0) -> nn.Module:
    """A classifier of 8x8 images with two equilibrium blocks."""
    torch.manual_seed(seed)
    backbone = EquilibriumTransformer(16, 2, layers=2, layer={"max_steps": 100})
    return ImageClassifier(backbone, SIZE, 1, CLASSES, readout="mean")


def images(
    step: int, number: int = 16, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Bright quadrants in noise, and which quadrant it is; the same in all processes."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    pictures = 0.5 * torch.rand(number, 1, SIZE, SIZE, generator=generator, dtype=dtype)
    for row, label in enumerate(labels.tolist()):
        top, left = 4 * (label // 2), 4 * (label % 2)
        pictures[row, :, top : top + 4, left : left + 4] += 0.4
    return pictures, labels


def wrap(model: nn.Module, engine: str) -> nn.Module:
    """``model`` for several processes.

    FSDP2 shards whole blocks (or layers), never what a solve calls many times: the update or energy
    within. The weights of a block are gathered once for its forward and once for its backward pass.
    """
    if engine == "ddp":
        return DistributedDataParallel(model)
    for part in model.modules():
        if isinstance(part, EquilibriumBlock):
            fully_shard(part)
    fully_shard(model)
    return model


def gradients(model: nn.Module, batch: tuple[Tensor, Tensor], parts: int = 1) -> Tensor:
    """The mean loss of a batch in ``parts``, one after the other; gradients are left in ``.grad``.

    They are summed over the processes after the last part alone.
    """
    pairs = list(zip(*(each.chunk(parts) for each in batch), strict=True))
    total = batch[0].new_zeros(())
    for number, (pictures, labels) in enumerate(pairs):
        last = number + 1 == len(pairs)
        local: Any = contextlib.nullcontext()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        elif isinstance(model, DistributedDataParallel) and not last:
            local = model.no_sync()
        with local:
            loss = F.cross_entropy(model(pictures), labels, reduction="sum") / len(batch[1])
            loss.backward()
        total += loss.detach()
    return total


def own_share(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """What this process takes of a batch: equal parts, so that the mean of means is the mean."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(batch[1]) % world:
        raise ValueError(f"a batch of {len(batch[1])} has no equal parts for {world} processes")
    return batch[0].chunk(world)[rank], batch[1].chunk(world)[rank]


def train(engine: str | None, steps: int, parts: int) -> None:
    model = build()
    model = model if engine is None else wrap(model, engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        batch = images(step)
        loss = gradients(model, batch if engine is None else own_share(batch), parts)
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        shown = step % max(1, steps // 5) == 0 or step == steps - 1
        if shown and (engine is None or dist.get_rank() == 0):
            print(f"step {step:3d}  loss {loss.item():.6f}", flush=True)


def main(engine: Literal["ddp", "fsdp"] = "ddp", steps: int = 20, accumulate: int = 1) -> None:
    """Train a small model with ``engine`` under torchrun, each batch in ``accumulate`` <= 8 parts."""
    if not 1 <= accumulate <= 8:
        raise SystemExit(f"--accumulate must be 1 to 8, got {accumulate}")
    if "RANK" not in os.environ:  # not under torchrun
        train(None, steps, accumulate)
        return
    # On CPUs. Whoever waits for a process that has died gives up after this time.
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    try:
        train(engine, steps, accumulate)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main)
