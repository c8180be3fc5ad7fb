"""A checkpoint is loaded whole or not at all: damaged in any part, it is named and changes nothing."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import load_checkpoint, read_progress, save_checkpoint

files = pytest.importorskip("safetensors.torch", reason="checkpoints are safetensors files")
Change = Callable[[dict[str, Tensor], dict[str, str]], object]


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_parameter("scale", nn.Parameter(torch.rand(())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.randn(5, 3)) * model.scale).square().sum().backward()
        optimizer.step()
    return model, optimizer


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything that a load may change, copied."""
    kept = optimizer.state_dict()
    found: dict[str, Any] = {k: v.clone() for k, v in model.state_dict().items()}
    for index, entries in kept["state"].items():
        found |= {f"{index}.{name}": value.clone() for name, value in entries.items()}
    return found | {"groups": json.dumps(kept["param_groups"]), "random": torch.get_rng_state()}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def rewrite(path: Path, change: Change) -> None:
    """Change the contents and write them as somebody could, in the format without a checksum."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(str(path), framework="pt") as file:
        texts, tensors = (
            file.metadata(),
            {name: file.get_tensor(name) for name in list(file.keys())},
        )
    texts.pop("checksum", None)
    texts["format"] = "implicit-attn checkpoint 1"
    change(tensors, texts)
    files.save_file(tensors, str(path), metadata=texts)


def put(name: str, value: Tensor | None) -> Change:
    """The tensor replaced, or taken away."""

    def change(tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        del tensors[name]
        if value is not None:
            tensors[name] = value

    return change


def spoil(name: str, value: float) -> Change:
    """One element replaced."""
    return lambda tensors, _: tensors[name].view(-1)[0].fill_(value)


def as_dtype(name: str, dtype: torch.dtype) -> Change:
    return lambda tensors, _: tensors.update({name: tensors[name].to(dtype)})


def say(name: str, text: str | None) -> Change:
    """A text of the header replaced, or taken away."""
    return lambda _, texts: texts.pop(name) if text is None else texts.update({name: text})


def regroup(**options: Any) -> Change:
    """Options of the optimizer's group replaced, or with None taken away."""

    def change(tensors: dict[str, Tensor], texts: dict[str, str]) -> None:
        groups = json.loads(texts["groups"])
        for name, value in options.items():
            del groups[0][name]
            if value is not None:
                groups[0][name] = value
        texts["groups"] = json.dumps(groups)

    return change


def rename(old: str, new: str) -> Change:
    return lambda tensors, _: tensors.update({new: tensors.pop(old)})


DAMAGE: dict[str, tuple[Change, str]] = {
    "random missing": (put("random.torch", None), "random state"),
    "random short": (put("random.torch", torch.zeros(3, dtype=torch.uint8)), "random state"),
    "random numbers": (put("random.torch", torch.zeros(5056)), "random state"),
    "random zero": (put("random.torch", torch.zeros(5056, dtype=torch.uint8)), "random state"),
    "progress missing": (say("progress", None), "progress"),
    "progress broken": (say("progress", '{"epoch": '), "progress"),
    "progress a list": (say("progress", "[1, 2]"), "progress must be a dict"),
    "progress deep": (say("progress", "[" * 100_000), "progress"),
    "groups missing": (say("groups", None), "groups"),
    "groups broken": (say("groups", "{"), "groups"),
    "groups a dict": (say("groups", "{}"), "groups must be a list"),
    "groups of numbers": (say("groups", "[3]"), "does not fit the optimizer"),
    "groups none": (say("groups", "[]"), "holds no optimizer state"),
    "optimizer missing": (say("optimizer", None), "optimizer"),
    "optimizer other": (say("optimizer", "SGD"), "was made with SGD"),
    "parameters missing": (regroup(params=[0, 1, 2]), "groups of .3. parameters, expected .7."),
    "parameters other": (regroup(params=[0, 2, 1, 3, 4, 5, 6]), "does not fit the optimizer"),
    "parameters a text": (regroup(params="abc"), "does not fit the optimizer"),
    "rate missing": (regroup(lr=None), "has no 'lr'"),
    "rate nan": (regroup(lr=math.nan), "lr=nan"),
    "rate a text": (regroup(lr="fast"), "lr='fast'"),
    "betas short": (regroup(betas=[0.9]), "betas"),
    "weight missing": (put("model.0.weight", None), r"0\.weight is None in the file"),
    "weight extra": (
        lambda t, _: t.update({"model.more": torch.ones(2)}),
        "more .* None in the mo",
    ),
    "weight shape": (put("model.0.weight", torch.ones(4, 2)), r"0\.weight is \(4, 2\)"),
    "weight turned": (put("model.0.weight", torch.ones(3, 4)), r"0\.weight is \(3, 4\)"),
    "weight int": (as_dtype("model.0.weight", torch.int64), r"0\.weight .* int64 .* float32"),
    "weight half": (as_dtype("model.0.weight", torch.float16), r"0\.weight .* float16"),
    "count float": (as_dtype("model.1.num_batches_tracked", torch.float32), "num_batches_tracked"),
    "weight nan": (spoil("model.0.weight", math.nan), r"0\.weight is not finite"),
    "weight inf": (spoil("model.2.bias", -math.inf), r"2\.bias is not finite"),
    "entry missing": (put("optimizer.0.exp_avg_sq", None), "exp_avg_sq"),
    "step missing": (put("optimizer.4.step", None), "step"),
    "entry shape": (put("optimizer.0.exp_avg", torch.ones(7)), r"exp_avg.* \(7,\)"),
    "entry one number": (put("optimizer.1.exp_avg", torch.ones(4, 1)), r"exp_avg.* \(4, 1\)"),
    "entry int": (as_dtype("optimizer.0.exp_avg", torch.int32), "exp_avg.* int32"),
    "entry of a number int": (as_dtype("optimizer.0.exp_avg", torch.int8), "exp_avg.* int8"),
    "entry nan": (spoil("optimizer.3.exp_avg", math.nan), "exp_avg .* is NaN"),
    "step negative": (spoil("optimizer.3.step", -1.0), "step"),
    "step many": (put("optimizer.3.step", torch.ones(4)), "step"),
    "index beyond": (rename("optimizer.6.step", "optimizer.9.step"), "parameter 9"),
    "index no number": (rename("optimizer.6.step", "optimizer.x.step"), r"optimizer\.x\.step"),
    "entry no name": (rename("optimizer.6.step", "optimizer.6"), r"optimizer\.6"),
}


