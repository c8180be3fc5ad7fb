"""Rings and their parities, and instances of any task."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from implicit_attn.data.tasks.instances import Instances
from implicit_attn.data.tasks.ring_parity import draw_rings


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("size", "marks"), [(1, (1, 1)), (2, (1, 2)), (7, (1, 3)), (12, (4, 20))])
def test_parities_and_runs_by_hand(size: int, marks: tuple[int, int]) -> None:
    rings = draw_rings(20, size, marks=marks, generator=generator())
    for ring in range(20):
        bits = [int(b) for b in (rings.inputs[ring, :, 0] > 0)]
        marked = [bool(m) for m in (rings.inputs[ring, :, 1] > 0)]
        assert min(marks[0], size) <= sum(marked) <= marks[1]
        longest = 0
        for place in range(size):
            back = next(n for n in range(size) if marked[(place - n) % size])
            run = [bits[(place - n) % size] for n in range(back + 1)]
            assert int(rings.targets[ring, place]) == sum(run) % 2
            longest = max(longest, len(run))
        assert int(rings.difficulty[ring]) == longest


def test_same_seed_same_rings_and_half_are_odd() -> None:
    first, second, other = (draw_rings(400, 9, generator=generator(s)) for s in (3, 3, 4))
    assert torch.equal(first.inputs, second.inputs)
    assert not torch.equal(first.inputs, other.inputs)
    assert abs(first.targets.float().mean().item() - 0.5) < 0.05
    assert {int(n) for n in (first.inputs[..., 1] > 0).sum(1)} == {1, 2, 3}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"number": 0}, "number"),
        ({"size": 0}, "size"),
        ({"marks": (0, 2)}, r"marks\[0\]"),
        ({"marks": (3, 2)}, "marks must be"),
    ],
)
def test_wrong_sizes_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        draw_rings(**({"number": 2, "size": 4, "generator": generator()} | options))


def made(**changes: Any) -> Instances:
    usual = {
        "inputs": {"a": torch.zeros(3, 2, 5), "b": torch.arange(3)},
        "targets": torch.tensor([[0, 1], [1, 1], [0, 0]]),
        "counted": torch.tensor([[True, False], [True, True], [False, True]]),
        "difficulty": torch.arange(3),
    }
    return Instances(**(usual | changes))


def test_parts_and_right_positions() -> None:
    instances = made()
    parts = list(instances.split(2))
    assert [len(part) for part in parts] == [2, 1]
    assert parts[1].inputs["b"].tolist() == [2]
    right = instances.right(torch.ones(3, 2, dtype=torch.int64))
    # Positions that are not asked for are never wrong.
    assert right.tolist() == [[False, True], [True, True], [True, False]]
    with pytest.raises(ValueError, match="predicted must be"):
        instances.right(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"targets": torch.zeros(3, 2)}, TypeError, "targets must be int64"),
        ({"counted": torch.ones(3, 2)}, TypeError, "counted must be bool"),
        ({"inputs": torch.zeros(2, 4)}, ValueError, "inputs must have 3 instances"),
        ({"difficulty": torch.zeros(3, 1)}, ValueError, "difficulty must be"),
        ({"difficulty": torch.zeros(2)}, ValueError, "difficulty must have 3"),
        (
            {"counted": torch.tensor([[True, True], [False, False], [True, True]])},
            ValueError,
            "got none of 1",
        ),
    ],
)
def test_instances_that_do_not_fit(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        made(**changes)
