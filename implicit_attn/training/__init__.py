"""The training loop, on Lightning Fabric: resumable at every epoch, in one or several processes."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.checkpoint import (
    load_checkpoint,
    read_progress,
    remove_unfinished,
    replace_file,
    save_checkpoint,
)
from implicit_attn.data import ImageData, epoch_generator
from implicit_attn.data.images import hash_seed
from implicit_attn.deq import DEQ
from implicit_attn.optional import require
from implicit_attn.training.tasks import CarriedStates as CarriedStates
from implicit_attn.training.tasks import Classification, Task, describe
from implicit_attn.training.tasks import MaskedImages as MaskedImages
from implicit_attn.training.tasks import NextToken as NextToken
from implicit_attn.training.tasks import SudokuCompletion as SudokuCompletion
from implicit_attn.training.tasks import accuracy as accuracy
from solvers.core.checks import require_choice, require_count, require_nonnegative

OPTIMIZERS = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}
DECAYS = ("cosine", "linear")
DECAYED = ("all", "matrices")


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of a training: Adam or AdamW, linear warm-up, cosine or linear decay, clipping.

    Attributes:
        epochs: passes over the training samples.
        batch: samples of a batch, over all processes.
        rate: peak learning rate.
        warmup: share of the training in which the learning rate rises from 0.
        floor: final learning rate as a share of the peak; 1 keeps it constant.
        weight_decay: decoupled with "adamw", added to the gradient with "adam".
        clip: largest norm of the gradient of all parameters; None: not clipped.
        seed: of the order of the samples, of the augmentation, of random iterations and of dropout.
        optimizer: "adamw" or "adam".
        betas: decay rates of the optimiser's two moving averages.
        iterations: of a recurrent model: a number, a pair (least, most) from which each batch draws
            one, or None for a model that is not asked for any.
        decay: how the learning rate falls to the floor: "cosine" over the whole training, times the
            warm-up; "linear" from the end of the warm-up on.
        decayed: what the weight decay acts on: "all" parameters, or "matrices", those of two
            dimensions or more, which leaves out biases, norms and single numbers.
        average: ``a`` in [0, 1) of ``w_bar <- a w_bar + (1 - a) w`` after every step but the first.
            Measures are those of the averages, which the model has after the last epoch. Buffers are
            not averaged. 0: none.

    Raises:
        TypeError: a number of epochs, samples or iterations is no integer.
        ValueError: a value is out of range; the message names it.
    """

    epochs: int
    batch: int
    rate: float
    warmup: float = 0.05
    floor: float = 0.01
    weight_decay: float = 1e-2
    clip: float | None = 1.0
    seed: int = 0
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    iterations: int | tuple[int, int] | None = None
    decay: str = "cosine"
    decayed: str = "all"
    average: float = 0.0

    def __post_init__(self) -> None:
        require_count("epochs", self.epochs)
        require_count("batch", self.batch)
        require_nonnegative("rate", self.rate)
        require_nonnegative("weight_decay", self.weight_decay)
        for name in ("warmup", "floor"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)!r}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be > 0 or None, got {self.clip!r}")
        if not require_nonnegative("average", self.average) < 1:
            raise ValueError(f"average must lie in [0, 1), got {self.average!r}")
        require_choice("optimizer", self.optimizer, OPTIMIZERS)
        require_choice("decay", self.decay, DECAYS)
        require_choice("decayed", self.decayed, DECAYED)
        if self.iterations is not None:
            pair = isinstance(self.iterations, tuple)
            drawn: Any = self.iterations if pair else (self.iterations,)
            for number in drawn:
                require_count("iterations", number)
            if pair and (len(drawn) != 2 or drawn[0] > drawn[1]):
                raise ValueError(f"iterations must be (least, most), got {self.iterations!r}")

    def rate_at(self, progress: float) -> float:
        """Learning rate where ``progress`` in [0, 1) of the training is done."""
        rise = min(1.0, progress / self.warmup) if self.warmup > 0 else 1.0
        if self.decay == "linear":
            left = min(1.0, (1 - progress) / (1 - self.warmup)) if self.warmup < 1 else 1.0
        else:
            left = 0.5 * (1 + math.cos(math.pi * progress))
        return self.rate * rise * (self.floor + (1 - self.floor) * left)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimiser of all parameters of ``model``."""
        options = {"lr": self.rate, "betas": self.betas, "weight_decay": self.weight_decay}
        least = 0 if self.decayed == "all" else 2  # dimensions of what decays
        parameters = list(model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() >= least]},
            {"params": [p for p in parameters if p.dim() < least], "weight_decay": 0.0},
        ]
        return OPTIMIZERS[self.optimizer]([g for g in groups if g["params"]], **options)

    def draw_iterations(self, generator: torch.Generator) -> int | None:
        """Iterations of one batch; draws from ``generator`` only where they are random."""
        if not isinstance(self.iterations, tuple):
            return self.iterations
        least, most = self.iterations
        return int(torch.randint(least, most + 1, (), generator=generator))


class SolveCounts:
    """Statuses, evaluations and residuals of every :class:`DEQ` in a model, which may have none."""

    def __init__(self, model: nn.Module) -> None:
        self.layers = [module for module in model.modules() if isinstance(module, DEQ)]
        self.reset()

    def reset(self) -> None:
        """Start an epoch."""
        # Solves, converged ones, adjoint solves, converged ones, products of these.
        self.sums = torch.zeros(5, dtype=torch.float64)
        self.largest = torch.zeros(2, dtype=torch.float64)  # adjoint residual, evaluations
        limits = (layer.max_steps for layer in self.layers)
        # Solves by their number of evaluations.
        self.spent = torch.zeros(1 + max(limits, default=0), dtype=torch.float64)

    def add(self) -> None:
        """Count the latest solve of every layer."""
        for layer in self.layers:
            if layer.last is None:  # not a part of this forward pass
                continue
            solve, adjoint = layer.last, layer.last.adjoint.solution
            # A call may have asked for more evaluations than the layer's own limit.
            spent = solve.evaluations.cpu().clamp(max=len(self.spent) - 1)
            self.spent += torch.bincount(spent, minlength=len(self.spent))
            sums = [solve.status.numel(), int(solve.converged.sum()), 0, 0, 0]
            residual = 0.0
            if adjoint is not None:
                sums[2:] = [adjoint.status.numel(), int(adjoint.converged.sum())]
                sums.append(int(adjoint.evaluations.sum()))
                residual = adjoint.residual.max().item()
            self.sums += torch.tensor(sums)
            largest = torch.tensor([residual, float(solve.evaluations.max())])
            self.largest = torch.maximum(self.largest, largest)  # keeps NaN

    def means(self, reduce: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
        """Shares and means per solve, the median of the evaluations, the maxima; {} without DEQ.

        ``reduce(tensor, "sum" | "max")`` is over the processes. What tells of solves or of adjoint solves
        is NaN where there were none of them.
        """
        if not self.layers:
            return {}
        solves, converged, adjoints, adjoint_converged, products = reduce(self.sums, "sum").tolist()
        spent, (residual, most) = reduce(self.spent, "sum"), reduce(self.largest, "max").tolist()
        median = int((spent.cumsum(0) >= spent.sum() / 2).int().argmax())
        return {
            "converged": converged / (solves or math.nan),
            "adjoint_converged": adjoint_converged / (adjoints or math.nan),
            "adjoint_products": products / (adjoints or math.nan),
            "evaluations": median if solves else math.nan,
            "adjoint_residual": residual if adjoints else math.nan,
            "most_evaluations": int(most),
        }


class NonFiniteLoss(ArithmeticError):
    """The loss, its gradient or a parameter is NaN or infinite; the last checkpoint is from before."""


class SettingsDiffer(ValueError):
    """A checkpoint was made by a run with other settings."""


class Training:
    """A training run and its state.

    On the CPU, a run that is killed anywhere and resumed ends bit-equal to one that was not: the
    checkpoint of the last whole epoch holds model, optimiser and history, and what is drawn in an
    epoch depends on (seed, epoch, batch) alone. Several processes split every batch among them. The
    loss and its gradient are those of the whole batch; they differ from those of one process by
    rounding and by dropout, which every process draws for its own samples.

    Args:
        model: inputs (B, ...) -> outputs; called with ``iterations=`` where the recipe names them.
        task: samples, loss and measures; :class:`ImageData` stands for :class:`Classification`.
        recipe: hyperparameters.
        path: of the checkpoint; the history stands beside it as a table, with the ending ``.csv``.
        settings: further settings of the run (JSON); a resumed run must have equal ones.
        observe: called with the model before training and after every epoch; what it returns
            (JSON) is kept in ``observations``.
        fabric: from :func:`start_processes`; None: one process on the CPU. Its loggers are given
            every row of the history.
        compile: compile the model's repeated layers, or the whole model (:func:`compile_step`).

    Attributes:
        history: a row an epoch: loss, seconds, the task's measures on the test samples, and for
            models with :class:`DEQ` layers how these were solved: share of converged samples
            forward and adjoint, evaluations (median), adjoint products, worst adjoint residual.
        observations: what ``observe`` returned: before training, and an entry an epoch.
        epoch: complete epochs.
    """

    def __init__(
        self,
        model: nn.Module,
        task: ImageData | Task,
        recipe: Recipe,
        path: str | Path,
        settings: dict[str, Any] | None = None,
        *,
        observe: Callable[[Any], Any] | None = None,
        fabric: Any = None,
        compile: bool = False,
    ) -> None:
        if isinstance(task, ImageData):
            task = Classification(task)
        self.fabric = start_processes(accelerator="cpu") if fabric is None else fabric
        self.model: Any = model
        self.recipe, self.path, self.settings = recipe, Path(path), settings or {}
        self.optimizer = recipe.build_optimizer(model)
        forward = compile_step(model) if compile else model
        self.forward, self.stepper = self.fabric.setup(forward, self.optimizer)
        self.task: Task = task.to(self.fabric.device)
        self.solves = SolveCounts(model)
        self.batches = -(-len(self.task.inputs) // recipe.batch)  # of an epoch
        self.epoch = 0
        self.history: list[dict[str, Any]] = []
        self.observe = observe
        self.observations: list[Any] = [] if observe is None else [observe(model)]
        self.resumed = False

    def save(self) -> None:
        """Write the checkpoint and the table, from the first process; the others wait for it.

        Raises:
            NonFiniteLoss: a parameter is not finite; nothing is written.
        """
        for name, value in self.model.named_parameters():  # equal in all processes
            if value.requires_grad and not bool(value.isfinite().all()):
                raise NonFiniteLoss(
                    f"the parameter {name} is not finite after epoch {self.epoch}; nothing was saved"
                )
        if self.fabric.global_rank == 0:
            names = ("epoch", "history", "observations", "settings")
            progress = {name: getattr(self, name) for name in names}
            progress["averaged"] = bool(self.recipe.average) and self.epoch == self.recipe.epochs
            save_checkpoint(self.path, self.model, self.optimizer, progress)
            if self.history:
                text = io.StringIO()
                writer = csv.DictWriter(text, list(self.history[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(self.history)
                replace_file(self.path.with_suffix(".csv"), text.getvalue().encode())
        self.fabric.barrier()

    def resume(self) -> None:
        """Load the checkpoint: :meth:`run` then goes on after the epoch at whose end it was saved.

        After an error, model, optimizer and random state are as they were.

        Raises:
            FileNotFoundError: there is none.
            SettingsDiffer: it was made with other settings.
            ValueError: it is damaged, or no checkpoint of such a training.
        """
        progress = read_progress(self.path)
        epoch, history = progress.get("epoch"), progress.get("history")
        if not isinstance(epoch, int) or not isinstance(history, list) or len(history) != epoch:
            raise ValueError(f"{self.path} is no checkpoint of a training, or of another version")
        if epoch > self.recipe.epochs:
            raise ValueError(f"epochs must be >= {epoch}, those of {self.path}")
        if progress.get("settings") != self.settings:
            raise SettingsDiffer(
                f"{self.path} was made with other settings: {progress.get('settings')}; give the "
                "same ones, or another folder"
            )
        load_checkpoint(self.path, self.model, self.optimizer)
        self.epoch, self.history = epoch, history
        self.observations = progress["observations"]
        self.resumed = True
        if progress.get("averaged") and epoch < self.recipe.epochs:  # its run ended here
            self._exchange()

    def run(self, *, overwrite: bool = False) -> None:
        """Train to the end of the last epoch, saving before the first and after each.

        Args:
            overwrite: replace the checkpoint of an earlier run, if there is one.

        Raises:
            ValueError: another run's checkpoint is there, neither resumed nor to be overwritten, or
                another run is writing it.
            OSError: the folder cannot be written.
            NonFiniteLoss: the loss, its gradient or a parameter is NaN or infinite.
        """
        with contextlib.ExitStack() as held:

            def claim() -> None:
                held.enter_context(alone(self.path))
                if self.path.exists() and not (self.resumed or overwrite):
                    raise ValueError(
                        f"{self.path} is there already: resume that run, overwrite it, or name another path"
                    )

            in_first(self.fabric, claim)
            self.save()  # from here on a kill leaves something to resume
            self.resumed = True
            while self.epoch < self.recipe.epochs:
                self._run_epoch()
                self.save()

    def _run_epoch(self) -> None:
        tqdm = require("tqdm", extra="training").tqdm
        first = self.fabric.global_rank == 0
        generator = epoch_generator(self.recipe.seed, self.epoch)
        order = torch.randperm(len(self.task.inputs), generator=generator).to(self.fabric.device)
        title = f"epoch {self.epoch + 1}/{self.recipe.epochs}"
        # disable=None: tqdm's own choice
        bar = tqdm(desc=title, total=self.batches, leave=False, disable=None if first else True)
        total, terms, start = 0.0, 0, time.perf_counter()
        self.solves.reset()
        self.task.begin()
        with bar:
            for batch, index in enumerate(order.split(self.recipe.batch)):
                inputs, targets = self.task.inputs[index], self.task.targets[index]
                added, number = self.step(batch, inputs, targets)
                total, terms = total + added, terms + number
                bar.update()
                bar.set_postfix_str(f"loss {total / terms:.4f}")
        seconds = time.perf_counter() - start
        with contextlib.ExitStack() as measured:
            self._exchange()
            measured.callback(self._exchange)
            measures = self.evaluate()
            if self.observe is not None:
                self.observations.append(self.observe(self.model))
            if self.epoch + 1 == self.recipe.epochs:
                measured.pop_all()  # the model keeps its averages
        row = {"epoch": self.epoch + 1, "loss": total / terms, **self.solves.means(self._reduce)}
        row |= {"seconds": seconds, **measures}
        self.history.append(row)
        self.epoch += 1
        self.fabric.log_dict(row, step=self.epoch)
        if first:
            shown = "  ".join(describe(name, value) for name, value in measures.items())
            tqdm.write(f"epoch {self.epoch:3d}  {_status(row)}  {shown}  {seconds:.1f} s")

    def step(self, batch: int, inputs: Tensor, targets: Tensor) -> tuple[float, int]:
        """One optimiser step on this process's share of a batch; the sum of its loss, and of what."""
        recipe, place = self.recipe, f"in epoch {self.epoch + 1}, batch {batch + 1}"
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate_at((self.epoch + batch / self.batches) / recipe.epochs)
        generator = epoch_generator(recipe.seed, self.epoch, batch)
        iterations = recipe.draw_iterations(generator)
        options = {} if iterations is None else {"iterations": iterations}
        inputs, targets = self.task.augmented(inputs, targets, generator)
        rank, world = self.fabric.global_rank, self.fabric.world_size
        parts = [each.tensor_split(world)[rank] for each in (inputs, targets)]
        own = len(parts[0]) > 0
        # Where there are fewer samples than processes, those left over take the first and do not count it.
        inputs, targets = parts if own else (inputs[:1], targets[:1])
        self.model.train()
        # What the model draws by itself (dropout).
        seed = hash_seed((2,), seed=recipe.seed, epoch=self.epoch, batch=batch, rank=rank)
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes longer, for all devices
        if self.fabric.device.type == "cuda":
            torch.cuda.manual_seed_all(seed)
        total, number = self.task.run(self.forward, inputs, targets, generator, **options)
        sums = torch.stack([total.detach().double(), total.new_tensor(number, dtype=torch.float64)])
        value, terms = self._reduce(sums * own, "sum").tolist()
        _check_finite("loss", value / terms, place)
        self.optimizer.zero_grad()
        # The processes' gradients are averaged, so each counts its terms world times.
        self.fabric.backward(total * (own * world / terms))
        most = math.inf if recipe.clip is None else recipe.clip
        norm = self.fabric.clip_gradients(
            self.forward, self.stepper, max_norm=most, error_if_nonfinite=False
        )
        _check_finite("gradient's norm", norm.item(), place)
        self.stepper.step()
        self._average()
        if own:
            self.solves.add()
        return value, int(terms)

    @torch.no_grad()
    def _average(self) -> None:
        """Averages stand in the optimiser's state, with which they are saved and resumed."""
        if not self.recipe.average:
            return
        for parameter, state in self.optimizer.state.items():
            if "average" not in state:
                state["average"] = parameter.detach().clone()
            state["average"].lerp_(parameter, 1 - self.recipe.average)

    @torch.no_grad()
    def _exchange(self) -> None:
        """The weights and their averages change places."""
        for parameter, state in self.optimizer.state.items() if self.recipe.average else ():
            weights = parameter.detach().clone()
            parameter.copy_(state["average"])
            state["average"].copy_(weights)

    def evaluate(self, iterations: int | None = None) -> dict[str, float]:
        """The task's measures of the model on the test samples, each a mean.

        ``iterations`` of a recurrent model; None: as many as it makes by itself.
        """
        rank, world = self.fabric.global_rank, self.fabric.world_size
        with self.fabric.autocast():
            found = self.task.evaluate(self.model, rank, world, iterations)
        pairs = torch.tensor(list(found.values()), dtype=torch.float64)
        sums = self._reduce(pairs, "sum").tolist()
        return {name: top / below for name, (top, below) in zip(found, sums, strict=True)}

    def summary(self) -> str:
        """Time, and the worst convergence of the whole training."""
        text = f"training {sum(row['seconds'] for row in self.history):.0f} s"
        solved = [row for row in self.history if not math.isnan(row.get("converged", math.nan))]
        if solved:
            share = 100 * min(row["converged"] for row in solved)
            spent = max(row["evaluations"] for row in solved)
            text += f"; worst epoch: {share:.2f} % of solves converged, "
            text += f"median evaluations per solve {spent:g}"
        return text

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        """``values`` summed ("sum") or the largest ("max") over the processes, on the CPU."""
        if self.fabric.world_size == 1:
            return values.cpu()
        return self.fabric.all_reduce(values.to(self.fabric.device), reduce_op=how).cpu()


