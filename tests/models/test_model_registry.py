"""Models from specifications, and back from checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cases.studies import specification
from implicit_attn.checkpoint import save_checkpoint
from implicit_attn.models import BACKBONES, ImageClassifier, build_model, load_model

pytest.importorskip("safetensors", reason="checkpoints need it")


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_round_trip(name: str, tmp_path: Path) -> None:
    """The rebuilt model has the same outputs, and survives JSON on the way."""
    wanted = json.loads(json.dumps(specification(name, iterations=3)))
    # Three evaluations do not solve an equilibrium, which would warn.
    layer = {"on_failure": "ignore"} if BACKBONES[name].solves else None
    model = build_model(wanted, layer=layer)
    assert isinstance(model, ImageClassifier)
    path = tmp_path / "weights.safetensors"
    progress = {"settings": {"model": wanted}, "history": [{"epoch": 1}]}
    save_checkpoint(path, model, progress=progress)
    again, kept = load_model(path, layer=layer)
    assert not again.training and kept == progress
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model.eval()(images), again(images))


BACKBONE = {"name": "crate", "dim": 8, "heads": 2}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kind": "poem", "backbone": BACKBONE}, ValueError, "'poem'"),
    ({"kind": "sudoku"}, ValueError, "backbone must be a dict"),
    ({"kind": "sudoku", "backbone": {"dim": 8}}, ValueError, "with 'name'"),
    ({"kind": "sudoku", "backbone": BACKBONE, "colour": 1}, TypeError, "colour"),
]


@pytest.mark.parametrize(("wanted", "kind", "message"), WRONG)
def test_wrong_specifications(wanted: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        build_model(wanted)


@pytest.mark.parametrize("settings", [{}, {"model": "hyperset"}])
def test_checkpoint_that_does_not_say_how(settings: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, torch.nn.Linear(2, 2), progress={"settings": settings})
    with pytest.raises(ValueError, match="does not say how its model is built"):
        load_model(path)
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "none.safetensors")
