"""Models of vector spins at their steady state: a backbone, and a classifier of images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.energies.tokens import check_mask, check_state
from implicit_attn.models.around import TokenClassifier, check_images
from implicit_attn.updates import MeanFieldAttention, NormedMLP
from implicit_attn.updates.spins import KineticAttention
from solvers.core.checks import require_count, require_flag, require_instance


class SpinTransformer(nn.Module):
    """Spin modules one after the other, each the steady state ``m*`` of a ``KineticAttention``.

    In the source nothing stands between two modules: ``x -> m*(x)``, and the next module puts the means
    on its spheres again. Then no part of the model but the attention weights mixes features. With
    ``residual`` a module is ``x -> x + O m*(x)``, with output weights O (d, d) that mix the heads.

    Args:
        dim, heads: features d of a token, attention heads, at most d / 2.
        layers: number of modules, each with weights of its own.
        iterations: evaluations per sample and module, an upper bound that a call may change.
        residual: whether the modules add to their input.
        layer: further options of the modules' ``DEQ`` (solver, tolerance, adjoint, on_failure, ...);
            a ``max_steps`` among them is ``iterations``.
        options: further arguments of :class:`implicit_attn.updates.KineticAttention`: beta, closure,
            scale, self_coupling, causal.

    Shapes: tokens (B, N, d) -> (B, N, d); ``mask`` (B, N) bool, False for masked tokens, which keep
    their input and influence no other token. How the latest solves went is in ``steady[k].last``.

    Source: Bal, "Spin-model transformers", https://mcbal.github.io/post/spin-model-transformers/.

    Example, a vision transformer of two modules:
        >>> from implicit_attn.models import ImageClassifier
        >>> spins = SpinTransformer(64, 4, layers=2)
        >>> model = ImageClassifier(spins, 8, 1, 10, patch=2, readout="tokens")
        >>> model(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        layers: int = 2,
        iterations: int = 50,
        residual: bool = False,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        number = require_count("layers", layers)
        require_instance("layer", layer, dict, "a dict of options", optional=True)
        limit = {"max_steps": require_count("iterations", iterations)}
        settings: dict[str, Any] = limit | (layer or {})
        self.dim, self.iterations = dim, settings["max_steps"]
        made = [DEQ(KineticAttention(dim, heads, **options), **settings) for _ in range(number)]
        self.steady: Any = nn.ModuleList(made)
        self.outputs: Any = None
        if require_flag("residual", residual):
            self.outputs = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(number))

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The tokens behind the last module, each solved in at most ``iterations`` evaluations."""
        check_state(x, type(self).__name__, dim=self.dim, tokens=True)
        check_mask(mask, x, type(self).__name__, features=1)
        limit = {} if iterations is None else {"max_steps": require_count("iterations", iterations)}
        z = x
        for index, steady in enumerate(self.steady):
            mean = steady(z, mask, **limit)
            z = mean if self.outputs is None else z + self.outputs[index](mean)
        return z if mask is None else torch.where(mask.unsqueeze(-1), z, x)

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}, residual={self.outputs is not None}"


IMAGE_SIZE, SITES = 28, 4  # pixels and sites along a side of the image


class SpinStem(nn.Module):
    """Images (B, C, 28, 28) -> fields of 4 x 4 sites (B, 16, dim), by four convolutions.

    Max pooling commutes with normalisation and ReLU where the gain is positive. Done before them,
    it leaves them a quarter of the values.
    """

    def __init__(self, channels: int, dim: int, widths: tuple[int, int, int]) -> None:
        super().__init__()
        first, second, third = widths
        self.layers = nn.Sequential(
            nn.Conv2d(channels, first, 3, padding=1, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(first),
            nn.ReLU(),
            nn.Conv2d(first, second, 3, padding=1, bias=False),
            nn.MaxPool2d(2),
            nn.BatchNorm2d(second),
            nn.ReLU(),
            nn.Conv2d(second, third, 3, padding=1, bias=False),
            nn.BatchNorm2d(third),
            nn.ReLU(),
            nn.Conv2d(third, dim, 3, stride=2, padding=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images).flatten(2).mT


class SpinClassifier(TokenClassifier):
    r"""Mean-field response of 16 sites and a class-token site to an image, and a linear readout.

    The sites respond to each other and to their fields x by mean-field attention ::

        z_i = sum_j J_ij z_j - f(z_i) + x_i

    with learned couplings J, symmetric and without self-coupling. Their spectral norm is bounded, so
    that training keeps to couplings for which the solver converges. Site 0 is the class token. Its
    field is learned and the same for all images: only J carries information on the image to it.

    Args:
        channels, classes: image channels, number of classes.
        dim: components d of a site.
        hidden: hidden units of the correction network f.
        widths: channels of the stem's first three convolutions.
        bound: bound on the spectral norm of J, or None.
        layer: further arguments for :class:`DEQ`.

    Shapes: images (B, C, 28, 28) -> logits (B, classes).

    Source: Bal, "Deep Implicit Attention: A Mean-Field Theory Perspective on Attention Mechanisms"
    (2021, https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/),
    which reports about 99.1 % on MNIST for a model of the same size, 25,828 parameters. Only the size
    is matched.
    """

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        *,
        dim: int = 10,
        hidden: int = 40,
        widths: tuple[int, int, int] = (16, 24, 24),
        bound: float | None = 0.9,
        layer: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(channels, IMAGE_SIZE, "class")
        if not isinstance(widths, (tuple, list)) or len(widths) != 3:
            raise ValueError(f"widths must be three integers >= 1, got {widths!r}")
        for index, width in enumerate(widths):
            require_count(f"widths[{index}]", width)
        self.stem = SpinStem(channels, require_count("dim", dim), widths)
        self.position = nn.Parameter(0.1 * torch.randn(SITES * SITES, dim))
        self.class_token = nn.Parameter(torch.randn(dim))
        correction = NormedMLP(dim, hidden)
        attention = MeanFieldAttention(1 + SITES * SITES, dim, correction=correction, bound=bound)
        self.layer = DEQ(attention, **(layer or {}))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, require_count("classes", classes))

    @property
    def attention(self) -> MeanFieldAttention:
        """The update of the layer."""
        update = self.layer.update
        assert isinstance(update, MeanFieldAttention)  # made in __init__
        return update

    def tokens(self, images: Tensor) -> Tensor:
        """Images -> the fields x of the sites, (B, 17, d), the class token first."""
        return self.with_class_token(
            self.stem(check_images(images, self.image_shape)) + self.position
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.layer(self.tokens(images)))