def start_processes(
    devices: int = 1,
    accelerator: str = "auto",
    precision: str = "32-true",
    *,
    unused_parameters: bool = False,
    loggers: Any = None,
) -> Any:
    """A launched ``lightning_fabric.Fabric``.

    With several devices the running script is started again once for each further one; the
    processes meet here and keep their gradients equal (gloo on CPUs, NCCL on CUDA cards).

    Args:
        devices: processes, one per card or, on the CPU, sharing it.
        accelerator: "cpu", "cuda", or "auto": CUDA where there is a card.
        precision: "32-true", or "bf16-mixed" for autocast to bfloat16.
        unused_parameters: some batches leave some parameters without a gradient.
        loggers: of ``lightning_fabric.loggers``, for the rows of a history.

    Raises:
        ValueError: there is no CUDA card, or fewer than ``devices``.
    """
    require_count("devices", devices)
    require_choice("precision", precision, ("32-true", "bf16-mixed"))
    cards = torch.cuda.device_count()
    if require_choice("accelerator", accelerator, ("auto", "cpu", "cuda")) == "auto":
        accelerator = "cuda" if cards else "cpu"
    if accelerator == "cuda" and cards == 0:
        raise ValueError("accelerator must be 'cpu' or 'auto' without a CUDA card, got 'cuda'")
    if accelerator == "cuda" and devices > cards:
        raise ValueError(f"devices must be <= {cards}, the CUDA cards here, got {devices}")
    several = "ddp_find_unused_parameters_true" if unused_parameters else "ddp"
    strategy = several if devices > 1 else "auto"
    options: Any = {"accelerator": accelerator, "devices": devices, "strategy": strategy}
    options |= {"precision": precision, "loggers": loggers}
    fabric = require("lightning_fabric", extra="training").Fabric(**options)
    fabric.launch()
    return fabric


