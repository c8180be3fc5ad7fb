"""The spectral radius of a model's equilibrium layers, for the record of a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from solvers.core.checks import require_count, require_instance


class SpectralRadii:
    """``observe`` of a :class:`implicit_attn.training.Training`: how far each layer is from diverging.

    Called with a model it solves every :class:`implicit_attn.DEQ` in it for the same few inputs, in
    evaluation mode, and computes the spectral radius of each layer's Jacobian where its solve ended, exactly
    (:func:`solvers.spectral_radius`). The model and the random state are left as they were.

    Args:
        inputs: (B, ...), given to the model.
        samples: how many of them, from the first; None: all. A sample takes tens of products with the
            Jacobian, so a few are enough for every epoch.

    Returns (of a call):
        For each layer, by its name in the model, ``{"median", "largest", "above_one", "samples"}``: of
        the radii, the share of them above 1 (near such a point plain iteration does not converge), and their
        number. All are Python numbers. A layer that the model did not call is left out; one that it called
        several times has the radii of all calls.

    Example:
        >>> model = DEQ.from_update(lambda z, x: 0.5 * z + x)
        >>> round(SpectralRadii(torch.ones(2, 3, 4))(model)[""]["largest"], 4)
        0.5

    ``solvers.SpectrumError`` where eigenvalues are not found.
    """

    def __init__(self, inputs: Tensor, *, samples: int | None = None) -> None:
        require_instance("inputs", inputs, Tensor, "a tensor (B, ...)")
        if inputs.dim() == 0 or inputs.shape[0] == 0:
            raise ValueError(f"inputs must hold at least one sample, got {tuple(inputs.shape)}")
        if samples is not None:
            require_count("samples", samples)
        self.inputs = inputs[:samples]

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        found: dict[str, list[Tensor]] = {}
        layers = {name: part for name, part in model.named_modules() if isinstance(part, DEQ)}
        before = {name: (at.observer, at.last, at._seeds) for name, at in layers.items()}
        training = [module for module in model.modules() if module.training]
        try:
            model.eval()
            for name, layer in layers.items():
                layer.observer = _noting(layer, found.setdefault(name, []))
            with torch.no_grad(), self._random_state():
                model(self.inputs)
        finally:
            for module in training:
                module.training = True
            for name, layer in layers.items():
                layer.observer, layer.last, layer._seeds = before[name]
        return {name: _summary(torch.cat(radii)) for name, radii in found.items() if radii}

    def _random_state(self) -> AbstractContextManager[None]:
        """Within, random numbers are drawn; after it, the generators are as they were before."""
        device = self.inputs.device
        others = [] if device.type == "cpu" else [device]
        return torch.random.fork_rng(others, device_type=device.type if others else "cuda")


def _noting(layer: DEQ, radii: list[Tensor]) -> Callable[..., None]:
    def note(x: Any, mask: Tensor | None, solution: Any) -> None:
        radii.append(layer.spectral_radius(solution.value, x, mask))

    return note


def _summary(radii: Tensor) -> dict[str, float]:
    return {
        "median": radii.median().item(),
        "largest": radii.max().item(),
        "above_one": (radii > 1).double().mean().item(),
        "samples": len(radii),
    }
