"""``implicit-attn study NAME``: the studies on trained models, a dataclass of options each."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from implicit_attn import studies
from implicit_attn.data import load
from implicit_attn.programs import choose_threads, make_folder, mistakes
from implicit_attn.studies.study import Subject, open_subject
from implicit_attn.training import NonFiniteLoss, Recipe

UNROLLED, SOLVED, SPINS = "digits-hyperset", "digits-hyperset-equilibrium", "mnist-spins"


@dataclass(kw_only=True)
class OnWeights:
    """A study of trained models."""

    weights: tuple[str, ...] = (UNROLLED, SOLVED)
    """checkpoints, or names of shipped weights"""
    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] | None = None
    """default: what the checkpoint was trained on"""
    samples: int | None = 1000
    """test samples, at most"""
    out: Path = Path("runs/studies")
    """folder of the files"""

    def run(self) -> None:
        """Study each of the models: a figure and CSV tables, named after the study and the model."""
        start = time.perf_counter()
        with mistakes():
            make_folder(self.out)
        for source in self.weights:
            with mistakes():
                subject = open_subject(source, self.data, self.samples)
            choose_threads(subject.model)
            stem = f"{type(self).__name__.lower()}-{subject.name}"
            print(f"{stem}: {subject.title}", flush=True)
            with mistakes(kinds=(TypeError,)):
                found = self.study(subject)
            title = f"{subject.title}\n{len(subject.inputs)} test samples"
            print(f"\n{found}\n\nsaved: {', '.join(map(str, found.save(self.out / stem, title)))}")
        print(f"{time.perf_counter() - start:.0f} s")

    def study(self, subject: Subject) -> studies.Study:
        """What the function of that name finds on one model, given the options that are its own."""
        common = {field.name for field in fields(OnWeights)}
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in common}
        find: Any = getattr(studies, type(self).__name__.lower())
        return find(subject, **own)


@dataclass(kw_only=True)
class Convergence(OnWeights):
    """Every solver on the layer: residual, energy, evaluations, time, eigenvalues at the end."""

    weights: tuple[str, ...] = (SOLVED,)
    samples: int | None = 64
    rtol: float | None = None
    """tolerance of the costs (default: of training)"""
    max_steps: int = 100
    """evaluations per sample"""
    spectra: int = 2
    """samples whose Jacobian is studied"""


@dataclass(kw_only=True)
class Extrapolation(OnWeights):
    """Accuracy, loss, energy, residual against test-time iterations; adaptive stopping."""

    factor: int = 4
    """up to so many times training's"""


@dataclass(kw_only=True)
class Paths(OnWeights):
    """Distances of the ends from the input, from zero and from random starts."""

    samples: int | None = 128
    starts: int = 2
    """random starts"""


@dataclass(kw_only=True)
class Geometry(OnWeights):
    """Energies, effective rank and average angle per head and iteration."""

    weights: tuple[str, ...] = (UNROLLED,)
    samples: int | None = 256
    iterations: int | None = None
    """how many (default: as in training)"""


@dataclass(kw_only=True)
class Report(OnWeights):
    """Training, convergence and accuracy at test time on one page; of spins their couplings."""

    weights: tuple[str, ...] = (SPINS,)
    samples: int | None = None

    def study(self, subject: Subject) -> studies.Study:
        return studies.report(subject, subject.observations)


@dataclass(kw_only=True)
class TradeOff:
    """Layers x iterations at constant depth: trains small models of Hyper-SET."""

    data: Literal["digits", "mnist", "fashion-mnist", "cifar10"] = "digits"
    depth: int = 12
    """layers times iterations"""
    layers: tuple[int, ...] = ()
    """divisors of the depth (default: all)"""
    epochs: int = 6
    rate: float = 4e-3
    """peak learning rate"""
    seeds: int = 1
    """trainings of each"""
    out: Path = Path("runs/studies")
    """folder of the files"""

    def run(self) -> None:
        with mistakes():
            make_folder(self.out)
            data = load(self.data)
            pairs = studies.layers_of_depth(self.depth, self.layers)
            recipes = [Recipe(self.epochs, 64, self.rate, seed=seed) for seed in range(self.seeds)]
        place = self.out / "trade-off"
        with mistakes(kinds=(NonFiniteLoss,)):
            found = studies.trade_off(data, pairs, recipes, place)
        title = f"{self.data}, hyperset, depth {self.depth}, {self.epochs} epochs of training"
        print(f"\n{found}\n\nsaved: {', '.join(map(str, found.save(place, title)))}")
