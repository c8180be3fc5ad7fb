"""DEQ-Flow's update block (Bai, Geng, Savani, Kolter 2022): optical flow of moving textures.

    python examples/published/deq_flow.py

The state is a pair: hidden features and the flow. Each evaluation looks up the correlations of the two
frames around the current flow, updates the features by a convolutional GRU and moves the flow. Training, as
published, has a loss on six states with one-step gradients (``supervised``). The published evaluation makes
36 plain iterations; the layer goes on until the flow has converged.

Source: https://arxiv.org/abs/2204.08442, code https://github.com/locuslab/deq-flow.
"""

import torch
import tyro
from common import Row, begin, row, show, solved, train
from generated import SIZE, grid, moving_textures, window
from torch import Tensor, nn
from torch.nn import functional as F

from implicit_attn import DEQ
from implicit_attn.regularization import fixed_point_correction

RADIUS = 3  # of the window of correlations, in pixels
State = tuple[Tensor, Tensor]  # hidden features (B, C, H, W) and flow (B, 2, H, W) in pixels


class Cell(nn.Module):
    """One update of the pair, of correlations (B, H W, H, W) and context features."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.motion = nn.Conv2d((2 * RADIUS + 1) ** 2 + 2, channels, 3, padding=1)
        self.gates = nn.Conv2d(3 * channels, 2 * channels, 3, padding=1)
        self.candidate = nn.Conv2d(3 * channels, channels, 3, padding=1)
        self.move = nn.Conv2d(channels, 2, 3, padding=1)

    def look(self, correlation: Tensor, flow: Tensor) -> Tensor:
        """Correlations within RADIUS of where the flow points, ((2 RADIUS + 1)^2 channels)."""
        line = torch.arange(-RADIUS, RADIUS + 1, dtype=flow.dtype) * (2 / SIZE)
        place = grid(flow).flatten(0, 2)[:, None, None] + window(line)
        found = F.grid_sample(correlation.flatten(0, 1)[:, None], place, align_corners=False)
        return found.flatten(1).unflatten(0, (-1, SIZE, SIZE)).movedim(-1, 1)

    def forward(self, z: State, x: tuple[Tensor, Tensor]) -> State:
        (hidden, flow), (correlation, context) = z, x
        looked = torch.cat([self.look(correlation, flow), flow], 1)
        inputs = torch.cat([F.relu(self.motion(looked)), context], 1)
        keep, reset = self.gates(torch.cat([hidden, inputs], 1)).sigmoid().chunk(2, 1)
        new = torch.tanh(self.candidate(torch.cat([reset * hidden, inputs], 1)))
        hidden = keep * hidden + (1 - keep) * new
        return hidden, flow + self.move(hidden)


def correlate(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cell's input: correlations of the first halves of features, and the context of one frame."""
    (one, context), (two, _) = one.chunk(2, 1), two.chunk(2, 1)
    return torch.einsum("bchw,bcij->bhwij", one, two).flatten(1, 2) / one.shape[1] ** 0.5, context


def start(x: tuple[Tensor, Tensor]) -> State:
    return torch.zeros_like(x[1]), torch.zeros_like(x[1][:, :2])


def main(channels: int = 24, steps: int = 80, seed: int = 0) -> list[Row]:
    """Train by six supervised states, then evaluate by 36 plain iterations and to convergence."""
    begin(seed)
    features = nn.Sequential(nn.Conv2d(3, 2 * channels, 3, padding=1), nn.Tanh())
    layer = DEQ.from_update(Cell(channels), init=start, tolerance=1e-2, max_steps=80)

    def loss() -> Tensor:
        first, second, flow = moving_textures(4)
        x = correlate(features(first), features(second))
        states = layer.supervised(x, segments=6, steps=7)
        return fixed_point_correction(lambda z: (z[1] - flow).abs().mean(), list(states))

    train([*features.parameters(), *layer.parameters()], loss, steps, rate=2e-3)
    first, second, flow = moving_textures(32)
    x = correlate(features(first), features(second))

    def error(z: State) -> float:
        return (z[1] - flow).norm(dim=1).mean().item()

    rows = [row("nothing: zero flow", 0, "", "", error=error(start(x)))]
    rows.append(row("36 plain iterations", 36, "", "", error=error(layer.unrolled(36)(x))))
    value = error(layer(x, on_failure="ignore", adjoint=None))
    return show([*rows, solved("layer", layer, error=value)])


if __name__ == "__main__":
    tyro.cli(main)
