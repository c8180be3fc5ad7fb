"""A transformer whose layers are steady states of kinetic vector spins, as a backbone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from implicit_attn.deq import DEQ
from implicit_attn.energies.checks import check_mask, check_state
from implicit_attn.updates.kinetic_attention import KineticAttention
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

    Raises:
        TypeError: for an option that the attention does not have, or a ``layer`` that is no dict.
        ValueError: for a value that does not fit, naming the argument.

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

    @property
    def layer(self) -> DEQ:
        """The only module of a model whose output is its state; TypeError for another model."""
        if len(self.steady) > 1 or self.outputs is not None:
            what = f"{len(self.steady)} modules, residual={self.outputs is not None}"
            raise TypeError(
                f"model must have one spin module without residual, got {what}; train with --layers 1"
            )
        return self.steady[0]

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
