"""Norms of the weights of whole modules: weight norm, spectral norm, spectral bound."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from implicit_attn.energies.projected import SpectralBound
from implicit_attn.energies.tokens import accumulation_dtype
from implicit_attn.parametrised import own_class, parametrise
from solvers.core.checks import require_choice, require_instance, require_positive

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
NORMS = ("weight", "spectral", "bound")
SMALLEST = 1e-12  # spectral norm below which a weight counts as this large


class WeightNorm(nn.Module):
    """Parametrisation ``W_i = g_i V_i / |V_i|`` of the slices of a weight along a dimension.

    Args:
        target: None: g is learned, and at first such that the weight is what it was; else ``g = target``.
        dim: dimension of the slices i, that of the outputs.

    Source: Salimans, Kingma, "Weight Normalization" (2016), equation 2, https://arxiv.org/abs/1602.07868.
    """

    def __init__(self, target: float | None = None, *, dim: int = 0) -> None:
        super().__init__()
        self.target = None if target is None else require_positive("target", target)
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        """W from (g, V), or from V alone where ``target`` is given."""
        # In half precision SMALLEST would be 0, and its inverse infinite.
        direction = parts[-1].to(accumulation_dtype(parts[-1].dtype))
        length = parts[0] if self.target is None else self.target
        return (direction * (length / self.size(direction))).to(parts[-1].dtype)

    def right_inverse(self, weight: Tensor) -> Any:
        return weight if self.target is not None else (self.size(weight), weight.clone())

    def size(self, weight: Tensor) -> Tensor:
        """What V is divided by, of a shape that broadcasts to the weight's."""
        others = [dim for dim in range(weight.dim()) if dim != self.dim % weight.dim()]
        norm = torch.linalg.vector_norm(weight, dim=others or None, keepdim=True)
        return norm.clamp_min(SMALLEST)

    def extra_repr(self) -> str:
        return f"target={self.target}, dim={self.dim}"


class SpectralNorm(WeightNorm):
    """Parametrisation ``W = g V / sigma(V)`` with the largest singular value sigma.

    sigma is computed exactly, as an eigenvalue of a Gram matrix, not by a power iteration: so W is the same
    in training and in evaluation and at every reading, as a fixed-point map and its derivative must be. The
    weight of a convolution is the matrix (outputs, everything else) here, whose norm bounds that of the
    convolution only up to a factor.

    Args:
        target: sigma of W; None: g is learned, and at first such that the weight is what it was.
        dim: dimension of the outputs.

    Source: Miyato et al., "Spectral Normalization for Generative Adversarial Networks" (2018),
    https://arxiv.org/abs/1802.05957.
    """

    def size(self, weight: Tensor) -> Tensor:
        sigma = SpectralBound(SMALLEST).norm_or_bound(_matrix(weight, self.dim))
        return sigma.to(weight.dtype)


class _MatrixBound(SpectralBound):
    """:class:`SpectralBound` for weights of any number of dimensions."""

    def __init__(self, bound: float, dim: int) -> None:
        super().__init__(bound)
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        sigma = self.norm_or_bound(_matrix(weight, self.dim))
        return weight * (self.bound / sigma).to(weight.dtype)


