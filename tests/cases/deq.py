"""Small layers, models and inputs for the tests of the DEQ layer and of what is built with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cases.energies import relative_error as relative_error
from implicit_attn import DEQ, ActivationStep, Energy, Update
from implicit_attn.energies import (
    BiSoftmaxAttention,
    Couplings,
    GELUFeedForward,
    IsingLagrangian,
    Quadratic,
    ReLUFeedForward,
    RMSNormLagrangian,
    SoftmaxAttention,
    SpinInteraction,
)
from implicit_attn.models import BACKBONES, build_model, save_model
from implicit_attn.updates import (
    KineticAttention,
    MeanFieldAttention,
    NormedMLP,
    SoftmaxCouplingAttention,
)
from solvers import Implicit, Tolerance

DIM, COUNT = 4, 3
EXACT: dict[str, Any] = {
    "tolerance": Tolerance(rtol=1e-13),
    "adjoint": Implicit(tolerance=Tolerance(rtol=1e-13)),
    "max_steps": 400,
    "on_failure": "raise",
}


class Cell(nn.Module):
    """A contraction with weights: ``tanh(z A) / 2 + x``."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.tanh(self.linear(z)) + x


def energy(dim: int = DIM, *, bound: float | None = 1.0) -> Energy:
    """Attention, memories and injection, with learned weights, float64."""
    attention = BiSoftmaxAttention(dim, 2, bound=bound).weighted(0.2, 1.0)
    memories = ReLUFeedForward(dim, 6, bound=bound).weighted(0.3, 1.0)
    return (attention + memories + Quadratic()).double()


def with_context() -> Energy:
    """Hidden biases and gates from the input, computed once a solve."""
    sees = GELUFeedForward(DIM, 6, context_dim=DIM, gates=True, norm=None, bound=1.0)
    with torch.no_grad():
        for name, weight in sees.named_parameters():
            if name.startswith("gate."):
                weight.copy_(0.3 * torch.randn(weight.shape))
    attention = BiSoftmaxAttention(DIM, 2, bound=1.0).weighted(0.2, 1.0)
    return attention + 0.4 * sees + Quadratic()


def with_activation() -> ActivationStep:
    attention = 0.3 * SoftmaxAttention(DIM, 2, bound=1.0)
    interaction = attention + 0.3 * ReLUFeedForward(DIM, 6, norm=None, bound=1.0)
    return ActivationStep(interaction, RMSNormLagrangian())


# What each layer solves.
LAYERS: dict[str, Callable[[], Energy | Update | Cell]] = {
    "gradient": energy,
    "context": with_context,
    "activation": with_activation,
    "update": Cell,
    "mean_field": lambda: MeanFieldAttention(COUNT, DIM, correction=NormedMLP(DIM, 6), scale=0.5),
    "softmax_couplings": lambda: SoftmaxCouplingAttention(DIM, 2, correction=NormedMLP(DIM, 6)),
    "kinetic": lambda: KineticAttention(DIM, 2),
    "spins": lambda: ActivationStep(
        SpinInteraction(Couplings(COUNT, DIM, scale=0.5)), IsingLagrangian()
    ),
}


def make(name: str, seed: int = 0, **options: Any) -> DEQ:
    """The named layer with seeded weights, float64."""
    torch.manual_seed(seed)
    solved = LAYERS[name]().double()
    if isinstance(solved, Cell):
        return DEQ.from_update(solved, **options)
    return DEQ(solved, **options)


def tokens(
    batch: int = 2, count: int = COUNT, dim: int = DIM, *, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Seeded input (B, N, d), float64."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(batch, count, dim, generator=generator, dtype=torch.float64)


def with_parameters(
    layer: DEQ, x: Tensor, mask: Tensor | None = None
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function of x and its parameters (gradcheck moves them where they are).

    The step is left out: the fixed point does not depend on it. So are masked tokens:
    they are constants.
    """

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        z = layer(x, mask)
        return z if mask is None else z[mask]

    weights = [p for n, p in layer.named_parameters() if "step_size" not in n]
    return function, [x.clone().requires_grad_(), *weights]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameter gradients; a missing one is an error."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        found[name] = parameter.grad.clone()
    return found


def specification(name: str, **options: Any) -> dict[str, Any]:
    """Of a model for 8x8 images, 4 tokens of 8 features, two heads."""
    backbone: dict[str, Any] = {"name": name, "dim": 8, "heads": 2, **options}
    if name == "hyperset":
        backbone = {"time_dim": 8, "initial_step": 0.1, **backbone}
    shape = {"image_size": 8, "channels": 1, "classes": 10, "patch": 4}
    return {"kind": "image-classifier", **shape, "readout": "mean", "backbone": backbone}


def write_weights(path: Path, name: str, **options: Any) -> Path:
    """A file of such a model as the examples write it, for the digits."""
    torch.manual_seed(0)
    wanted = specification(name, **{"iterations": 3} | options)
    spent = {"evaluations": 4} if BACKBONES[name].solves else {}
    save_model(path, build_model(wanted), {"data": "digits", "model": wanted, **spent})
    return path
