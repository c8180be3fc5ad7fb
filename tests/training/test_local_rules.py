"""Training by local rules: the loss falls, the bound holds, the seed alone decides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies import BareAttention
from implicit_attn.training import fit_locally
from solvers import TorusSite


def made() -> BareAttention:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BareAttention(3, 2, site=TorusSite())


def rings(count: int = 200) -> Tensor:
    """Three angles, the second that of the first plus a right angle, the third alone."""
    angles = 6.28 * torch.rand(count, 2, generator=torch.Generator().manual_seed(1))
    angles = torch.stack([angles[:, 0], angles[:, 0] + 1.57, angles[:, 1]], 1)
    return torch.stack([angles.cos(), angles.sin()], -1)


def test_the_likelihood_rises_and_the_right_pair_is_found() -> None:
    model, data, done = made(), rings(), []
    before = model.log_prob(data).sum(1).mean().item()
    generator = torch.Generator().manual_seed(2)
    fit_locally(model, data, steps=120, rate=0.1, generator=generator, watch=done.append)
    after = model.log_prob(data).sum(1).mean().item()
    assert done == list(range(1, 121))
    assert after > before + 1.5
    norms = model.couplings.site_norms().detach()
    assert norms[0, 1] > 2 * norms[0, 2] and norms[1, 0] > 2 * norms[1, 2]
    turn = model.couplings.weight[1, 0].detach()
    torch.testing.assert_close(
        turn / turn.norm(), torch.tensor([[0.0, -1], [1, 0]]) / 2**0.5, rtol=0, atol=0.1
    )


@pytest.mark.parametrize("rule", ["source", "hebb"])
def test_the_other_rules_end_at_their_bound(rule: str) -> None:
    model = made()
    generator = torch.Generator().manual_seed(2)
    fit_locally(model, rings(), rule=rule, steps=60, rate=0.1, cap=1.5, generator=generator)
    norms = model.couplings.site_norms().detach()
    assert norms.max() <= 1.5 + 1e-6
    assert norms[0, 1].item() == pytest.approx(1.5, rel=1e-4)


def test_the_generator_alone_decides() -> None:
    weights = []
    for seed in (3, 3, 4):
        model = made()
        torch.manual_seed(len(weights))
        generator = torch.Generator().manual_seed(seed)
        fit_locally(model, rings(), steps=3, batch=8, generator=generator)
        weights.append(model.couplings.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


class Fragile(nn.Module):
    """Its gradient leaves the range of numbers where the parameter is above 10."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(start))

    def local_gradient(self, z: Tensor, rule: str, /) -> Tensor:
        return torch.tensor(torch.inf if self.level > 10 else -1.0)

    def assign_gradient(self, gradient: Tensor, /) -> None:
        self.level.grad = gradient

    def cap_norms(self, maximum: float, /) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(("steps", "done"), [(9, 3), (3, 3), (1, None)])
def test_a_ruined_model_is_not_returned_without_a_word(steps: int, done: int | None) -> None:
    """Each step of Adam moves the parameter by 4; the last one is looked at, too."""
    options = {"steps": steps, "rate": 4.0, "generator": torch.Generator()}
    if done is None:
        fit_locally(Fragile(), rings(), **options)
        with pytest.raises(ValueError, match="model must have a finite gradient"):
            fit_locally(Fragile(20.0), rings(), **options)
        return
    with pytest.raises(ValueError, match=rf"rate is too large, got 4.0: .* after step {done}$"):
        fit_locally(Fragile(), rings(), **options)


def test_errors_name_what_is_wrong() -> None:
    model, generator = made(), torch.Generator()
    with pytest.raises(ValueError, match="cap must be given with rule='source'"):
        fit_locally(model, rings(), rule="source", generator=generator)
    with pytest.raises(ValueError, match="rule must be one of"):
        fit_locally(model, rings(), rule="oja", generator=generator)
    with pytest.raises(ValueError, match="samples must hold at least one"):
        fit_locally(model, rings()[:0], generator=generator)
    with pytest.raises(ValueError, match="steps must be >= 1"):
        fit_locally(model, rings(), steps=0, generator=generator)
    with pytest.raises(ValueError, match="batch must be >= 1"):
        fit_locally(model, rings(), batch=0, generator=generator)
    with pytest.raises(ValueError, match="rate must be finite"):
        fit_locally(model, rings(), rate=0.0, generator=generator)
    with pytest.raises(ValueError, match=r"rate must be at most 1e\+36, got 1e\+39"):
        fit_locally(made(), rings(), rate=1e39, generator=generator)
    with pytest.raises(TypeError, match="samples must be a floating tensor"):
        fit_locally(model, [1.0], generator=generator)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator"):
        fit_locally(model, rings(), generator=0)  # type: ignore[arg-type]
    broken = rings()
    broken[7, 1] = torch.nan
    with pytest.raises(ValueError, match="samples must be finite, got 2 values that are not"):
        fit_locally(model, broken, generator=generator)
    with pytest.raises(ValueError, match="cap must be finite"):
        fit_locally(model, rings(), cap=-1.0, generator=generator)