def compile_step(model: nn.Module, backend: Any = "inductor") -> nn.Module:
    """The model with what it repeats compiled once, or compiled whole where nothing is repeated.

    A layer with ``context`` and ``advance`` (of ``implicit_attn.models.RecurrentBackbone``) has its
    ``advance`` replaced by a compiled one, so that any number of iterations shares one graph.

    Returns:
        ``model`` itself, changed, or a compiled wrapper around it.
    """
    repeated: list[Any] = [
        module
        for module in model.modules()
        if callable(getattr(module, "advance", None)) and callable(getattr(module, "context", None))
    ]
    for layer in repeated:
        layer.advance = torch.compile(layer.advance, backend=backend)
    return model if repeated else torch.compile(model, backend=backend)  # type: ignore[return-value]


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """The right to write the files of the run at ``path``; it ends with the process, however that ends.

    The folder is made, and what killed runs left unfinished is removed.

    Raises:
        ValueError: another run has it.
        OSError: the folder cannot be written.
    """
    filelock = require("filelock", extra="training")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A singleton, so that one process may take it twice.
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=0, is_singleton=True)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(
            f"{path} is in use by another run; wait for its end, or name another folder"
        ) from None
    try:
        remove_unfinished(path)
        yield
    finally:
        lock.release()


def in_first(fabric: Any, act: Callable[[], object]) -> None:
    """Call ``act`` in the first process; where it fails by what it finds, all raise its error."""
    problem: Exception | None = None
    if fabric.global_rank == 0:
        try:
            act()
        except (ValueError, OSError) as error:
            problem = error
    if fabric.world_size > 1:
        problem = fabric.broadcast(problem)
    if problem is not None:
        raise problem


def _check_finite(name: str, value: float, place: str) -> None:
    """Before the optimiser's step."""
    if not math.isfinite(value):
        raise NonFiniteLoss(f"the {name} is {value} {place}; the last checkpoint is from before")


def _status(row: dict[str, Any]) -> str:
    """Loss and, where there are equilibrium layers, their solves, in a line."""
    text = f"loss {row['loss']:.4f}"
    if not math.isnan(row.get("converged", math.nan)):
        text += f"  converged {100 * row['converged']:.1f} %  evaluations {row['evaluations']}"
    if not math.isnan(row.get("adjoint_converged", math.nan)):
        text += f"  adjoint {row['adjoint_residual']:.0e}"
    return text
