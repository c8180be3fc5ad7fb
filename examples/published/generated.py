"""Generated data of the programs of this folder: moving textures, 4 x 4 Sudoku, rings."""

from itertools import permutations

import torch
from torch import Tensor
from torch.nn import functional as F

SIZE = 16  # height and width of the textures


def grid(flow: Tensor) -> Tensor:
    """Where pixels come from, (B, H, W, 2) in the coordinates of ``grid_sample``."""
    place = window(torch.arange(SIZE, dtype=flow.dtype)) + flow.movedim(1, -1)
    return (place + 0.5) * (2 / SIZE) - 1


def window(line: Tensor) -> Tensor:
    """Pairs (x, y) of coordinates, (n, n, 2)."""
    return torch.stack(torch.meshgrid(line, line, indexing="xy"), -1)


def moving_textures(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two frames (B, 3, H, W) of a smooth texture, and the flow that takes one to the other."""
    texture = F.interpolate(torch.randn(batch, 3, SIZE, SIZE), scale_factor=2.0, mode="bicubic")
    second = texture[..., SIZE // 2 : -SIZE // 2, SIZE // 2 : -SIZE // 2]
    corners = 1.5 * torch.randn(batch, 2, 2, 2).clamp(-2, 2)
    flow = F.interpolate(corners, size=SIZE, mode="bilinear", align_corners=True)
    first = F.grid_sample(second, grid(flow), align_corners=False, padding_mode="reflection")
    return first, second, flow


def boards() -> Tensor:
    """All 288 boards (288, 16) with digits 1 to 4."""
    rows = torch.tensor(list(permutations(range(1, 5))))
    index = torch.cartesian_prod(*[torch.arange(24)] * 4)
    grids = rows[index]  # (24^4, 4, 4)
    boxes = grids.unflatten(1, (2, 2)).unflatten(3, (2, 2)).transpose(2, 3).flatten(1, 2).flatten(2)
    units = torch.cat([grids.mT, boxes], 1).sort(-1).values
    return grids[(units == torch.arange(1, 5)).all(-1).all(-1)].flatten(1)


def puzzles(solutions: Tensor, every: Tensor, count: int, holes: int) -> tuple[Tensor, Tensor]:
    """Boards with ``holes`` empty cells (0) that have one solution, and their solutions."""
    drawn = solutions[torch.randint(len(solutions), (4 * count,))]
    hidden = torch.rand(drawn.shape).argsort(1) < holes
    given = drawn.masked_fill(hidden, 0)
    fits = ((every == given[:, None]) | hidden[:, None]).all(-1).sum(-1) == 1
    return given[fits][:count], drawn[fits][:count]


def rings(count: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Directed edges (n, n) from each node to the next, features (n, 2) and labels (n,); n = count * length.

    Only the first node of a ring shows the ring's label.
    """
    edges = torch.block_diag(*[torch.eye(length).roll(1, 0)] * count)
    labels = torch.arange(count) % 2
    features = torch.zeros(count, length, 2)
    features[torch.arange(count), 0, labels] = 1.0
    return edges, features.flatten(0, 1), labels.repeat_interleave(length)
