"""Modules with parametrised weights are copied, pickled and saved whole, and read in another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_attn import EquilibriumBlock, apply_norm
from implicit_attn.energies import Couplings

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))


class Normed(nn.Sequential):
    """With two parametrised tensors in one layer, the second by torch's own function."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        apply_norm(self, "bound", target=0.5)
        parametrize.register_parametrization(self[0], "bias", nn.Softplus())


class Tokens(nn.Module):
    """Something else with parametrised weights, applied to tokens."""

    def __init__(self, part: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.part, self.use = part, use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.part, x)


def couplings(part: nn.Module, x: Tensor) -> Tensor:
    return x.flatten(1) @ part.matrix  # type: ignore[operator]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "block": lambda: EquilibriumBlock(8, heads=2),
    "stack": lambda: nn.Sequential(*(EquilibriumBlock(8, heads=2) for _ in range(2))),
    "norm": Normed,
    "couplings": lambda: Tokens(Couplings(5, 8, bound=0.5), couplings),
}


def saved(module: nn.Module, folder: Path) -> nn.Module:
    torch.save(module, folder / "module.pt")
    return torch.load(folder / "module.pt", weights_only=False)


@pytest.mark.parametrize("name", MODULES)
def test_copies_are_equal_and_apart(name: str, tmp_path: Path) -> None:
    module = MODULES[name]()
    expected = module(X)
    expected.sum().backward()  # what a solve leaves behind goes along or is left out
    for copied in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(module)))),
        saved(module, tmp_path),
    ):
        assert torch.equal(copied(X), expected)
        assert list(copied.state_dict()) == list(module.state_dict())
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.mul_(0.5)
        assert not torch.equal(copied(X), expected) and torch.equal(module(X), expected)


def test_a_loaded_module_is_trained_parametrised_and_freed_as_any_other() -> None:
    loaded = pickle.loads(pickle.dumps(Normed()))
    loaded(X).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())
    parametrize.remove_parametrizations(loaded[0], "bias")
    assert type(loaded[0]).__name__ == "ParametrizedLinear"
    parametrize.remove_parametrizations(loaded[0], "weight")
    assert type(loaded[0]) is nn.Linear
