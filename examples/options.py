"""Options of the training scripts: a recipe, where and how long a training runs, a backbone by name."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import solvers
from implicit_attn.models import BACKBONES

DEFAULTS = {
    "warmup": 0.05, "floor": 0.01, "weight_decay": 1e-2, "clip": 1.0, "optimizer": "adamw",
    "betas": (0.9, 0.999), "decay": "cosine", "decayed": "all", "average": 0.0,
}  # fmt: skip
# Other numbers must be positive.
MAY_BE_ZERO = (
    "seed", "warmup", "floor", "weight_decay", "average", "dropout", "initial_step", "rtol", "temperature",
    "minutes", "carried", "guesses",
)  # fmt: skip


def refuse(option: str, value: Any, error: Exception) -> SystemExit:
    """Return the end of a script whose ``--option`` leads to an error, as one line."""
    return SystemExit(f"--{option} {value}: {error}")


@dataclass(kw_only=True)
class Recipe:
    """How a model is trained. None stands for the script's preset, or for ``DEFAULTS``."""

    epochs: int | None = None
    """passes over the training samples"""
    batch: int | None = None
    """samples of a step, of all processes"""
    rate: float | None = None
    """largest learning rate"""
    warmup: float | None = None
    """share of the training in which the rate rises from 0"""
    floor: float | None = None
    """last rate as a share of the largest"""
    weight_decay: float | None = None
    clip: float | None = None
    """largest norm of the gradient"""
    optimizer: Literal["adamw", "adam"] | None = None
    betas: tuple[float, float] | None = None
    decay: Literal["cosine", "linear"] | None = None
    """of the rate after the warm-up"""
    decayed: Literal["all", "matrices"] | None = None
    """parameters on which the weight decay acts"""
    average: float | None = None
    """decay of a moving average of the weights, which is tested; 0: none"""
    random_iterations: tuple[int, int] | None = None
    """least and most iterations of a recurrent model, drawn for each step"""
    seed: int = 0
    """of the weights and of all that is drawn"""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if value < 0 or (value == 0 and name not in MAY_BE_ZERO):
                least = "0 or more" if name in MAY_BE_ZERO else "positive"
                raise SystemExit(f"--{name.replace('_', '-')} must be {least}, got {value:g}")

    def fill(self, preset: dict[str, Any]) -> Any:
        """Set what is None to the value in ``preset``, or else in ``DEFAULTS``; return the options."""
        for name, value in (DEFAULTS | preset).items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        return self

    def rate_at(self, done: float) -> float:
        """The learning rate where a share ``done`` of the training is done."""
        options: Any = self
        rise = min(1.0, done / options.warmup) if options.warmup else 1.0
        left = 0.5 * (1 + math.cos(math.pi * done))
        if self.decay == "linear":
            left = min(1.0, (1 - done) / (1 - options.warmup))
        return options.rate * rise * (options.floor + (1 - options.floor) * left)

    def build_optimizer(self, model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
        least = 0 if self.decayed == "all" else 2  # dimensions of a parameter that decays
        groups: list[Any] = [{"params": [p for p in model.parameters() if p.dim() >= least]}]
        if rest := [p for p in model.parameters() if p.dim() < least]:
            groups.append({"params": rest, "weight_decay": 0.0})
        options: Any = {"lr": self.rate, "betas": self.betas, "weight_decay": self.weight_decay}
        options["fused"] = fused or None  # None lets PyTorch choose
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, **options)

    def draw_iterations(self, generator: torch.Generator) -> int | None:
        if not isinstance(self.random_iterations, tuple):  # none, or always as many
            return self.random_iterations
        least, most = self.random_iterations
        return int(torch.randint(least, most + 1, (), generator=generator))

    def descend(self, model: nn.Module, loss: Callable[[torch.Generator], Tensor]) -> None:
        """Train a model by ``epochs`` steps; ``loss`` draws a batch and returns its loss."""
        optimizer, generator = self.build_optimizer(model), torch.Generator().manual_seed(self.seed)
        for step in range(self.epochs or 0):
            for group in optimizer.param_groups:
                group["lr"] = self.rate_at(step / (self.epochs or 1))
            value = loss(generator)
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.clip or math.inf)
            optimizer.step()
        model.eval()


@dataclass(kw_only=True)
class Run(Recipe):
    """Where and how long a training runs, besides its recipe."""

    out: Path | None = None
    """folder of the results"""
    minutes: float = math.inf
    """stop after so many; --resume goes on"""
    resume: bool = False
    """go on with the training in that folder"""
    devices: int = 1
    """processes, one a card or sharing the processor"""
    accelerator: str = "auto"
    """cpu, cuda, ..."""
    strategy: str = "auto"
    """of Lightning Fabric"""
    precision: Literal["32-true", "tf32", "bf16-mixed", "16-mixed", "64-true"] = "32-true"
    """of Lightning Fabric; tf32 is 32-true with products in TF32 on a card"""
    compile: bool = False
    """compile the repeated layer (a minute at the start)"""
    arguments: tuple[str, ...] = ()
    """further arguments of the model or its backbone, KEY=VALUE"""

    def further(self) -> dict[str, Any]:
        """The arguments in ``arguments``, read as JSON where they are, else as text."""
        found: dict[str, Any] = {}
        for word in self.arguments:
            key, equal, text = word.partition("=")
            if not equal:
                raise SystemExit(f"--arguments must be KEY=VALUE, got {word!r}")
            found[key] = text
            with contextlib.suppress(ValueError):
                found[key] = json.loads(text)
        return found


@dataclass(kw_only=True)
class Backbone(Run):
    """A training of Hyper-SET, of its equilibrium, or of another backbone."""

    preset: Literal["small", "paper"] = "small"
    """what two cores train, or what is published of Hyper-SET"""
    iterations: int | None = None
    """of the layer, in each step as many; of an equilibrium the most evaluations"""
    layers: int | None = None
    """with weights of their own, each repeated"""
    dim: int | None = None
    """features of a token"""
    heads: int | None = None
    width: int | None = None
    """memories, or hidden units"""
    initial_step: float | None = None
    """of Hyper-SET"""
    rtol: float | None = None
    """tolerance of an equilibrium"""

    def fill_for(self, name: str, preset: dict[str, Any], solved: dict[str, Any]) -> None:
        """``fill`` with what this backbone takes of a preset; ``solved`` replaces it for an equilibrium."""
        row = BACKBONES[name]
        if self.iterations is not None:  # asked for: not drawn, unless that is asked for too
            preset = preset | {"random_iterations": None}
        if row.solves:
            preset = preset | solved
        plain = not str(self.further().get("step_size", "conditioned-")).startswith("conditioned-")
        if name != "hyperset" or plain:
            preset = preset | {"initial_step": None}
        self.fill(preset | ({} if row.width else {"width": None}))

    def specification(
        self, name: str, step_size: str
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The arguments of ``build_backbone``, and the options of its ``DEQ`` layers."""
        names = ("dim", "heads", "width", "iterations", "layers", "initial_step")
        given = {key: getattr(self, key) for key in names if getattr(self, key) is not None}
        if name == "hyperset":
            given["step_size"] = step_size
        layer = layer_options(self.rtol or 1e-3) if BACKBONES[name].solves else None
        return {"name": name, **given, **self.further()}, layer


def layer_options(rtol: float, **options: Any) -> dict[str, Any]:
    """Options of a ``DEQ`` in training, which counts what does not converge and does not warn."""
    adjoint = solvers.Implicit(on_failure="ignore")
    return {"on_failure": "ignore", "adjoint": adjoint, "tolerance": rtol, **options}
