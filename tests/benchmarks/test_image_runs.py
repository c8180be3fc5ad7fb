"""The comparisons of image models: the examples take every command line that they plan."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("safetensors", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("tqdm", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("lightning_fabric", reason="the benchmarks train by an example of [examples]")
pytest.importorskip("matplotlib", reason="the benchmarks train by an example of [examples]")

from benchmarks.images import cifar10, masked
from implicit_attn.data import ImageData
from implicit_attn.models import build_model

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = {
    "cifar10": (cifar10, ["--rows", "crate", "hyperset", "--seeds", "2", "--epochs", "1"]),
    "masked": (masked, ["--rows", "transformer", "--seeds", "2", "--epochs", "1"]),
}


def load_example(name: str) -> Any:
    path = ROOT / "implicit_attn/programs" / name
    found = importlib.util.spec_from_file_location(f"compared_{path.stem}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_example_takes_every_command_line(name: str) -> None:
    benchmark: ModuleType = BENCHMARKS[name][0]
    example = load_example(benchmark.EXAMPLE)
    runs = benchmark.plan(benchmark.parser().parse_args([]))
    assert {run.row for run in runs} == set(benchmark.ROWS)
    assert len({run.folder for run in runs}) == len(runs)
    for run in runs:
        assert example.arguments(run.words).model == run.row
    few = benchmark.plan(benchmark.parser().parse_args(BENCHMARKS[name][1]))
    assert [run.seed for run in few] == sorted(run.seed for run in few)
    assert all(example.arguments(run.words).epochs == 1 for run in few)


def test_the_models_of_the_table_are_of_one_size() -> None:
    example = load_example(cifar10.EXAMPLE)
    images, labels = torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.int64)
    data = ImageData("colours", 10, images, labels, images, labels)
    sizes = []
    for run in cifar10.plan(cifar10.parser().parse_args([])):
        model = build_model(example.specification(example.arguments(run.words), data))
        sizes.append(sum(each.numel() for each in model.parameters()))
    assert max(sizes) < 1.08 * min(sizes)
