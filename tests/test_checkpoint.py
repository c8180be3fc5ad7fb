"""Checkpoints: training goes on exactly where it stopped; what is damaged is named and changes nothing."""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import (
    checksum,
    load_checkpoint,
    read_progress,
    restore_constants,
    save_checkpoint,
)
from implicit_attn.models import EquilibriumTransformer, ImageClassifier

files = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors files")
Change = Callable[[dict[str, Tensor], dict[str, str]], object]
Run = tuple[nn.Module, torch.optim.Optimizer]


def build(seed: int = 0, steps: int = 2) -> Run:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("scale", nn.Parameter(torch.rand(())))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    (model(torch.randn(5, 3)) * model.get_parameter("scale")).square().sum().backward()
    optimizer.step()


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a load may change, copied."""
    kept = optimizer.state_dict()
    found: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items()}
    for index, entries in kept["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in entries.items()}
    groups = [{**group, "betas": list(group["betas"])} for group in kept["param_groups"]]
    return found | {"groups": groups, "random": torch.get_rng_state()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Values and dtypes."""
    return first.keys() == second.keys() and all(
        a.dtype == second[name].dtype and torch.equal(a, second[name])
        if isinstance(a, Tensor)
        else a == second[name]
        for name, a in first.items()
    )


@pytest.mark.parametrize("before", [0, 3])
def test_training_continues_exactly(tmp_path: Path, before: int) -> None:
    path = tmp_path / "deep" / "folder" / "run.safetensors"
    first, other = build(steps=before), build(seed=1)
    torch.manual_seed(11)
    numbers = {"epoch": before, "third": 1 / 3, "infinite": math.inf, "none": None}
    save_checkpoint(path, *first, numbers)
    expected = contents(*first)
    torch.manual_seed(99)
    assert load_checkpoint(path, *other) == read_progress(path) == numbers
    assert same(contents(*other), expected)  # saving drew no random numbers either
    for run in (first, other):
        torch.manual_seed(5)
        step(*run)
    assert same(contents(*first), contents(*other))


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": torch.optim.AdamW,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    """The checks refuse none of what torch's optimizers keep, a parameter without gradient among it."""

    def make(seed: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        shapes: list[tuple[int, ...]] = [(3, 2), (4,), (), (2, 1, 3), (1,), (5,)]
        values = nn.ParameterList([nn.Parameter(torch.randn(s).bfloat16()) for s in shapes])
        return values, KINDS[kind](list(values))

    def move(values: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for value in list(values)[:-1]:
            value.square().sum().backward()
        optimizer.step()

    path = tmp_path / "run.safetensors"
    first, other = make(0), make(1)
    move(*first)
    save_checkpoint(path, *first)
    load_checkpoint(path, *other)
    move(*first)
    move(*other)
    assert all(map(torch.equal, first[0], other[0]))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool], ids=str
)
def test_tensors_of_every_dtype_shape_and_sharing(tmp_path: Path, dtype: torch.dtype) -> None:
    """As plain safetensors: views and tied weights are stored as copies, and there is no pickle."""

    def make(values: Tensor) -> nn.Module:
        model = nn.Module()
        views = {"a": values, "b": values[1], "c": values[:0], "d": values[::2], "e": values[0, 0]}
        for name, view in {**views, "f": values.mT}.items():
            model.register_buffer(name, view)
        return model

    model = make(torch.arange(-3, 9).reshape(6, 2).to(dtype))
    save_checkpoint(tmp_path / "run.safetensors", model)
    stored = files.load_file(str(tmp_path / "run.safetensors"))
    loaded = make(torch.zeros(6, 2).to(dtype))
    load_checkpoint(tmp_path / "run.safetensors", loaded)
    for name, value in model.state_dict().items():
        assert stored[f"model.{name}"].dtype == dtype
        assert stored[f"model.{name}"].tolist() == value.tolist()
    assert loaded.get_buffer("a").tolist() == model.get_buffer("a").tolist()


def test_infinities_of_buffers_and_frozen_parameters_are_kept(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model, mask in zip(models, ([0.0, -math.inf, math.nan], [0.0] * 3), strict=True):
        model.register_buffer("mask", torch.tensor(mask))
        model.bias.requires_grad_(False)
    models[0].bias.data.fill_(math.inf)
    save_checkpoint(tmp_path / "run", models[0])
    load_checkpoint(tmp_path / "run", models[1])
    states = [model.state_dict() for model in models]
    torch.testing.assert_close(*states, equal_nan=True, rtol=0, atol=0)


@pytest.mark.defect("B4")
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    save_checkpoint(path, model, optimizer, {"epoch": 1})
    with pytest.raises(TypeError, match="JSON"):
        save_checkpoint(path, model, progress={"loss": torch.ones(1)})
    wide = nn.Module()
    wide.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"model\.wide must be a dense tensor .*complex128"):
        save_checkpoint(path, wide)
    weight = model.get_parameter("0.weight")
    optimizer.state[weight]["exp_avg"][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"exp_avg is NaN"):
        save_checkpoint(path, model, optimizer)
    with torch.no_grad():
        weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"0\.weight is not finite"):
        save_checkpoint(path, model)
    assert load_checkpoint(path, *build()) == {"epoch": 1}


