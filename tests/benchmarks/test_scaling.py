"""The ring of devices is exact and counts its bytes; implicit memory does not grow; the curves are made."""

from __future__ import annotations

import pytest
import torch

from benchmarks import curves, memory, ring
from benchmarks.ring import gather, places, scatter


@pytest.mark.parametrize(
    ("devices", "causal", "masked"), [(2, True, True), (3, False, False), (4, True, False)]
)
def test_the_ring_is_exact_and_sends_what_is_planned(
    devices: int, causal: bool, masked: bool
) -> None:
    found = ring.exactness(devices, causal, masked, tokens=24)
    for name in ("gradient", "HVP", "adjoint"):
        assert found[name] <= 1e-12, name  # type: ignore[operator]
    assert found["bytes / plan"] == 1


def test_places_divide_the_tokens() -> None:
    for zigzag in (False, True):
        where = places(12, 3, zigzag)
        whole = torch.randn(1, 1, 12, 2)
        assert torch.equal(gather(scatter(whole, where), where), whole)
    assert places(8, 2, True)[0].tolist() == [0, 1, 6, 7]
    with pytest.raises(ValueError, match="multiple of 6"):
        places(8, 3, True)


def test_what_implicit_layers_save_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "ITERATIONS", (2, 12))
    # Weights are kept anyway, and do not count.
    for name, (run, module) in memory.models(2, 8, 2).items():
        weights = list(module.parameters())
        x = torch.ones(1, 3, 8, requires_grad=True)
        counted, _ = memory.saved_bytes(lambda run=run, x=x: run(x), [])
        own, _ = memory.saved_bytes(lambda run=run, x=x: run(x), weights)
        assert weights and own < counted, name
    rows = memory.measure(2, 5, 8, 2)
    saved = {(row["way"], row["iterations"]): row["saved MB"] for row in rows}
    assert saved["implicit", 2] == saved["implicit", 12] > 0
    for way in ("unrolled", "transformer layers"):
        assert saved[way, 12] > 2 * saved[way, 2], way
    assert saved["unrolled, checkpointed", 12] < 0.7 * saved["unrolled", 12]


def test_curves_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "BASE", {"B": 2, "N": 4, "d": 8})
    rows = curves.measure(1, {"N": (5,)})
    assert [row["layer"] for row in rows] == list(curves.COLORS)
    assert all(row["converged"] == 1 and row["ms"] > 0 for row in rows)
    assert all(row["evaluations"] > 1 and row["backward"] > 0 for row in rows[:2])
    assert rows[2]["evaluations"] == 1
