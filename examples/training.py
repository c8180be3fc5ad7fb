"""The loop of the training scripts, on Lightning Fabric: steps, checkpoints, measures, how solves went.

What a step draws depends on the seed and the number of the step alone. A training that stops after some
minutes and is resumed therefore ends with the weights of one that ran through.

Samples, draws and sums stay on the device, and the host reads the sums only every ``LOOK`` steps and before
it saves. A card therefore seldom waits for the host; an equilibrium layer is read in each step.
"""

import copy
import csv
import json
import math
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning_fabric
import numpy as np
import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm

from implicit_attn import DEQ
from implicit_attn.models import save_model

# Options that may differ when a training is resumed.
FREE = ("out", "resume", "minutes", "devices", "accelerator", "strategy", "compile")
LOOK = 50  # steps after which the host reads the loss
Pair = tuple[Tensor, Tensor]  # inputs and targets
Sums = dict[str, tuple[float, int]]  # of each measure its sum, and the number of its terms


def seeded(seed: int, epoch: int, *batch: int, stream: int = 1) -> torch.Generator:
    """A generator for an epoch, or for a batch of it."""
    sequence = np.random.SeedSequence([seed, epoch, *batch], spawn_key=(stream,) if batch else ())
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


class Task:
    """What is learned: samples, a loss that is a sum of terms, measures of outputs on test samples."""

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N, ...)
    tests: Pair
    size = 256  # test samples at once

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        return inputs, targets

    def loss(self, outputs: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        """The sum of the terms, and their number, an int or a tensor."""
        raise NotImplementedError

    def measures(self, outputs: Any, inputs: Tensor, targets: Tensor) -> Sums:
        """The sum and the number of each measure."""
        raise NotImplementedError

    def run(
        self, forward: Any, inputs: Tensor, targets: Tensor, generator: Any, **options: Any
    ) -> Any:
        return self.loss(forward(inputs, **options), inputs, targets)

    def to(self, device: torch.device) -> None:
        """Move the training samples to a device."""
        self.inputs, self.targets = self.inputs.to(device), self.targets.to(device)

    def state(self) -> dict[str, Any]:
        """What a checkpoint within an epoch must hold."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take what :meth:`state` returned."""


class Training:
    """A model, its task and its options; ``settings`` build the model again (``models.load_model``)."""

    def __init__(
        self, options: Any, model: Any, task: Task, settings: dict[str, Any], folder: Path
    ) -> None:
        self.options, self.model, self.task = options, model, task
        self.folder = options.out or folder
        self.settings = json.loads(json.dumps(settings | {"seed": options.seed}))
        several = options.devices > 1 and options.strategy == "auto"
        self.fabric = lightning_fabric.Fabric(
            accelerator=options.accelerator, devices=options.devices,
            precision="32-true" if options.precision == "tf32" else options.precision,
            strategy="ddp_find_unused_parameters_true" if several else options.strategy,
        )  # fmt: skip
        self.fabric.launch()
        self.path = self.folder / "checkpoint.pt"
        if options.resume != self.path.exists():
            raise SystemExit(
                f"there is {'no' if options.resume else 'already a'} training in {self.folder}: "
                f"{'leave out' if options.resume else 'use'} --resume, or choose another --out"
            )
        small = sum(p.numel() for p in model.parameters()) < 1_000_000
        if small and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a second thread would mostly wait
        for layer in model.modules() if options.compile else ():
            if hasattr(layer, "advance"):  # of a recurrent layer, or of a BoardUpdate
                layer.advance = torch.compile(layer.advance)
        card = self.fabric.device.type == "cuda"
        if options.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        optimizer = options.build_optimizer(model, card and options.precision != "16-mixed")
        self.forward, self.optimizer = self.fabric.setup(model, optimizer)
        self.averaged = copy.deepcopy(model) if options.average else None
        for layer in self.averaged.modules() if self.averaged else ():
            vars(layer).pop("advance", None)  # a compiled one is bound to the weights of the model
        task.to(self.fabric.device)
        self.layers = [module for module in model.modules() if isinstance(module, DEQ)]
        self.batches = -(-len(task.inputs) // options.batch)
        self.steps = options.epochs * self.batches
        # What a checkpoint holds besides: the sums are those of the current epoch.
        self.step, self.history, self.sums = 0, list[dict[str, float]](), dict[str, float]()
        self.totals = torch.zeros(2, dtype=torch.float64, device=self.fabric.device)
        ours = vars(options).items()  # paths and devices may differ, what is computed may not
        self.recipe = {name: str(value) for name, value in ours if name not in FREE}
        if options.resume:
            state = self.fabric.load(self.path)
            if (state["settings"], state["recipe"]) != (self.settings, self.recipe):
                raise SystemExit(f"{self.path} was made with other options, or other data")
            state = self.fabric.load(self.path, self._parts())
            vars(self).update({name: state[name] for name in ("step", "history", "sums")})
            self.totals = self.totals.new_tensor(state["totals"])
            task.restore(state["task"])

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.forward, "optimizer": self.optimizer}
        return parts | ({"averaged": self.averaged} if self.averaged else {})

    def mean_loss(self) -> float:
        """The mean loss of the epoch until now, which waits for the device."""
        value, terms = self.totals.tolist()
        if not math.isfinite(value):
            raise SystemExit(f"the loss is {value} by step {self.step}; nothing was saved of it")
        return value / terms if terms else 0.0

    def save(self) -> None:
        self.mean_loss()
        names = ("step", "history", "sums", "settings", "recipe")
        kept = {name: getattr(self, name) for name in names}
        kept |= {"totals": self.totals.tolist(), "task": self.task.state()}
        self.fabric.save(self.path.with_suffix(".part"), self._parts() | kept)
        if self.fabric.global_rank == 0:
            self.path.with_suffix(".part").replace(self.path)
            if self.step < self.steps:  # weights.safetensors stands for a whole training
                self._write_weights("unfinished.safetensors")
            if self.history:
                with (self.folder / "history.csv").open("w", newline="") as file:
                    writer = csv.DictWriter(file, list(self.history[0]))
                    writer.writeheader()
                    writer.writerows(self.history)

    def run(self) -> bool:
        """Train to the end, or for as many minutes as are asked for; whether the end was reached."""
        self.folder.mkdir(parents=True, exist_ok=True)
        start, rank, options = time.perf_counter(), self.fabric.global_rank, self.options
        bar = tqdm(total=self.steps, initial=self.step, disable=rank > 0 or None, leave=False)
        while self.step < self.steps:
            epoch, batch = divmod(self.step, self.batches)
            order = torch.randperm(len(self.task.inputs), generator=seeded(options.seed, epoch))
            begun = time.perf_counter()
            for index in order.to(self.fabric.device).split(options.batch)[batch:]:
                self._step(epoch, self.step % self.batches, index)
                bar.update()
                if self.step % LOOK == 0:
                    bar.set_postfix(loss=self.mean_loss())
                if time.perf_counter() - start > 60 * options.minutes and self.step % self.batches:
                    break
            self.mean_loss()
            self._count(seconds=time.perf_counter() - begun)
            if self.step % self.batches == 0:
                self._finish_epoch(epoch)
            self.save()
            if time.perf_counter() - start > 60 * options.minutes and self.step < self.steps:
                self.fabric.print(
                    f"stopped after {self.step} of {self.steps} steps: --resume goes on; the weights so "
                    f"far are in {self.folder}/unfinished.safetensors"
                )
                return False
        if self.averaged is not None:
            self.model.load_state_dict(self.averaged.state_dict())
        if rank == 0:
            self._write_weights("weights.safetensors")
            (self.folder / "unfinished.safetensors").unlink(missing_ok=True)
        return True

    def _write_weights(self, name: str) -> None:
        spent = self.history[-1].get("evaluations") if self.history else None
        settings = self.settings | ({} if spent is None else {"evaluations": spent})
        save_model(self.folder / name, self.averaged or self.model, settings)

    def _step(self, epoch: int, batch: int, index: Tensor) -> None:
        options, fabric, rank = self.options, self.fabric, self.fabric.global_rank
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate_at(self.step / self.steps)
        generator = seeded(options.seed, epoch, batch)
        iterations = options.draw_iterations(generator)
        drawn = {} if iterations is None else {"iterations": iterations}
        if fabric.device.type != "cpu":
            generator = torch.Generator(fabric.device).manual_seed(generator.initial_seed())
        whole = self.task.augmented(self.task.inputs[index], self.task.targets[index], generator)
        inputs, targets = (each.tensor_split(fabric.world_size)[rank] for each in whole)
        own = len(inputs) > 0  # in a last batch of fewer samples than processes, some count none
        inputs, targets = (inputs, targets) if own else (whole[0][:1], whole[1][:1])
        self.model.train()
        dropout = seeded(options.seed, epoch, batch, rank, stream=2).initial_seed()
        torch.manual_seed(dropout)
        total, number = self.task.run(self.forward, inputs, targets, generator, **drawn)
        terms = number if isinstance(number, Tensor) else torch.full_like(total, number)
        sums: Any = own * torch.stack([total.detach().double(), terms.double()])
        sums = fabric.all_reduce(sums, reduce_op="sum")
        self.optimizer.zero_grad()
        # Gradients are averaged over the processes: each counts its terms that many times.
        fabric.backward(total * (own * fabric.world_size / sums[1]).to(total.dtype))
        if options.clip is not None:
            clip: Any = {"max_norm": options.clip, "error_if_nonfinite": False}
            fabric.clip_gradients(self.forward, self.optimizer, **clip)
        self.optimizer.step()
        self.step += 1
        self.totals += sums
        if self.averaged is not None:
            self._average(self.averaged)
        for layer in self.layers:
            if layer.last is not None:
                last = layer.last
                self._count(solves=len(last.status), converged=int(last.converged.sum()))
                for spent, times in Counter(last.evaluations.tolist()).items():
                    self._count(**{f"spent {spent}": times})
                if (adjoint := last.adjoint.solution) is not None:
                    right = int(adjoint.converged.sum())
                    self._count(adjoints=len(adjoint.status), adjoints_converged=right)

    @torch.no_grad()
    def _average(self, averaged: torch.nn.Module) -> None:
        """Move the averaged weights towards those of the model, which they equal after the first step."""
        move = get_ema_multi_avg_fn(self.options.average if self.step > 1 else 0.0)
        move(list(averaged.parameters()), list(self.model.parameters()), 0)
        for kept, new in zip(averaged.buffers(), self.model.buffers(), strict=True):
            kept.copy_(new)

    def _count(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0) + number

    def _finish_epoch(self, epoch: int) -> None:
        sums = self.sums
        row = {"epoch": epoch + 1, "loss": self.mean_loss()}
        for part in ("solves", "adjoints"):
            if part in sums:
                name = "converged" if part == "solves" else "adjoints_converged"
                row[name] = sums[name] / sums[part]
        spent = Counter({int(k[6:]): int(n) for k, n in sums.items() if k.startswith("spent")})
        if spent:
            row["evaluations"] = sorted(spent.elements())[spent.total() // 2]
        row |= {"seconds": sums["seconds"], **self.evaluate()}
        self.history.append(row)
        self.sums = {}
        self.totals.zero_()
        if self.fabric.global_rank == 0:
            tqdm.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()))

    @torch.no_grad()
    def evaluate(self, iterations: int | None = None) -> dict[str, float]:
        """The means of the task's measures on the test samples, with so many iterations."""
        model = self.averaged or self.model
        model.eval()
        options = {} if iterations is None else {"iterations": iterations}
        sums: dict[str, Any] = {}
        rank, world = self.fabric.global_rank, self.fabric.world_size
        parts = [each[rank::world].split(self.task.size) for each in self.task.tests]
        for batch in zip(*parts, strict=True):
            inputs, targets = (each.to(self.fabric.device) for each in batch)
            with self.fabric.autocast():
                found = self.task.measures(model(inputs, **options), inputs, targets)
            for name, pair in found.items():
                sums[name] = sums.get(name, 0) + torch.tensor(pair, dtype=torch.float64)
        sums = {name: self.fabric.all_reduce(pair, reduce_op="sum") for name, pair in sums.items()}
        return {name: float(pair[0] / pair[1]) for name, pair in sums.items()}

    def report(self, numbers: list[int]) -> list[dict[str, float]]:
        """Print and return the measures, also with these numbers of iterations, and how solves went."""
        size, show = sum(p.numel() for p in self.model.parameters()), self.fabric.print
        rows: list[dict[str, float]] = []
        for number in numbers or [None]:
            rows.append({"iterations": number or 0, **self.evaluate(number)})
            shown = "  ".join(f"{k} {v:.4f}" for k, v in rows[-1].items() if k != "iterations")
            show(f"{f'{number:4d} iterations' if number else 'test'}: {shown}")
        if "converged" in self.history[-1]:
            worst = 100 * min(row["converged"] for row in self.history)
            spent = max(row["evaluations"] for row in self.history)
            text = f"{worst:.2f} % converged, median evaluations {spent:g}"
            show(f"solves: in the worst epoch {text}")
        seconds = sum(row["seconds"] for row in self.history)
        show(f"{size:,} parameters, training {seconds:.0f} s; weights and history: {self.folder}")
        return rows
