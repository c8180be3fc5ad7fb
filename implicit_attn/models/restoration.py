"""Models that restore images with one trained energy and a data term for each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.deq import DEQ
from implicit_attn.energies.energy import Energy, Sum, Weighted
from implicit_attn.energies.restoration import DataTerm, NetworkEnergy
from implicit_attn.models.images import count_patches, join_patches, split_patches
from solvers.core.checks import require_choice, require_count

NETWORKS = ("convolution", "transformer")


class ConvolutionalNetwork(nn.Module):
    """Convolutional network (B, C, S, S) -> (B, C, S, S) with two coarser resolutions, S a multiple of 4."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        half: Any = {"kernel_size": 4, "stride": 2, "padding": 1}
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, **half)
        self.lower = nn.Conv2d(2 * width, 4 * width, **half)
        self.raised = nn.ConvTranspose2d(4 * width, 2 * width, **half)
        self.up = nn.ConvTranspose2d(2 * width, width, **half)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        full = F.gelu(self.first(z))
        half = F.gelu(self.down(full))
        coarse = F.gelu(self.lower(half))
        half = F.gelu(self.raised(coarse)) + half
        return self.last(F.gelu(self.up(half)) + full)


class PatchTransformer(nn.Module):
    """Transformer encoder on patches, (B, C, S, S) -> (B, C, S, S), with a residual connection."""

    def __init__(
        self, image_size: int, channels: int, dim: int, patch: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(channels * patch**2, dim)
        self.position = nn.Parameter(0.02 * torch.randn(count_patches(image_size, patch), dim))
        options: Any = {"dropout": 0.0, "activation": "gelu", "batch_first": True}
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, norm_first=True, **options)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.read = nn.Linear(dim, channels * patch**2)

    def forward(self, z: Tensor) -> Tensor:
        tokens = self.embed(split_patches(z, self.patch)) + self.position
        return z + join_patches(self.read(self.layers(tokens)), self.patch)


