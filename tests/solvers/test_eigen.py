"""Spectral radii and extreme eigenvalues against dense linear algebra; penalties of the Jacobian."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torchdeq.loss import jac_reg

import solvers
from cases.solves import matrices, multiply, normal, right_sides
from implicit_attn import DEQ
from solvers import Implicit, fixed_point, jacobian_penalty
from solvers.eigen import (
    Spectrum,
    SpectrumError,
    extreme_eigenvalues,
    jacobian,
    spectral_radius,
    spectrum,
)

SIZES = pytest.mark.parametrize(("size", "method"), [(1, "dense"), (20, "auto"), (20, "arpack")])


def update(z: Tensor, matrix: Tensor) -> Tensor:
    return torch.tanh(multiply(z, matrix)) + 0.1 * z


def energy(z: Tensor, matrix: Tensor) -> Tensor:
    """``z.Az / 2 + sum z^4 / 12``, with Hessian ``A + diag(z^2)``."""
    return 0.5 * (z * multiply(z, matrix)).sum(1) + z.pow(4).sum(1) / 12


def problem(size: int, kind: str, batch: int = 3) -> tuple[Tensor, Tensor]:
    return right_sides(batch, size) / 2, matrices(kind, batch, size)


def dense_jacobian(z: Tensor, matrix: Tensor) -> Tensor:
    slope = 1 - torch.tanh(multiply(z, matrix)) ** 2
    return slope[:, :, None] * matrix + 0.1 * torch.eye(z.shape[1], dtype=z.dtype)


def dense_hessian(z: Tensor, matrix: Tensor) -> Tensor:
    return matrix + torch.diag_embed(z * z)


def radius(matrix: Tensor) -> Tensor:
    return torch.from_numpy(numpy.abs(numpy.linalg.eigvals(matrix.numpy())).max(axis=1))


@pytest.mark.parametrize("size", [1, 7])
def test_jacobian_is_that_of_the_formula(size: int) -> None:
    z, matrix = problem(size, "contraction")
    torch.testing.assert_close(jacobian(update, z, (matrix,)), dense_jacobian(z, matrix))
    symmetric = matrices("indefinite", 3, size)
    hessian = jacobian(energy, z, (symmetric,), kind="energy")
    torch.testing.assert_close(hessian, dense_hessian(z, symmetric))
    given = jacobian(lambda z, v, a: multiply(v, a), z, (matrix,), kind="product")
    torch.testing.assert_close(given, matrix)


@SIZES
def test_spectral_radius(size: int, method: str) -> None:
    z, matrix = problem(size, "contraction")
    found = spectral_radius(update, z, (matrix,), method=method)
    torch.testing.assert_close(found, radius(dense_jacobian(z, matrix)), rtol=1e-5, atol=0)


def gradient(z: Tensor, matrix: Tensor) -> Tensor:
    return multiply(z, matrix) + z**3 / 3


def product(z: Tensor, v: Tensor, matrix: Tensor) -> Tensor:
    return multiply(v, matrix) + z * z * v


@pytest.mark.parametrize("method", ["auto", "arpack"])
@pytest.mark.parametrize(
    ("f", "kind"), [(energy, "energy"), (gradient, "map"), (product, "product")]
)
def test_extreme_eigenvalues(f: Any, kind: Any, method: Any) -> None:
    z, matrix = problem(20, "indefinite")
    smallest, largest = extreme_eigenvalues(f, z, (matrix,), kind=kind, method=method)
    reference = torch.linalg.eigvalsh(dense_hessian(z, matrix))
    torch.testing.assert_close(smallest, reference[:, 0], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(largest, reference[:, -1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["dense", "arpack"])
def test_several_eigenvalues(method: str) -> None:
    z, matrix = problem(30, "contraction")
    result = spectrum(update, z, (matrix,), count=4, method=method)
    assert result.eigenvalues.shape == (3, 4)
    magnitudes = numpy.abs(numpy.linalg.eigvals(dense_jacobian(z, matrix).numpy()))
    expected = torch.from_numpy(-numpy.sort(-magnitudes, axis=1)[:, :4].copy())
    torch.testing.assert_close(result.eigenvalues.abs(), expected, rtol=1e-5, atol=0)
    symmetric = matrices("indefinite", 3, 30)
    ends = spectrum(energy, z, (symmetric,), what="extremes", kind="energy", count=3, method=method)
    values = torch.linalg.eigvalsh(dense_hessian(z, symmetric))
    expected = torch.cat([values[:, :3], values[:, -3:]], dim=1)
    torch.testing.assert_close(ends.eigenvalues, expected, rtol=1e-6, atol=1e-8)
    for found in (result, ends):
        assert found.converged.all() and (found.residual < 1e-5).all()
        assert (found.products >= (30 if method == "dense" else 1)).all()


@pytest.mark.parametrize("method", ["dense", "arpack"])
def test_samples_without_finite_eigenvalues_are_named(method: str) -> None:
    z, matrix = problem(12, "contraction")
    matrix[1, 0, 0] = float("nan")
    with pytest.raises(SpectrumError, match=r"\[1\]") as got:
        spectral_radius(update, z, (matrix,), method=method)
    found: Spectrum = got.value.spectrum
    assert found.converged.tolist() == [True, False, True]
    assert found.eigenvalues.isnan().squeeze(1).tolist() == [False, True, False]
    expected = radius(dense_jacobian(z, matrix)[[0, 2]])
    torch.testing.assert_close(found.eigenvalues[[0, 2], 0].abs(), expected)
    spectrum(update, z, (matrix,), method=method, on_failure="ignore")


def test_eigenvalues_that_arpack_misses_are_computed_densely_or_reported() -> None:
    """Eigenvalues on a circle, all of one magnitude: no Krylov space tells them apart in time."""
    z = torch.zeros(2, 100, dtype=torch.float64)

    def shift(z: Tensor) -> Tensor:
        return 0.7 * z.roll(1, dims=1)

    with pytest.raises(SpectrumError):
        spectral_radius(shift, z, method="arpack", max_products=10)
    result = spectrum(shift, z, max_products=10)
    assert result.converged.all()
    assert (result.products > 100).all()
    torch.testing.assert_close(result.eigenvalues.abs(), torch.full((2, 1), 0.7).double())


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"f": 1}, TypeError, r"\bf\b"),
    ({"what": "all"}, ValueError, "what"),
    ({"kind": "energy"}, ValueError, r"energy|f"),
    ({"count": 13}, ValueError, "unknowns"),
    ({"count": 5, "method": "arpack"}, ValueError, "unknowns"),
    ({"tolerance": -1.0}, ValueError, "tolerance"),
    ({"args": (torch.ones(4),)}, ValueError, "args"),
    ({"z": torch.ones(3, 1), "what": "extremes"}, ValueError, "unknowns"),
    ({"what": "extremes"}, ValueError, "symmetric"),
    ({"f": lambda z: z.detach()}, ValueError, r"\bz\b"),
    ({"f": lambda z: z[:, :3]}, ValueError, r"\bf\b"),
    ({"samples": 0}, ValueError, "samples"),
    ({"samples": 1.5}, TypeError, "samples"),
    ({"samples": 1, "generator": 3}, TypeError, "generator"),
    ({"samples": 1, "mask": torch.ones(2, 5).bool()}, ValueError, "mask"),
    ({"samples": 1, "z": torch.ones(2, 4, dtype=torch.int64)}, TypeError, r"\bz\b"),
    ({"samples": 1, "f": lambda z: z[:, :2]}, ValueError, r"\bf\b"),
])  # fmt: skip
def test_errors_say_what_came_and_what_was_expected(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {
        "f": lambda z: z.cumsum(1) ** 2,
        "z": torch.ones(3, 12, dtype=torch.float64),
        **change,
    }
    call: Any = jacobian_penalty if "samples" in change else spectrum
    with pytest.raises(error, match=message):
        call(arguments.pop("f"), arguments.pop("z"), arguments.pop("args", ()), **arguments)


WEIGHT = 0.4 * normal(3, 3)


def step(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(z.flip(1) @ WEIGHT) + x * z.square().mean((1, 2), keepdim=True)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.mark.parametrize("masked", [False, True])
def test_exact_and_estimated_size(masked: bool) -> None:
    z, x = normal(2, 4, 3), 0.3 * normal(2, 4, 3, seed=1)
    mask = torch.tensor([[True, True, True, not masked], [True] * 4])
    keep = mask[:, :, None].expand(2, 4, 3).flatten(1)
    dense = solvers.jacobian(step, z, (x,)) * keep[:, :, None] * keep[:, None, :]
    expected = dense.square().sum((1, 2)) / keep.sum(1)
    options: dict[str, Any] = {"mask": mask if masked else None}
    exact = jacobian_penalty(step, z, (x,), samples=None, **options)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=0)
    many = jacobian_penalty(step, z, (x,), samples=500, generator=generator(), **options)
    torch.testing.assert_close(many, expected, rtol=0.15, atol=0)
    one = [jacobian_penalty(step, z, (x,), generator=g) for g in (generator(), generator())]
    assert torch.equal(*one) and not torch.equal(one[0], exact)


def test_the_estimate_is_that_of_torchdeq() -> None:
    z, x = normal(2, 4, 3).requires_grad_(), 0.3 * normal(2, 4, 3, seed=1)
    torch.manual_seed(0)
    theirs = jac_reg(step(z, x), z, vecs=300).detach()
    exact = jacobian_penalty(step, z, (x,), samples=None).mean().detach()
    torch.testing.assert_close(theirs, exact, rtol=0.15, atol=0)


@pytest.mark.parametrize("samples", [None, 2])
def test_derivatives(samples: int | None) -> None:
    def penalty(z: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        def f(z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(z @ weight) * x

        return jacobian_penalty(f, z, (x,), samples=samples, generator=generator())

    given = [t.requires_grad_() for t in (normal(2, 2, 3), normal(2, 2, 3, seed=1), WEIGHT.clone())]
    assert torch.autograd.gradcheck(penalty, given)


EXACT: dict[str, Any] = {"tolerance": 1e-13, "adjoint": Implicit(tolerance=1e-13), "max_steps": 200}


@pytest.mark.parametrize("masked", [False, True])
def test_the_penalty_of_a_layer_moves_with_the_fixed_point(masked: bool) -> None:
    """The whole derivative by the weights, central differences of solve and penalty; or at a fixed z."""
    x = normal(1, 2, 3, seed=1)
    mask = torch.tensor([[True, False]]) if masked else None

    def penalty(weight: Tensor, z: Tensor | None = None) -> Tensor:
        layer = DEQ.from_update(lambda z, x, mask: torch.tanh(z @ weight) + x, **EXACT)
        z = layer(x, mask) if z is None else z
        return layer.jacobian_penalty(z, x, mask, samples=None)

    start = DEQ.from_update(lambda z, x, mask: torch.tanh(z @ WEIGHT) + x, **EXACT)(x, mask)
    weight = WEIGHT.clone().requires_grad_()
    assert torch.autograd.gradcheck(penalty, (weight,), atol=1e-6)
    assert torch.autograd.gradcheck(lambda weight: penalty(weight, start), (weight,))
    gradients = [torch.autograd.grad(penalty(weight, z).sum(), weight)[0] for z in (None, start)]
    assert (gradients[0] - gradients[1]).abs().max() > 1e-3


def test_the_radius_of_a_layer_with_masked_tokens() -> None:
    """A masked token stays where it is, which is no eigenvalue 1 of what is solved."""
    layer = DEQ.from_update(lambda z, x, mask: torch.where(mask[..., None], 0.5 * z + x, z))
    x = normal(2, 4, 3)
    mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    z = layer(x, mask)
    torch.testing.assert_close(layer.spectral_radius(z, x, mask), torch.full((2,), 0.5).double())
    torch.testing.assert_close(
        layer.jacobian_penalty(z, x, mask), torch.full((2,), 0.25, dtype=torch.float64)
    )


def test_a_view_of_attention_is_differentiated_twice() -> None:
    """The plain formula of attention has the memory layout of the fused kernels."""
    torch.manual_seed(0)
    weight = torch.randn(16, 48, dtype=torch.float64) / 8

    def attention(z: Tensor, x: Tensor, reshape: bool = False) -> Tensor:
        parts = ((z + x) @ weight).view(*z.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        return 0.5 * (mixed.reshape(z.shape) if reshape else mixed.view(z.shape))

    x = torch.randn(3, 5, 16, dtype=torch.float64)
    options: dict[str, Any] = {"tolerance": 1e-10, "solver": "newton"}
    found = []
    for reshape in (False, True):
        f = partial(attention, reshape=reshape)
        z = fixed_point(f, x, (x,), **options).value
        penalty = jacobian_penalty(f, z, (x,), samples=None)
        found.append((z, penalty, spectral_radius(f, z, (x,))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
