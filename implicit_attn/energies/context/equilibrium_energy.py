"""The energy of an equilibrium block: attention and memories that see the input, with one minimum."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.checks import check_mask
from implicit_attn.energies.context.conditional_attention import ConditionalAttention
from implicit_attn.energies.context.memory_energy import MemoryEnergy
from implicit_attn.energies.energy import Evaluation, SummedEnergy
from implicit_attn.energies.heads.inputs import AttentionInput
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.simple import Quadratic
from implicit_attn.energies.tokens import hide

# Of the mean square of a token and the memory's answer, which is of order 1 mostly: a token of zeros
# keeps a gradient that does not explode.
EPSILON = 1e-2


class EquilibriumEnergy(SummedEnergy):
    r"""``E(z; x) = 1/2 |z|^2 + E_attention(z; c(x)) + E_memory(z; x)``, the input inside, not beside z.

    The attention is made of ``c(x) = rms_norm(x - dE_memory/dz(0; x))``, the input and what the memory
    answers to it at once, so that its values are no linear functions of a token. The first gradient step
    from ``z = 0`` is therefore a feed-forward block followed by multi-head attention; the equilibrium
    sends both back through the transposed weights until they agree.

    Where attention and memory have Hessians above ``-a`` and ``-b``, with ``a + b < 1``, E is strongly
    convex: one minimum, which depends continuously on x and the weights, and is found by any descent.

    Args:
        attention: a ``ConditionalAttention``, or None.
        memory: a feed-forward energy with ``context_dim`` and without norm, or None; not both None.
        output: a map O of the state (..., s) to the width of x, where that is another one;
            ``c(x) = rms_norm(x - O dE_memory/dz(0; x))`` then.

    Shapes: ``z`` (B, N, s); ``x`` (B, N, d), or an ``AttentionInput`` whose ``tokens`` are x;
    ``mask`` (B, N) bool.

    Raises:
        ValueError: there is neither attention nor memory, or the memory has a norm or sees no input.
    """

    def __init__(
        self,
        attention: ConditionalAttention | None,
        memory: MemoryEnergy | None,
        output: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if attention is None and memory is None:
            raise ValueError("attention and memory must not both be None")
        if memory is not None and (memory.context_dim is None or memory.norm is not None):
            raise ValueError("memory must have a context_dim and norm=None")
        self.quadratic = Quadratic()
        self.attention, self.memory, self.output = attention, memory, output

    def summands(self) -> Iterable[Any]:
        terms = (self.quadratic, self.attention, self.memory)
        return [term for term in terms if term is not None]

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """What attention and memory prepare, as a ``Prepared``; nothing for ``1/2 |z|^2``.

        Its second part is ``-dE_memory/dz(0; x)``, like z, from where a solve may start; None without a
        memory. No gradient flows through it.
        """
        if isinstance(x, Prepared):
            return x
        given = x if isinstance(x, AttentionInput) else AttentionInput(tokens=x)
        tokens, parts, answer = given.tokens, [None], None
        if isinstance(tokens, Tensor):
            check_mask(mask, tokens, type(self).__name__, features=1)
            tokens = hide(tokens, mask)
        recalled = None if self.memory is None else self.memory.prepare(tokens, mask=mask)
        if self.memory is not None and tokens is not None:
            origin = tokens.new_zeros(*tokens.shape[:-1], self.memory.dim)
            answer = -self.memory.grad(origin, recalled, mask=mask)
        if self.attention is not None:
            seen = tokens if answer is None else self.context(tokens, answer)
            parts.append(self.attention.prepare(given._replace(tokens=seen), mask=mask))
        terms = tuple(parts if recalled is None else [*parts, recalled])
        return Prepared((Prepared(terms), None if answer is None else answer.detach()))

    def forward(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().forward(z, self._terms(x, mask), mask=mask)

    def value_and_grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Evaluation:
        return super().value_and_grad(z, self._terms(x, mask), mask=mask)

    def grad(self, z: Any, x: Any = None, *, mask: Tensor | None = None) -> Any:
        return super().grad(z, self._terms(x, mask), mask=mask)

    def hvp(self, z: Any, v: Any, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        return super().hvp(z, v, self._terms(x, mask), mask=mask)

    def _terms(self, x: Any, mask: Tensor | None) -> Prepared:
        return self.prepare(x, mask=mask).parts[0]

    def context(self, x: Any, answer: Tensor) -> Tensor:
        """``c(x)``, like ``x``, where the memory's answer at once is ``answer`` (..., s)."""
        if self.output is not None:
            answer = self.output(answer)
        if answer.shape != x.shape:
            raise ValueError(
                f"{type(self).__name__}: output must map the state to the width of x, "
                f"{x.shape[-1]}, got {answer.shape[-1]}"
            )
        return F.rms_norm(x + answer, (x.shape[-1],), eps=EPSILON)
