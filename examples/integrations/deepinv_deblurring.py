"""deepinv: proximal gradient descent with a learned prior, trained and solved as an equilibrium layer.

    pip install ".[examples,integrations]"
    python examples/integrations/deepinv_deblurring.py

One iteration of an algorithm of deepinv is an update of a layer. The table has evaluations of the iteration
and the mean PSNR by the layer and by deepinv's own loops, on the same weights, all to a residual of 1e-4.
"""

from functools import partial
from typing import Any

import torch
import tyro
from deepinv import optim, physics  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from implicit_attn import DEQ
from implicit_attn.data import load_digits


class Denoiser(nn.Module):
    """``0.9 x + N(x)``, a contraction before training; N is a network with one hidden layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, channels, 3, 1, 1), nn.Conv2d(channels, 1, 3, 1, 1)
        nn.init.zeros_(self.second.weight)

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return 0.9 * x + self.second(self.first(x).tanh())


class Iteration(nn.Module):
    """One iteration of an algorithm of deepinv: images x and observation y (B, 1, H, W) -> (B, 1, H, W)."""

    def __init__(self, own: Any, operator: Any) -> None:
        super().__init__()
        self.own, self.operator = own, operator

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = self.own
        parts = own.update_data_fidelity_fn(0), own.update_prior_fn(0), own.update_params_fn(0)
        return own.fixed_point.iterator({"est": (x, x)}, *parts, y, self.operator)["est"][0]


def main(channels: int = 16, steps: int = 200, limit: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    data, kernel = load_digits().first(limit), physics.functional.gaussian_blur((5, 5), 0.8)
    operator, denoiser = physics.Blur(kernel, padding="circular"), Denoiser(channels)
    algorithm = partial(
        optim.PGD, data_fidelity=optim.L2(), prior=optim.PnP(denoiser), trainable_params=[], DEQ=True,
        stepsize=1.0, max_iter=400, early_stop=True, thres_conv=1e-4, crit_conv="residual",
    )  # fmt: skip
    layer = DEQ.from_update(Iteration(algorithm(), operator), init=operator.A_adjoint)
    layer.max_steps, optimizer = 100, torch.optim.Adam(layer.parameters(), lr=3e-3)
    for _ in range(steps):
        clean = data.train_images[torch.randint(len(data.train_images), (32,))]
        y = operator(clean) + 0.05 * torch.randn_like(clean)
        loss = (layer(y) - clean).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    clean, results = data.test_images, {}
    y = operator(clean) + 0.05 * torch.randn_like(clean)
    with torch.no_grad():
        for name, accelerated in (("deepinv", False), ("deepinv, Anderson", True)):
            own, calls = algorithm(anderson_acceleration=accelerated), []
            own.fixed_point.iterator.register_forward_hook(lambda *_, into=calls: into.append(1))
            results[name] = own(y, operator), len(calls)
        solution = layer.solve(y)
        results["layer"] = solution.value, int(solution.evaluations.max())
    for name, (found, number) in {"blurred": (y, 0), **results}.items():
        psnr = -10 * (found - clean).square().mean((1, 2, 3)).log10().mean()
        print(f"{name:18} {number:4} evaluations, PSNR {psnr:.2f} dB")
    return {"layer": layer, "denoiser": denoiser, "operator": operator, "results": results}


if __name__ == "__main__":
    tyro.cli(main)