@pytest.mark.defect("B1")
@pytest.mark.defect("B4")
@pytest.mark.defect("C4")
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_changes_nothing(tmp_path: Path, name: str) -> None:
    """Also without the checksum, which says as much and less clearly."""
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})
    change, message = DAMAGE[name]
    rewrite(path, change)
    model, optimizer = build(seed=1)
    before = contents(model, optimizer)
    with pytest.raises(ValueError, match=rf"(?s)run\.safetensors.*{message}"):
        load_checkpoint(path, model, optimizer)
    assert same(contents(model, optimizer), before)


@pytest.mark.defect("B1")
def test_a_check_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 7})
    model, optimizer = build(seed=1)
    before = contents(model, optimizer)

    def refuse(progress: dict[str, Any], state: dict[int, Any]) -> None:
        assert len(state) == 7
        raise KeyError(progress["epoch"])

    with pytest.raises(KeyError, match="7"):
        load_checkpoint(path, model, optimizer, check=refuse)
    assert same(contents(model, optimizer), before)


@pytest.mark.defect("B1")
def test_a_model_that_refuses_leaves_the_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build())
    model, optimizer = build(seed=1)
    before = contents(model, optimizer)

    def refuse(*_: Any) -> None:
        raise RuntimeError("not these")

    model.register_load_state_dict_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="not these"):
        load_checkpoint(path, model, optimizer)
    assert same(contents(model, optimizer), before)


@pytest.mark.defect("B4")
@pytest.mark.defect("C4")
def test_flipped_bits_are_found(tmp_path: Path) -> None:
    """Anywhere in the file: an error that names it, or, where the bit means nothing, the same load."""
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1, "text": "ä"})
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    draw = random.Random(0)
    places = [*range(16), *(draw.randrange(header) for _ in range(120))]
    places += [draw.randrange(header, len(whole)) for _ in range(120)]
    model, optimizer = build(seed=1)
    before = contents(model, optimizer)
    accepted = 0
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            load_checkpoint(path, model, optimizer)
        except ValueError as error:
            assert "run.safetensors" in str(error)
            assert same(contents(model, optimizer), before), place
        else:  # a blank at the end of the header became another one, for instance
            accepted += 1
            assert place < header
            expected = build()
            path.write_bytes(whole)
            load_checkpoint(path, *expected)
            assert same(contents(model, optimizer), contents(*expected)), place
            model, optimizer = build(seed=1)
            before = contents(model, optimizer)
    assert accepted <= 3


