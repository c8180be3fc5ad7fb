"""Adaptive TAP: forward and backward of a layer, and its means beside those of a saddle point.

    python benchmarks/adaptive_tap.py layer [--site sphere]
    python benchmarks/adaptive_tap.py saddle [--rounds 5]

Of a layer ours against (a) autograd through the same iterations and (b) torchdeq's implicit gradients of the
same map, each at the loosest tolerances that reach the same true residual and gradient error.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

import solvers
from benchmarks.measure import interleaved, table
from benchmarks.step import Pair
from benchmarks.step import theirs as torchdeq_layer
from implicit_attn import DEQ
from implicit_attn.updates import AdaptiveTAPAttention
from solvers import SpinState, Tolerance

B, N, D = 64, 17, 10
RESIDUAL, GRADIENT = 1e-4, 1e-4  # what every contestant must reach
FORWARD = (1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6)
BACKWARD = (1e-2, 1e-3, 3e-4, 1e-4, 1e-5)
STEPS = 60
SITES: dict[str, Callable[[], solvers.Site]] = {
    "sphere": solvers.SphericalSite,
    "sphere, large d": lambda: solvers.SphericalSite(large_dimension=True),
    "potts": solvers.PottsSite,
}


@dataclass
class Setting:
    """A layer, an input, the gradient of the mean, and the answers in float64."""

    update: AdaptiveTAPAttention
    x: Tensor
    cotangent: Tensor
    exact: list[Tensor]

    @classmethod
    def make(cls, site: str, scale: float) -> Setting:
        torch.manual_seed(0)
        update = AdaptiveTAPAttention(N, D, site=SITES[site](), scale=scale)
        x, cotangent = torch.randn(B, N, D, requires_grad=True), torch.randn(B, N, D)
        setting = cls(update.double(), x, cotangent, [])
        tight = solvers.Implicit(tolerance=Tolerance(1e-9))
        wide = x.detach().double().requires_grad_()
        options: Any = {"tolerance": Tolerance(1e-9), "max_steps": 200, "adjoint": tight}
        layer = DEQ(update, solver=solvers.AdaptiveTAP(), **options)
        loss = (layer(wide).mean * cotangent.double()).sum()
        setting.exact = list(torch.autograd.grad(loss, [wide, *update.parameters()]))
        update.float()
        return setting

    def gradients(self, state: SpinState) -> list[Tensor]:
        loss = (state.mean * self.cotangent).sum()
        return list(torch.autograd.grad(loss, [self.x, *self.update.parameters()]))

    def errors(self, state: SpinState, gradients: list[Tensor]) -> tuple[float, float]:
        """Worst relative residual of a sample and the larger relative error of the two gradients."""
        with torch.no_grad():
            now = torch.cat([t.flatten(1) for t in state], 1).double()
            self.update.double()
            double = SpinState(*[t.double() for t in state])
            after = torch.cat([t.flatten(1) for t in self.update(double, self.x.double())], 1)
            self.update.float()
        residual = ((after - now).norm(dim=1) / after.norm(dim=1)).max().item()
        pairs = zip(gradients, self.exact, strict=True)
        return residual, max(((g.double() - e).norm() / e.norm()).item() for g, e in pairs)


Contestant = Callable[[float, float], SpinState]


def ours(setting: Setting, adjoint: str) -> Contestant:
    update = setting.update

    def solve(forward: float, backward: float) -> SpinState:
        implicit = solvers.Implicit(tolerance=Tolerance(backward))
        options: Any = {"tolerance": Tolerance(forward), "max_steps": STEPS}
        options["adjoint"] = implicit if adjoint == "implicit" else solvers.Unrolled()
        return DEQ(update, solver=solvers.AdaptiveTAP(), **options)(setting.x)

    return solve


def unrolled_plain(setting: Setting) -> Contestant:
    """The iteration as published, ``m <- site mean``, damped, in torch's own differentiable operators."""
    update = setting.update

    def solve(forward: float, backward: float) -> SpinState:
        couplings = update.couplings.matrix
        options: Any = {"solver": solvers.AdaptiveTAP(damping=0.7), "max_steps": STEPS}
        options |= {"tolerance": Tolerance(forward), "adjoint": solvers.Unrolled()}
        return solvers.fixed_point(
            lambda state, x: plain_step(state, x, couplings, update.site),
            update.initial(setting.x), (setting.x,), **options,
        ).value  # fmt: skip

    return solve


def plain_step(state: SpinState, x: Tensor, couplings: Tensor, site: solvers.Site) -> SpinState:
    """The equations as they stand, inverses by Cholesky, all of it seen by autograd."""
    mean, variance = state
    h = x + (mean.flatten(1) @ couplings).view_as(x) - (variance @ mean.unsqueeze(-1)).squeeze(-1)
    mu, covariance = site.moments(h, variance)
    precision = inverse(covariance)
    chi = inverse(block_diagonal(variance + precision) - couplings)
    own = chi.view(len(x), N, D, N, D).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return SpinState(mu, variance + precision - inverse(own))


def inverse(matrix: Tensor) -> Tensor:
    return torch.cholesky_inverse(torch.linalg.cholesky(matrix))


def block_diagonal(blocks: Tensor) -> Tensor:
    """(B, N, d, d) -> (B, N d, N d)."""
    whole = torch.eye(N)[:, None, :, None] * blocks.unsqueeze(3)
    return whole.reshape(len(blocks), N * D, N * D)


