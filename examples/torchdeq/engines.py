"""One cell, two libraries: what the ported examples share.

An engine finds the fixed point of a cell ``z = cell(z, x)``, by torchdeq as its users write it, or by a
layer of this package. "bridge" is our layer around torchdeq's own solver. All engines take the same cell,
the same weights and the same random numbers, so their losses can be compared step by step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchdeq import get_deq, reset_deq
from torchdeq.dropout import VariationalDropout1d
from torchdeq.loss import jac_reg
from torchdeq.norm import apply_norm as their_apply_norm

from implicit_attn import DEQ
from implicit_attn.regularization import VariationalDropout, apply_norm, dropout_seeds
from solvers import Implicit, Tolerance
from solvers.torchdeq_bridge import TorchDEQ

ENGINES = ("torchdeq", "bridge", "ours")
BACKWARD = ("anderson", "broyden", "fixed_point_iter")


class Metered(nn.Module):
    """A cell that counts for how many samples it is evaluated, and its derivative multiplied.

    The counts are taken in the cell, so they mean the same for every library: all calls are in them,
    whatever made them. For a batch of B, B rows are one evaluation of all its samples.
    """

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.forward_rows = self.backward_rows = 0

    def forward(self, z: Any, x: Any) -> Any:
        image = self.cell(z, x)
        first = image if isinstance(image, Tensor) else image[0]
        self.forward_rows += len(first)
        if first.requires_grad:
            first.register_hook(self._multiplied)
        return image

    def _multiplied(self, cotangent: Tensor) -> None:
        self.backward_rows += len(cotangent)


class ByTorchDEQ(nn.Module):
    """The cell solved by torchdeq: weight norm, one dropout mask a solve, implicit gradient."""

    def __init__(
        self, cell: Metered, start: Callable[[Any], Any], tol: float, most: int, backward: str
    ) -> None:
        super().__init__()
        their_apply_norm(cell, "weight_norm")
        for name, part in list(cell.named_modules()):
            if isinstance(part, VariationalDropout):
                cell.set_submodule(name, SameMasks(part))
        self.cell, self.start = cell, start
        self.deq = get_deq(
            core="indexing", ift=True, f_solver="anderson", b_solver=backward,
            f_tol=tol, b_tol=tol, f_stop_mode="rel", b_stop_mode="rel",
            f_max_iter=most, b_max_iter=most,
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        reset_deq(self.cell)  # weights computed anew, another dropout mask
        several = not isinstance(start := self.start(x), Tensor)
        states, _ = self.deq(lambda *z: self.cell(z if several else z[0], x), start)
        return states[-1]

    def penalty(self, z: Tensor, x: Tensor) -> Tensor:
        """``|J|_F^2 / D``, estimated at the solution held fixed."""
        z = z.detach().requires_grad_()
        return jac_reg(self.cell(z, x), z)

    @torch.no_grad()
    def residual(self, z: Any, x: Any) -> float:
        """Largest ``|f(z) - z| / |f(z)|`` of the batch; torchdeq's own is that of another point."""
        image = self.cell.cell(z, x)  # not counted
        return float((_rows(image) - _rows(z)).norm(dim=1).div(_rows(image).norm(dim=1)).max())


class SameMasks(VariationalDropout1d):
    """torchdeq's dropout, with masks drawn as ours are, so that both libraries drop the same."""

    def __init__(self, ours: VariationalDropout) -> None:
        super().__init__(ours.p)
        self.ours = ours

    def reset_mask(self, x: Tensor) -> None:
        self.mask = self.ours.mask(x, dropout_seeds(len(x)), 0)


class ByOurs(nn.Module):
    """The cell as a layer of this package; nothing has to be reset."""

    def __init__(
        self, cell: Metered, start: Callable[[Any], Any], tol: float, most: int, *, bridge: bool
    ) -> None:
        super().__init__()
        apply_norm(cell)
        solver = TorchDEQ("anderson") if bridge else None
        options: Any = {"solver": solver, "tolerance": Tolerance(tol), "max_steps": most}
        self.layer = DEQ.from_update(cell, init=start, adjoint=Implicit(max_steps=most), **options)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def penalty(self, z: Tensor, x: Tensor) -> Tensor:
        """``|J|_F^2 / D``, estimated at the solution held fixed."""
        return self.layer.jacobian_penalty(z.detach(), x).mean()

    def residual(self, z: Any, x: Any) -> float:
        """Largest ``|f(z) - z| / |f(z)|`` of the batch."""
        assert self.layer.last is not None
        return float(self.layer.last.residual.max())


def _rows(z: Any) -> Tensor:
    """A state as a matrix, a row for each sample."""
    return torch.cat([leaf.flatten(1) for leaf in ([z] if isinstance(z, Tensor) else z)], dim=1)


def engine(
    options: argparse.Namespace, cell: Metered, start: Callable[[Any], Any]
) -> ByTorchDEQ | ByOurs:
    """The engine that the command line asks for, to solve ``cell(z, x)`` from ``start(x)``."""
    tol, most = options.tol, options.max_steps
    if options.engine == "torchdeq":
        return ByTorchDEQ(cell, start, tol, most, options.backward)
    return ByOurs(cell, start, tol, most, bridge=options.engine == "bridge")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that both examples have."""
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="ours")
    add("--backward", choices=BACKWARD, default="broyden", help="torchdeq's b_solver")
    add("--tol", type=float, default=1e-3, help="relative residual that a solve is asked for")
    add("--max-steps", type=int, default=60, help="evaluations of a solve, forward and backward")
    add("--steps", type=int, default=50, help="of training")
    add("--rate", type=float, default=1e-3)
    add("--seed", type=int, default=0)


class Equilibrium(nn.Module):
    """A model around an engine; a subclass defines ``losses``.

    Attributes:
        meter: the cell, which counts.
        reached: residual of the latest solve.
    """

    meter: Metered
    reached: float = float("nan")

    def losses(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | float]:
        """The loss and a penalty that is added to it, scalars."""
        raise NotImplementedError


@dataclass
class Record:
    """What the steps of a training took, a number a step.

    Attributes:
        losses: the loss, without the penalty.
        forward, backward: evaluations of the cell and products with its derivative, per sample.
        residuals: largest ``|f(z) - z| / |f(z)|`` of the batch, at the z that the loss is taken of.
    """

    losses: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)


def train(
    model: Equilibrium, batches: Callable[[int], tuple[Tensor, Tensor]], *, steps: int, rate: float,
    report: int,
) -> Record:  # fmt: skip
    """``steps`` steps of Adam; batch k is ``batches(k)``, inputs (B, ...) and targets (B, ...).

    A line is printed after every ``report`` steps; 0: none.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    record = Record()
    for step in range(steps):
        inputs, targets = batches(step)
        torch.manual_seed(step)  # the same masks and random vectors for every engine
        meter = model.meter
        meter.forward_rows = meter.backward_rows = 0
        loss, penalty = model.losses(inputs, targets)
        optimizer.zero_grad()
        (loss + penalty).backward()
        record.forward.append(meter.forward_rows / len(inputs))
        record.backward.append(meter.backward_rows / len(inputs))
        record.residuals.append(model.reached)
        optimizer.step()
        record.losses.append(loss.item())
        if report and (step % report == 0 or step == steps - 1):
            made = f"{record.forward[-1]:.1f} + {record.backward[-1]:.1f}"
            text = f"step {step + 1:3d}  loss {loss.item():.4f}  evaluations {made}"
            print(f"{text}  residual {model.reached:.1e}")
    return record
