"""For training a layer: norms of weights, dropout, spectral radii, the loss on the way to a fixed point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from implicit_attn.deq import DEQ
from implicit_attn.dropout import VariationalDropout, dropout_seeds
from implicit_attn.energies.tokens import SpectralBound, accumulation_dtype
from implicit_attn.parametrised import own_class, parametrise
from solvers import Implicit, OneStep
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
    require_increasing,
    require_instance,
    require_nonnegative,
    require_number,
    require_positive,
)

__all__ = [
    "SpectralNorm",
    "SpectralRadii",
    "VariationalDropout",
    "WeightNorm",
    "apply_norm",
    "correction_weights",
    "dropout_seeds",
    "fixed_point_correction",
    "remove_norm",
    "states_at",
]

# Norms of the weights of whole modules.

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

    sigma is computed exactly on CPUs, and replaced by an upper bound of it on CUDA devices
    (:func:`implicit_attn.spectral.gram_bound`). Unlike a power iteration it is the same in training and in
    evaluation and at every reading, as a fixed-point map and its derivative must be. The
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

    def matrix(self, weight: Tensor) -> Tensor:
        return _matrix(weight, self.dim)


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


# The spectral radius of a model's layers, for the record of a training.


class SpectralRadii:
    """How far each layer of a model is from diverging, for the record of a training.

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
        device = self.inputs.device
        others = [] if device.type == "cpu" else [device]
        kept = torch.random.fork_rng(others, device_type=device.type if others else "cuda")
        try:
            model.eval()
            for name, layer in layers.items():
                layer.observer = _noting(layer, found.setdefault(name, []))
            with torch.no_grad(), kept:
                model(self.inputs)
        finally:
            for module in training:
                module.training = True
            for name, layer in layers.items():
                layer.observer, layer.last, layer._seeds = before[name]
        return {
            name: {
                "median": (radii := torch.cat(parts)).median().item(),
                "largest": radii.max().item(),
                "above_one": (radii > 1).double().mean().item(),
                "samples": len(radii),
            }
            for name, parts in found.items()
            if parts
        }


def _noting(layer: DEQ, radii: list[Tensor]) -> Callable[..., None]:
    def note(x: Any, mask: Tensor | None, solution: Any) -> None:
        radii.append(layer.spectral_radius(solution.value, x, mask))

    return note


# The loss on the way to a fixed point: fixed-point correction.

DISCOUNTS = ("exponential", "linear", "constant")
DEFAULT_GAMMA = {"exponential": 0.8, "linear": 0.9, "constant": 1.0}


def correction_weights(
    count: int, kind: str = "exponential", *, gamma: float | None = None
) -> list[float]:
    """Weights of ``count`` losses from the first state to the solution, whose weight is 1.

    With ``m = 0`` for the solution, ``m = 1`` for the state before it, and so on::

        "exponential"   gamma^m                 gamma 0.8 by default
        "linear"        1 - gamma m / count     gamma 0.9 by default
        "constant"      1

    ``count``: the number of losses, >= 1; ``gamma``: in [0, 1], None: the default; not for "constant".
    """
    require_count("count", count)
    require_choice("kind", kind, DISCOUNTS)
    if gamma is None:
        gamma = DEFAULT_GAMMA[kind]
    elif kind == "constant":
        raise ValueError(f'gamma belongs to "exponential" and "linear" weights, got {gamma!r}')
    gamma = require_number("gamma", gamma, low=0.0, high=1.0)
    before = range(count - 1, -1, -1)
    if kind == "linear":
        return [1 - gamma * m / count for m in before]
    return [gamma**m for m in before]


def states_at(
    layer: DEQ, x: Any, numbers: Sequence[int], mask: Tensor | None = None, *, z0: Any = None
) -> list[Any]:
    """What the layer's solve has after each of these numbers of evaluations, with gradients.

    The state after k evaluations is ``layer.solve(x, mask, max_steps=k).value``, which takes k evaluations
    more. Its gradient is that of the layer's adjoint, if that differentiates steps (``Unrolled``,
    ``Phantom``, ``OneStep``); else of one step from it, as the equation of the fixed point does not hold
    there. ``layer.last`` stays that of the solve before. Dropout draws masks of its own.

    ``numbers`` are increasing, ``layer.max_steps`` at most; ``x``, ``mask``, ``z0`` as for ``layer.solve``.
    """
    require_instance("layer", layer, DEQ, "a DEQ")
    limits = require_increasing("numbers", numbers, high=layer.max_steps, what="max_steps")
    options: dict[str, Any] = {"z0": z0, "on_failure": "ignore"}
    if layer.adjoint is None or isinstance(layer.adjoint, Implicit):
        options["adjoint"] = OneStep()
    before = layer.last, layer._seeds, layer.observer
    layer.observer = None
    try:
        return [layer.solve(x, mask, max_steps=limit, **options).value for limit in limits]
    finally:
        layer.last, layer._seeds, layer.observer = before


def fixed_point_correction(
    loss: Callable[[Any], Tensor], states: Sequence[Any], weights: Sequence[float] | None = None
) -> Tensor:
    """``sum_k w_k loss(z_k)`` over states on the way to the fixed point and the fixed point itself.

    It asks states that the solver passes for the answer too. So a short solve learns to be useful, and
    the solve as a whole to converge.

    Args:
        loss: of one state, a scalar, or any shape that is the same for all states.
        states: z_1, ..., z_n from the first to the solution, n >= 1: ``[*states_at(layer, x, numbers),
            layer(x)]``.
        weights: n finite numbers >= 0; None: ``correction_weights(n)``.

    Example:
        >>> import torch
        >>> from implicit_attn import DEQ
        >>> layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
        >>> x = torch.ones(2, 3, 4)
        >>> every = [*states_at(layer, x, [2, 4]), layer(x)]
        >>> fixed_point_correction(lambda z: z.square().mean(), every).shape
        torch.Size([])

    Source: Bai, Geng, Savani, Kolter, "Deep Equilibrium Optical Flow Estimation" (2022), section 4.3,
    https://arxiv.org/abs/2204.08442.
    """
    require_callable("loss", loss)
    if isinstance(states, Tensor) or not isinstance(states, Sequence) or not states:
        raise TypeError(
            "states must be a sequence of at least one state, such as [*states_at(layer, x, [2, 4]), "
            f"layer(x)], got {type(states)}"
        )
    numbers = correction_weights(len(states)) if weights is None else list(weights)
    if len(numbers) != len(states):
        raise ValueError(f"weights must be {len(states)} numbers like states, got {len(numbers)}")
    terms = []
    for at, (weight, state) in enumerate(zip(numbers, states, strict=True)):
        term = loss(state)
        if not isinstance(term, Tensor) or (terms and term.shape != terms[0].shape):
            raise TypeError(f"loss must return a tensor of one shape for all states, got {term!r}")
        terms.append(require_nonnegative(f"weights[{at}]", weight) * term)
    return torch.stack(terms).sum(0)
