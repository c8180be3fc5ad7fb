"""What the integration examples need around them in tests: no network, and torchvision beside any torch.

timm, torchmetrics and transformers import torchvision. That of PyPI is compiled for torch with CUDA; beside
the wheel of torch for CPUs its library does not load, and its import fails at shape functions for two
operators that are then unknown ("operator torchvision::nms does not exist"). Nothing here calls them, so
their schemas are enough. With a torchvision that fits its torch this does nothing.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def _name_missing_operators() -> torch.library.Library | None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:  # compiled for another torch
        missing = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            missing.define(name + _SCHEMA)
        return missing
    return None


_KEPT = _name_missing_operators()  # its operators live as long as it does
