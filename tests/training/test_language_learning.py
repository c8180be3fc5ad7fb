"""What the attention forms learn in 400 steps: the order of their losses on the characters of novels.

The settings are those of ``benchmarks/language.py forms --size tiny``, on shorter windows and fewer of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from implicit_attn.data import load_text
from implicit_attn.models import LanguageModel
from implicit_attn.training import NextToken, Recipe, Training

pytest.importorskip("safetensors", reason="a training writes checkpoints")
pytest.importorskip("lightning_fabric", reason="a training runs in Fabric's processes")

STEPS, BATCH, LENGTH = 400, 16, 32


def loss_of(folder: Path, attention: str, descent: str) -> float:
    """The validation loss of a form, with the same windows and initial weights for all."""
    try:
        data = load_text("austen")
    except FileNotFoundError as error:
        pytest.skip(f"the novels are not at hand: {error}")
    torch.manual_seed(0)
    model = LanguageModel(
        len(data.alphabet), 64, 4, 4, LENGTH, attention=attention, descent=descent, dropout=0.0
    )
    recipe = Recipe(
        1, BATCH, 3e-3, warmup=0.1, floor=0.0, weight_decay=0.01, decay="linear", decayed="matrices"
    )
    task = NextToken(data, LENGTH, samples=STEPS * BATCH)
    training = Training(model, task, recipe, folder / f"{attention}-{descent}.safetensors")
    training.run()
    return training.evaluate()["validation_loss"]


@pytest.mark.slow
def test_what_the_forms_learn(tmp_path: Path) -> None:
    plain = loss_of(tmp_path, "softmax", "plain")
    assert plain < 2.35  # counts of pairs of characters: 2.443
    assert loss_of(tmp_path, "softmax", "momentum") < plain
    assert abs(loss_of(tmp_path, "light-newton-taylor", "plain") - plain) < 0.02
    assert loss_of(tmp_path, "newton-taylor", "plain") > plain + 0.1