class Restorer(nn.Module):
    """Model that restores partial observations with one trained energy and a data term for each task.

    The layer returns ``z* = argmin_z  c/2 |sqrt(w) (A z - y)|^2 + R(z)``. The observation y, its weights
    ``w = 1 / s^2`` and the operator A belong to the task; the energy R and the factor c are learned. After
    training with ``A = I``, :meth:`solve` accepts any differentiable operator without further training.

    Args:
        prior: energy R of the state z (B, ...).
        mean: (...), initial state at missing observations, such as the mean of the training set; a
            buffer.
        factor: initial c > 0.
        layer: options of the :class:`DEQ`, such as ``tolerance``.

    Source: Venkatakrishnan, Bouman, Wohlberg (GlobalSIP 2013),
    https://doi.org/10.1109/GlobalSIP.2013.6737048; for training through the fixed point, Gilton, Ongie,
    Willett, "Deep Equilibrium Architectures for Inverse Problems in Imaging" (2021),
    https://arxiv.org/abs/2102.07944.
    """

    mean: Tensor

    def __init__(
        self,
        prior: Energy,
        mean: Tensor,
        *,
        factor: float = 0.05,
        layer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", mean.detach().contiguous().clone())
        options: dict[str, Any] = {"tolerance": 3e-3, "max_steps": 200}
        energy = DataTerm().weighted(factor) + prior
        # The latest operator and its layer, which is not a submodule.
        self._task: tuple[Any, DEQ] | None = None
        self.layer = DEQ(energy, **options | dict(layer or {}))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_task": None
        }  # an operator may be a lambda, which cannot be pickled

    @property
    def data(self) -> Weighted:
        """Data term with its learned factor c."""
        update: Any = self.layer.update
        return update.energy.terms[0]

    @property
    def prior(self) -> Any:
        """Energy R."""
        update: Any = self.layer.update
        terms = list(update.energy.terms)[1:]
        return terms[0] if len(terms) == 1 else Sum(terms)

    def solve(
        self,
        y: Tensor,
        weight: Tensor | None = None,
        operator: Callable[[Tensor], Tensor] | None = None,
        *,
        start: Tensor | None = None,
        **options: Any,
    ) -> solvers.Solution:
        """Return the :class:`solvers.Solution`, whose ``value`` (B, ...) is the restored state.

        Args:
            y: observations (B, ...), shaped like the operator's result.
            weight: ``1 / s^2`` of each entry of y for noise of standard deviation s, and 0 at missing
                entries; None for ones.
            operator: A, from states to observations; None for the identity.
            start: initial states; None for y where its weight is positive and ``mean`` elsewhere, or
                ``mean`` everywhere with an operator.
            options: options of :meth:`DEQ.solve`.
        """
        x = {"y": y, "weight": torch.ones_like(y) if weight is None else weight}
        start = self._start(operator, x) if start is None else start
        return self._layer(operator).solve(x, z0=start, **options)

    def stream(
        self,
        observations: Iterable[tuple[Tensor, Tensor]],
        operator: Callable[[Tensor], Tensor] | None = None,
        *,
        slots: int = 128,
        **options: Any,
    ) -> Iterator[tuple[Tensor, solvers.Solution]]:
        """Restore all observations, ``slots`` of them at a time; see :meth:`DEQ.stream`.

        Args:
            observations: batches ``(y, weight)``, as in :meth:`solve`.
            operator: as in :meth:`solve`.
            slots, options: see :meth:`DEQ.stream`.
        """
        inputs = ({"y": y, "weight": weight} for y, weight in observations)
        start = partial(self._start, operator)
        return self._layer(operator).stream(inputs, slots=slots, **{"start": start, **options})

    def _layer(self, operator: Callable[[Tensor], Tensor] | None) -> DEQ:
        """Return the layer with the operator in its data term."""
        if operator is None:
            return self.layer
        if self._task is None or self._task[0] is not operator:
            self._task = operator, self.layer.replace(self.data.energy, DataTerm(operator))
        return self._task[1].train(self.training)

    def _start(self, operator: Callable[[Tensor], Tensor] | None, x: dict[str, Tensor]) -> Tensor:
        """Return initial states of observations: the mean, and known entries without an operator."""
        start = self.mean.expand(len(x["y"]), *self.mean.shape)
        return start if operator is not None else torch.where(x["weight"] > 0, x["y"], start)

    def forward(self, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Return the states restored from y with these weights, with implicit gradients."""
        return self.solve(y, weight).value


class ImageRestorer(Restorer):
    """Restorer of square images with the energy of a network, ``R(z) = 1/2 |z - N(z)|^2``.

    Args:
        image_size, channels: sizes of images (B, channels, image_size, image_size).
        network: network N, "convolution" (channels are multiples of ``width``; the image size must be a
            multiple of 4) or "transformer" (on patches, with ``width`` features per token).
        width: width of the network.
        patch, layers, heads: sizes of the transformer.
        layer: options of the :class:`DEQ`.

    Source: Hurault, Leclaire, Papadakis (ICLR 2022), https://arxiv.org/abs/2110.03220; see also
    :class:`Restorer`.
    """

    def __init__(
        self,
        image_size: int = 28,
        channels: int = 1,
        *,
        network: str = "convolution",
        width: int = 24,
        patch: int = 4,
        layers: int = 4,
        heads: int = 4,
        layer: Mapping[str, Any] | None = None,
    ) -> None:
        size, channels = (
            require_count("image_size", image_size),
            require_count("channels", channels),
        )
        if require_choice("network", network, NETWORKS) == "transformer":
            made: nn.Module = PatchTransformer(size, channels, width, patch, layers, heads)
        elif size % 4:
            raise ValueError(f"image_size must be a multiple of 4 for convolutions, got {size}")
        else:
            made = ConvolutionalNetwork(channels, require_count("width", width))
        super().__init__(NetworkEnergy(made), torch.zeros(channels, size, size), layer=layer)

    def denoise(self, y: Tensor) -> Tensor:
        """Return one gradient step on the network's energy, the output of the first training stage."""
        return self.prior.denoise(y)
