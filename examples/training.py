"""The loop of the training scripts, on Lightning Fabric: steps, checkpoints, measures, how solves went.

What a step draws depends on the seed and the number of the step alone. A training that stops after some
minutes and is resumed therefore ends with the weights of one that ran through.
"""

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
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm

from implicit_attn import DEQ
from implicit_attn.models import save_model

# Options that may differ when a training is resumed.
FREE = ("out", "resume", "minutes", "devices", "accelerator", "strategy", "compile")


def seeded(seed: int, epoch: int, *batch: int, stream: int = 1) -> torch.Generator:
    """A generator for an epoch, or for a batch of it."""
    key = (stream,) if batch else ()
    numbers = np.random.SeedSequence([seed, epoch, *batch], spawn_key=key).generate_state(
        1, np.uint64
    )
    return torch.Generator().manual_seed(int(numbers[0]))


class Task:
    """What is learned: samples, a loss that is a sum of terms, measures of outputs on test samples."""

    inputs: Tensor  # (N, ...)
    targets: Tensor  # (N, ...)
    tests: tuple[Tensor, Tensor]
    size = 256  # test samples at once

    def augmented(
        self, inputs: Tensor, targets: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        return inputs, targets

    def loss(self, outputs: Any, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """The sum of the terms, and their number."""
        raise NotImplementedError

    def measures(
        self, outputs: Any, inputs: Tensor, targets: Tensor
    ) -> dict[str, tuple[float, int]]:
        """The sum and the number of each measure."""
        raise NotImplementedError

    def run(
        self, forward: Any, inputs: Tensor, targets: Tensor, generator: Any, **options: Any
    ) -> Any:
        return self.loss(forward(inputs, **options), inputs, targets)

    def begin(self) -> None:
        """Called before every epoch."""

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
        self.options, self.model, self.task, self.folder = (
            options,
            model,
            task,
            options.out or folder,
        )
        self.settings = json.loads(json.dumps(settings | {"seed": options.seed}))
        several = options.devices > 1 and options.strategy == "auto"
        self.fabric = lightning_fabric.Fabric(
            accelerator=options.accelerator, devices=options.devices, precision=options.precision,
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
        self.forward, self.optimizer = self.fabric.setup(model, options.build_optimizer(model))
        average = get_ema_multi_avg_fn(options.average) if options.average else None
        self.averaged = AveragedModel(model, multi_avg_fn=average) if average else None
        for layer in self.averaged.modules() if self.averaged else ():
            vars(layer).pop("advance", None)  # a compiled one is bound to the weights of the model
        task.inputs, task.targets = (x.to(self.fabric.device) for x in (task.inputs, task.targets))
        self.layers = [module for module in model.modules() if isinstance(module, DEQ)]
        self.batches = -(-len(task.inputs) // options.batch)
        self.steps = options.epochs * self.batches
        # What a checkpoint holds besides: the sums are those of the current epoch.
        self.step, self.history, self.sums = 0, list[dict[str, float]](), dict[str, float]()
        ours = vars(options).items()  # paths and devices may differ, what is computed may not
        self.recipe = {name: str(value) for name, value in ours if name not in FREE}
        if options.resume:
            state = self.fabric.load(self.path)
            if (state["settings"], state["recipe"]) != (self.settings, self.recipe):
                raise SystemExit(f"{self.path} was made with other options, or other data")
            state = self.fabric.load(self.path, self._parts())
            vars(self).update({name: state[name] for name in ("step", "history", "sums")})
            task.restore(state["task"])

    def _parts(self) -> dict[str, Any]:
        parts = {"model": self.forward, "optimizer": self.optimizer}
        return parts | ({"averaged": self.averaged} if self.averaged else {})

    def save(self) -> None:
        kept = {
            name: getattr(self, name) for name in ("step", "history", "sums", "settings", "recipe")
        }
        kept["task"] = self.task.state()
        self.fabric.save(self.path.with_suffix(".part"), self._parts() | kept)
        if self.fabric.global_rank == 0:
            self.path.with_suffix(".part").replace(self.path)
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
            if batch == 0:
                self.task.begin()
            order = torch.randperm(len(self.task.inputs), generator=seeded(options.seed, epoch))
            for index in order.split(options.batch)[batch:]:
                begun = time.perf_counter()
                self._step(epoch, self.step % self.batches, index.to(self.fabric.device))
                self._count(seconds=time.perf_counter() - begun)
                bar.update()
                bar.set_postfix(loss=self.sums["loss"] / self.sums["terms"])
                if time.perf_counter() - start > 60 * options.minutes and self.step % self.batches:
                    break
            if self.step % self.batches == 0:
                self._finish_epoch(epoch)
            self.save()
            if time.perf_counter() - start > 60 * options.minutes and self.step < self.steps:
                self.fabric.print(
                    f"stopped after {self.step} of {self.steps} steps: --resume goes on"
                )
                return False
        if self.averaged is not None:
            self.model.load_state_dict(self.averaged.module.state_dict())
        if rank == 0:
            spent = self.history[-1].get("evaluations")
            settings = self.settings | ({} if spent is None else {"evaluations": spent})
            save_model(self.folder / "weights.safetensors", self.model, settings)
        return True

    def _step(self, epoch: int, batch: int, index: Tensor) -> None:
        options, fabric, rank = self.options, self.fabric, self.fabric.global_rank
        for group in self.optimizer.param_groups:
            group["lr"] = options.rate_at(self.step / self.steps)
        generator = seeded(options.seed, epoch, batch)
        iterations = options.draw_iterations(generator)
        drawn = {} if iterations is None else {"iterations": iterations}
        whole = self.task.augmented(self.task.inputs[index], self.task.targets[index], generator)
        inputs, targets = (each.tensor_split(fabric.world_size)[rank] for each in whole)
        own = len(inputs) > 0  # in a last batch of fewer samples than processes, some count none
        inputs, targets = (inputs, targets) if own else (whole[0][:1], whole[1][:1])
        self.model.train()
        dropout = seeded(options.seed, epoch, batch, rank, stream=2).initial_seed()
        torch.manual_seed(dropout)
        total, number = self.task.run(self.forward, inputs, targets, generator, **drawn)
        sums = own * torch.stack([total.detach().double(), total.new_tensor(number).double()])
        reduced: Any = fabric.all_reduce(sums, reduce_op="sum")
        value, terms = reduced.tolist()
        if not math.isfinite(value):
            raise SystemExit(
                f"the loss is {value} in step {self.step + 1}; nothing was saved of it"
            )
        self.optimizer.zero_grad()
        # Gradients are averaged over the processes: each counts its terms that many times.
        fabric.backward(total * (own * fabric.world_size / terms))
        if options.clip is not None:
            fabric.clip_gradients(self.forward, self.optimizer, max_norm=options.clip)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        self.step += 1
        self._count(loss=value, terms=terms)
        for layer in self.layers:
            if layer.last is not None:
                self._count(
                    solves=len(layer.last.status), converged=int(layer.last.converged.sum())
                )
                for spent, times in Counter(layer.last.evaluations.tolist()).items():
                    self._count(**{f"spent {spent}": times})
                if (adjoint := layer.last.adjoint.solution) is not None:
                    right = int(adjoint.converged.sum())
                    self._count(adjoints=len(adjoint.status), adjoints_converged=right)

    def _count(self, **numbers: float) -> None:
        for name, number in numbers.items():
            self.sums[name] = self.sums.get(name, 0) + number

    def _finish_epoch(self, epoch: int) -> None:
        sums = self.sums
        row = {"epoch": epoch + 1, "loss": sums["loss"] / sums["terms"]}
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
        if self.fabric.global_rank == 0:
            tqdm.write("  ".join(f"{name} {value:.4g}" for name, value in row.items()))

    @torch.no_grad()
    def evaluate(self, iterations: int | None = None) -> dict[str, float]:
        """The means of the task's measures on the test samples, with so many iterations."""
        model = self.model if self.averaged is None else self.averaged.module
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
            show(
                f"solves: in the worst epoch {worst:.2f} % converged, median evaluations {spent:g}"
            )
        seconds = sum(row["seconds"] for row in self.history)
        show(f"{size:,} parameters, training {seconds:.0f} s; weights and history: {self.folder}")
        return rows