def theirs(setting: Setting, solver: str, options: dict[str, Any]) -> Contestant:
    update, made = setting.update, dict[Pair, Any]()

    def solve(forward: float, backward: float) -> SpinState:
        key = (forward, backward)
        if key not in made:
            made[key] = torchdeq_layer(solver, key, STEPS)
        # As our layer does: the couplings are formed once a solve.
        couplings = update.couplings.weight

        def step(mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
            state = SpinState(mean, variance)
            return tuple(solvers.tap_step(state, setting.x, couplings, update.site))

        start = tuple(update.initial(setting.x))
        outputs, _ = made[key](step, start, solver_kwargs=options)
        return SpinState(*outputs[-1])

    return solve


def found_by(setting: Setting, solve: Contestant, implicit: bool) -> tuple[Pair, Pair]:
    """The loosest tolerances that reach the targets, and what they reach."""

    def reach(pair: Pair) -> Pair:
        state = solve(*pair)
        found = SpinState(*[t.detach() for t in state])
        return setting.errors(found, setting.gradients(state))

    tight = BACKWARD[-1]
    forward = next((each for each in FORWARD if met(reach((each, tight)))), FORWARD[-1])
    backwards = (each for each in BACKWARD if implicit and met(reach((forward, each))))
    chosen = (forward, next(backwards, tight))
    return chosen, reach(chosen)


def met(reached: Pair) -> bool:
    return reached[0] <= RESIDUAL and reached[1] <= GRADIENT


def race(site: str, scale: float, rounds: int) -> list[dict[str, Any]]:
    setting = Setting.make(site, scale)
    contestants: dict[str, Contestant] = {
        "ours, implicit": ours(setting, "implicit"),
        "(a) unrolled, our map": ours(setting, "unrolled"),
        "(b) torchdeq anderson": theirs(setting, "anderson", {"lam": 1e-8}),
        "(b) torchdeq broyden": theirs(setting, "broyden", {}),
        "(b) torchdeq fixed_point_iter": theirs(setting, "fixed_point_iter", {}),
    }
    if site != "potts":  # whose covariance has no inverse
        contestants["(a) unrolled, plain damped TAP"] = unrolled_plain(setting)
    found = {n: found_by(setting, solve, "unrolled" not in n) for n, solve in contestants.items()}
    runs: dict[str, Callable[[], object]] = {
        name: lambda solve=solve, name=name: setting.gradients(solve(*found[name][0]))
        for name, solve in contestants.items()
    }
    seconds = interleaved(runs, rounds)
    base = seconds["ours, implicit"]
    rows: list[dict[str, Any]] = []
    for name, (tolerances, reached) in found.items():
        row: dict[str, Any] = {"contestant": name if met(reached) else f"{name} (target missed)"}
        row["tolerances"] = "{:.0e}, {:.0e}".format(*tolerances)
        row |= {"residual": reached[0], "gradient error": reached[1]}
        rows.append(row | {"ms": 1e3 * seconds[name], "/ ours": seconds[name] / base})
    return rows


def layer(
    rounds: int = 5,
    site: Literal["sphere", "sphere, large d", "potts"] = "sphere",
    scales: tuple[float, ...] = (1.0, 3.0),
    threads: int = 2,
) -> None:
    """Forward and backward of an adaptive-TAP layer, at equal residual and gradient error."""
    torch.set_num_threads(threads)
    warnings.simplefilter("ignore", solvers.SolveWarning)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for scale in scales:
        print(
            f"\nadaptive TAP, {site}, B {B}, N {N}, d {D}, couplings x {scale:g}; residual <= "
            f"{RESIDUAL:g}, gradient error <= {GRADIENT:g}\n"
        )
        print(table(race(site, scale, rounds)))


STRENGTH = 0.5  # couplings N(0, STRENGTH^2 / N), fields N(0, 1)


def compare(sites: int, dim: int, batch: int, rounds: int) -> dict[str, Any]:
    """A row: median seconds of both, their ratio, the relative difference of the means."""
    generator = torch.Generator().manual_seed(0)
    options: Any = {"generator": generator, "dtype": torch.float64}
    upper = torch.randn(sites, sites, **options).triu(1) * STRENGTH / sites**0.5
    scalar = upper + upper.T
    full = scalar[..., None, None] * torch.eye(dim, dtype=torch.float64)
    field = torch.randn(batch, sites, dim, **options).requires_grad_()
    site = solvers.SphericalSite(large_dimension=True)
    steepest = partial(solvers.spherical_saddle, scalar, field)
    tap = partial(solvers.adaptive_tap, full, field, site=site)
    first, second = steepest().value.mean.detach(), tap().value.mean.detach()
    seconds = interleaved({"saddle": steepest, "tap": tap}, rounds)
    row: dict[str, Any] = {"N": sites, "d": dim, "B": batch}
    row |= {"saddle point, ms": 1e3 * seconds["saddle"], "adaptive TAP, ms": 1e3 * seconds["tap"]}
    row["ratio"] = seconds["saddle"] / seconds["tap"]
    return row | {"difference of the means": ((first - second).norm() / second.norm()).item()}


def saddle(rounds: int = 5, threads: int = 2) -> None:
    """The means of O(d) spins with couplings ``K_ij I``: the saddle point beside adaptive TAP for large d."""
    torch.set_num_threads(threads)
    cases = ((6, 40, 1), (16, 32, 1), (16, 32, 8))
    print(table([compare(*case, rounds) for case in cases]))


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"layer": layer, "saddle": saddle})
