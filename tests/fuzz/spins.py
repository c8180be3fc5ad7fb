"""Random models of spins: adaptive TAP and naive mean field, every site, masks and precisions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import solvers
from cases.spin_models import as_matrix, couplings, fields
from fuzz.cases import Draw
from fuzz.invariants import refused, valid
from fuzz.refusals import BAD_COUNTS, BAD_FLAGS
from solvers import Status

NEAR = {torch.float64: 1e-6, torch.float32: 3e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
STRENGTHS = (0.0, 0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 20.0)


def check(draw: Draw) -> None:
    """One model with good arguments, or one that must be refused."""
    dim = draw.note("d", draw.random.choice((1, 1, 2, 3, 4)))
    sites, batch = (
        draw.note("N", draw.random.randint(1, 6)),
        draw.note("B", draw.random.randint(1, 4)),
    )
    dtype = draw.choose("dtype", list(NEAR), (5, 4, 1, 1))
    strength = draw.choose("strength", STRENGTHS)
    j = couplings(sites, dim, strength / (sites * dim) ** 0.5, draw.generator).to(dtype)
    x = fields(batch, sites, dim, draw.generator, draw.choose("field", (0.0, 0.5, 3.0, 50.0))).to(
        dtype
    )
    site = _site(draw, dim).to(dtype)
    if draw.chance(0.05):
        _refuse(draw, j, x, site)
        return
    mask = draw.mask(batch, sites) if draw.chance(0.25) else None
    if mask is not None:
        draw.note("mask", mask.tolist())
    policy = draw.random.choice(("ignore", "ignore", "warn", "raise"))
    options: dict[str, Any] = {
        "max_steps": draw.note("max_steps", draw.random.choice((1, 2, 5, 200))),
        "mask": mask,
        "order": draw.choose("order", ("adaptive", "naive", "second"), (8, 2, 1)),
        "log_partition": draw.note("log_partition", draw.chance(0.3)),
        "response": draw.note("response", draw.chance(0.4)),
        "record": draw.chance(0.2),
        "damping": draw.note("damping", draw.random.choice((None, None, 0.3, 1.0))),
    }
    call = valid(
        draw,
        lambda: solvers.adaptive_tap(j, x, site=site, on_failure=policy, **options),
        (j, x, mask),
        allowed=solvers.SolveError,
    )
    error = call.error
    solution = error.solution if isinstance(error, solvers.SolveError) else call.result
    if solution is None:
        return
    failed = not bool(solution.converged.all())
    draw.expect((error is not None) == (failed and policy == "raise"), "policy", "raise")
    draw.expect(len(call.warned) == int(failed and policy == "warn"), "policy", "warn")
    _check_solution(draw, solution, (j, x, site), options)


def _site(draw: Draw, dim: int) -> solvers.Site:
    kinds = ["gaussian", *(["ising"] if dim == 1 else ["potts", "spherical", "large spherical"])]
    kind = draw.choose("site", kinds)
    if kind == "gaussian":
        root = draw.normal(dim, dim) / dim**0.5
        return solvers.GaussianSite(root @ root.T + 0.1 * torch.eye(dim, dtype=root.dtype))
    if kind == "ising":
        return solvers.IsingSite()
    if kind == "potts":
        return solvers.PottsSite()
    return solvers.SphericalSite(large_dimension=kind != "spherical")


def _check_solution(
    draw: Draw, solution: solvers.Solution, model: Any, options: dict[str, Any]
) -> None:
    _, x, site = model
    mask, status, value = options["mask"], solution.status, solution.value
    for name, part in value._asdict().items():
        if part is not None:
            draw.expect_rows(
                torch.isfinite(part).reshape(len(part), -1).all(1), f"finite {name}", status=status
            )
    near = NEAR[x.dtype]
    mean, covariance = value.mean.double(), value.covariance.double()
    if mask is not None:
        draw.expect((mean[~mask] == 0).all(), "mask", "masked sites have a mean")
    converged = solution.converged
    _check_domain(draw, site, mean, mask, status, near)
    lowest = torch.linalg.eigvalsh((covariance + covariance.mT) / 2).flatten(1).amin(1)
    draw.expect_rows((lowest >= -near) | ~converged, "covariance", lowest=lowest, status=status)
    if isinstance(site, solvers.GaussianSite) and options["order"] == "adaptive":
        _check_gaussian(draw, solution, model, mask, near)
    if value.response is not None:
        response = value.response.double().flatten(3).flatten(1, 2)
        apart = (response - response.mT).abs().amax((1, 2)) / response.abs().amax((1, 2))
        draw.expect_rows(~(apart > near) | ~converged, "response", apart=apart, status=status)
    told = {"status": status, "residual": solution.residual}
    known = torch.isfinite(solution.residual) | (status == Status.INDEFINITE)
    draw.expect_rows(known | (status == Status.NONFINITE), "unknown residual", **told)


def _check_domain(
    draw: Draw, site: Any, mean: Tensor, mask: Tensor | None, status: Tensor, near: float
) -> None:
    """Means are means: within [-1, 1], the simplex or the ball, converged or not."""
    if isinstance(site, solvers.IsingSite):
        outside = (mean.abs() - 1).amax((1, 2))
    elif isinstance(site, solvers.PottsSite):
        total = (mean.sum(2) - 1).abs()
        total = total if mask is None else total * mask
        outside = torch.maximum((-mean).amax((1, 2)), total.amax(1))
    elif isinstance(site, solvers.SphericalSite) and not site.large_dimension:
        outside = (mean.norm(dim=2) - mean.shape[2] ** 0.5).amax(1)
    else:
        return
    draw.expect_rows(outside <= near, "domain", outside=outside, status=status)


def _check_gaussian(
    draw: Draw, solution: solvers.Solution, model: Any, mask: Tensor | None, near: float
) -> None:
    """Gaussian sites are solved exactly: ``m = (Sigma^-1 - J)^-1 x``."""
    j, x, site = model
    batch, sites, dim = x.shape
    precision = torch.linalg.inv(site.sigma.double())
    whole = torch.block_diag(*[precision] * sites) - as_matrix(j.double())
    for row in range(batch):
        keep = torch.ones(sites, dtype=torch.bool) if mask is None else mask[row]
        index = keep.repeat_interleave(dim).nonzero().flatten()
        if not len(index):
            continue
        matrix = whole[index][:, index]
        lowest = torch.linalg.eigvalsh(matrix)
        condition = float(lowest[-1] / lowest[0].clamp_min(1e-12))
        if not bool(solution.converged[row]):
            continue
        draw.expect(lowest[0] > -near * lowest[-1], "Gaussian", f"converged at {float(lowest[0])}")
        if condition > 0.1 / near:
            continue
        exact = torch.linalg.solve(matrix, x[row].double().flatten()[index])
        apart = (solution.value.mean[row].double().flatten()[index] - exact).norm()
        allowed = near * (exact.norm() * condition + 1e-3)
        draw.expect(
            apart <= allowed, "Gaussian", f"sample {row}: off by {apart:.3g}, {condition=:.3g}"
        )


def _refuse(draw: Draw, j: Tensor, x: Tensor, site: solvers.Site) -> None:
    own = j.clone()
    own[0, 0] += 1
    bad: dict[str, tuple[Any, ...]] = {
        "couplings": (j[..., :0], j.long(), 3.0, torch.full_like(j, torch.nan), own, j[0]),
        "field": (x.long(), None, x * torch.nan, x[0], x[:0], x[..., :0]),
        "site": (None, 3, "icing"),
        "mask": ("mask", x, x[..., 0] > 0, torch.ones(1, len(j) + 1, dtype=torch.bool))[:2],
        "max_steps": BAD_COUNTS,
        "order": ("", "third", 2),
        "response": BAD_FLAGS,
        "record": BAD_FLAGS,
        "damping": (0.0, 1.5, "1"),
        "on_failure": ("quiet", None),
        "tolerance": (-1.0, "x"),
        "adjoint": ("implicit", 3),
    }
    name = draw.choose("argument", list(bad))
    position = draw.note("position", draw.random.randrange(len(bad[name])))
    value = bad[name][position]
    named: dict[str, Any] = {"couplings": j, "field": x, "site": site} | {name: value}
    refused(draw, lambda: solvers.adaptive_tap(**named), name)
