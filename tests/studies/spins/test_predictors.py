"""The categorical Jacobian of predictors whose couplings are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from implicit_attn.energies.spins import zero_sum
from implicit_attn.models import FactoredAttention, MaskedTransformer
from implicit_attn.studies import graph_potts
from implicit_attn.studies.spins.graphs import conditional_logits
from implicit_attn.studies.spins.measures import coupling_error
from implicit_attn.studies.spins.predictors import categorical_jacobian

MODEL = graph_potts("er-general", torch.Generator().manual_seed(0), sites=5, colours=3, edges=6)
SEQUENCES = torch.randint(0, 3, (4, 5), generator=torch.Generator().manual_seed(1))


class Exact(nn.Module):
    """The conditionals of a Potts model; refuses a call with two masked sites or none."""

    def __init__(self, mask: int | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mask is not None:
            assert ((tokens == self.mask).sum(1) == 1).all()
        return conditional_logits(MODEL, tokens.clamp_max(2))


@pytest.mark.parametrize("mask", [3, None])
def test_a_potts_model_has_its_own_couplings(mask: int | None) -> None:
    found = categorical_jacobian(Exact(mask), SEQUENCES, 3, mask=mask, batch=7)
    assert coupling_error(found, MODEL.couplings) < 1e-12
    assert not found.diagonal().any()


def test_factored_attention_has_its_own_couplings() -> None:
    torch.manual_seed(0)
    model = FactoredAttention(5, 3, heads=2, rows="sink").double()
    with torch.no_grad():
        model.values.normal_()
    found = categorical_jacobian(model, SEQUENCES, 3)
    torch.testing.assert_close(zero_sum(found), zero_sum(model.couplings().detach()))


def test_entries_are_means_of_single_calls_and_the_mode_is_kept() -> None:
    torch.manual_seed(0)
    model = MaskedTransformer(5, 3, 8, 2, iterations=2).double()
    found = categorical_jacobian(model, SEQUENCES, 3, mask=3, iterations=1)
    assert model.training
    changed = SEQUENCES.clone()
    changed[:, 4], changed[:, 1] = 3, 2
    expected = model.eval()(changed, iterations=1)[:, 4].mean(0)
    torch.testing.assert_close(found[4, 1, :, 2], expected.detach())


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="sequences must be integers"):
        categorical_jacobian(Exact(None), SEQUENCES.double(), 3)
    with pytest.raises(ValueError, match="batch must be >= 1"):
        categorical_jacobian(Exact(None), SEQUENCES, 3, batch=0)
