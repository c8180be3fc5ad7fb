"""What programs that train a backbone share: which one, its presets, its specification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from implicit_attn.models import build_model
from implicit_attn.models.registry import BACKBONES
from implicit_attn.training import Training, describe
from implicit_attn.training.script import Program, Values, layer_options, save_weights

SOLVED = tuple(name for name, row in BACKBONES.items() if row.solves)
Data = Literal["digits", "mnist", "fashion-mnist", "cifar10"]
# The iterations of an equilibrium are the most evaluations of a solve, which seldom needs as many.
SOLVES: Values = {"iterations": 50, "random_iterations": None, "rtol": 1e-3}


@dataclass(kw_only=True)
class BackboneProgram(Program):
    """Hyper-SET, its equilibrium, or a baseline; ``--options`` reaches every argument of the model."""

    model: Literal[
        "hyperset", "hyperset-equilibrium", "equilibrium", "transformer", "deq-transformer",
        "energy-transformer", "crate", "spin-transformer",
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

    def report(self, training: Training) -> None:
        """The weights alone, and the test measures at 1/2 to 4 times the trained iterations.

        In every process, because the test samples are split among them; the first one writes.
        """
        trained = training.settings["model"]["backbone"]["iterations"]
        numbers = sorted({max(1, round(times * trained)) for times in (0.5, 1, 2, 4)})
        found = {number: training.evaluate(number) for number in numbers}
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        size = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"\n{training.data.name}, {self.model}, {size} parameters; {training.summary()}")
        print("test measures by iterations:")
        for number, measures in found.items():
            print(f"  {number:3d}  " + "  ".join(describe(*each) for each in measures.items()))
        print(f"tables, checkpoint and weights: {self.place}")


def take(values: Values, *names: str) -> Values:
    """The named values that are there, taken out of ``values``."""
    return {name: values.pop(name) for name in names if values.get(name) is not None}
