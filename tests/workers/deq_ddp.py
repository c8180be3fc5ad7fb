"""One of two processes that train models with DEQ layers under DistributedDataParallel and FSDP2.

    python tests/workers/deq_ddp.py RANK WORLD STORE_FILE RESULT_FILE

Writes its parameters after every step, and the gradients of the first one; and what
``examples/scale_out.py`` computes with each engine.
"""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cases.deq import DIM, make, tokens
from implicit_attn import EquilibriumBlock
from solvers import Implicit, Tolerance

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


def example() -> Any:
    sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
    return importlib.import_module("scale_out")


def blocks(script: Any) -> nn.Module:
    """Blocks alone, of tokens made of the example's images."""
    torch.manual_seed(1)
    made = [EquilibriumBlock(8, 2, attention=a) for a in ("self", None)]
    return nn.Sequential(nn.Flatten(1, 2), *made, nn.Flatten(1), nn.Linear(64, script.CLASSES))


MODELS: dict[str, Any] = {"classifier": lambda script: script.build(), "blocks": blocks}
RUNS = [
    (name, engine, parts)
    for name in MODELS
    for engine, parts in (("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2))
]


def scaled_out(script: Any, name: str, engine: str | None, parts: int) -> list[dict[str, Tensor]]:
    """Loss, gradients and updated weights of two steps; ``engine`` None: of this process alone."""
    model = MODELS[name](script).double()
    for part in model.modules():
        if isinstance(part, EquilibriumBlock):
            part.deq.tolerance = Tolerance(1e-10)
            part.deq.adjoint = Implicit(tolerance=Tolerance(1e-10))
    plain, model = model, model if engine is None else script.wrap(model, engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history: list[dict[str, Tensor]] = []
    for step in range(2):
        batch = script.images(step, 8, torch.float64)
        loss = script.gradients(model, batch if engine is None else script.own_share(batch), parts)
        if engine is not None:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        named = list(plain.named_parameters())
        found = {f"gradient of {name}": _whole(_gradient(p)) for name, p in named}
        optimizer.step()
        optimizer.zero_grad()
        history.append({"loss": loss} | found | {name: _whole(p.detach()) for name, p in named})
    return history


def _whole(tensor: Any) -> Tensor:
    """A copy of what may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def sharded_within() -> str:
    """What is said where a module inside of an update is sharded."""
    layer: Any = make("update")
    fully_shard(layer.update.function)
    try:
        layer(tokens())
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    rank, world, store, result = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=180),
    )  # fmt: skip
    share = SAMPLES // world
    model = DistributedDataParallel(build())
    history = train(model, slice(rank * share, (rank + 1) * share))
    script = example()
    runs = {key: scaled_out(script, *key) for key in RUNS}
    torch.save({"history": history, "runs": runs, "refused": sharded_within()}, result)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
