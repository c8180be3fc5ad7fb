"""Couplings: their symmetries, parameters and gauge, and how they are set, bounded and applied."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from cases.potts import random_couplings
from implicit_attn.energies.spins import binary_size, check_couplings, zero_sum
from implicit_attn.updates import Couplings

SITES, DIM = 5, 3
BOUNDS = [None, 0.4]
each_symmetry = pytest.mark.parametrize("tied", [True, False])


def make(tied: bool = True, **options: Any) -> Couplings:
    torch.manual_seed(0)
    return Couplings(SITES, DIM, symmetric_sites=tied, **options).double()


def state(batch: int = 4, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, SITES, DIM, generator=generator, dtype=torch.float64)


def has_symmetries(weight: Tensor, tied: bool) -> bool:
    """Zero diagonal blocks, and exactly the symmetries asked for."""
    empty = all(bool((weight[i, i] == 0).all()) for i in range(len(weight)))
    sites = torch.equal(weight, weight.permute(1, 0, 3, 2))
    return empty and sites == tied


@each_symmetry
@pytest.mark.parametrize("bound", BOUNDS)
def test_symmetries_are_exact_also_after_training(tied: bool, bound: float | None) -> None:
    couplings = make(tied, bound=bound)
    assert has_symmetries(couplings.weight, tied)
    optimizer = torch.optim.Adam(couplings.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        (couplings(state(seed=seed)) - 1.0).square().sum().backward()
        optimizer.step()
    assert has_symmetries(couplings.weight, tied)


@each_symmetry
def test_only_free_entries_are_parameters(tied: bool) -> None:
    couplings = make(tied)
    pairs = SITES * (SITES - 1) // (2 if tied else 1)
    count = pairs * DIM * DIM
    (parameter,) = couplings.parameters()
    assert parameter is couplings.free
    assert parameter.numel() == count
    # Every free entry moves J in a direction of its own.
    jacobian = torch.autograd.functional.jacobian(
        couplings.parametrizations["weight"][0],  # type: ignore[index]
        parameter.detach(),
    )
    assert isinstance(jacobian, Tensor)
    assert torch.linalg.matrix_rank(jacobian.reshape(SITES**2 * DIM**2, count)) == count


@each_symmetry
@pytest.mark.parametrize("bound", BOUNDS)
def test_field_is_the_sum_over_the_other_sites(tied: bool, bound: float | None) -> None:
    couplings, z = make(tied, bound=bound), state()
    expected = torch.einsum("ijab,njb->nia", couplings.weight, z)
    torch.testing.assert_close(couplings(z), expected, rtol=1e-13, atol=1e-13)
    matrix = couplings.weight.permute(0, 2, 1, 3).reshape(SITES * DIM, SITES * DIM)
    assert torch.equal(couplings.matrix, matrix)
    # The matrix is the memory of the weight, so that reading it copies nothing.
    assert couplings.weight.transpose(1, 2).is_contiguous()
    blocks = torch.stack([torch.stack([b.norm() for b in row]) for row in couplings.weight])
    torch.testing.assert_close(couplings.site_norms(), blocks)


def test_masked_sites_neither_pull_nor_feel() -> None:
    couplings, z = make(), state()
    mask = torch.tensor([[True] * 5, [True, False, True, True, False], [False] * 5, [True] * 5])
    field = couplings(z.masked_fill(~mask.unsqueeze(-1), float("nan")), mask=mask)
    assert (field[~mask] == 0).all()
    keep = mask[1]
    part = torch.einsum("ijab,jb->ia", couplings.weight[keep][:, keep], z[1, keep])
    torch.testing.assert_close(field[1, keep], part, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(field[0], couplings(z)[0], rtol=1e-13, atol=1e-13)


@each_symmetry
def test_weights_can_be_set_and_copied(tied: bool) -> None:
    source, target = make(tied), make(tied)
    with torch.no_grad():
        source.free.normal_()
    before = target.free
    target.weight = source.weight
    assert target.free is before  # optimisers keep their parameter
    assert torch.equal(target.weight, source.weight)
    target.reset_parameters()
    target.load_state_dict(source.state_dict())
    assert list(source.state_dict()) == ["parametrizations.weight.original"]
    twin = copy.deepcopy(source)
    with torch.no_grad():
        source.free.zero_()
    assert (source.weight == 0).all()
    assert torch.equal(twin.weight, target.weight) and (twin.weight != 0).any()


@pytest.mark.parametrize("tied", [True, False])
def test_bound_caps_the_spectral_norm_and_nothing_else(tied: bool) -> None:
    couplings = make(tied, bound=0.4)
    free = couplings.free.detach().clone()
    for factor in (1.0, 100.0, 1e-3, 0.0):
        with torch.no_grad():
            couplings.free.copy_(factor * free)
        unbounded = make(tied)
        unbounded.load_state_dict({"parametrizations.weight.original": couplings.free.detach()})
        norm = torch.linalg.matrix_norm(unbounded.matrix, ord=2).item()
        found = torch.linalg.matrix_norm(couplings.matrix, ord=2).item()
        assert found == pytest.approx(min(norm, 0.4), rel=1e-10)
        scale = min(1.0, 0.4 / norm) if norm else 1.0
        torch.testing.assert_close(couplings.weight, scale * unbounded.weight)
    couplings(state()).sum().backward()  # at J = 0
    assert couplings.free.grad is not None and couplings.free.grad.isfinite().all()


def test_one_site_couples_to_nobody() -> None:
    couplings = Couplings(1, 4, bound=1.0)
    assert couplings.free.numel() == 0
    assert (couplings(torch.ones(2, 1, 4)) == 0).all()


def _weight(change: str) -> Tensor:
    weight = make().weight.detach().clone()
    if change == "diagonal":
        weight[1, 1, 0, 0] = 1.0
    elif change == "sites":
        weight[0, 1, 0, 0] += 1.0
    elif change == "nan":
        weight[0, 1] = float("nan")
    return weight


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("diagonal", "weight must have zero blocks J_ii, got deviations up to 1"),
        ("sites", "weight must have J_ij^ab = J_ji^ba, got deviations up to 1"),
    ],
)
def test_set_weights_must_have_the_symmetries(change: str, message: str) -> None:
    couplings = make()
    before = couplings.weight.detach().clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        couplings.weight = _weight(change)
    assert torch.equal(couplings.weight, before)
    couplings.weight = _weight("nothing")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be finite and > 0, got 0.0"),
        ({"bound": float("inf")}, ValueError, "bound must be finite and > 0, got inf"),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        arguments: dict[str, Any] = {"sites": 4, "dim": 3} | options
        Couplings(**arguments)


@pytest.mark.parametrize(
    ("z", "kind", "message"),
    [
        (torch.zeros(2, 4, 3), ValueError, "z must have 5 sites (N), got shape (2, 4, 3)"),
        (torch.zeros(2, 5, 4), ValueError, "z must have 3 features (d)"),
        (torch.zeros(5, 3), ValueError, "z must have the shape (B, N, d), got (5, 3)"),
        (torch.zeros(2, 5, 3, dtype=torch.long), TypeError, "z must be of a floating dtype"),
    ],
)
def test_bad_states(z: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        Couplings(SITES, DIM)(z)


def couplings(seed: int = 0) -> torch.Tensor:
    return random_couplings(5, 3, torch.Generator().manual_seed(seed))


def test_the_gauge_has_zero_sums_and_is_kept() -> None:
    gauged = zero_sum(couplings() + couplings(1).transpose(2, 3))
    torch.testing.assert_close(gauged.sum(2), torch.zeros(5, 5, 3).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(gauged, gauged.permute(1, 0, 3, 2))
    torch.testing.assert_close(zero_sum(gauged), gauged)


def test_directions_are_averaged() -> None:
    single = torch.zeros(2, 2, 2, 2)
    single[0, 1] = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    assert torch.equal(zero_sum(single)[0, 1], 0.5 * single[0, 1])
    assert torch.equal(zero_sum(single)[1, 0], 0.5 * single[0, 1])


@pytest.mark.parametrize("scale", [1.0, 0.7, 3e-30, 2e38, 0.0])
def test_dividing_by_the_size_rounds_nothing(scale: float) -> None:
    scaled = couplings().float() / couplings().abs().max() * scale
    size = binary_size(scaled)
    assert torch.equal(scaled / size * size, scaled)
    assert scale == 0 or 1 <= float((scaled / size).abs().max()) < 2


def test_wrong_couplings() -> None:
    with pytest.raises(TypeError, match="truth must be a floating"):
        check_couplings(torch.zeros(3, 3, 2, 2, dtype=torch.long), "truth")
    with pytest.raises(ValueError, match=r"\(N, N, d, d\)"):
        zero_sum(torch.zeros(3, 2, 2, 2))
    with pytest.raises(ValueError, match="finite"):
        zero_sum(torch.full((2, 2, 2, 2), float("inf")))
