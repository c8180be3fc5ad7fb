"""What programs that train a backbone share: which one, its presets, its specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from implicit_attn.models import build_model
from implicit_attn.models.registry import BACKBONES
from implicit_attn.training.script import Program, Values, layer_options

SOLVED = tuple(name for name, row in BACKBONES.items() if row.solves)
Data = Literal["digits", "mnist", "fashion-mnist", "cifar10"]
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVES: Values = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}


@dataclass(kw_only=True)
class BackboneProgram(Program):
    """Hyper-SET, its equilibrium, or a baseline; ``--options`` reaches every argument of the model."""

    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "energy-transformer",
        "crate", "spin-transformer",
    ] = "hyperset"  # fmt: skip
    preset: Literal["small", "paper"] = "small"
    """what two cores train, or what is published of Hyper-SET"""
    iterations: int | None = None
    """of the layer, in each batch the same number; of an equilibrium the most evaluations"""
    layers: int | None = None
    """with weights of their own, each repeated"""

    def values_of(self, preset: Mapping[str, Any], solves: Mapping[str, Any] = SOLVES) -> Values:
        """The values of the run, without those of the preset that the model does not take."""
        preset = {**preset, **(solves if self.model in SOLVED else {})}
        own = self.further()
        if self.iterations is not None:  # asked for: no random numbers unless these are, too
            preset.pop("random_iterations", None)
        # A preset's first step, 0 for example, is meant for a network that says the steps.
        plain = not str(own.get("step_size", "conditioned-")).startswith("conditioned-")
        if self.model != "hyperset" or plain:
            preset.pop("initial_step", None)
        if isinstance(BACKBONES[self.model].width, str):  # it takes none
            preset.pop("width", None)
        return self.values(preset, "iterations", "layers")

    def build(self, around: Values, values: Values, step_size: str) -> tuple[Values, nn.Module]:
        """The specification and the model: ``around`` of it, of ``values`` the backbone and rtol."""
        rtol = values.pop("rtol", None)
        backbone = {"name": self.model, **values}
        if self.model == "hyperset":
            backbone = {"step_size": step_size, **backbone}
        specification = {**around, "backbone": backbone}
        layer = layer_options(rtol) if self.model in SOLVED else None
        if layer is None and rtol is not None:
            raise ValueError(f"rtol is for {' and '.join(SOLVED)}, got the model {self.model}")
        torch.manual_seed(self.seed)
        return specification, build_model(specification, layer=layer)


def take(values: Values, *names: str) -> Values:
    """The named values that are there, taken out of ``values``."""
    return {name: values.pop(name) for name in names if values.get(name) is not None}
