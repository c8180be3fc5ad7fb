"""Data terms, energies of networks, parts that are exchanged after training, and models of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from implicit_attn import DEQ, check_energy
from implicit_attn.energies import DataTerm, Hopfield, NetworkEnergy, Quadratic
from implicit_attn.models import ImageRestorer, Restorer


def network(dim: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(dim, 9), nn.Tanh(), nn.Linear(9, dim)).double()


def test_the_gradient_and_hessian_of_a_network_are_those_of_the_formula() -> None:
    """``r - J^T r`` and ``(I - J)^T (I - J) v - sum_i r_i H_i v``, J and H_i by torch.func."""
    net = network()
    energy = NetworkEnergy(net)
    z, v = torch.randn(3, 6).double(), torch.randn(3, 6).double()
    for k in range(3):
        jacobian = torch.func.jacrev(net)(z[k])
        second = torch.func.jacrev(torch.func.jacrev(net))(z[k])
        residual, rest = z[k] - net(z[k]), torch.eye(6).double() - jacobian
        gradient = residual - jacobian.T @ residual
        curvature = rest.T @ rest - torch.einsum("i,ijk->jk", residual, second)
        assert torch.allclose(energy.grad(z)[k], gradient, rtol=1e-10, atol=1e-12)
        assert torch.allclose(energy.hvp(z, v)[k], curvature @ v[k], rtol=1e-10, atol=1e-12)
    assert torch.allclose(energy.denoise(z), z - energy.grad(z))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("operator", [None, lambda z: z[:, ::2] + 0.1 * z[:, ::2] ** 3])
def test_data_terms_are_checked(operator: Any, weighted: bool) -> None:
    torch.manual_seed(0)
    z = torch.randn(3, 6)
    y = torch.randn_like(z if operator is None else operator(z))
    x: Any = {"y": y, "weight": torch.rand_like(y)} if weighted else y
    assert check_energy(DataTerm(operator), z, x).ok


def test_data_terms_name_what_is_wrong() -> None:
    z = torch.zeros(2, 6)
    mistakes: list[tuple[Any, type[Exception], str]] = [
        (lambda: DataTerm()(z, {"weight": z}), TypeError, r"\by\b"),
        (lambda: DataTerm(lambda z: z[:, :3])(z, z), ValueError, r"\by\b"),
        (lambda: DataTerm()(z, {"y": z, "weight": z[:, :1]}), ValueError, "weight"),
        (lambda: DataTerm(torch.sin)(z, z, mask=z == 0), ValueError, "mask"),
        (lambda: NetworkEnergy(nn.Linear(6, 3))(z), ValueError, "network"),
    ]
    for call, error, name in mistakes:
        with pytest.raises(error, match=name):
            call()


def test_a_part_is_exchanged_and_the_others_are_shared() -> None:
    first, memory = Quadratic(), Hopfield(torch.eye(4), learnable=True)
    layer = DEQ(first.weighted(0.5) + 2.0 * memory)
    other = layer.replace(first, DataTerm())
    assert {id(p) for p in other.parameters()} == {id(p) for p in layer.parameters()}
    kinds, others = ([type(part) for part in each.modules()] for each in (layer, other))
    assert DataTerm not in kinds
    assert [DataTerm if kind is Quadratic else kind for kind in kinds] == others
    x = torch.randn(2, 3, 4)
    options: Any = {"max_steps": 3, "on_failure": "ignore"}
    assert torch.equal(layer(x, **options), other(x, **options))  # the two terms are equal
    assert layer.last is not other.last
    with pytest.raises(ValueError, match="old"):
        layer.replace(Quadratic(), DataTerm())
    with pytest.raises(TypeError, match="energy"):
        layer.replace(first, torch.sin)  # type: ignore[arg-type]


def test_a_restorer_finds_the_minimum_of_a_linear_problem() -> None:
    """With a linear network the answer solves a linear system, for each of two operators."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 6, bias=False).double()
    model = Restorer(NetworkEnergy(linear), torch.zeros(6).double(), factor=0.7).double()
    options: Any = {"tolerance": 1e-9, "max_steps": 500}
    rest = torch.eye(6).double() - linear.weight.detach()
    for matrix in (torch.eye(6).double(), torch.randn(3, 6).double()):
        y, weight = torch.randn(4, len(matrix)).double(), torch.rand(4, len(matrix)).double()
        operator = None if len(matrix) == 6 else lambda z, matrix=matrix: z @ matrix.T
        found = model.solve(y, weight, operator, **options)
        assert found.converged.all()
        factor = model.data.factor().item()
        for k in range(4):
            part = factor * matrix.T @ torch.diag(weight[k])
            exact = torch.linalg.solve(part @ matrix + rest.T @ rest, part @ y[k])
            assert torch.allclose(found.value[k], exact, rtol=1e-5, atol=1e-6)
        pairs = zip(y.split(3), weight.split(3), strict=True)
        for index, streamed in model.stream(pairs, operator, slots=2, **options):
            torch.testing.assert_close(streamed.value, found.value[index], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["convolution", "transformer"])
def test_an_image_restorer_learns_to_remove_noise(kind: str) -> None:
    """Bright squares: its error falls below that of the noisy images, by one step and by the layer."""
    torch.manual_seed(0)
    model = ImageRestorer(
        8, network=kind, width=8, layers=1, heads=2, layer={"on_failure": "ignore"}
    )
    corners = torch.randint(0, 5, (64, 2))
    clean = torch.zeros(64, 1, 8, 8)
    for image, (i, j) in zip(clean, corners.tolist(), strict=True):
        image[:, i : i + 4, j : j + 4] = 1.0
    noisy = clean + 0.5 * torch.randn_like(clean)
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        optimiser.zero_grad()
        (model.denoise(noisy) - clean).square().mean().backward()
        optimiser.step()
    assert (model.denoise(noisy) - clean).square().mean() < 0.18  # of 0.25
    with torch.no_grad():
        restored = model.eval().solve(noisy, torch.full_like(noisy, 4.0), max_steps=30)
    assert (restored.value - clean).square().mean() < 0.2
    assert restored.value.shape == clean.shape
