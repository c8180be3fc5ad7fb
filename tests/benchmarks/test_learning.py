"""``benchmarks/learning.py`` on few images: every row runs, tasks leak nothing, a command goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")
pytest.importorskip("tyro", reason="the benchmark reads its options with tyro")

from benchmarks import learning
from benchmarks.learning import ABLATIONS, ROWS, Run, TokenModel, perform, recall, task_of


@pytest.mark.parametrize("row", [name for name, build in (ROWS | ABLATIONS).items() if build])
def test_a_row_trains_every_weight(row: str) -> None:
    torch.manual_seed(0)
    build = (ROWS | ABLATIONS)[row]
    assert build is not None
    layer, x = build(5, 8, 2), torch.randn(3, 5, 8, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    (out * torch.randn_like(out)).sum().backward()
    for weight in [x, *(each for each in layer.parameters() if each.requires_grad)]:
        assert weight.grad is not None and weight.grad.isfinite().all()


def test_no_test_image_is_trained_on() -> None:
    for name in ("digits", "same-different"):
        task = task_of(name, None)
        seen, unseen = (
            {row.numpy().tobytes() for row in part[0]} for part in (task.train, task.test)
        )
        assert not seen & unseen


def test_recall_is_answered_by_the_pairs() -> None:
    pairs, values = recall(50).train
    for sequence, value in zip(pairs, values, strict=True):
        (place,) = (sequence[1:, 0] == sequence[0, 0]).nonzero().flatten().tolist()
        assert sequence[1 + place, 1] == value
    model = TokenModel(recall(10), lambda n, d, h: torch.nn.Identity(), 1, "query")
    other = pairs.clone()
    other[:, 1:] = pairs[:, 1:].flip(0)
    assert torch.equal(model(pairs), model(other))  # nothing is mixed: only the first token is read


def test_a_command_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "tasks": ("digits",),
        "rows": ("logistic", "per-token", "block"),
        "readouts": ("class",),
    }
    options |= {"limit": 100, "epochs": 1, "seeds": 2, "rates": (1e-3, 3e-3), "out": tmp_path}
    threads, asked = torch.get_num_threads(), list[Run]()

    def until_the_sixth(run: Run) -> dict[str, object]:
        asked.append(run)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return perform(run)

    monkeypatch.setattr(learning, "perform", until_the_sixth)
    try:
        with pytest.raises(KeyboardInterrupt):
            learning.main(**options)  # type: ignore[arg-type]
        rows = learning.main(**options)  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(threads)
    assert len(asked) == len(set(asked)) + 1 == 1 + (3 + 1) + 2 * (2 + 2)
    assert [row["row"] for row in rows] == ["logistic", "per-token", "block"]
    assert rows[2]["converged (worst epoch)"] == 1.0 and "evaluations" not in rows[1]
