"""Fixed points in float64 by methods that share no code with the solvers under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import optimize
from scipy.sparse.linalg import LinearOperator, minres
from torch import Tensor

Map = Callable[..., Tensor]
ACCURACY = 1e-12  # of |f(z) - z| relative to |z|, demanded of every reference


def row(index: int, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Row ``index`` of each argument, as a batch of one."""
    return tuple(tensor[index : index + 1] for tensor in args)


def check(f: Map, z: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """``z`` itself if it is a fixed point of f to ``ACCURACY``; raises RuntimeError otherwise."""
    error = (f(z, *args) - z).flatten(1).norm(dim=1) / z.flatten(1).norm(dim=1)
    if not bool((error <= ACCURACY).all()):
        raise RuntimeError(f"reference not found: relative residuals {error.tolist()}")
    return z


def newton(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int = 60) -> Tensor:
    """Newton's method with dense Jacobians and backtracking on the residual, sample by sample."""
    found = [_newton_row(f, z[i : i + 1], row(i, args), steps) for i in range(z.shape[0])]
    return check(f, torch.cat(found), args)


def _newton_row(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int) -> Tensor:
    def residual(flat: Tensor) -> Tensor:
        return f(flat.view_as(z), *args).reshape(-1) - flat

    flat = z.reshape(-1)
    value = residual(flat)
    for _ in range(steps):
        jacobian: Any = torch.autograd.functional.jacobian(residual, flat, vectorize=True)
        direction = torch.linalg.lstsq(jacobian, -value.unsqueeze(1)).solution.squeeze(1)
        length = 1.0
        trial = residual(flat + direction)
        # the negated comparison also backs away from NaN
        while not bool(trial.norm() < value.norm()) and length > 1e-6:
            length /= 2
            trial = residual(flat + length * direction)
        if not bool(trial.norm() < value.norm()):
            break
        flat, value = flat + length * direction, trial
    return flat.view_as(z)


def root(f: Map, z0: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """Powell's hybrid method (scipy, MINPACK hybrj) from z0, then Newton steps."""
    found = []
    for i in range(z0.shape[0]):
        mine = row(i, args)

        def residual(flat: Tensor, mine: tuple[Tensor, ...] = mine) -> Tensor:
            return f(flat.view_as(z0[:1]), *mine).reshape(-1) - flat

        def fun(flat: np.ndarray, residual: Map = residual) -> np.ndarray:
            return residual(torch.from_numpy(flat)).numpy()

        def jac(flat: np.ndarray, residual: Map = residual) -> np.ndarray:
            matrix: Any = torch.autograd.functional.jacobian(residual, torch.from_numpy(flat))
            return matrix.numpy()

        start = z0[i].reshape(-1).numpy()
        result = optimize.root(fun, start, jac=jac, method="hybr", options={"xtol": 1e-13})
        found.append(torch.from_numpy(result.x).view_as(z0[:1]))
    return newton(f, torch.cat(found), args)


def contraction(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int) -> Tensor:
    """``steps`` plain iterations, then Newton steps (semi-smooth ones where f has kinks)."""
    for _ in range(steps):
        z = f(z, *args)
    return newton(f, z, args)


def continuation(
    f: Map, z: Tensor, args_at: Callable[[float], tuple[Tensor, ...]], steps: int = 20
) -> Tensor:
    """Newton's method along ``f(z, *args_at(t))``, t from ``1 / steps`` to 1."""
    for step in range(1, steps):
        args = args_at(step / steps)
        z = torch.cat([_newton_row(f, z[i : i + 1], row(i, args), 20) for i in range(z.shape[0])])
    return newton(f, z, args_at(1.0))


def minimum(f: Map, energy: Map, z0: Tensor, args: tuple[Tensor, ...]) -> Tensor:
    """L-BFGS (scipy) on the energy from z0, then Newton steps by MINRES on its Hessian."""
    found = []
    for i in range(z0.shape[0]):
        mine, shape = row(i, args), z0[:1].shape

        def fun(flat: np.ndarray, mine: Any = mine, shape: Any = shape) -> tuple[float, np.ndarray]:
            z = torch.from_numpy(flat).view(shape)
            gradient = (z - f(z, *mine)).reshape(-1)
            return float(energy(z, *mine)), gradient.numpy()

        start = z0[i].reshape(-1).numpy()
        options = {"maxiter": 20000, "maxfun": 40000, "ftol": 0.0, "gtol": 1e-9, "maxcor": 30}
        result = optimize.minimize(fun, start, jac=True, method="L-BFGS-B", options=options)
        found.append(_newton_minres(f, torch.from_numpy(result.x).view(shape), mine))
    return check(f, torch.cat(found), args)


def _newton_minres(f: Map, z: Tensor, args: tuple[Tensor, ...], steps: int = 8) -> Tensor:
    for _ in range(steps):
        point = z.detach().requires_grad_()
        gradient = point - f(point, *args)
        if float(gradient.detach().norm()) <= 0.1 * ACCURACY * float(z.norm()):
            break

        def product(v: np.ndarray, point: Tensor = point, gradient: Tensor = gradient) -> Any:
            vector = torch.from_numpy(np.asarray(v)).reshape(point.shape)
            (out,) = torch.autograd.grad(gradient, point, vector, retain_graph=True)
            return out.reshape(-1).numpy()

        size = point.numel()
        operator: Any = LinearOperator  # its constructor dispatches to a subclass, unknown to types
        hessian = operator((size, size), matvec=product, dtype=np.float64)
        step, _ = minres(hessian, gradient.detach().reshape(-1).numpy(), rtol=1e-10, maxiter=4000)
        z = z - torch.from_numpy(step).view_as(z)
    return z.detach()
