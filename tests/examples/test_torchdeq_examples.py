"""The examples ported from torchdeq: the same losses by both libraries, and every engine runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("sklearn", reason="the digits need the extra [examples]")
Load = Callable[[str], ModuleType]
SIZES: dict[str, dict[str, Any]] = {
    "language_model": {"dim": 16, "heads": 2, "length": 12, "batch": 4},
    "multiscale_digits": {"channels": 4, "batch": 8},
}


@pytest.mark.parametrize("name", SIZES)
def test_losses_agree_by_every_engine(name: str, load: Load) -> None:
    """Twelve steps of training: within 1 % of torchdeq's at each of them, and they fall."""
    example = load(f"torchdeq/{name}")
    records = {
        engine: example.run(
            example.Options(engine=engine, steps=12, rate=5e-3, **SIZES[name]), report=0
        )
        for engine in ("torchdeq", "bridge", "ours")
    }
    expected = records["torchdeq"]
    assert sum(expected.losses[6:]) < sum(expected.losses[:6])
    for engine in ("bridge", "ours"):
        found = records[engine]
        for mine, other in zip(found.losses, expected.losses, strict=True):
            assert abs(mine - other) < 0.01 * other
        assert max(found.residuals) <= 1e-3
        assert sum(found.forward) <= sum(expected.forward)
        assert sum(found.backward) <= sum(expected.backward)


def test_the_comparison_prints_its_table(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    load("torchdeq/compare").main(("digits",), seeds=1, steps=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "torchdeq", "bridge", "ours", "ours, as exact",
    ]  # fmt: skip
    assert all(float(line[-7:]) < 1.1e-3 for line in lines[2:])
    assert "0.00 %" in lines[2]
