"""Solves, training and inference in several threads, or processes, give what each gives alone."""

from __future__ import annotations

import importlib
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.utils import parametrizations

from cases.deq import make, relative_error, tokens
from implicit_attn import DEQ, EquilibriumBlock, Update
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Couplings,
    Quadratic,
    VectorSpin,
)
from solvers import Implicit, Tolerance


def bounded(seed: int = 0, **options: Any) -> DEQ:
    torch.manual_seed(seed)
    return DEQ(BiSoftmaxAttention(8, 2, bound=0.5) + Quadratic(), **options)


def sample(seed: int = 0) -> Tensor:
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed))


def together(*functions: Callable[[], object]) -> list[Any]:
    """The results of functions that run at the same time, each in a thread of its own."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return [future.result(60) for future in [pool.submit(call) for call in functions]]


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())))


def move(layer: nn.Module) -> None:
    """What an optimizer does, by a step that bounds do not undo."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter[::2] *= 0.1


@pytest.mark.defect("A1")
def test_a_solve_that_ends_within_another_leaves_no_weights_behind() -> None:
    layers, x = (bounded(0), bounded(1)), sample()
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        layers[0].solve(x, callback=lambda _: first_is_in.set() or second_is_in.wait(30))
        first_is_out.set()

    def second() -> None:
        assert first_is_in.wait(30)
        layers[1].solve(x, callback=lambda _: second_is_in.set() or first_is_out.wait(30))

    together(first, second)
    for layer in layers:
        move(layer)
        alone = bounded()
        alone.load_state_dict(layer.state_dict())
        for mine, other in zip(gradients(layer, x), gradients(alone, x), strict=True):
            assert torch.equal(mine, other) and bool(mine.any())


class WeightNorm(Update):
    """A plain network whose weight is parametrised by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return torch.tanh(0.3 * self.linear(z) + x)


def trained(template: nn.Module) -> list[Tensor]:
    layer = deepcopy(template)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        loss = layer(sample(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in layer.parameters())]


def inferred(layer: nn.Module) -> list[Tensor]:
    with torch.inference_mode():
        return [layer(sample(seed)) for seed in range(10)]


@pytest.mark.defect("A1")
def test_training_and_inference_at_once_are_bit_equal_to_each_alone() -> None:
    torch.manual_seed(0)
    to_train: list[nn.Module] = [
        bounded(),
        DEQ(WeightNorm()),
        DEQ(VectorSpin(Couplings(4, 8, bound=0.5)), on_failure="ignore"),
    ]
    shared = bounded(9)
    jobs = [partial(trained, layer) for layer in to_train]
    jobs += [partial(inferred, shared), partial(inferred, shared), partial(inferred, bounded(7))]
    alone = [job() for job in jobs]
    for results, expected in zip(together(*jobs), alone, strict=True):
        for one, other in zip(results, expected, strict=True):
            assert torch.equal(one, other)


ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


def example(name: str = "scale_out") -> Any:
    sys.path.append(str(ROOT / "examples"))
    return importlib.import_module(name)


RUNS = [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)]


def scaled_out(script: Any, engine: str | None, parts: int) -> list[dict[str, Tensor]]:
    """Loss, gradients and updated weights of two steps; ``engine`` None: of this process alone."""
    model = script.build().double()
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
        found = {f"gradient of {name}": _whole(p.grad) for name, p in named}
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


def run_process(rank: int, folder: Path) -> None:
    """One of two processes on gloo; writes what it trained."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD,
        timeout=timedelta(seconds=180),
    )  # fmt: skip
    script = example()
    runs = {key: scaled_out(script, *key) for key in RUNS}
    # A number of samples without equal shares.
    queues = example("several_queues").solve(99, 8)
    results = {"runs": runs, "refused": sharded_within(), "queues": queues}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both processes, which are started once for all tests."""
    folder = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        if "lo" in [name for _, name in socket.if_nameindex()]:
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        spawn(run_process, (folder,), WORLD)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


def on_gloo(test: Callable[..., None]) -> Callable[..., None]:
    available = dist.is_available() and dist.is_gloo_available()
    return pytest.mark.slow(pytest.mark.skipif(not available, reason="torch has no gloo")(test))


@on_gloo
def test_engines_and_accumulation_train_as_one(results: list[dict[str, Any]]) -> None:
    """Loss, gradients and weights of DDP and FSDP2, also in parts, are those of the whole batch."""
    single = scaled_out(example(), None, 1)
    assert relative_error(single[1]["loss"], single[0]["loss"]) > 1e-6
    for result in results:
        for key, run in result["runs"].items():
            for found, expected in zip(run, single, strict=True):
                assert found.keys() == expected.keys()
                for what, reference in expected.items():
                    assert relative_error(found[what], reference) <= 1e-7, (key, what)


@on_gloo
def test_updates_may_not_be_sharded(results: list[dict[str, Any]]) -> None:
    """Their processes would wait for each other at evaluations that not all of them make."""
    for result in results:
        assert "shard" in result["refused"]


@on_gloo
def test_queues_of_several_processes_solve_all_samples(results: list[dict[str, Any]]) -> None:
    value, evaluations, own = example("several_queues").solve(99, 8)
    assert own == 99 and len(evaluations.unique()) > 3
    for result in results:
        shared = result["queues"]
        assert shared[2] == 50  # one sample twice, so that the shares are equal
        torch.testing.assert_close(shared[0], value, rtol=2e-4, atol=2e-4)
        assert (shared[1] - evaluations).abs().max() <= 2
