"""Softmax attention among frozen keys as a free energy of each query: its shape, and its descent.

The closed forms are those of Ren et al., "Transformers as Intrinsic Optimizers"
(https://arxiv.org/abs/2511.00907), theorems 1 and 3, for queries ``q = W_q z`` and keys ``k_j = W_k x_j``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cases.energies import relative_error
from implicit_attn.energies import SoftmaxAttention

DIM, HEADS, WIDTH = 6, 2, 3
KINDS = ("inner", "elastic")


def make(kind: str, seed: int = 0, heads: int = HEADS, **options: object) -> SoftmaxAttention:
    torch.manual_seed(seed)
    options = {"energy": kind, "cross": True, "norm": None, "beta": 0.7} | options
    return SoftmaxAttention(DIM, heads, head_dim=WIDTH, **options).double()  # type: ignore[arg-type]


def draw(seed: int, queries: int = 1, keys: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(1, queries, DIM, generator=generator, dtype=torch.float64)
    return z, torch.randn(1, keys, DIM, generator=generator, dtype=torch.float64)


def single(kind: str, beta: float, keys: Tensor) -> tuple[SoftmaxAttention, Tensor]:
    """One head whose queries are the tokens themselves, and whose keys are ``keys`` (M, p)."""
    width = keys.shape[1]
    energy = SoftmaxAttention(width, 1, energy=kind, cross=True, norm=None, beta=beta).double()
    with torch.no_grad():
        energy.query.weight.copy_(torch.eye(width))
        energy.key.weight.copy_(torch.eye(width))
    return energy, keys[None]


def least_curvatures(energy: SoftmaxAttention, points: Tensor, x: Tensor) -> Tensor:
    """The least eigenvalue of each point's own Hessian; ``points`` (N, p)."""
    z, width = points[None], points.shape[1]
    columns = [energy.hvp(z, v.expand_as(z), x)[0] for v in torch.eye(width).double()]
    return torch.linalg.eigvalsh(torch.stack(columns, -1).detach())[:, 0]


def test_the_elastic_energy_is_convex_above_a_quarter_of_the_squared_diameter() -> None:
    """No covariance of points exceeds that (Popoviciu); a quarter of that temperature is too cold."""
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(7, 3, generator=generator, dtype=torch.float64)
    points = 2.0 * torch.randn(2000, 3, generator=generator, dtype=torch.float64)
    quarter = 0.25 * torch.cdist(keys, keys).max().item() ** 2
    energy, x = single("elastic", 1.0 / quarter, keys)
    assert least_curvatures(energy, points, x).min() >= -1e-12
    energy, x = single("elastic", 4.0 / quarter, keys)
    assert least_curvatures(energy, points, x).min() < 0.0


@pytest.mark.parametrize("temperature", [0.5, 0.99, 1.0, 1.01, 2.0])
def test_the_bound_is_sharp_for_two_keys(temperature: float) -> None:
    """Between keys ``+a`` and ``-a`` the curvature along a is ``1 - |a|^2 / T``."""
    a = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    energy, x = single("elastic", 1.0 / temperature, torch.cat((a, -a)))
    z = torch.zeros(1, 1, 2, dtype=torch.float64)
    curvature = (energy.hvp(z, a[None], x) * a).sum().item()
    assert curvature == pytest.approx(1.0 - 1.0 / temperature, abs=1e-12)
    assert least_curvatures(energy, z[0], x).item() == pytest.approx(curvature, abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "eta"),
    [("inner", 0.1), ("inner", 1.0), ("inner", 1000.0), ("elastic", 1.0), ("elastic", 1.9)],
)
def test_how_far_a_gradient_step_descends(kind: str, eta: float) -> None:
    """Inner: at least ``eta |g|^2`` for every eta; elastic: ``eta (1 - eta L / 2) |g|^2``.

    L is the largest eigenvalue of ``sum_h W_h^T W_h``: one where the queries are the tokens.
    """
    for seed in range(20):
        if seed % 2:
            generator = torch.Generator().manual_seed(seed)
            keys = torch.randn(5, DIM, generator=generator, dtype=torch.float64)
            energy, x = single(kind, 0.7, keys)
        else:
            energy = make(kind, seed)
            if kind == "elastic":
                with torch.no_grad():
                    energy.query.weight /= torch.linalg.matrix_norm(energy.query.weight, ord=2)
            _, x = draw(seed)
        z, _ = draw(seed)
        value, gradient = energy.value_and_grad(z, x)
        promised = eta if kind == "inner" else eta * (1.0 - 0.5 * eta)
        lower = energy(z - eta * gradient, x)
        slack = 1e-9 * value.abs().clamp_min(1.0)
        assert (lower <= value - promised * gradient.square().sum() + slack).all()


def test_distances_and_products_agree_for_keys_of_one_norm() -> None:
    """``F_elastic = F_inner + |z|^2/2 + rho^2/2``, so the weights agree and the gradients up to z."""
    generator = torch.Generator().manual_seed(8)
    keys = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    keys = 1.3 * keys / keys.norm(dim=1, keepdim=True)
    z = torch.randn(1, 3, 4, generator=generator, dtype=torch.float64)
    found = {kind: single(kind, 0.7, keys) for kind in KINDS}
    value, gradient = zip(*(e.value_and_grad(z, x) for e, x in found.values()), strict=True)
    shift = 0.5 * z.square().sum() + 3 * 0.5 * 1.3**2
    assert relative_error(value[1].detach(), (value[0] + shift).detach()) <= 1e-13
    assert relative_error(gradient[1].detach(), (gradient[0] + z).detach()) <= 1e-13
