"""The layers that the benchmarks solve; no program."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from implicit_attn.energies import BiSoftmaxAttention, Energy, Quadratic, ReLUFeedForward

B, N, D = 64, 17, 10


class MeanField(nn.Module):
    """``z = J z - ffn(z) + x`` with symmetric couplings without self-coupling; Bal (2021)."""

    def __init__(
        self, scale: float = 1.0, seed: int = 0, samples: int = B, masked: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.raw = nn.Parameter(scale * torch.randn(N * D, N * D) / (N * D * D) ** 0.5)
        self.first, self.second = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        blocks = torch.kron(1 - torch.eye(N), torch.ones(D, D))
        self.blocks: Tensor
        self.register_buffer("blocks", blocks)
        self.x = torch.randn(samples, N, D)
        self.cotangent = torch.randn(samples, N, D)
        self.mask = None
        if masked:  # a quarter of the tokens, others in each sample
            self.mask = torch.rand(samples, N).argsort(1) >= N // 4

    def couplings(self) -> Tensor:
        return (self.raw + self.raw.mT) / 2 * self.blocks

    def update(self, z: Tensor, x: Tensor, couplings: Tensor, mask: Tensor | None = None) -> Tensor:
        field = F.linear(z.reshape(len(z), -1), couplings).view_as(z)
        updated = field - self.second(F.gelu(self.first(z))) + x
        return updated if mask is None else updated.masked_fill(~mask.unsqueeze(-1), 0.0)

    def exact(self) -> tuple[Tensor, list[Tensor]]:
        """Fixed point and gradients of <cotangent, z> by a dense float64 solve."""
        self.double()
        couplings = self.couplings()
        x, cotangent = self.x.double(), self.cotangent.double()
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(20):  # Newton
                jacobian = self._jacobian(z, couplings)
                residual = self.update(z, x, couplings, self.mask) - z
                unit = torch.eye(N * D, dtype=z.dtype)
                z = z + solve_each(unit - jacobian, residual.flatten(1)).view_as(z)
        jacobian = self._jacobian(z, couplings)
        unit = torch.eye(N * D, dtype=z.dtype)
        u = solve_each((unit - jacobian).mT, cotangent.flatten(1)).view_as(z)
        loss = (self.update(z, x, couplings, self.mask) * u.detach()).sum()
        gradients = torch.autograd.grad(loss, list(self.parameters()))
        self.float()
        return z, [g.detach() for g in gradients]

    def _jacobian(self, z: Tensor, couplings: Tensor) -> Tensor:
        def one(state: Tensor, x: Tensor, mask: Tensor) -> Tensor:
            return self.update(state.view(1, N, D), x[None], couplings, mask[None]).flatten()

        mask = torch.ones(z.shape[:2], dtype=torch.bool) if self.mask is None else self.mask
        each = torch.func.vmap(torch.func.jacrev(one))
        return each(z.flatten(1), self.x.to(z.dtype), mask).detach()


def solve_each(matrices: Tensor, right: Tensor) -> Tensor:
    """Dense solves one by one: batched LU of large matrices breaks after ``set_num_threads(2)``."""
    pairs = zip(matrices, right, strict=True)
    return torch.stack([torch.linalg.solve(matrix, vector) for matrix, vector in pairs])


def hyper_energy(a: float, b: float, seed: int = 0) -> tuple[Energy, Tensor]:
    """The exact bi-softmax + ReLU energy at N 16, d 64, 4 heads, M 128, epsilon 1, and an input."""
    torch.manual_seed(seed)
    energy = a * BiSoftmaxAttention(64, heads=4) + b * ReLUFeedForward(64, 128) + Quadratic()
    return energy, torch.randn(B, 16, 64)
