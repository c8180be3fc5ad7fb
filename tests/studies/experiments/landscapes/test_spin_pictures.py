"""The numbers behind the small pictures of spins."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_attn.energies import SphericalLagrangian
from implicit_attn.studies.experiments.landscapes.spins import (
    bessel_ratio,
    bessel_table,
    directed_couplings,
    large_order_ratio,
    norm_curves,
    planar_spins,
    strongest,
)
from solvers import SphericalSite


@pytest.mark.parametrize("order", [0, 1])
def test_ratio_of_low_orders(order: int) -> None:
    """Against torch's own Bessel functions."""
    x = torch.tensor([1e-3, 0.3, 2.0, 30.0, 400.0], dtype=torch.float64)
    first = torch.special.i1e(x) / torch.special.i0e(x)
    expected = first if order == 0 else 1 / first - 2 / x  # I_2 = I_0 - 2 I_1 / x
    bound = 1e-13 if order == 0 else 1e-8  # the difference cancels for small x
    torch.testing.assert_close(bessel_ratio(order, x), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("order", [1, 8, 64])
def test_ratio_is_the_mean_of_a_spherical_site(order: int) -> None:
    """The means of spins in ``d = 2 nu + 2`` dimensions, by the package's quadrature."""
    dim = 2 * order + 2
    x = torch.tensor([order**0.5, order, order**2], dtype=torch.float64)
    field = torch.zeros(3, dim, dtype=torch.float64)
    field[:, 0] = x
    mean = SphericalSite(1.0).mean(field, torch.zeros(dim, dim, dtype=torch.float64))
    torch.testing.assert_close(bessel_ratio(order, x), mean[:, 0], rtol=1e-12, atol=0.0)


def test_ratio_of_huge_arguments() -> None:
    """``1 - (2 nu + 1) / (2 x) + (4 nu^2 - 1) / (8 x^2)`` up to ``nu^4 / x^3``."""
    x = torch.tensor([512.0**2], dtype=torch.float64)
    expected = 1 - 1025 / (2 * x) + (4 * 512**2 - 1) / (8 * x**2)
    torch.testing.assert_close(bessel_ratio(512, x), expected, rtol=1e-6, atol=0.0)
    assert bessel_ratio(3, torch.zeros(1, dtype=torch.float64)).item() == 0.0


def test_errors_of_the_limit() -> None:
    """0.72, 0.078, 9.5e-3 and 1.2e-3 at ``x = nu``, and smaller elsewhere for large orders."""
    table = bessel_table((1, 8, 64, 512))
    errors = {row["order"]: row["relative_error"] for row in table if row["at"] == "nu"}
    for order, published in {1: 0.72, 8: 0.078, 64: 9.5e-3, 512: 1.2e-3}.items():
        assert errors[order] == pytest.approx(published, rel=0.02)
    assert all(0 < row["relative_error"] < 2.1e-3 for row in table if row["order"] == 512)


def test_curves_of_norms() -> None:
    table = norm_curves((0.5, 2.0), dim=64, points=9)
    assert len(table) == 18 and table[0]["norm"] == table[0]["exact"] == 0.0
    radius = math.sqrt(31)
    for row in table:
        field = row["beta"] * row["field"]
        expected = field / (1 + math.sqrt(1 + (field / radius) ** 2))
        assert row["norm"] == pytest.approx(expected, rel=1e-12, abs=1e-15)
        assert row["exact"] <= row["norm"] < radius  # the limit is above, by 1 / (nu + 1) at most
        assert row["norm"] == pytest.approx(row["exact"], rel=1 / 31, abs=1e-15)


def test_the_limit_is_the_spherical_activation() -> None:
    """``SphericalLagrangian`` has the radius ``sqrt d`` and the order ``d / 2``, so it agrees at those."""
    z = torch.tensor([[3.0, -1.0, 2.0, 0.5]], dtype=torch.float64)
    norm = SphericalLagrangian().activation(z).norm()
    torch.testing.assert_close(norm, 2 * large_order_ratio(2, 2 * z.norm()))


def test_planar_spins_are_a_solution() -> None:
    picture = planar_spins(7, strength=2.0, seed=0)
    assert torch.equal(picture.couplings, picture.couplings.T)
    local = picture.fields + picture.couplings @ picture.means
    size = local.norm(dim=1, keepdim=True)
    expected = bessel_ratio(0, size) * local / size
    torch.testing.assert_close(picture.means, expected, rtol=1e-8, atol=1e-8)


def test_strongest_couplings() -> None:
    couplings = directed_couplings(12, seed=0)
    table = strongest(couplings, 0.25)
    assert len(table) == math.ceil(0.25 * 12 * 11)
    sizes = [abs(row["coupling"]) for row in table]
    assert sizes == sorted(sizes)
    assert (couplings.abs() > sizes[0]).sum() == len(table) - 1
    assert all(couplings[row["to"], row["from"]] == row["coupling"] for row in table)
    pairs = strongest(couplings + couplings.T, 1.0)
    assert len(pairs) == 66 and all(row["to"] < row["from"] for row in pairs)


def test_errors() -> None:
    with pytest.raises(ValueError, match="order must be >= 0"):
        bessel_ratio(-1, torch.ones(1))
    with pytest.raises(ValueError, match="dim must be"):
        norm_curves((1.0,), dim=2)
    with pytest.raises(ValueError, match="sites must be"):
        directed_couplings(1)
