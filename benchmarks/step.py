"""The training step of a mean-field layer, ours beside torchdeq's.

python benchmarks/step.py race [--rounds 40] [--threads 2]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torchdeq.core import get_deq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import solvers
from benchmarks.measure import interleaved, table

B, N, D = 64, 17, 10
TORCHDEQ = ("anderson", "broyden", "fixed_point_iter")
# What every contestant of the training step must reach: true residual, gradient error.
TARGETS = ((1e-4, 1e-3), (1e-6, 1e-5))
TOLERANCES = [10 ** (-k / 2) for k in range(4, 17)]
Pair = tuple[float, float]  # of the forward and of the backward solve
Ladder = Sequence[float]  # of tolerances, the loosest first


class MeanField(nn.Module):
    """``z = J z - ffn(z) + x`` with symmetric couplings without self-coupling; Bal (2021)."""

    def __init__(self, scale: float = 1.0, samples: int = B) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.raw = nn.Parameter(scale * torch.randn(N * D, N * D) / (N * D * D) ** 0.5)
        self.first, self.second = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        blocks = torch.kron(1 - torch.eye(N), torch.ones(D, D))
        self.blocks: Tensor
        self.register_buffer("blocks", blocks)
        self.x = torch.randn(samples, N, D)
        self.cotangent = torch.randn(samples, N, D)

    def couplings(self) -> Tensor:
        return (self.raw + self.raw.mT) / 2 * self.blocks

    def update(self, z: Tensor, x: Tensor, couplings: Tensor) -> Tensor:
        field = F.linear(z.reshape(len(z), -1), couplings).view_as(z)
        return field - self.second(F.gelu(self.first(z))) + x

    def exact(self) -> tuple[Tensor, list[Tensor]]:
        """Fixed point and gradients of <cotangent, z> by a dense float64 solve."""
        self.double()
        couplings = self.couplings()
        x, cotangent = self.x.double(), self.cotangent.double()
        z = torch.zeros_like(x)
        unit = torch.eye(N * D, dtype=z.dtype)
        with torch.no_grad():
            for _ in range(20):  # Newton
                residual = self.update(z, x, couplings) - z
                systems = unit - self._jacobian(z, couplings)
                z = z + solve_each(systems, residual.flatten(1)).view_as(z)
        jacobian = self._jacobian(z, couplings)
        u = solve_each((unit - jacobian).mT, cotangent.flatten(1)).view_as(z)
        loss = (self.update(z, x, couplings) * u.detach()).sum()
        gradients = torch.autograd.grad(loss, list(self.parameters()))
        self.float()
        return z, [g.detach() for g in gradients]

    def _jacobian(self, z: Tensor, couplings: Tensor) -> Tensor:
        def one(state: Tensor, x: Tensor) -> Tensor:
            return self.update(state.view(1, N, D), x[None], couplings).flatten()

        each = torch.func.vmap(torch.func.jacrev(one))
        return each(z.flatten(1), self.x.to(z.dtype)).detach()


def solve_each(matrices: Tensor, right: Tensor) -> Tensor:
    """Dense solves one by one: batched LU of large matrices breaks after ``set_num_threads(2)``."""
    pairs = zip(matrices, right, strict=True)
    return torch.stack([torch.linalg.solve(matrix, vector) for matrix, vector in pairs])


def theirs(solver: str, tolerances: Pair, most: int) -> Any:
    """torchdeq's layer with implicit differentiation, one solver for both solves."""
    return get_deq(
        ift=True, f_solver=solver, b_solver=solver, f_tol=tolerances[0], b_tol=tolerances[1],
        f_stop_mode="rel", b_stop_mode="rel", f_max_iter=most, b_max_iter=most,
    )  # fmt: skip


class Ours:
    def __init__(self, layer: MeanField, solver: solvers.Solver | None) -> None:
        self.layer, self.solver = layer, solver

    def step(self, tolerances: Pair) -> Tensor:
        couplings, layer = self.layer.couplings(), self.layer
        forward, backward = (solvers.Tolerance(each) for each in tolerances)
        solution = solvers.fixed_point(
            lambda z, x: layer.update(z, x, couplings), torch.zeros_like(layer.x), (layer.x,),
            solver=self.solver, tolerance=forward, adjoint=solvers.Implicit(tolerance=backward),
            max_steps=200,
        )  # fmt: skip
        layer.zero_grad()
        solution.value.backward(layer.cotangent)
        return solution.value.detach()


