"""Images as tokens on circles, and back."""

from __future__ import annotations

import math

import pytest
import torch

from implicit_attn.data.spherical import (
    CircleTokens,
    points,
    principal_features,
    random_features,
)

CODEC = CircleTokens(channels=3, height=4, width=6, patch=2)


def pictures(count: int = 5) -> torch.Tensor:
    return torch.rand(count, 3, 4, 6, generator=torch.Generator().manual_seed(0))


def test_encoding_and_back() -> None:
    images = pictures()
    images[0, 0, 0, :2] = torch.tensor([0.0, 1.0])
    tokens = CODEC.encode(images)
    assert tokens.shape == (5, CODEC.sites, CODEC.dim) == (5, 6, 24)
    torch.testing.assert_close(tokens.norm(dim=-1), torch.full((5, 6), 12**0.5))
    torch.testing.assert_close(CODEC.decode(tokens), images, rtol=0, atol=1e-6)
    torch.testing.assert_close(CODEC.decode(0.1 * tokens), images, rtol=0, atol=1e-6)


def test_a_value_is_half_a_turn() -> None:
    """0, 1/2 and 1 lie at angles 0, pi/2 and pi; directions beyond go to the nearer end."""
    codec = CircleTokens(1, 1, 3, 1)
    tokens = codec.encode(torch.tensor([0.0, 0.5, 1.0]).view(1, 1, 1, 3))
    expected = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
    torch.testing.assert_close(tokens[0], expected, rtol=0, atol=1e-6)
    beyond = points(torch.tensor([-0.3, math.pi + 0.3, math.pi / 4])).view(1, 3, 2)
    values = codec.decode(beyond).flatten()
    torch.testing.assert_close(values, torch.tensor([0.0, 1.0, 0.25]))


def test_patches_are_squares_counted_by_rows() -> None:
    images = torch.arange(72.0).view(1, 3, 4, 6)
    patches = CODEC.patches(images)
    assert torch.equal(patches[0, 1], images[0, :, :2, 2:4].flatten())
    assert torch.equal(patches[0, 3], images[0, :, 2:, :2].flatten())
    assert torch.equal(CODEC.images(patches), images)


def test_noise_turns_the_points() -> None:
    tokens = CODEC.encode(pictures(200))
    noisy = CODEC.noisy(tokens, 0.3, torch.Generator().manual_seed(1))
    cosines = (tokens * noisy).unflatten(-1, (-1, 2)).sum(-1)
    assert cosines.mean().item() == pytest.approx(math.exp(-(0.3**2) / 2), abs=3e-3)
    again = CODEC.noisy(tokens, 0.3, torch.Generator().manual_seed(1))
    assert torch.equal(noisy, again)
    torch.testing.assert_close(CODEC.noisy(tokens, 0.0, torch.Generator()), tokens)


def test_random_tokens_point_everywhere() -> None:
    tokens = CODEC.random(500, torch.Generator().manual_seed(2))
    assert tokens.shape == (500, 6, 24)
    assert tokens.mean().abs() < 0.01
    torch.testing.assert_close(tokens.norm(dim=-1), torch.full((500, 6), 12**0.5))


def test_features_are_orthonormal_and_the_principal_ones_keep_most() -> None:
    tokens = CODEC.encode(pictures(50))
    kept = {}
    random = random_features(5, 24, torch.Generator().manual_seed(3))
    for name, F in (("random", random), ("principal", principal_features(5, tokens))):
        torch.testing.assert_close(F @ F.mT, torch.eye(5), rtol=0, atol=1e-6)
        kept[name] = (tokens @ F.mT).square().mean().item()
    assert kept["principal"] > 1.5 * kept["random"]
    whole = principal_features(24, tokens)
    torch.testing.assert_close(tokens @ whole.mT @ whole, tokens, rtol=0, atol=1e-5)


def test_values_stay_in_their_range_at_the_branch_of_the_angle() -> None:
    """A sine of -0.0 beside a negative cosine is the angle -pi; a pair (0, 0) has no direction."""
    codec = CircleTokens(1, 1, 3, 1)
    tokens = torch.tensor([[[-1.0, -0.0], [0.0, 0.0], [-0.0, -0.0]]])
    values = codec.decode(tokens).flatten()
    assert values[0] == 1 and values.min() >= 0 and values.max() <= 1
    assert values[1] == 0


def test_wrong_tensors_are_named() -> None:
    tokens = CODEC.encode(pictures(2))
    with pytest.raises(TypeError, match="images must be a floating tensor, got list"):
        CODEC.encode([1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"images must be a floating tensor, got torch\.uint8"):
        CODEC.encode(torch.zeros(2, 3, 4, 6, dtype=torch.uint8))
    with pytest.raises(ValueError, match="images must have the shape"):
        CODEC.patches(torch.zeros(3, 4, 6))
    with pytest.raises(ValueError, match=r"patches must have the shape \(B, 6, 12\)"):
        CODEC.images(torch.zeros(2, 5, 12))
    with pytest.raises(ValueError, match=r"tokens must have the shape \(B, 6, 24\)"):
        CODEC.decode(tokens[:, :5])
    with pytest.raises(TypeError, match="tokens must be a floating tensor"):
        CODEC.decode_patches(None)  # type: ignore[arg-type]
    for sigma in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="sigma must be finite and >= 0"):
            CODEC.noisy(tokens, sigma, torch.Generator())
    with pytest.raises(ValueError, match="tokens must have 24 components"):
        CODEC.noisy(tokens[..., :23], 0.1, torch.Generator())


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="patch must divide the image of 4 x 6, got 4"):
        CircleTokens(1, 4, 6, 4)
    with pytest.raises(ValueError, match="channels must be >= 1"):
        CircleTokens(0, 4, 6, 2)
    with pytest.raises(ValueError, match=r"images must have the shape \(B, \*\(3, 4, 6\)\)"):
        CODEC.encode(torch.zeros(2, 1, 4, 6))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got values in \[0.0, 2.0\]"):
        CODEC.encode(torch.tensor([0.0, 2.0]).repeat(36).view(1, 3, 4, 6))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        CODEC.encode(torch.full((1, 3, 4, 6), torch.nan))
    with pytest.raises(ValueError, match="tokens must have 24 components"):
        CODEC.decode(torch.zeros(1, 6, 23))
    with pytest.raises(ValueError, match="dim must be at most width=4"):
        random_features(5, 4, torch.Generator())
    with pytest.raises(ValueError, match="dim must be at most the 24 components"):
        principal_features(25, CODEC.encode(pictures()))
