"""Learned couplings between vector spins, parametrised so that their symmetries hold exactly."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from implicit_attn.energies.checks import check_tokens
from implicit_attn.energies.projected import SpectralBound
from implicit_attn.energies.tokens import accumulation_dtype, hide
from solvers.core.checks import require_count, require_flag, require_positive


class Couplings(nn.Module):
    """Couplings ``J`` (N, N, d, d) between N sites with d components; no site couples to itself.

    ``J_ii = 0``; with ``symmetric_sites`` ``J_ij^{ab} = J_ji^{ba}``, so that ``J`` as a matrix
    (Nd, Nd) is symmetric; with ``symmetric_internal`` also ``J_ij^{ab} = J_ij^{ba}``. The only
    parameters are the entries that the symmetries leave free (``torch.nn.utils.parametrize``), so
    optimisers and weight decay see each once. They are drawn from ``N(0, scale^2 / (N d^2))``, which
    gives the matrix a spectral norm of about ``2 scale / sqrt d``.

    ``weight`` is J itself. It can be read, set (``couplings.weight = J``) and cached
    (``torch.nn.utils.parametrize.cached()``); a solve computes it once.

    Args:
        sites: N.
        dim: d.
        symmetric_sites: tie ``J_ij`` to the transpose of ``J_ji``.
        symmetric_internal: make every block ``J_ij`` symmetric.
        scale: of the initial entries, > 0.
        bound: bound on the spectral norm of the matrix, or None. A larger ``J`` is scaled down to
            it, at the cost of an eigenvalue (or singular value) decomposition a solve.

    Raises:
        TypeError, ValueError: for arguments out of range; on setting ``weight`` to a tensor of
            another shape or without the symmetries.

    Source: Opper and Winther (2001), https://doi.org/10.1103/PhysRevE.64.056131, for the model; Bal,
    "Deep Implicit Attention" (2021),
    https://mcbal.github.io/post/deep-implicit-attention-a-mean-field-theory-perspective-on-attention-mechanisms/
    """

    weight: Tensor

    def __init__(
        self,
        sites: int,
        dim: int,
        *,
        symmetric_sites: bool = True,
        symmetric_internal: bool = False,
        scale: float = 1.0,
        bound: float | None = None,
    ) -> None:
        super().__init__()
        self.sites, self.dim = require_count("sites", sites), require_count("dim", dim)
        self.symmetric_sites = require_flag("symmetric_sites", symmetric_sites)
        self.symmetric_internal = require_flag("symmetric_internal", symmetric_internal)
        self.scale = require_positive("scale", scale)
        self.bound = None if bound is None else require_positive("bound", bound)
        self.weight = nn.Parameter(torch.zeros(sites, sites, dim, dim))
        expansion = _FreeEntries(sites, dim, symmetric_sites, symmetric_internal)
        parametrize.register_parametrization(self, "weight", expansion)
        if self.bound is not None:
            bounding = _BoundedMatrix(self.bound, symmetric_sites)
            parametrize.register_parametrization(self, "weight", bounding)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the free entries from ``N(0, scale^2 / (N d^2))``."""
        nn.init.normal_(self.free, std=self.scale / (self.sites**0.5 * self.dim))

    @property
    def free(self) -> nn.Parameter:
        """The entries that the symmetries leave free, the only parameter.

        (K, d, d), or (K, d(d+1)/2) with ``symmetric_internal``; K is N(N-1)/2 or N(N-1) pairs.
        """
        return self.parametrizations["weight"].original  # type: ignore[index,union-attr,return-value]

    @property
    def matrix(self) -> Tensor:
        """``J`` as a matrix (Nd, Nd), rows ``(i, a)``, columns ``(j, b)``."""
        size = self.sites * self.dim
        return self.weight.transpose(1, 2).reshape(size, size)

    @property
    def parameter_count(self) -> int:
        """Number of free entries."""
        return self.free.numel()

    def forward(self, z: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """The field ``sum_j J_ij z_j`` at every site, (B, N, d), one matrix product.

        Masked sites act on no other site, and their own field is 0.
        """
        self.check(z, mask)
        field = (hide(z, mask).flatten(1) @ self.matrix.mT).view(z.shape)
        return hide(field, mask)

    def check(self, z: Tensor, mask: Tensor | None = None) -> None:
        """``z`` must be (B, N, d) of this N and d, and ``mask`` (B, N) bool, or errors that say so."""
        check_tokens(z, mask, "Couplings", dim=self.dim, tokens=True)
        if z.shape[1] != self.sites:
            raise ValueError(
                f"Couplings: z must have {self.sites} sites (N), got shape {tuple(z.shape)}"
            )

    def site_norms(self) -> Tensor:
        """Frobenius norm of every block ``J_ij``, (N, N): how strongly two sites are coupled."""
        return torch.linalg.matrix_norm(self.weight)

    def extra_repr(self) -> str:
        return (
            f"sites={self.sites}, dim={self.dim}, symmetric_sites={self.symmetric_sites}, "
            f"symmetric_internal={self.symmetric_internal}, bound={self.bound}"
        )


class _FreeEntries(nn.Module):
    """Parametrisation: free entries -> ``J`` (N, N, d, d), laid out in memory as (N, d, N, d)."""

    rows: Tensor
    columns: Tensor
    entries: Tensor

    def __init__(self, sites: int, dim: int, tied: bool, internal: bool) -> None:
        super().__init__()
        self.sites, self.dim, self.tied, self.internal = sites, dim, tied, internal
        rows, columns = torch.triu_indices(sites, sites, 1)
        if not tied:
            rows, columns = torch.cat([rows, columns]), torch.cat([columns, rows])
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)
        # The index of entry (a, b) of a symmetric block among the entries with a <= b.
        first, second = torch.triu_indices(dim, dim)
        entries = torch.zeros(dim, dim, dtype=torch.long)
        entries[first, second] = entries[second, first] = torch.arange(len(first))
        self.register_buffer("entries", entries.flatten(), persistent=False)

    def forward(self, free: Tensor) -> Tensor:
        n, d = self.sites, self.dim
        blocks = free.index_select(1, self.entries).view(-1, d, d) if self.internal else free
        upper = free.new_zeros(n, d, n, d).transpose(1, 2)
        upper = upper.index_put((self.rows, self.columns), blocks)
        return upper + upper.permute(1, 0, 3, 2) if self.tied else upper

    def right_inverse(self, weight: Tensor) -> Tensor:
        n, d = self.sites, self.dim
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            kind = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
            raise TypeError(f"weight must be a floating tensor (N, N, d, d), got {kind}")
        if tuple(weight.shape) != (n, n, d, d):
            raise ValueError(
                f"weight must have the shape (N, N, d, d) = {(n, n, d, d)}, got {tuple(weight.shape)}"
            )
        self._check_symmetries(weight.detach())
        blocks = weight[self.rows, self.columns]
        if not self.internal:
            return blocks
        first, second = torch.triu_indices(d, d, device=weight.device)
        return blocks[:, first, second]

    def _check_symmetries(self, weight: Tensor) -> None:
        if not bool(weight.isfinite().all()):
            raise ValueError("weight must be finite, got NaN or infinity in it")
        allowed = 32 * torch.finfo(weight.dtype).eps * weight.abs().max()
        offences = {"have zero blocks J_ii": weight.diagonal().abs().max()}
        if self.tied:
            offences["have J_ij^ab = J_ji^ba"] = (weight - weight.permute(1, 0, 3, 2)).abs().max()
        if self.internal:
            offences["have J_ij^ab = J_ij^ba"] = (weight - weight.mT).abs().max()
        for wanted, worst in offences.items():
            if not bool(worst <= allowed):
                raise ValueError(f"weight must {wanted}, got deviations up to {float(worst):.3g}")


class _BoundedMatrix(SpectralBound):
    """The bound for ``J`` (N, N, d, d), on the spectral norm of its matrix (Nd, Nd)."""

    def __init__(self, bound: float, symmetric: bool) -> None:
        super().__init__(bound)
        self.symmetric = symmetric

    def spectral_norm(self, weight: Tensor) -> Tensor:
        size = weight.shape[0] * weight.shape[2]
        matrix = weight.transpose(1, 2).reshape(size, size)
        wide = matrix.to(accumulation_dtype(matrix.dtype))
        # LAPACK raises at a NaN. Without it the NaN stays in J, and the solve's status reports it.
        wide = torch.where(wide.isfinite(), wide, 0.0)
        if self.symmetric:
            return torch.linalg.eigvalsh(wide).abs().amax()
        return torch.linalg.matrix_norm(wide, ord=2)

    def norm_or_bound(self, weight: Tensor) -> Tensor:
        return self.spectral_norm(weight).clamp_min(self.bound)
