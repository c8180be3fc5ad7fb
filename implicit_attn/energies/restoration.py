"""Energies for restoration: a data term, which can be replaced after training, and a network's residual."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from implicit_attn.energies.energy import Energy, FunctionCall
from implicit_attn.energies.tokens import (
    Mask,
    check_input,
    check_tokens,
    hide,
    sum_samples,
    sum_squares,
)
from solvers.core.checks import require_callable


class DataTerm(Energy):
    """Squared error of a state for an observation, ``E(z; x) = 1/2 sum_i w_i ((A z)_i - y_i)^2``.

    For Gaussian noise of variance ``s^2`` the weight is ``w = 1 / s^2``, and the energy is the negative
    log-likelihood of the observation. A weight of zero marks missing observations. The gradient
    is ``A^T w (A z - y)``, where ``A^T`` is the transposed Jacobian if A is not linear.

    A layer that was trained with one operator can be used with another one::

        data, prior = DataTerm(), NetworkEnergy(network)
        layer = DEQ(data.weighted(0.05) + prior)  # trained to remove noise
        deblur = layer.replace(data, DataTerm(blur))  # shares all weights with layer

    Shapes: ``z`` (B, ...); ``x`` is the observation y (B, ...), shaped like ``A z``, or a dict with ``"y"``
    and a ``"weight"`` of the same shape. ``mask`` (B, N) requires the identity: masked tokens of z
    contribute nothing.

    Args:
        operator: A, a function or module from (B, ...) to (B, ...) that treats samples independently;
            None for the identity.

    Raises:
        TypeError: if x is neither a tensor nor such a dict.
        ValueError: if y or the weight does not have the shape of ``A z``, or a mask is passed with an
            operator.

    Source: Bertero and Boccacci, "Introduction to Inverse Problems in Imaging" (1998), chapter 5; for
    replacing data terms, Venkatakrishnan, Bouman, Wohlberg, "Plug-and-Play Priors for Model Based
    Reconstruction" (GlobalSIP 2013), https://doi.org/10.1109/GlobalSIP.2013.6737048.

    Example:
        >>> import torch
        >>> coarse = DataTerm(torch.nn.AvgPool2d(2))
        >>> coarse(torch.ones(1, 1, 4, 4), torch.zeros(1, 1, 2, 2))
        tensor([2.])
    """

    def __init__(self, operator: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.operator = require_callable("operator", operator, optional=True)

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        check_tokens(z, mask, "DataTerm", features=0)
        if mask is not None and self.operator is not None:
            raise ValueError(
                "mask must be None when DataTerm has an operator; set weight to 0 at masked tokens"
            )
        y, weight = (x.get("y"), x.get("weight")) if isinstance(x, Mapping) else (x, None)
        image = z if self.operator is None else self.operator(z)
        squares = hide(image - check_input(y, image, "DataTerm, y"), mask).square()
        if weight is not None:
            squares = check_input(weight, image, "DataTerm, weight") * squares
        return 0.5 * sum_samples(squares)

    def extra_repr(self) -> str:
        return "" if self.operator is None else f"operator={self.operator!r}"


class NetworkEnergy(Energy):
    r"""Energy of a network N, ``E(z; x) = 1/2 |z - N(z, x)|^2``.

    With the residual ``r = z - N(z, x)`` and the Jacobian J of N with respect to z::

        gradient        r - J^T r
        Hessian times v (I - J)^T (I - J) v - sum_i r_i (Hessian of N_i) v

    The energy is at least 0, and is 0 exactly at the fixed points of N. A network that was trained to remove
    noise makes it small near clean data, so it can serve as a prior together with a :class:`DataTerm`. One
    gradient step is a denoiser, ``z - dE/dz`` (Hurault et al., equation 3).

    Shapes: ``z`` (B, ...); ``N(z)`` is like z. ``x`` and ``mask`` are passed to networks that accept them.

    Args:
        network: a module or function ``N(z)`` or ``N(z, x)``, optionally with ``mask``, twice differentiable
            (GELU, SiLU or tanh instead of ReLU), without dropout or batch statistics. A module is
            registered with its parameters. Attention may use ``scaled_dot_product_attention``.

    Raises:
        TypeError: if network has another signature.
        ValueError: if N(z) does not have the shape of z.

    Source: Hurault, Leclaire, Papadakis, "Gradient Step Denoiser for convergent Plug-and-Play" (ICLR 2022),
    https://arxiv.org/abs/2110.03220, equation 5; as an energy of a network's residual: Romano, Elad,
    Milanfar, "The Little Engine that Could: Regularization by Denoising" (2017).

    Example:
        >>> import torch
        >>> energy = NetworkEnergy(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()))
        >>> energy(torch.randn(3, 4)).shape
        torch.Size([3])
    """

    def __init__(self, network: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = FunctionCall.read(network)
        self.network = network

    def forward(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        check_tokens(z, mask, "NetworkEnergy", features=0)
        z = hide(z, mask)
        image = self.call(self.network, z, x, mask)
        if not isinstance(image, Tensor) or image.shape != z.shape:
            got = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"network must return a tensor of shape {tuple(z.shape)}, got {got}")
        return 0.5 * sum_squares(hide(z - image, mask))

    def denoise(self, z: Tensor, x: Any = None, *, mask: Mask = None) -> Tensor:
        """Return one differentiable gradient step, ``z - dE/dz = N(z) + J^T (z - N(z))``."""
        return z - self.grad(z, x, mask=mask)
