"""Equilibrium blocks in the studies: a solve of the tokens behind the block is the block's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import solvers
from cases.studies import image_subject
from implicit_attn import EquilibriumBlock
from implicit_attn.studies.subjects import BlockStep


def test_the_tokens_behind_the_block() -> None:
    subject = image_subject("equilibrium", iterations=100).exact()
    block: Any = subject.model.backbone.blocks[0]
    x = subject.tokens(subject.inputs)
    tight: Any = {"tolerance": solvers.Tolerance(rtol=1e-10)}
    with torch.no_grad():
        expected = x + block.solve(x, **tight).value
        found = subject.layer.solve(x, **tight)
        assert torch.allclose(found.value, expected, atol=1e-8)
        energy = subject.energy
        assert energy is not None and found.energy is not None
        own = block.energy(found.value - x, block.arguments(x)[1])
        assert torch.allclose(energy(found.value, x), own)
        assert torch.allclose(found.energy, own)
        output = subject.model(subject.inputs)
        assert torch.allclose(subject.classify(found.value), output, atol=1e-2)


def test_its_step_descends_its_energy() -> None:
    """f(y, x) = y - dE/dy, with the energy that ``joint`` says."""
    subject = image_subject("equilibrium").exact()
    update: Any = subject.layer.update
    x = subject.tokens(subject.inputs).detach()
    y = (x + torch.randn_like(x)).requires_grad_()
    image, energy, gradient = update.joint(y, update.prepare(x))
    (slope,) = torch.autograd.grad(energy.sum(), y)
    assert torch.allclose(gradient, slope) and torch.allclose(image, y - slope)
    assert torch.allclose(update(y, x), image)


def test_what_has_no_such_step() -> None:
    with pytest.raises(TypeError, match="one equilibrium block, got 2"):
        _ = image_subject("equilibrium", layers=2).layer
    with pytest.raises(TypeError, match="state_dim=None"):
        BlockStep(EquilibriumBlock(8, 2, state_dim=4))
