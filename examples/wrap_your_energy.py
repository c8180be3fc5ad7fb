"""Can a plain function be the energy of a layer that is trained? A denoiser learns filters for edges.

    python examples/wrap_your_energy.py        # a minute

The data are noisy piecewise constant signals. The layer returns the minimiser z of ``energy``, which is
close to the noisy x and has small responses to learned filters. Implicit differentiation trains the filters,
and the error decreases to half of the noise. After training each filter sums to nearly zero, and one is a
multiple of (1, -1): the layer has learned to penalise differences of neighbours (total variation).
"""

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

from implicit_attn import DEQ

torch.manual_seed(0)
filters = torch.nn.Parameter(0.3 * torch.randn(3, 1, 3))


def energy(z: Tensor, x: Tensor) -> Tensor:
    """Distance to x plus the absolute responses of the filters, one number per sample: (B,)."""
    response = F.conv1d(z.unsqueeze(1), filters)
    return 0.5 * (z - x).square().sum(1) + (response.square() + 0.01).sqrt().flatten(1).sum(1)


def signals(count: int) -> tuple[Tensor, Tensor]:
    """Constant runs of 8 values at random heights, clean and with noise, (count, 64) each."""
    clean = torch.randn(count, 9).repeat_interleave(8, dim=1)[:, torch.randint(8, ()) :][:, :64]
    return clean, clean + 0.3 * torch.randn_like(clean)


def train(steps: int = 150) -> None:
    layer = DEQ.from_energy(energy, max_steps=100)
    optimizer = torch.optim.Adam([filters], lr=0.02)
    for step in range(steps + 1):
        clean, noisy = signals(64)
        solution = layer.solve(noisy)
        loss = F.mse_loss(solution.value, clean)
        if step % max(1, steps // 6) == 0:
            before, after = energy(noisy, noisy).mean(), energy(solution.value, noisy).mean()
            print(
                f"step {step:3d}  error {loss.item():.4f} "
                f"(noisy {F.mse_loss(noisy, clean).item():.4f})  "
                f"converged {100 * solution.converged.float().mean().item():.0f} %  "
                f"energy {before.item():.2f} -> {after.item():.2f}"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("filters:", *[[round(v, 2) for v in row] for row in filters[:, 0].tolist()], sep="\n  ")


if __name__ == "__main__":
    tyro.cli(train)
