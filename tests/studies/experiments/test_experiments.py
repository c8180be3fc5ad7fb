"""Every experiment as its sub-command: help, figure, tables, the same numbers again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from implicit_attn.studies.command import main
from implicit_attn.studies.experiments.registry import EXPERIMENTS, WINGS

for module in ("matplotlib", "tqdm"):
    pytest.importorskip(module, reason="studies need the extra [examples]")

NAMES = sorted(EXPERIMENTS)


def tables(folder: Path) -> dict[str, list[dict[str, str]]]:
    found = {}
    for path in sorted(folder.glob("*.csv")):
        with path.open(newline="") as file:
            found[path.name] = list(csv.DictReader(file))
    return found


def test_no_name_is_given_twice() -> None:
    assert len(EXPERIMENTS) == sum(len(wing.EXPERIMENTS) for wing in WINGS)


@pytest.mark.parametrize("name", NAMES)
def test_a_quick_run_writes_the_same_numbers_whatever_the_random_state(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture and tables, too."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        folder = tmp_path / str(seed)
        main([name, "--out", str(folder), *EXPERIMENTS[name].quick])
        results.append(tables(folder))
        assert torch.equal(torch.random.get_rng_state(), state), "the global random state changed"
        picture = folder / f"{name}.png"
        assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert str(picture) in capsys.readouterr().out
    assert results[0] and all(results[0].values())
    assert results[0] == results[1]


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_it_does(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert EXPERIMENTS[name].run.__doc__
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert all(flag in said for flag, *_ in EXPERIMENTS[name].options)