def test_cut_and_replaced_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})
    whole = path.read_bytes()
    cuts = [*range(12), *random.Random(0).sample(range(12, len(whole)), 60), len(whole) - 1]
    pieces = [whole[:cut] for cut in cuts]
    pieces += [whole + b"\0", b"\x1f\x8b" + whole, b"PK\x03\x04", b"\xff" * 4096, bytes(4096)]
    pieces.append((10**15).to_bytes(8, "little") + whole[8:])
    nested = b'{"__metadata__":' + b'{"a":' * 5000
    pieces.append(len(nested).to_bytes(8, "little") + nested)
    model, optimizer = build(seed=1)
    before = contents(model, optimizer)
    for piece in pieces:
        path.write_bytes(piece)
        for read in (lambda: load_checkpoint(path, model, optimizer), lambda: read_progress(path)):
            with pytest.raises(ValueError, match=r"run\.safetensors"):
                read()
    assert same(contents(model, optimizer), before)


@pytest.mark.defect("B4")
def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    """Those written before there was one; but not one of today that lost it."""
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, *build(), {"epoch": 1})
    rewrite(path, lambda *_: None)
    model, optimizer = build(seed=1)
    assert load_checkpoint(path, model, optimizer) == {"epoch": 1}
    expected = build()
    for name, value in contents(*expected).items():
        found = contents(model, optimizer)[name]
        assert name == "random" or (
            torch.equal(found, value) if isinstance(value, Tensor) else found == value
        )
    rewrite(path, say("format", "implicit-attn checkpoint 2"))
    with pytest.raises(ValueError, match="it has no checksum"):
        load_checkpoint(path, model, optimizer)


@pytest.mark.defect("B4")
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    model, optimizer = build()
    save_checkpoint(path, model, optimizer, {"epoch": 1})
    weight = model.get_parameter("0.weight")
    optimizer.state[weight]["exp_avg"][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"exp_avg .* is NaN"):
        save_checkpoint(path, model, optimizer)
    with torch.no_grad():
        weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"0\.weight is not finite"):
        save_checkpoint(path, model)
    assert load_checkpoint(path, *build()) == {"epoch": 1}


def test_infinities_of_buffers_and_frozen_parameters_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor([0.0, -math.inf, math.nan]))
    model.bias.requires_grad_(False).fill_(math.inf)
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, model)
    other = nn.Linear(2, 2)
    other.register_buffer("mask", torch.zeros(3))
    other.bias.requires_grad_(False)
    load_checkpoint(path, other)
    torch.testing.assert_close(
        other.state_dict(), model.state_dict(), equal_nan=True, rtol=0, atol=0
    )


KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_optimizer_goes_on_exactly(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """The checks refuse none of what torch's optimizers keep, a parameter without gradient among it."""

    def make(seed: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        shapes: list[tuple[int, ...]] = [(3, 2), (4,), (), (2, 1, 3), (1,), (5,)]
        values = nn.ParameterList([nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes])
        return values, KINDS[kind](list(values))

    def step(values: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for value in list(values)[:-1]:
            value.square().sum().backward()
        optimizer.step()

    path = tmp_path / "run.safetensors"
    first, other = make(0), make(1)
    step(*first)
    save_checkpoint(path, *first)
    load_checkpoint(path, *other)
    step(*first)
    step(*other)
    for mine, theirs in zip(first[0], other[0], strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
        torch.int64, torch.int16, torch.uint8, torch.bool,
    ],
    ids=str,
)  # fmt: skip
def test_buffers_of_every_dtype_and_shape(tmp_path: Path, dtype: torch.dtype) -> None:
    def make(values: Tensor) -> nn.Module:
        model = nn.Module()
        for name, view in {"a": values, "b": values[1], "c": values[:0], "d": values[::2]}.items():
            model.register_buffer(name, view)
        return model

    values = torch.arange(-3, 9).reshape(6, 2).to(dtype)
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, make(values))
    loaded = make(torch.zeros(6, 2).to(dtype))
    load_checkpoint(path, loaded)
    stored = files.load_file(str(path))
    for name, value in make(values).state_dict().items():
        own = loaded.get_buffer(name)
        for found in (own, stored[f"model.{name}"]):
            assert found.dtype == dtype
            assert found.shape == value.shape
        if name != "c" and dtype.itemsize > 1:  # these share their memory in the loaded model
            assert torch.equal(stored[f"model.{name}"], value)


def test_what_safetensors_does_not_know_is_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(TypeError, match=r"model\.wide must be a dense tensor .*complex128"):
        save_checkpoint(tmp_path / "run.safetensors", model)
    assert list(tmp_path.iterdir()) == []
