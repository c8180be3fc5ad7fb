"""The comparisons of image models: the examples take every command line that they plan."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("tqdm", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("lightning_fabric", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("matplotlib", reason="the benchmarks train by an example of [examples]")

from benchmarks.images import cifar10, masked
from implicit_attn.cli import read
from implicit_attn.data import ImageData
from implicit_attn.programs.images import MaskedPatches, VitImages

PROGRAMS = {"vit-images": VitImages, "masked-images": MaskedPatches}
BENCHMARKS = {
    "cifar10": (cifar10, ["--rows", "crate", "hyperset", "--seeds", "2", "--epochs", "1"]),
    "masked": (masked, ["--rows", "transformer", "--seeds", "2", "--epochs", "1"]),
}


def options_of(run: Any) -> Any:
    return read(PROGRAMS[run.program], run.command[1:])


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_program_takes_every_command_line(name: str) -> None:
    benchmark: ModuleType = BENCHMARKS[name][0]
    runs = benchmark.plan(benchmark.parser().parse_args([]))
    assert {run.row for run in runs} == set(benchmark.ROWS)
    assert len({run.folder for run in runs}) == len(runs)
    assert all(options_of(run).model == run.row for run in runs)
    few = benchmark.plan(benchmark.parser().parse_args(BENCHMARKS[name][1]))
    assert [run.seed for run in few] == sorted(run.seed for run in few)
    assert all(options_of(run).epochs == 1 for run in few)


def test_the_models_of_the_table_are_of_one_size(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = torch.zeros(4, 3, 32, 32), torch.arange(4)
    data = ImageData("colours", 10, images, labels, images, labels)
    monkeypatch.setattr("implicit_attn.programs.images.load", lambda _: data)
    sizes = []
    for run in cifar10.plan(cifar10.parser().parse_args([])):
        model = options_of(run).job(False).model
        sizes.append(sum(each.numel() for each in model.parameters()))
    assert max(sizes) < 1.08 * min(sizes)
