"""What attention and feed-forward energies share: project, normalise, evaluate, pull back."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from implicit_attn.energies.checks import check_mask, check_state, check_vector
from implicit_attn.energies.energy import Energy
from implicit_attn.energies.norms import Projection, RMSNorm, check_norm
from implicit_attn.energies.tokens import hide


class ProjectedEnergy(Energy):
    """``E(z) = potential(norm(z W^T))``, with gradient and Hessian-vector product in closed form.

    A subclass states the potential of the features alone: its value, its gradient (force), and
    its Hessian times a vector. Projection, norm and heads are handled here, and so are masks as
    far as they can be: features (and vectors) of tokens that do not count are zero, and what the
    potential says about them is dropped from the gradient; their part of the value is left to
    the subclass. The weight is read once per evaluation.

    Args:
        dim: features d of the state.
        rows: features of the projection.
        heads: split the features into so many heads, (B, N, d) -> (B, heads, N, rows / heads);
            None: no head dimension, (B, ..., d) -> (B, ..., rows).
        norm: norm over the last dimension of the features, or None.
        bound: bound on the spectral norm of the weight, or None.
    """

    def __init__(
        self,
        dim: int,
        rows: int,
        *,
        heads: int | None,
        norm: RMSNorm | None,
        bound: float | None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.heads = heads
        self.norm = check_norm(norm)
        self.projection = Projection(dim, rows, bound)

    @abstractmethod
    def potential(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """Value of each sample, (B,), for features ``y``."""

    @abstractmethod
    def potential_and_force(self, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The potential and its gradient by ``y``."""

    @abstractmethod
    def force_and_curvature(
        self, y: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The gradient by ``y`` and the Hessian by ``y`` times ``v``."""

    def force(self, y: Tensor, mask: Tensor | None) -> Tensor:
        """The gradient of the potential by ``y`` alone."""
        return self.potential_and_force(y, mask)[1]

    def features(
        self, z: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """``norm(z W^T)``: (B, heads, N, p), or (B, ..., rows) without heads; ``weight`` replaces W."""
        z = self._visible(z, mask)
        return self._features(z, self.projection.weight if weight is None else weight)[0]

    def straight_gradient(
        self, z: Tensor, *, mask: Tensor | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Gradient by the features after the norm, pulled back by W: the norm's derivative dropped.

        ``dE/dy W`` at ``y = norm(z W^T)``, like ``z``; no gradient of a function of z unless the
        norm is None.

        Args:
            z: state, as for ``forward``.
            mask: as for ``forward``; zero for tokens that do not count.
            weight: (rows, d), used in place of the energy's own.

        Source: Hu, Zou, Xu, "Hyper-SET" (arXiv 2502.11646), equations 9 and 11.
        """
        z = self._visible(z, mask)
        weight = self.projection.weight if weight is None else weight
        y, _ = self._features(z, weight)
        return self._pull_back(self.force(y, mask), weight, mask).to(z.dtype)

    def value_and_force(self, raw: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The value and its gradient by the features before the norm."""
        if self.norm is None:
            return self.potential_and_force(raw, mask)
        y, radius = self.norm.normalise(raw)
        value, force = self.potential_and_force(y, mask)
        return value, self.norm.jacobian_product(y, radius, force)

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z = self._visible(z, mask)
        y, _ = self._features(z, self.projection.weight)
        return self.potential(y, mask)

    def value_and_grad(
        self, z: Tensor, x: Any = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        z = self._visible(z, mask)
        weight = self.projection.weight
        value, force = self.value_and_force(self._split(F.linear(z, weight)), mask)
        return value, self._pull_back(force, weight, mask).to(z.dtype)

    def hvp(self, z: Tensor, v: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        z = self._visible(z, mask)
        check_vector(v, z)
        weight = self.projection.weight
        y, radius = self._features(z, weight)
        raw = self._split(F.linear(hide(v, mask), weight))
        if self.norm is None or radius is None:
            _, curved = self.force_and_curvature(y, raw, mask)
        else:
            tangent = self.norm.jacobian_product(y, radius, raw)
            force, curved = self.force_and_curvature(y, tangent, mask)
            curved = self.norm.hessian_product(y, radius, force, curved, raw)
        return self._pull_back(curved, weight, mask).to(z.dtype)

    def _visible(self, z: Tensor, mask: Tensor | None) -> Tensor:
        name = type(self).__name__
        check_state(z, name, dim=self.dim, tokens=self.heads is not None)
        check_mask(mask, z, name, features=1)
        return hide(z, mask)

    def _features(self, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self._split(F.linear(z, weight))
        return (y, None) if self.norm is None else self.norm.normalise(y)

    def _split(self, y: Tensor) -> Tensor:
        """(B, N, heads p) -> (B, heads, N, p), contiguous for the matrix products that follow."""
        if self.heads is None:
            return y
        batch, tokens, rows = y.shape
        return y.view(batch, tokens, self.heads, rows // self.heads).transpose(1, 2).contiguous()

    def _pull_back(self, force: Tensor, weight: Tensor, mask: Tensor | None) -> Tensor:
        if self.heads is not None:
            batch, heads, tokens, width = force.shape
            force = force.transpose(1, 2).reshape(batch, tokens, heads * width)
        return hide(force @ weight, mask)

    def extra_repr(self) -> str:
        return f"norm={self.norm}"
