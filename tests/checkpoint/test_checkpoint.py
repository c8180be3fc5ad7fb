"""Checkpoints: training goes on exactly where it stopped, and mistakes are named."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cases.deq import make, tokens
from implicit_attn.checkpoint import load_checkpoint, save_checkpoint

files = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors files")


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    layer = make("gradient", seed)
    groups = [
        {"params": [p for p in layer.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in layer.parameters() if p.dim() <= 1], "lr": 3e-3},
    ]
    return layer, torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x = tokens() + 0.1 * torch.randn(2, 3, 4).double()  # the random state matters
    loss = model(x).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("before", [0, 1, 3])
def test_training_continues_exactly(tmp_path: Path, before: int) -> None:
    path = tmp_path / "deep" / "folder" / "run.safetensors"
    model, optimizer = build()
    torch.manual_seed(11)
    for _ in range(before):
        step(model, optimizer)
    save_checkpoint(path, model, optimizer, {"epoch": before, "history": [{"loss": 0.1}]})
    for _ in range(3):
        step(model, optimizer)
    expected = weights(model)

    other, other_optimizer = build(seed=1)
    torch.manual_seed(99)
    progress = load_checkpoint(path, other, other_optimizer)
    assert progress == {"epoch": before, "history": [{"loss": 0.1}]}
    for _ in range(3):
        step(other, other_optimizer)
    assert same(weights(other), expected)
    for mine, theirs in zip(optimizer.param_groups, other_optimizer.param_groups, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - {"params", "betas"}:
            assert mine[key] == theirs[key], key
        assert tuple(mine["betas"]) == tuple(theirs["betas"])


def test_optimizer_state_is_kept_to_the_last_bit(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    step(model, optimizer)
    save_checkpoint(path, model, optimizer)
    other, other_optimizer = build(seed=1)
    step(other, other_optimizer)
    load_checkpoint(path, other, other_optimizer)
    mine, theirs = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert mine.keys() == theirs.keys() and mine
    for index, entries in mine.items():
        assert entries.keys() == theirs[index].keys()
        for name, value in entries.items():
            assert value.dtype == theirs[index][name].dtype
            assert value.shape == theirs[index][name].shape
            assert torch.equal(value, theirs[index][name])


@pytest.mark.parametrize("restore", [True, False])
def test_random_state(tmp_path: Path, restore: bool) -> None:
    path = tmp_path / "run.safetensors"
    model = build()[0]
    torch.manual_seed(3)
    save_checkpoint(path, model)
    expected = torch.rand(5)
    torch.manual_seed(4)
    load_checkpoint(path, model, restore_random=restore)
    assert torch.equal(torch.rand(5), expected) == restore


def test_saving_draws_no_random_numbers(tmp_path: Path) -> None:
    model, optimizer = build()
    step(model, optimizer)
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    save_checkpoint(tmp_path / "a.safetensors", model, optimizer)
    assert torch.equal(torch.rand(5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build()[0].to(dtype)
    save_checkpoint(tmp_path / "a.safetensors", model)
    other = build(seed=1)[0].to(dtype)
    load_checkpoint(tmp_path / "a.safetensors", other)
    assert same(weights(model), weights(other))


def test_shared_and_strided_weights(tmp_path: Path) -> None:
    """Tied weights and views are no trouble: every tensor is stored as its own copy."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("turned", torch.arange(6.0).reshape(2, 3).mT)
    save_checkpoint(tmp_path / "a.safetensors", model)
    expected = weights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(tmp_path / "a.safetensors", model)
    assert same(weights(model), expected)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nowhere"):
        load_checkpoint(tmp_path / "nowhere.safetensors", build()[0])
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(tmp_path, build()[0])  # a folder


@pytest.mark.parametrize(
    "content",
    [b"", b"hello", b"\x10" + bytes(7) + b"{}", b"\xff" * 64],
    ids=["empty", "text", "cut", "high"],
)
def test_not_a_safetensors_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.safetensors is not a checkpoint"):
        load_checkpoint(path, build()[0])


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_somebody_elses_file(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "other.safetensors"
    files.save_file({"weight": torch.ones(2)}, str(path), metadata=metadata)
    with pytest.raises(ValueError, match=r"other\.safetensors is not a checkpoint of this package"):
        load_checkpoint(path, build()[0])


def test_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_checkpoint(path, *build())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"cut\.safetensors is not a checkpoint"):
        load_checkpoint(path, *build())


def test_wrong_model_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build())
    model = nn.Linear(3, 3)
    before = weights(model)
    with pytest.raises(ValueError, match=r"(?s)does not fit the model.*in the model"):
        load_checkpoint(path, model)
    assert same(weights(model), before)


def test_wrong_shape_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 5))
    before = weights(model)
    with pytest.raises(ValueError, match=r"(?s)does not fit the model.*in the model"):
        load_checkpoint(path, model)
    assert same(weights(model), before)


def test_wrong_optimizer_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    step(model, optimizer)
    save_checkpoint(path, model)
    other, other_optimizer = build(seed=1)
    before = weights(other)
    with pytest.raises(ValueError, match="holds no optimizer state"):
        load_checkpoint(path, other, other_optimizer)
    assert same(weights(other), before)
    save_checkpoint(path, model, optimizer)
    single = torch.optim.AdamW(other.parameters())  # one group, the file has two
    with pytest.raises(ValueError, match="does not fit the optimizer"):
        load_checkpoint(path, other, single)
    assert same(weights(other), before)


def test_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    save_checkpoint(path, model, optimizer, {"epoch": 1})
    old = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(path, model, optimizer, {"epoch": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.safetensors"]  # no half a file
    assert path.read_bytes() == old
    assert load_checkpoint(path, *build()) == {"epoch": 1}
    save_checkpoint(path, model, optimizer, {"epoch": 3})
    assert load_checkpoint(path, *build()) == {"epoch": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.safetensors"]


def test_two_that_save_to_one_path_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one saves while the first one is writing; the first one ends last."""
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    moved: list[tuple[Path, Path]] = []
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        moved.append((source, target))
        if len(moved) == 1:
            save_checkpoint(path, model, optimizer, {"saved": "second"})
            assert load_checkpoint(path, *build()) == {"saved": "second"}
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    save_checkpoint(path, model, optimizer, {"saved": "first"})
    assert len({source for source, _ in moved}) == 2
    assert {each.parent for pair in moved for each in pair} == {tmp_path}  # moved without copying
    assert load_checkpoint(path, *build()) == {"saved": "first"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run.safetensors"]


def test_progress_must_be_plain_data(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model = build()[0]
    save_checkpoint(path, model, progress={"epoch": 1})
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(path, model, progress={"loss": torch.ones(1)})
    assert load_checkpoint(path, model) == {"epoch": 1}
    numbers = {"tiny": 1e-300, "third": 1 / 3, "infinite": float("inf"), "none": None}
    save_checkpoint(path, model, progress=numbers)
    assert load_checkpoint(path, model) == json.loads(json.dumps(numbers)) == numbers


def test_whole_file_is_plain_safetensors(tmp_path: Path) -> None:
    """Other programs can read the weights: no pickle anywhere."""
    model, optimizer = build()
    step(model, optimizer)
    save_checkpoint(tmp_path / "run.safetensors", model, optimizer)
    stored = files.load_file(str(tmp_path / "run.safetensors"))
    for name, value in model.state_dict().items():
        assert torch.equal(stored[f"model.{name}"], value)
