"""The base of feed-forward energies: overlaps with memories, hidden biases and gates from an input."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn.energies.checks import check_vector
from implicit_attn.energies.context.hidden import HiddenBias, HiddenGate, visible_context
from implicit_attn.energies.prepared import Prepared
from implicit_attn.energies.projected import SOFT_NORM, Projection, RMSNorm, TokenEnergy
from implicit_attn.energies.tokens import Pair, hide, sum_samples
from solvers.core.checks import require_count, require_flag


class MemoryEnergy(TokenEnergy):
    """A sum over tokens of a function of ``y = norm(D^T z + U x + c)``, ``D`` the memories.

    ``projection.weight`` holds ``D^T``, one memory a row; U and c are absent unless asked for. With gates
    the term of hidden unit m is weighted by ``g_m(x) = 2 sigmoid(G x + g)_m``. An energy that sees x only
    in ``1/2 |z - x|^2`` makes the layer a proximal operator of x, close to the identity; one that sees x
    in its hidden units does not.

    Shapes: ``z`` (B, ..., d); ``x`` (B, ..., k) with the tokens of ``z``, ignored without
    ``context_dim``; ``mask`` (B, N) for ``z`` (B, N, ..., d). Masked tokens of x influence nothing.

    Args:
        dim: features d of the tokens.
        memories: number M of memories, which are the hidden units.
        context_dim: features k of x, for hidden biases ``U x + c``; None: x is ignored.
            ``context.weight`` holds U (M, k), without a bound: it adds no curvature in z.
        gates: weight the hidden units by gates from x, all 1 at first; needs ``context_dim``.
        bias: learn c (M,), zero at first; what sees a context has it anyway.
        norm: norm over the M hidden units of a token, ``RMSNorm(epsilon)`` or None.
        bound: bound on the spectral norm of ``D``, or None.
    """

    concave_without_norm = False
    takes_gates = True
    bias: nn.Parameter | None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "token_value_and_force" in vars(cls) and "force" not in vars(cls):
            cls.force = MemoryEnergy.force  # not a parent's, of another energy

    def __init__(
        self,
        dim: int,
        memories: int,
        *,
        context_dim: int | None = None,
        gates: bool = False,
        bias: bool = False,
        norm: RMSNorm | None = SOFT_NORM,
        bound: float | None = None,
    ) -> None:
        super().__init__(dim, norm=norm)
        self.projection = Projection(dim, memories, bound)
        if require_flag("gates", gates) and not self.takes_gates:
            raise ValueError(
                f"gates must be False for a {type(self).__name__}, where the gate g of a hidden unit "
                "would be a hidden bias log g, which context_dim gives; got True"
            )
        if gates and context_dim is None:
            raise ValueError("gates=True needs a context, got context_dim=None")
        self.context_dim, self.context, self.gate = context_dim, None, None
        if context_dim is not None:
            self.context = HiddenBias(require_count("context_dim", context_dim), memories)
            self.gate = HiddenGate(context_dim, memories) if gates else None
        biased = require_flag("bias", bias) or context_dim is not None
        self.register_parameter("bias", nn.Parameter(torch.zeros(memories)) if biased else None)
        self.concave = self.concave_without_norm and norm is None

    @abstractmethod
    def token_value_and_force(self, y: Tensor, gates: Tensor | None = None) -> Pair:
        """(B, ..., M) -> the value of each token, (B, ...), and its gradient by ``y``.

        ``gates`` (B, ..., M) weight the hidden units; None: all are 1.
        """

    @abstractmethod
    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair: ...

    def force(self, y: Tensor, mask: Tensor | None, gates: Tensor | None = None) -> Tensor:
        return self.token_value_and_force(y, gates)[1]

    def potential_and_force(
        self, y: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        value, force = self.token_value_and_force(y, gates)
        return sum_samples(hide(value, mask)), force

    def value_and_force(
        self, raw: Tensor, mask: Tensor | None, gates: Tensor | None = None
    ) -> Pair:
        if self.norm is None:
            return self.potential_and_force(raw, mask, gates)
        y, radius = self.norm.normalise(raw)
        value, force = self.potential_and_force(y, mask, gates)
        return value, self.norm.jacobian_product(y, radius, force)

    def prepare(self, x: Any, *, mask: Tensor | None = None) -> Any:
        """``Prepared((U x + c, gates or None))``, tensors (B, ..., M); ``x`` without a context."""
        if self.context is None or isinstance(x, Prepared):
            return x
        x = visible_context(x, mask, self.context.weight, type(self).__name__)
        return Prepared((self.context(x, self.bias), None if self.gate is None else self.gate(x)))

    def held(self, x: Any) -> Any:
        """Nothing, without a context; what looks at ``x`` all the same has to override this."""
        return None if self.context is None else x

    def features(
        self,
        z: Tensor,
        x: Any = None,
        *,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """``norm(z W^T + U x + c)``, (B, ..., M); ``weight`` replaces W."""
        weight = self.weight if weight is None else weight
        return self._hidden(self._visible(z, mask), x, mask, weight)[0]

    def straight_gradient(
        self,
        z: Tensor,
        x: Any = None,
        *,
        mask: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """The gradient without the norm's derivative, as for ``ProjectedEnergy``."""
        z = self._visible(z, mask)
        weight = self.weight if weight is None else weight
        y, _, gates = self._hidden(z, x, mask, weight)
        return self._pull_back(self.force(y, mask, gates), weight, mask).to(z.dtype)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        y, _, gates = self._hidden(self._visible(z, mask), x, mask, self.weight)
        return self.potential_and_force(y, mask, gates)[0]

    def value_and_grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Pair:
        z, weight = self._visible(z, mask), self.weight
        raw, gates = self._overlaps(z, x, mask, weight)
        value, force = self.value_and_force(raw, mask, gates)
        return value, self._pull_back(force, weight, mask).to(z.dtype)

    def grad(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        if self.norm is not None:
            return super().grad(z, x, mask=mask)
        z, weight = self._visible(z, mask), self.weight
        raw, gates = self._overlaps(z, x, mask, weight)
        return self._pull_back(self.force(raw, mask, gates), weight, mask).to(z.dtype)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z, weight = self._visible(z, mask), self.weight
        check_vector(v, z)
        y, radius, gates = self._hidden(z, x, mask, weight)
        raw = F.linear(hide(v, mask), weight)
        if self.norm is None or radius is None:
            _, curved = self.force_and_curvature(y, raw, mask, gates)
        else:
            tangent = self.norm.jacobian_product(y, radius, raw)
            force, curved = self.force_and_curvature(y, tangent, mask, gates)
            curved = self.norm.hessian_product(y, radius, force, curved, raw)
        return self._pull_back(curved, weight, mask).to(z.dtype)

    def _overlaps(
        self, z: Tensor, x: Any, mask: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """``z W^T + U x + c``, (B, ..., M), and the gates."""
        if self.context is None:
            return F.linear(z, weight, self.bias), None
        shift, gates = self.prepare(x, mask=mask).parts
        if shift.shape[:-1] != z.shape[:-1]:
            expected = (*z.shape[:-1], self.context_dim)
            raise ValueError(
                f"{type(self).__name__}: x must have the tokens of z, shape {expected}, got "
                f"{(*shift.shape[:-1], self.context_dim)}"
            )
        # The sum is left to the product of matrices, which saves a pass over the hidden units.
        overlaps = torch.addmm(shift.flatten(0, -2), z.flatten(0, -2), weight.mT)
        return overlaps.view(shift.shape), gates

    def _hidden(
        self, z: Tensor, x: Any, mask: Tensor | None, weight: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``norm(z W^T + U x + c)``, the radius of the norm, and the gates."""
        raw, gates = self._overlaps(z, x, mask, weight)
        y, radius = (raw, None) if self.norm is None else self.norm.normalise(raw)
        return y, radius, gates
