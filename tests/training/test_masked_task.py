"""The task of masked tokens: its samples, loss and measures, and a training."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.models import MaskedTransformer
from implicit_attn.studies import graph_potts
from implicit_attn.studies.spins.graphs import bayes_npl, conditional_logits
from implicit_attn.training import MaskedTokens, Recipe, Training

MODEL = graph_potts("er-general", torch.Generator().manual_seed(0), sites=5, colours=3, edges=6)
TOKENS = torch.randint(0, 3, (40, 5), generator=torch.Generator().manual_seed(1))


class Truth(nn.Module):
    """The exact conditionals, whatever stands on a masked site."""

    def forward(self, tokens: Tensor) -> Tensor:
        return conditional_logits(MODEL, tokens % 3)


def task(**options: int) -> MaskedTokens:
    return MaskedTokens(TOKENS[:30], TOKENS[30:], 3, **options)


@pytest.mark.parametrize("masks", [1, 3, 5])
def test_so_many_tokens_are_masked_and_nothing_else_changes(masks: int) -> None:
    made = task(masks=masks)
    inputs, targets = made.augmented(made.inputs, made.targets, torch.Generator().manual_seed(0))
    hidden = inputs == 3
    assert hidden.sum(1).tolist() == [masks] * 30
    assert torch.equal(inputs[~hidden], made.inputs[~hidden]) and torch.equal(targets, made.inputs)
    assert made.terms(inputs, targets) == 30 * masks
    again, _ = made.augmented(made.inputs, made.targets, torch.Generator().manual_seed(0))
    assert torch.equal(inputs, again)


def test_every_site_is_masked_equally_often() -> None:
    many = MaskedTokens(TOKENS.repeat(100, 1), TOKENS, 3)
    inputs, _ = many.augmented(many.inputs, many.inputs, torch.Generator().manual_seed(0))
    shares = (inputs == 3).double().mean(0)
    assert (shares - 0.2).abs().max().item() < 4 * (0.2 * 0.8 / 4000) ** 0.5


def test_one_mask_is_the_pseudo_likelihood() -> None:
    """The mean over all choices of the masked site is the loss per site of the conditionals."""
    made, logits = task(), conditional_logits(MODEL, TOKENS[:30])
    total = 0.0
    for site in range(5):
        inputs = made.inputs.clone()
        inputs[:, site] = 3
        total += made.loss(logits, inputs, made.targets).item()
    assert total / (30 * 5) == pytest.approx(bayes_npl(MODEL, TOKENS[:30]), rel=1e-12)


def test_several_masks_are_another_objective() -> None:
    """Two coupled sites, both masked: the best predictor knows no more than the mean of each."""
    pair = graph_potts("tree", torch.Generator(), sites=2, colours=2, strength=4.0)
    weights = pair.couplings[0, 1].exp()
    weights = weights / weights.sum()
    both = -(weights.sum(1) * weights.sum(1).log()).sum()  # entropy of a site alone
    one = -(weights * (weights / weights.sum(0)).log()).sum()  # given the other
    tokens = torch.tensor([list(s) for s in itertools.product(range(2), repeat=2)])
    counts = (weights.flatten() * 1000).round().long()
    data = tokens.repeat_interleave(counts, dim=0)
    hidden = torch.full_like(data, 2)
    marginals = weights.sum(1).log().expand(len(data), 2, 2)
    loss = MaskedTokens(data, data, 2, masks=2).loss(marginals, hidden, data) / data.numel()
    assert loss.item() == pytest.approx(both.item(), abs=1e-3)
    assert both > 5 * one


def test_the_measures_mask_every_site_in_its_turn() -> None:
    made = task(batch=15)
    found = made.evaluate(Truth(), 0, 1)
    loss, number = found["test_loss"]
    assert number == 50 and loss / number == pytest.approx(bayes_npl(MODEL, TOKENS[30:]), rel=1e-6)
    right = (conditional_logits(MODEL, TOKENS[30:]).argmax(-1) == TOKENS[30:]).sum().item()
    assert found["token_accuracy"] == (right, 50)
    parts = [made.evaluate(Truth(), rank, 3) for rank in range(3)]
    for name, (top, below) in found.items():
        assert sum(part[name][0] for part in parts) == pytest.approx(top)
        assert sum(part[name][1] for part in parts) == below
    assert made.evaluate(Truth(), 11, 12)["test_loss"] == (0.0, 0)  # more processes than samples


def test_mistakes() -> None:
    with pytest.raises(TypeError, match="train must be of int64"):
        MaskedTokens(TOKENS.double(), TOKENS, 3)
    with pytest.raises(ValueError, match=r"test must hold integers in \[0, 2\)"):
        MaskedTokens(TOKENS % 2, TOKENS, 2)
    with pytest.raises(ValueError, match="test must have 5 sites"):
        MaskedTokens(TOKENS, TOKENS[:, :4], 3)
    with pytest.raises(ValueError, match="train must have the shape"):
        MaskedTokens(TOKENS[0], TOKENS, 3)
    with pytest.raises(ValueError, match="masks must be at most the 5 sites"):
        task(masks=6)


def test_a_recycled_transformer_trains(tmp_path: Path) -> None:
    """Random numbers of iterations, the loop of the package, a checkpoint and a resumed end."""
    for module in ("safetensors", "tqdm", "lightning_fabric"):
        pytest.importorskip(module, reason="needs the extra [training]")
    data = torch.randint(0, 3, (64, 1), generator=torch.Generator().manual_seed(0)).expand(64, 4)
    copies = MaskedTokens(data.contiguous(), data[:8].contiguous(), 3)  # all sites are equal
    torch.manual_seed(0)
    model = MaskedTransformer(4, 3, 16, 2, iterations=2)
    recipe = Recipe(40, 64, 1e-2, iterations=(1, 3))
    training = Training(model, copies, recipe, tmp_path / "run.safetensors")
    training.run()
    assert training.history[-1]["token_accuracy"] == 1.0
    for iterations in (1, 2, 3):
        assert (
            training.evaluate(iterations)["test_loss"]
            < 0.2
            < F.cross_entropy(torch.zeros(1, 3), torch.zeros(1).long())
        )
