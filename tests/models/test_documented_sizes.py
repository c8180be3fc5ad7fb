"""Parameter counts in the documents are those of the models, and say what they count."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from implicit_attn.data import load
from implicit_attn.models import SpinClassifier, build_model
from implicit_attn.studies.trading_off import layers_of_depth, small_classifier
from implicit_attn.updates import ConditionedStepSizes

pytestmark = pytest.mark.defect("D13")
ROOT = Path(__file__).resolve().parents[2]


def text_of(document: str) -> str:
    return " ".join((ROOT / document).read_text("utf-8").split())


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def sizes(specification: dict[str, Any], layers: int, iterations: int) -> tuple[int, int, int]:
    """All parameters; those of one step-size network; all, if the layers shared one."""
    backbone = {**specification["backbone"], "layers": layers, "iterations": iterations}
    model = build_model({**specification, "backbone": backbone})
    networks = [size(m) for m in model.modules() if isinstance(m, ConditionedStepSizes)]
    assert len(networks) == layers
    return size(model), networks[0], size(model) - sum(networks[1:])


def row(document: str, name: str) -> list[str]:
    """Cells of the table row that begins with ``name``."""
    for line in (ROOT / document).read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0].startswith(name):
            return cells[1:]
    raise AssertionError(f"{document} has no row {name!r}")


def test_layers_against_iterations() -> None:
    specification = small_classifier(load("digits"))
    found = [sizes(specification, *pair) for pair in layers_of_depth(12)]
    assert row("docs/results.md", "parameters") == [f"{own:,}" for own, _, _ in found]
    shared = "parameters, one step-size network for all layers"
    assert row("docs/results.md", shared) == [f"{all_one:,}" for _, _, all_one in found]
    text = text_of("docs/results.md")
    (first, network, _), (last, _, last_shared) = found[0], found[-1]
    added = found[1][0] - first
    assert f"{network:,} of the {added:,} parameters that a layer adds" in text
    assert f"{last / first:.1f} times the parameters, or {last_shared / first:.1f} times" in text


def test_twelve_layers_for_imagenet() -> None:
    backbone = {"name": "hyperset", "dim": 768, "heads": 12}
    shape = {"image_size": 224, "channels": 3, "classes": 1000, "patch": 16, "readout": "class"}
    with torch.device("meta"):
        own, _, shared = sizes(
            {"kind": "image-classifier", **shape, "backbone": backbone}, layers=12, iterations=1
        )
    stated = f"{own / 1e6:.1f} M parameters here and {shared / 1e6:.1f} M with one network"
    assert stated in text_of("docs/results.md")


def test_spins_on_mnist_match_the_published_size_only() -> None:
    name = f"MNIST, coupled spins, {size(SpinClassifier()):,} parameters"
    published = row("README.md", name)[-1]
    assert re.search(r"25,828 parameters: only the size is matched", published)
