"""Two processes on gloo: averaged gradients are those of the joint batch, and stay in step."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cases.deq import relative_error
from workers.deq_ddp import MODELS, RUNS, STEPS, build, example, scaled_out, train

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()),
        reason="torch was built without gloo",
    ),
]


def run_workers(folder: Path) -> list[dict[str, Any]]:
    paths = [str(ROOT), str(ROOT / "tests")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if "lo" in [name for _, name in socket.if_nameindex()]:
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    script = str(ROOT / "tests" / "workers" / "deq_ddp.py")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(WORLD), str(folder / "store"),
             str(folder / f"rank{rank}.pt")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # which closes its pipe
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of both processes, which are started once for all tests."""
    return run_workers(tmp_path_factory.mktemp("processes"))


def test_two_processes_train_as_one(results: list[dict[str, Any]]) -> None:
    ranks = [result["history"] for result in results]
    single = train(build(), slice(None))
    assert len(single) == STEPS + 1
    for step, expected in enumerate(single):
        for name, reference in expected.items():
            first, second = ranks[0][step][name], ranks[1][step][name]
            assert torch.equal(first, second), (step, name)
            # A sample's solve does not depend on who else is in the batch.
            assert relative_error(first, reference) <= 1e-9, (step, name)
    moved = [relative_error(single[-1][n], single[1][n]) for n in single[1]]
    assert min(moved) > 1e-6


@pytest.mark.parametrize("name", MODELS)
def test_engines_and_accumulation_train_as_one(name: str, results: list[dict[str, Any]]) -> None:
    """Loss, gradients and weights of DDP and FSDP2, also in parts, are those of the whole batch."""
    single = scaled_out(example(), name, None, 1)
    assert relative_error(single[1]["loss"], single[0]["loss"]) > 1e-6
    for key in RUNS:
        if key[0] != name:
            continue
        for result in results:
            for found, expected in zip(result["runs"][key], single, strict=True):
                assert found.keys() == expected.keys()
                for what, reference in expected.items():
                    assert relative_error(found[what], reference) <= 1e-7, (key, what)


def test_updates_may_not_be_sharded(results: list[dict[str, Any]]) -> None:
    """Their processes would wait for each other at evaluations that not all of them make."""
    for result in results:
        assert "shard the DEQ layer" in result["refused"]


def test_the_example_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torchrun it is one process, whose losses do not depend on the parts of a batch."""
    monkeypatch.delenv("RANK", raising=False)
    losses = []
    for parts in (1, 2):
        example().main(steps=2, accumulate=parts)
        losses.append([float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()])
    assert len(losses[0]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    with pytest.raises(SystemExit):
        example().main(accumulate=9)


def test_unequal_parts_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 3, 3 and 2 images give the loss and gradients of the whole; processes need equal parts."""
    script = example()
    model, batch = script.build().double(), script.images(0, 8, torch.float64)
    found: list[list[torch.Tensor]] = []
    for parts in (1, 3):
        model.zero_grad()
        loss = script.gradients(model, batch, parts)
        found.append([loss, *(p.grad.clone() for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) <= 1e-9
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match="no equal parts for 3 processes"):
        script.own_share(batch)
