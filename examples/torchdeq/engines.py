"""One cell, two libraries: what the ported examples share.

An engine finds the fixed point of a cell ``z = cell(z, x)``, by torchdeq as its users write it, or by a
layer of this package. "bridge" is our layer around torchdeq's own solver. All engines take the same cell,
the same weights and the same random numbers, so their losses can be compared step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

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

Engine = Literal["torchdeq", "bridge", "ours"]
Backward = Literal["anderson", "broyden", "fixed_point_iter"]


@dataclass(kw_only=True)
class Options:
    """The options that both examples have."""

    engine: Engine = "ours"
    backward: Backward = "broyden"  # torchdeq's b_solver
    tol: float = 1e-3  # relative residual that a solve is asked for
    max_steps: int = 60  # evaluations of a solve, forward and backward
    steps: int = 50  # of training
    rate: float = 1e-3
    seed: int = 0


class Metered(nn.Module):
    """A cell that counts for how many samples it is evaluated, and its derivative multiplied.

    All calls are counted, whatever made them, so the counts mean the same for every library.
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

    def __init__(self, options: Options, cell: Metered, start: Callable[[Any], Any]) -> None:
        super().__init__()
        tol, most = options.tol, options.max_steps
        their_apply_norm(cell, "weight_norm")
        for name, part in list(cell.named_modules()):
            if isinstance(part, VariationalDropout):
                cell.set_submodule(name, SameMasks(part))
        self.cell, self.start = cell, start
        self.deq = get_deq(
            core="indexing", ift=True, f_solver="anderson", b_solver=options.backward,
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

    def __init__(self, options: Options, cell: Metered, start: Callable[[Any], Any]) -> None:
        super().__init__()
        apply_norm(cell)
        most = options.max_steps
        self.layer = DEQ.from_update(
            cell, init=start, solver=TorchDEQ("anderson") if options.engine == "bridge" else None,
            tolerance=Tolerance(options.tol), max_steps=most, adjoint=Implicit(max_steps=most),
        )  # fmt: skip

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


def engine(options: Options, cell: Metered, start: Callable[[Any], Any]) -> ByTorchDEQ | ByOurs:
    """The engine that is asked for, to solve ``cell(z, x)`` from ``start(x)``."""
    return (ByTorchDEQ if options.engine == "torchdeq" else ByOurs)(options, cell, start)


@dataclass
class Record:
    """What the steps of a training took, a number a step."""

    losses: list[float] = field(default_factory=list)  # without the penalty
    forward: list[float] = field(default_factory=list)  # evaluations of the cell, per sample
    backward: list[float] = field(default_factory=list)  # products with its derivative
    residuals: list[float] = field(default_factory=list)  # largest of the batch


def train(
    model: Any, batch: Callable[[], tuple[Tensor, Tensor]], options: Options, report: int
) -> Record:
    """Steps of Adam on ``batch()``, inputs (B, ...) and targets (B, ...); a line after ``report`` steps.

    ``model.losses(inputs, targets)`` is the loss and a penalty that is added to it; ``model.meter`` is its
    cell, ``model.reached`` the residual of the latest solve.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    record, meter = Record(), model.meter
    for step in range(options.steps):
        inputs, targets = batch()
        torch.manual_seed(step)  # the same masks and random vectors for every engine
        meter.forward_rows = meter.backward_rows = 0
        loss, penalty = model.losses(inputs, targets)
        optimizer.zero_grad()
        (loss + penalty).backward()
        record.forward.append(meter.forward_rows / len(inputs))
        record.backward.append(meter.backward_rows / len(inputs))
        record.residuals.append(model.reached)
        optimizer.step()
        record.losses.append(loss.item())
        if report and (step % report == 0 or step == options.steps - 1):
            made = f"{record.forward[-1]:.1f} + {record.backward[-1]:.1f}"
            text = f"step {step + 1:3d}  loss {loss.item():.4f}  evaluations {made}"
            print(f"{text}  residual {model.reached:.1e}")
    return record