class Theirs:
    def __init__(self, layer: MeanField, solver: str) -> None:
        self.layer, self.solver = layer, solver
        self.deq: dict[Pair, Any] = {}

    def step(self, tolerances: Pair) -> Tensor:
        if tolerances not in self.deq:
            self.deq[tolerances] = theirs(self.solver, tolerances, 200)
        couplings, layer = self.layer.couplings(), self.layer
        outputs, _ = self.deq[tolerances](
            lambda z: layer.update(z, layer.x, couplings), torch.zeros_like(layer.x)
        )
        layer.zero_grad()
        outputs[-1].backward(layer.cotangent)
        return outputs[-1].detach()


def loosest(
    reach: Callable[[Pair], Pair], target: Pair, forwards: Ladder, backwards: Ladder
) -> tuple[Pair, Pair]:
    """The loosest tolerances that reach the target, and what they reach; else the tightest."""
    first = ((each, backwards[-1]) for each in forwards)
    forward = next((pair[0] for pair in first if reach(pair)[0] <= target[0]), forwards[-1])
    pairs = ((forward, each) for each in backwards)
    chosen = next((pair for pair in pairs if reach(pair)[1] <= target[1]), (forward, backwards[-1]))
    return chosen, reach(chosen)


def errors(layer: MeanField, z: Tensor, exact: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """Worst true relative residual of a sample, and relative error of the parameter gradient."""
    with torch.no_grad():
        fz = layer.update(z, layer.x, layer.couplings())
    residual = ((fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)).max().item()
    got = torch.cat([p.grad.flatten().double() for p in layer.parameters() if p.grad is not None])
    want = torch.cat([g.flatten() for g in exact[1]])
    return residual, ((got - want).norm() / want.norm()).item()


def _rows(
    layer: MeanField, contestants: dict[str, Any], target: Pair, exact: Any, rounds: int
) -> list[dict[str, Any]]:
    found = {
        name: loosest(
            lambda pair, each=each: errors(layer, each.step(pair), exact),
            target, TOLERANCES, TOLERANCES,
        )
        for name, each in contestants.items()
    }  # fmt: skip
    runs: dict[str, Callable[[], object]] = {
        name: partial(each.step, found[name][0]) for name, each in contestants.items()
    }
    seconds = interleaved(runs, rounds)
    meets = {n: r[0] <= target[0] and r[1] <= target[1] for n, (_, r) in found.items()}
    fastest = min(t for n, t in seconds.items() if n.startswith("torchdeq") and meets[n])
    rows: list[dict[str, Any]] = []
    for name, (_, reached) in found.items():
        same = "torchdeq " + name.split()[1].replace("forward", "fixed_point_iter")
        row: dict[str, Any] = {"solver": name if meets[name] else f"{name} (target missed)"}
        row |= {"residual": reached[0], "gradient error": reached[1], "ms": 1e3 * seconds[name]}
        row["/ its torchdeq"] = seconds[name] / seconds[same] if same in seconds else ""
        rows.append(row | {"/ fastest torchdeq": seconds[name] / fastest})
    return rows


def race(rounds: int = 40, threads: int = 2) -> None:
    """Contestants at equal true residual and gradient error."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    for scale in (1.0, 2.0):
        layer = MeanField(scale)
        exact = layer.exact()
        contestants: dict[str, Any] = {f"torchdeq {name}": Theirs(layer, name) for name in TORCHDEQ}
        contestants |= {
            "ours anderson": Ours(layer, solvers.Anderson()),
            "ours broyden": Ours(layer, solvers.Broyden()),
            "ours forward": Ours(layer, solvers.Forward()),
            "ours default": Ours(layer, None),
        }
        for target in TARGETS:
            rows = _rows(layer, contestants, target, exact, rounds)
            print(
                f"\n(a) training step, mean-field layer, couplings x {scale:g}; "
                f"residual <= {target[0]:g}, gradient error <= {target[1]:g}\n"
            )
            print(table(rows))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"race": race})
