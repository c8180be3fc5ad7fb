"""Regularisation of layers: norms of weights, dropout, spectral radii, and fixed-point correction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from implicit_attn.deq import DEQ
from implicit_attn.dropout import VariationalDropout, dropout_seeds
from implicit_attn.energies.tokens import SpectralBound, accumulation_dtype
from implicit_attn.parametrised import own_class, parametrise
from solvers.core.checks import (
    require_callable,
    require_choice,
    require_count,
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
]

# Norms of the weights of whole modules.

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
SMALLEST = 1e-12  # smallest norm to divide by


class WeightNorm(nn.Module):
    """Parametrisation ``W_i = g_i V_i / |V_i|`` of the slices of a weight along a dimension.

    Args:
        target: None to learn g, which initially preserves the weight; else ``g = target``.
        dim: dimension of the slices i, the outputs.

    Source: Salimans, Kingma, "Weight Normalization" (2016), equation 2, https://arxiv.org/abs/1602.07868.
    """

    def __init__(self, target: float | None = None, *, dim: int = 0) -> None:
        super().__init__()
        self.target = None if target is None else require_positive("target", target)
        self.dim = dim

    def forward(self, *parts: Tensor) -> Tensor:
        """Return W from (g, V), or from V with a ``target``."""
        # In half precision SMALLEST would be 0 and its inverse infinite.
        direction = parts[-1].to(accumulation_dtype(parts[-1].dtype))
        length = parts[0] if self.target is None else self.target
        return (direction * (length / self.size(direction))).to(parts[-1].dtype)

    def right_inverse(self, weight: Tensor) -> Any:
        return weight if self.target is not None else (self.size(weight), weight.clone())

    def size(self, weight: Tensor) -> Tensor:
        """Return the divisor of V, in a shape that broadcasts to the weight's."""
        others = [dim for dim in range(weight.dim()) if dim != self.dim % weight.dim()]
        norm = torch.linalg.vector_norm(weight, dim=others or None, keepdim=True)
        return norm.clamp_min(SMALLEST)

    def extra_repr(self) -> str:
        return f"target={self.target}, dim={self.dim}"


class SpectralNorm(WeightNorm):
    """Parametrisation ``W = g V / sigma(V)`` with the largest singular value sigma.

    sigma is exact on CPUs and replaced by an upper bound on CUDA devices
    (:func:`implicit_attn.spectral.gram_bound`). Unlike power iteration it is the same in training and
    evaluation and at every read, which a fixed-point map and its derivative require. The weight of a
    convolution is treated as a matrix (outputs, everything else); the norm of the convolution as an
    operator may be larger (see :func:`apply_norm`).

    Args:
        target: sigma of W; None to learn g, which initially preserves the weight.
        dim: dimension of the outputs.

    Source: Miyato et al., "Spectral Normalization for Generative Adversarial Networks" (2018),
    https://arxiv.org/abs/1802.05957.
    """

    def size(self, weight: Tensor) -> Tensor:
        return SpectralBound(SMALLEST, self.dim).norm_or_bound(weight).to(weight.dtype)


