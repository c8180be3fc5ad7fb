"""A transformer of equilibrium blocks, as a backbone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from implicit_attn.block import EquilibriumBlock
from implicit_attn.energies.tokens import check_mask, check_state
from solvers.core.checks import require_count


class EquilibriumTransformer(nn.Module):
    """Equilibrium blocks one after the other, each ``x -> x + O z*(x)`` with weights of its own.

    Args:
        dim, heads: features d of a token, attention heads.
        hidden: hidden units M of a block; None: ``2 d``.
        layers: number of blocks.
        iterations: evaluations per sample and block, an upper bound that a call may change.
        layer: further options of the blocks' ``DEQ`` (solver, tolerance, adjoint, on_failure, ...).
        options: further arguments of :class:`implicit_attn.EquilibriumBlock`: attention ("self" or
            None), activation, state_dim, causal, curvature, dropout.

    Shapes: tokens (B, N, d) -> (B, N, d); ``mask`` (B, N) bool, False for masked tokens, which keep
    their input and influence no other token. How the latest solves went is in ``blocks[k].last``.

    Example, a vision transformer of two blocks:
        >>> from implicit_attn.models import ImageClassifier
        >>> model = ImageClassifier(EquilibriumTransformer(64, 4, layers=2), 8, 1, 10, patch=2)
        >>> model(torch.rand(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        hidden: int | None = None,
        *,
        layers: int = 1,
        iterations: int = 50,
        layer: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        number = require_count("layers", layers)
        if options.get("attention") == "cross":
            raise ValueError('attention must be "self" or None in a backbone, got "cross"')
        if not options.get("batch_first", True):
            raise ValueError("batch_first must be True in a backbone, got False")
        self.dim, self.iterations = dim, require_count("iterations", iterations)
        settings: dict[str, Any] = {"max_steps": iterations} | (layer or {})
        made = [
            EquilibriumBlock(dim, heads, hidden, layer=settings, **options) for _ in range(number)
        ]
        self.blocks: Any = nn.ModuleList(made)

    def forward(
        self, x: Tensor, *, iterations: int | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The tokens behind the last block, each solved in at most ``iterations`` evaluations."""
        check_state(x, type(self).__name__, dim=self.dim, tokens=True)
        check_mask(mask, x, type(self).__name__, features=1)
        padding = None if mask is None else ~mask
        for block in self.blocks:
            if iterations is None:
                x = block(x, src_key_padding_mask=padding)
            else:
                limit: dict[str, Any] = {"max_steps": iterations}
                z = block.solve(x, src_key_padding_mask=padding, **limit).value
                x = x + block.dropout(z if block.output is None else block.output(z))
        return x

    def extra_repr(self) -> str:
        return f"iterations={self.iterations}"
