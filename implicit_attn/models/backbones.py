"""Backbones by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from implicit_attn.energies.hyperset_energy import ATTENTIONS, FEEDFORWARDS
from implicit_attn.models.crate import CRATE
from implicit_attn.models.energy_transformer import EnergyTransformer
from implicit_attn.models.hyperset import HyperSET, HyperSETEquilibrium
from implicit_attn.models.recurrent import ORDERS
from implicit_attn.models.transformer import SharedTransformer
from implicit_attn.updates.step_sizes import STEP_SIZES
from solvers.core.checks import require_choice

EQUILIBRIUM = "hyperset-equilibrium"  # the only one that solves, and so takes options of a DEQ
BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "hyperset": HyperSET,
    EQUILIBRIUM: HyperSETEquilibrium,
    "transformer": SharedTransformer,
    "energy-transformer": EnergyTransformer,
    "crate": CRATE,
}
# What some options of a backbone may be; not every backbone takes each, or each of its values.
CHOICES: dict[str, tuple[str, ...]] = {
    "attention": tuple(ATTENTIONS),
    "feedforward": tuple(FEEDFORWARDS),
    "step_size": tuple(STEP_SIZES),
    "order": ORDERS,
}


def build_backbone(
    name: str, dim: int, heads: int, width: int | None = None, **options: Any
) -> Any:
    """A backbone of ``BACKBONES``: tokens (B, N, d) -> (B, N, d).

    Args:
        name: "hyperset", "hyperset-equilibrium", "transformer", "energy-transformer" or "crate".
        dim: features d of a token.
        heads: attention heads.
        width: memories of Hyper-SET (None: d) and of the Energy Transformer (None: 4 d), hidden
            units of the transformer (None: 4 d); CRATE has none.
        options: further arguments of that backbone, ``iterations`` for example.

    Raises:
        ValueError: for an unknown name, or a width for CRATE.
        TypeError: for an option that the backbone does not have.
    """
    if require_choice("name", name, BACKBONES) == "crate":
        if width is not None:
            raise ValueError(
                f"width must be None for 'crate', whose dictionary is d x d, got {width}"
            )
        return CRATE(dim, heads, **options)
    if name.startswith("hyperset"):
        width = dim if width is None else width
    return BACKBONES[name](dim, heads, width, **options)


def token_width(backbone: Any) -> int:
    """The features d of a backbone's tokens, its attribute ``dim``.

    Raises:
        TypeError: it is no module, or has no such integer.
    """
    dim = getattr(backbone, "dim", None)
    if not isinstance(backbone, nn.Module) or not isinstance(dim, int):
        raise TypeError(
            "backbone must be a module (B, N, d) -> (B, N, d) with an integer attribute dim, "
            f"got {type(backbone)}"
        )
    return dim