@pytest.mark.defect("B3")
@pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")
def test_the_mode_is_that_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "run", nn.Linear(2, 2))
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o640


def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})

    def full(handle: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(path, *build(), {"epoch": 2})
    assert [each.name for each in tmp_path.iterdir()] == ["run.safetensors"]  # no half a file
    assert read_progress(path) == {"epoch": 1}
    save_checkpoint(path, *build(), {"epoch": 3})
    assert read_progress(path) == {"epoch": 3}


# Damage. Each file is written anew with its checksum, as somebody could.


def rewrite(path: Path, change: Change) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(str(path), framework="pt") as file:
        texts: dict[str, str] = file.metadata()
        tensors = {name: file.get_tensor(name) for name in list(file.keys())}
    before = texts["checksum"]
    change(tensors, texts)
    if texts.get("checksum") == before:
        texts["checksum"] = checksum(tensors, texts)
    files.save_file(tensors, str(path), metadata=texts)


def put(name: str, value: Tensor | None) -> Change:
    """The tensor replaced, or taken away."""
    return lambda tensors, _: tensors.pop(name) if value is None else tensors.update({name: value})


def spoil(name: str, value: float) -> Change:
    """One element replaced."""
    return lambda tensors, _: tensors[name].view(-1)[0].fill_(value)


def as_dtype(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors, _: tensors.update({name: tensors[name].to(dtype)})


def say(name: str, text: str | None) -> Change:
    """A text of the header replaced, or taken away."""
    return lambda _, texts: texts.pop(name) if text is None else texts.update({name: text})


def regroup(name: str, value: Any) -> Change:
    """An option of the optimizer's first group replaced, or with None taken away."""

    def change(tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        groups = json.loads(texts["groups"])
        groups[0] |= {name: value}
        if value is None:
            del groups[0][name]
        texts["groups"] = json.dumps(groups)

    return change


def rename(old: str, new: str) -> Change:
    return lambda tensors, _: tensors.update({new: tensors.pop(old)})


DAMAGE: dict[str, tuple[Change, str]] = {
    "no checksum": (say("checksum", None), "it has no 'checksum'"),
    "another format": (say("format", "implicit-attn checkpoint 1"), "is not a checkpoint of this"),
    "random missing": (put("random.torch", None), "random state"),
    "random short": (put("random.torch", torch.zeros(3, dtype=torch.uint8)), "random state"),
    "progress broken": (say("progress", '{"epoch": '), "progress"),
    "progress a list": (say("progress", "[1, 2]"), "progress must be a dict"),
    "progress deep": (say("progress", "[" * 100_000), "progress"),
    "groups a dict": (say("groups", "{}"), "groups must be a list"),
    "groups of numbers": (say("groups", "[3, 4]"), "do not fit the optimizer"),
    "optimizer other": (say("optimizer", "SGD"), "state of SGD, expected AdamW"),
    "optimizer none": (say("optimizer", ""), "state of no optimizer, expected AdamW"),
    "parameters other": (regroup("params", [1, 0]), "do not fit the optimizer"),
    "rate missing": (regroup("lr", None), "has no 'lr'"),
    "weight missing": (put("model.0.weight", None), r"0\.weight is None in the file"),
    "weight shape": (put("model.0.weight", torch.ones(3, 4)), r"0\.weight is \(3, 4\)"),
    "weight half": (as_dtype("model.0.weight", torch.float16), r"0\.weight .*float16"),
    "weight nan": (spoil("model.0.weight", math.nan), r"0\.weight is not finite"),
    "entry missing": (put("optimizer.0.exp_avg_sq", None), r"0\.exp_avg_sq is None"),
    "entry shape": (put("optimizer.0.exp_avg", torch.ones(7)), r"exp_avg is \(7,\)"),
    "entry nan": (spoil("optimizer.3.exp_avg", math.nan), "exp_avg is NaN"),
    "step negative": (spoil("optimizer.3.step", -1.0), r"3\.step"),
    "index beyond": (rename("optimizer.6.step", "optimizer.9.step"), "parameter 9"),
    "index no number": (rename("optimizer.6.step", "optimizer.x.step"), r"optimizer\.x\.step"),
}


@pytest.mark.defect("B1")
@pytest.mark.defect("B4")
@pytest.mark.defect("C4")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_changes_nothing(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})
    change, message = DAMAGE[name]
    rewrite(path, change)
    run = build(seed=1)
    before = contents(*run)
    with pytest.raises(ValueError, match=rf"(?s)run\.safetensors.*{message}"):
        load_checkpoint(path, *run)
    assert same(contents(*run), before)


@pytest.mark.defect("B1")
def test_a_model_that_refuses_leaves_the_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build())
    run = build(seed=1)
    before = contents(*run)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not these")

    run[0].register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not these"):
        load_checkpoint(path, *run)
    assert same(contents(*run), before)


@pytest.mark.defect("B4")
def test_flipped_bits_are_found(tmp_path: Path) -> None:
    """Anywhere in the file: an error that names it, or, where the bit means nothing, the same load."""
    path, draw = tmp_path / "run.safetensors", random.Random(0)
    save_checkpoint(path, *build(), {"epoch": 1, "text": "ä"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [*range(16), *(draw.randrange(header) for _ in range(80))]
    places += [draw.randrange(header, len(whole)) for _ in range(80)]
    expected = build()
    load_checkpoint(path, *expected)
    accepted = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        run = build(seed=1)
        before = contents(*run)
        try:
            load_checkpoint(path, *run)
        except ValueError as error:
            assert "run.safetensors" in str(error)
            assert same(contents(*run), before), place
        else:  # a blank at the end of the header became another one, for instance
            accepted += 1
            assert place < header and same(contents(*run), contents(*expected)), place
    assert accepted <= 3


@pytest.mark.defect("C4")
def test_cut_and_foreign_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})
    whole = path.read_bytes()
    cuts = [*range(12), *random.Random(0).sample(range(12, len(whole)), 30), len(whole) - 1]
    pieces = [whole[:cut] for cut in cuts]
    pieces += [whole + b"\0", b"\x1f\x8b" + whole, b"PK\x03\x04", b"\xff" * 4096, bytes(4096)]
    pieces.append((10**15).to_bytes(8, "little") + whole[8:])
    nested = b'{"__metadata__":' + b'{"a":' * 5000
    pieces.append(len(nested).to_bytes(8, "little") + nested)
    pieces += [files.save({"a": torch.ones(2)}), files.save({"a": torch.ones(2)}, {"format": "pt"})]
    model, optimizer = build(seed=1)
    for piece in pieces:
        path.write_bytes(piece)
        for read in (lambda: load_checkpoint(path, model, optimizer), lambda: read_progress(path)):
            with pytest.raises(ValueError, match=r"run\.safetensors"):
                read()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_checkpoint(tmp_path, model)  # a folder


# Buffers that are in no state dict come back after a loader has left them empty.


def classifier(size: int = 8) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(EquilibriumTransformer(8, 2), size, 1, 3, readout="mean")


class Shared(nn.Module):
    """One tensor under two names, and another."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        numbers = torch.arange(4.0)
        for name, value in {"a": numbers, "b": numbers, "c": torch.arange(size)}.items():
            self.register_buffer(name, value, persistent=False)


def test_a_model_made_on_meta() -> None:
    model, images = classifier(), torch.rand(2, 1, 8, 8)
    with torch.device("meta"):
        empty, half, shared = classifier(), classifier().bfloat16(), Shared()
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    empty.position.fill_(float("nan"))
    restore_constants(empty, classifier())
    assert torch.equal(empty(images), model(images))
    restore_constants(half, classifier())  # buffers become real, and dtypes stay
    assert half.position.device.type == "cpu" and half.position.dtype == torch.bfloat16
    torch.testing.assert_close(half.position, classifier().position.bfloat16())
    norm: Any = nn.BatchNorm1d(3)
    norm.running_mean.fill_(2.0)
    restore_constants(norm, nn.BatchNorm1d(3))  # what is in the state dict stays
    assert (norm.running_mean == 2).all()
    restore_constants(shared.to_empty(device="cpu"), Shared())
    for name in ("a", "b"):
        assert torch.equal(shared.get_buffer(name), torch.arange(4.0))


def test_a_refused_model_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"arguments of model; other: .*position"):
        restore_constants(classifier(), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"arguments of model; other: .*position"):
        restore_constants(classifier(), classifier(16))
    model: Any = Shared()
    model.a.fill_(7.0)
    with torch.device("meta"):
        empty = Shared()
    wrong = {"arguments of model; other: .*c": Shared(5), 'a is on the device "meta"': empty}
    for words, fresh in wrong.items():
        with pytest.raises(ValueError, match=words):
            restore_constants(model, fresh)
        assert (model.a == 7).all()