def apply_norm(
    module: nn.Module,
    norm: str = "weight",
    *,
    target: float | None = None,
    kinds: tuple[type[nn.Module], ...] = KINDS,
    only: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
) -> list[str]:
    """Parametrise the weights of all layers in a module, ``torch.nn.utils.parametrize``.

    ============  ==========================================  ====================================
    norm          without ``target``                          with it
    ============  ==========================================  ====================================
    "weight"      ``W_i = g_i V_i / |V_i|``, g learned        rows of norm ``target``
    "spectral"    ``W = g V / sigma(V)``, g learned           ``sigma(W) = target``
    "bound"       not possible                                ``sigma(W) <= target``
    ============  ==========================================  ====================================

    Without ``target`` the weights are at first what they were. A solve computes every parametrised weight
    once and holds it constant; outside of solves ``torch.nn.utils.parametrize.cached()`` does that. Call
    this before an optimizer is made: the parameters are new ones, ``parametrizations.weight.original...``.

    Args:
        module: whose layers are looked for, itself among them.
        norm: one of the three.
        target: a number > 0, or None.
        kinds: classes of layers that have a ``weight``.
        only, skip: patterns of names of layers in ``module`` (``"encoder.*"``, ``"*head*"``), as in a
            shell: a layer is taken if it fits one of ``only`` and none of ``skip``.

    Returns the names of the weights, such as ``"encoder.0.weight"``. ValueError if no layer fits, or a
    weight is parametrised already or shared by several modules.

    Example:
        >>> cell = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        >>> apply_norm(cell, "bound", target=0.9)
        ['0.weight', '2.weight']
        >>> remove_norm(cell)
        ['0.weight', '2.weight']
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    require_choice("norm", norm, NORMS)
    if target is not None:
        require_positive("target", target)
    elif norm == "bound":
        raise ValueError('target must be a number > 0 for norm="bound", got None')
    chosen = _chosen(module, kinds, _patterns("only", only), _patterns("skip", skip))
    _check_weights(module, chosen)
    for layer in chosen.values():
        dim = 1 if isinstance(layer, TRANSPOSED) else 0
        made: nn.Module
        if norm == "bound":
            assert target is not None
            made = _MatrixBound(target, dim)
        else:
            made = (WeightNorm if norm == "weight" else SpectralNorm)(target, dim=dim)
        parametrise(layer, "weight", made)
    return [_weight_name(name) for name in chosen]


def remove_norm(module: nn.Module) -> list[str]:
    """Take off what :func:`apply_norm` has put on; the weights keep their values, as plain parameters.

    Other parametrisations stay, and so do copies of the module as they are. Call it before an optimizer is
    made: where a length was learned, the parameter is a new one. Returns the names of the weights;
    ValueError if a weight has another parametrisation on top of such a norm.
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    found = []
    for name, layer in module.named_modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        parts = list(layer.parametrizations["weight"])  # type: ignore[index,arg-type]
        ours = [isinstance(part, (WeightNorm, _MatrixBound)) for part in parts]
        if not any(ours):
            continue
        if not all(ours):
            raise ValueError(f"{_weight_name(name)} has other parametrisations, remove them first")
        found.append((name, layer))
    for _, layer in found:
        _remove(layer)
    return [_weight_name(name) for name, _ in found]


def _remove(layer: nn.Module) -> None:
    originals = list(layer.parametrizations["weight"].parameters())  # type: ignore[index,union-attr]
    own_class(layer)
    with torch.enable_grad():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    if originals and "weight" in layer._buffers:  # which torch makes of a frozen parameter
        weight = layer._buffers.pop("weight")
        assert weight is not None
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))


def _matrix(weight: Tensor, dim: int) -> Tensor:
    return weight.movedim(dim, 0).flatten(1)


def _weight_name(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _patterns(name: str, patterns: Any) -> tuple[str, ...]:
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(f"{name} must be a pattern of names or several, got {patterns!r}")
    return given


def _chosen(
    module: nn.Module, kinds: Any, only: tuple[str, ...], skip: tuple[str, ...]
) -> dict[str, nn.Module]:
    """The layers by their names; ValueError where there is none."""

    def fits(name: str, patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    chosen = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, kinds) and fits(name, only) and not fits(name, skip)
    }
    if not chosen:
        layers = [name for name, layer in module.named_modules() if isinstance(layer, kinds)]
        raise ValueError(
            f"module must hold a layer that fits only={only} and not skip={skip}; its layers of these "
            f"kinds are {layers[:10]}"
        )
    return chosen


def _check_weights(module: nn.Module, chosen: dict[str, nn.Module]) -> None:
    """Every chosen weight is a parameter of its layer alone."""
    places: dict[int, list[str]] = {}
    for path, part in module.named_modules():  # each once, also one that is used at several places
        for name, weight in part._parameters.items():
            places.setdefault(id(weight), []).append(f"{path}.{name}" if path else name)
    for name, layer in chosen.items():
        if parametrize.is_parametrized(layer, "weight"):
            raise ValueError(f"{_weight_name(name)} is parametrised already: remove_norm first")
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, nn.Parameter) or isinstance(weight, UninitializedParameter):
            raise ValueError(
                f"{_weight_name(name)} must be a parameter with numbers, got {type(weight)}"
            )
        if len(places[id(weight)]) > 1:
            raise ValueError(
                f"a weight must belong to one layer, got one shared by {places[id(weight)]}"
            )
