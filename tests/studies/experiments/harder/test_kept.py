"""Trainings in files: read again as they were, refused where they are of something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from implicit_attn.studies.experiments.harder import runs
from implicit_attn.studies.experiments.harder.contenders import EQUILIBRIUM, MAJORITY, Settings
from implicit_attn.studies.experiments.harder.found import Found
from implicit_attn.studies.experiments.harder.runs import run_all

SETTINGS = Settings(size=4, steps=1, batch=4, tests=4, dim=8, heads=2)


def test_a_run_goes_on_after_the_trainings_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []

    def counted(settings: Settings, seed: int, name: str, *rest: object) -> Found:
        trained.append((name, seed))
        row = {"model": name, "seed": seed, "solved": 1 / 3, "iterations": None}
        picture = torch.tensor([[True, False]]) if name == EQUILIBRIUM else None
        return Found([row], needed=[row], picture=picture)

    monkeypatch.setattr(runs, "_run_one", counted)
    folder = tmp_path / "new" / "folder"
    whole = run_all(SETTINGS, [0, 1], lambda what: None)
    run_all(SETTINGS, [0, 1], lambda what: None, folder)
    files = sorted(folder.iterdir())
    assert len(files) == 10 and all(path.suffix == ".json" for path in files)
    (folder / "one-iteration-1.json").unlink()
    trained.clear()
    again = run_all(SETTINGS, [0, 1], lambda what: None, folder)
    assert trained == [("one iteration", 1)]
    assert again.as_plain() == whole.as_plain()
    assert again.picture is not None and again.picture.tolist() == [[True, False]]
    assert again.picture.dtype == torch.bool
    common = [row for row in again.sizes if row["model"] == MAJORITY]
    assert [row["size"] for row in common] == [4, 6, 8, 12, 16]
    assert all(0.2 < row["accuracy"] < 0.8 for row in common)


def test_files_of_other_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "equilibrium-0.json"
    path.write_text(json.dumps({"by": [], **Found().as_plain()}))
    with pytest.raises(ValueError, match="keep must be of the same options"):
        run_all(SETTINGS, [0], lambda what: None, tmp_path)
    for text in ("{", "[]", "{}"):
        path.write_text(text)
        with pytest.raises(ValueError, match="keep must hold files of this experiment"):
            run_all(SETTINGS, [0], lambda what: None, tmp_path)
