"""The transformer of masked tokens: shapes, recycles, mistakes."""

from __future__ import annotations

import pytest
import torch

from implicit_attn.models import MaskedTransformer


def made(**options: int) -> MaskedTransformer:
    torch.manual_seed(0)
    return MaskedTransformer(6, 4, 8, 2, **options).double().eval()


TOKENS = torch.randint(0, 5, (3, 6), generator=torch.Generator().manual_seed(0))


def test_recycling_applies_the_layer_again() -> None:
    model = made(iterations=3)
    x = model.embedding(TOKENS) + model.positions
    for _ in range(3):
        x = model.backbone(x, iterations=1)
    torch.testing.assert_close(model(TOKENS), model.readout(model.norm(x)))
    assert not torch.allclose(model(TOKENS, iterations=2), model(TOKENS))


def test_a_position_and_the_tokens_of_others_matter() -> None:
    model = made()
    same = torch.zeros(1, 6, dtype=torch.long)
    logits = model(same)[0]
    assert not torch.allclose(logits[0], logits[1])
    changed = same.clone()
    changed[0, 5] = 4
    assert not torch.allclose(model(changed)[0, 0], logits[0])


def test_mistakes() -> None:
    model = made()
    with pytest.raises(ValueError, match=r"tokens must be \(B, 6\)"):
        model(TOKENS[:, :5])
    with pytest.raises(TypeError, match="tokens must be integers"):
        model(TOKENS.double())