def apply_norm(
    module: nn.Module,
    norm: str = "weight",
    *,
    target: float | None = None,
    kinds: tuple[type[nn.Module], ...] = KINDS,
    only: str | Sequence[str] = "*",
    skip: str | Sequence[str] = (),
) -> list[str]:
    """Normalise the weights of all layers in a module with ``torch.nn.utils.parametrize``.

    ============  ==========================================  ====================================
    norm          without ``target``                          with ``target``
    ============  ==========================================  ====================================
    "weight"      ``W_i = g_i V_i / |V_i|``, g learned        rows of norm ``target``
    "spectral"    ``W = g V / sigma(V)``, g learned           ``sigma(W) = target / sqrt(m)``
    "bound"       not possible                                ``sigma(W) <= target / sqrt(m)``
    ============  ==========================================  ====================================

    For a linear layer ``m = 1``. For a convolution sigma is that of the matrix (outputs, everything else),
    and m is the largest number of kernel positions that read the same input, 9 for 3 x 3. The norm of the
    convolution as an operator is then at most ``target``, because with the patches ``P_i x`` of its input
    ``sum_i |W P_i x|^2 <= sigma(W)^2 sum_i |P_i x|^2 <= sigma(W)^2 m |x|^2``. This holds for the padding
    modes "zeros" and "circular"; "reflect" and "replicate" read pixels at the border more often.

    Without ``target`` the initial weights do not change. A layer computes every parametrised weight once per
    solve; elsewhere use ``torch.nn.utils.parametrize.cached()``. Call this function before you create an
    optimizer, because it replaces the parameters (``parametrizations.weight.original...``).

    Args:
        module: module whose layers are normalised, including itself.
        norm: "weight", "spectral" or "bound".
        target: a number > 0, or None.
        kinds: classes of layers that have a ``weight``.
        only, skip: shell patterns of layer names (``"encoder.*"``, ``"*head*"``): a layer is normalised if
            it matches one of ``only`` and none of ``skip``.

    Returns the names of the weights, such as ``"encoder.0.weight"``. ValueError if no layer matches, or a
    weight is already parametrised or shared by several modules.

    Example:
        >>> cell = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        >>> apply_norm(cell, "bound", target=0.9)
        ['0.weight', '2.weight']
        >>> remove_norm(cell)
        ['0.weight', '2.weight']
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    require_choice("norm", norm, PARAMETRISATIONS)
    if target is not None:
        require_positive("target", target)
    elif norm == "bound":
        raise ValueError('target must be a number > 0 for norm="bound", got None')
    wanted, unwanted = _matcher("only", only), _matcher("skip", skip)
    chosen = {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, kinds) and wanted(name) and not unwanted(name)
    }
    if not chosen:
        raise ValueError(f"module must contain a layer that matches only={only}, not skip={skip}")
    for name, layer in chosen.items():
        _check_weight(module, name, layer)
    for layer in chosen.values():
        dim, made = 1 if isinstance(layer, TRANSPOSED) else 0, PARAMETRISATIONS[norm]
        size = target
        if target is not None and norm != "weight":
            size = target / math.sqrt(_positions(layer))
        parametrise(layer, "weight", made(size, dim=dim))
    return [_weight_name(name) for name in chosen]


PARAMETRISATIONS: dict[str, Any] = {
    "weight": WeightNorm, "spectral": SpectralNorm, "bound": SpectralBound,
}  # fmt: skip


def _positions(layer: nn.Module) -> int:
    """Return the largest number of kernel positions of a convolution that read the same input, else 1.

    With a stride s and a dilation d along an axis, positions that read the same input lie ``s / gcd(s, d)``
    apart. A transposed convolution reads every input at every position.
    """
    if not isinstance(layer, _ConvNd):
        return 1
    if isinstance(layer, TRANSPOSED):
        return math.prod(layer.kernel_size)
    axes = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    return math.prod(math.ceil(size * math.gcd(s, d) / s) for size, s, d in axes)


def remove_norm(module: nn.Module) -> list[str]:
    """Remove the norms of :func:`apply_norm` and bounds; the weights keep their values as plain parameters.

    Weights with other parametrisations and copies of the module do not change. Call it before you create an
    optimizer, because learned norms are replaced by new parameters. Returns the names of the weights.
    """
    require_instance("module", module, nn.Module, "an nn.Module")
    removed = []
    for name, layer in module.named_modules():
        if not parametrize.is_parametrized(layer, "weight"):
            continue
        parts: Any = layer.parametrizations["weight"]  # type: ignore[index]
        if not all(isinstance(part, (WeightNorm, SpectralBound)) for part in parts):
            continue
        own_class(layer)
        with torch.enable_grad():
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
        if "weight" in layer._buffers:  # torch makes a frozen parameter a buffer
            weight: Any = layer._buffers.pop("weight")
            layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        removed.append(_weight_name(name))
    return removed


def _weight_name(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _matcher(argument: str, patterns: Any) -> Callable[[str], bool]:
    """Return whether a name matches one of the patterns, as a function."""
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in given):
        raise TypeError(
            f"{argument} must be a name pattern or a sequence of them, got {patterns!r}"
        )
    return lambda name: any(fnmatchcase(name, pattern) for pattern in given)


def _check_weight(module: nn.Module, name: str, layer: nn.Module) -> None:
    """Check that the weight of a layer is a parameter of that layer only."""
    name = _weight_name(name)
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError(f"{name} is already parametrised; remove_norm first")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, nn.Parameter) or isinstance(weight, UninitializedParameter):
        raise ValueError(f"{name} must be an initialised parameter, got {type(weight)}")
    parameters = [each for part in module.modules() for each in part._parameters.values()]
    if sum(each is weight for each in parameters) > 1:
        raise ValueError(f"{name} must belong to one layer, got one that several share")


# Spectral radii of a model's layers during training.


class SpectralRadii:
    """Measure the spectral radii of a model's layers, as ``observe`` of a training.

    A call with a model runs it in evaluation mode on a few fixed inputs and computes the spectral radius of
    the Jacobian of every :class:`implicit_attn.DEQ` at its solution (:func:`solvers.spectral_radius`). The
    model and the random state do not change.

    Args:
        inputs: (B, ...), inputs of the model.
        samples: number of samples, from the first; None for all. A sample takes tens of products with
            the Jacobian, so use a few.

    Returns (of a call):
        For each layer, by its name in the model, ``{"median", "largest", "above_one", "samples"}``: median
        and largest radius, the share above 1 (where plain iteration does not converge locally), and the
        number of radii. All are Python numbers. Layers that the model did not call are omitted; a layer
        that it called several times includes the radii of all calls.

    Example:
        >>> model = DEQ.from_update(lambda z, x: 0.5 * z + x)
        >>> round(SpectralRadii(torch.ones(2, 3, 4))(model)[""]["largest"], 4)
        0.5

    ``solvers.SpectrumError`` if eigenvalues do not converge.
    """

    def __init__(self, inputs: Tensor, *, samples: int | None = None) -> None:
        require_instance("inputs", inputs, Tensor, "a tensor (B, ...)")
        if inputs.dim() == 0 or inputs.shape[0] == 0:
            raise ValueError(f"inputs must contain at least one sample, got {tuple(inputs.shape)}")
        if samples is not None:
            require_count("samples", samples)
        self.inputs = inputs[:samples]

    def __call__(self, model: nn.Module) -> dict[str, dict[str, float]]:
        layers = {name: part for name, part in model.named_modules() if isinstance(part, DEQ)}
        radii: dict[str, list[Tensor]] = {name: [] for name in layers}
        training = [module for module in model.modules() if module.training]
        devices = [] if self.inputs.device.type == "cpu" else [self.inputs.device]
        kind = self.inputs.device.type if devices else "cuda"
        try:
            model.eval()
            with _undisturbed(layers.values()), torch.random.fork_rng(devices, device_type=kind):
                for name, layer in layers.items():
                    layer.observer = partial(_note_radii, layer, radii[name])
                with torch.no_grad():
                    model(self.inputs)
        finally:
            for module in training:
                module.training = True
        return {name: _summary(torch.cat(parts)) for name, parts in radii.items() if parts}


def _note_radii(
    layer: DEQ, radii: list[Tensor], x: Any, mask: Tensor | None, solution: Any
) -> None:
    radii.append(layer.spectral_radius(solution.value, x, mask))


def _summary(radii: Tensor) -> dict[str, float]:
    return {
        "median": radii.median().item(),
        "largest": radii.max().item(),
        "above_one": (radii > 1).double().mean().item(),
        "samples": len(radii),
    }


@contextmanager
def _undisturbed(layers: Iterable[DEQ]) -> Iterator[None]:
    """Solve without observers, and restore what the layers keep of their latest solve."""
    before = [(layer, layer.observer, layer.last, layer._seeds) for layer in layers]
    try:
        for layer, *_ in before:
            layer.observer = None
        yield
    finally:
        for layer, observer, last, seeds in before:
            layer.observer, layer.last, layer._seeds = observer, last, seeds


# Fixed-point correction: a loss on intermediate states.

DISCOUNTS = ("exponential", "linear", "constant")
DEFAULT_GAMMA = {"exponential": 0.8, "linear": 0.9, "constant": 1.0}


def correction_weights(
    count: int, kind: str = "exponential", *, gamma: float | None = None
) -> list[float]:
    """Return weights of ``count`` losses from the first state to the solution, whose weight is 1.

    With ``m = 0`` for the solution, ``m = 1`` for the previous state, and so on::

        "exponential"   gamma^m                 gamma 0.8 by default
        "linear"        1 - gamma m / count     gamma 0.9 by default
        "constant"      1

    ``count`` is the number of losses, >= 1; ``gamma`` is in [0, 1], or None for the default.
    """
    require_count("count", count)
    require_choice("kind", kind, DISCOUNTS)
    if gamma is None:
        gamma = DEFAULT_GAMMA[kind]
    elif kind == "constant":
        raise ValueError(f'gamma must be None for kind="constant", got {gamma!r}')
    gamma = require_number("gamma", gamma, low=0.0, high=1.0)
    before = range(count - 1, -1, -1)
    if kind == "linear":
        return [1 - gamma * m / count for m in before]
    return [gamma**m for m in before]


def fixed_point_correction(
    loss: Callable[[Any], Tensor], states: Sequence[Any], weights: Sequence[float] | None = None
) -> Tensor:
    """Return ``sum_k w_k loss(z_k)`` over intermediate states and the fixed point.

    The loss of intermediate states trains short solves to be accurate and the whole solve to converge.

    Args:
        loss: loss of one state, a scalar or a tensor of the same shape for all states.
        states: z_1, ..., z_n from the first to the solution, n >= 1, such as those of
            :meth:`implicit_attn.DEQ.supervised`.
        weights: n finite numbers >= 0; None for ``correction_weights(n)``.

    Example:
        >>> import torch
        >>> from implicit_attn import DEQ
        >>> layer = DEQ.from_update(lambda z, x: 0.5 * torch.tanh(z) + x)
        >>> x = torch.ones(2, 3, 4)
        >>> states = list(layer.supervised(x, segments=3, steps=2))
        >>> fixed_point_correction(lambda z: z.square().mean(), states).shape
        torch.Size([])

    Source: Bai, Geng, Savani, Kolter, "Deep Equilibrium Optical Flow Estimation" (2022), section 4.3,
    https://arxiv.org/abs/2204.08442.
    """
    require_callable("loss", loss)
    if isinstance(states, Tensor) or not isinstance(states, Sequence) or not states:
        raise TypeError(f"states must be a sequence of at least one state, got {type(states)}")
    numbers = correction_weights(len(states)) if weights is None else list(weights)
    if len(numbers) != len(states):
        raise ValueError(f"weights must contain {len(states)} numbers, got {len(numbers)}")
    terms = [
        require_nonnegative(f"weights[{at}]", weight) * loss(state)
        for at, (weight, state) in enumerate(zip(numbers, states, strict=True))
    ]
    return torch.stack(terms).sum(0)
