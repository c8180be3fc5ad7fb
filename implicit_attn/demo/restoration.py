"""Image restoration with one energy: tasks, a prior with memories, its training, and linear estimates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import solvers
from implicit_attn.energies import Energy
from implicit_attn.models import Restorer
from implicit_attn.optional import progress
from implicit_attn.studies.study import new_figure

HIDDEN = (0.68, 0.81, 0.93)  # colour of a pixel that was not observed


class Memories(Energy):
    """``R(z) = -1/beta log sum_k exp(beta (b_k - |S (z - m_k)|^2 / 2))`` with memories m_k and a metric S.

    It is the energy of a modern Hopfield network with biases of the patterns and a learned metric.
    """

    def __init__(self, memories: Tensor) -> None:
        super().__init__()
        count, size = memories.shape
        self.memories, self.bias = nn.Parameter(memories.clone()), nn.Parameter(torch.zeros(count))
        self.metric = nn.Parameter(1.5 * torch.eye(size))
        self.log_beta = nn.Parameter(torch.tensor(2.0))

    def forward(self, z: Tensor, x: Any = None, *, mask: Tensor | None = None) -> Tensor:
        a, m = z.flatten(1) @ self.metric, self.memories @ self.metric
        closeness = a @ m.T - (a.square().sum(1, keepdim=True) + m.square().sum(1)) / 2 + self.bias
        beta = self.log_beta.exp()
        return -torch.logsumexp(beta * closeness, 1) / beta


@dataclass(frozen=True)
class Task:
    """Observations y = A x + noise of standard deviation ``sigma``, with missing entries set to 0."""

    name: str
    sigma: float
    missing: float | str = 0.0  # a share of the pixels, or "quarter"
    operator: Callable[[Tensor], Tensor] | None = None

    def observe(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return observations and weights, both like ``A images``."""
        seen = images if self.operator is None else self.operator(images)
        keep = torch.ones_like(seen)
        if self.missing == "quarter":
            half = seen.shape[-1] // 2
            for image, corner in zip(
                keep, torch.randint(4, (len(keep),), generator=generator), strict=True
            ):
                row, column = half * (corner // 2), half * (corner % 2)
                image[:, row : row + half, column : column + half] = 0
        elif isinstance(self.missing, float) and self.missing:
            keep = (torch.rand(seen.shape, generator=generator) > self.missing).to(seen)
        y = keep * (seen + self.sigma * torch.randn(seen.shape, generator=generator))
        return y, keep / self.sigma**2

    def start(self, y: Tensor, weight: Tensor, mean: Tensor) -> Tensor:
        """Return an initial image: observed pixels, and the mean image elsewhere."""
        if y.shape[1:] != mean.shape:
            return F.interpolate(y, mean.shape[1:], mode="bilinear")
        return torch.where(weight > 0, y, mean)


def blur(images: Tensor, deviation: float) -> Tensor:
    """Blur images (B, 1, S, S) with a Gaussian kernel of 5 x 5 pixels."""
    line = torch.exp(-(torch.arange(5.0) - 2).square() / (2 * deviation**2))
    kernel = torch.outer(line, line) / line.sum() ** 2
    return F.conv2d(images, kernel.to(images).expand(1, 1, 5, 5), padding=2)


def tasks_of(size: int) -> list[Task]:
    """Return the six tasks on images of 8 x 8 or more pixels."""
    noise, deviation = (0.3, 0.8) if size == 8 else (0.5, 1.5)
    half = size // 2
    return [
        Task(f"noise {noise}", noise),
        Task("half missing", 0.1, 0.5),
        Task("3/4 missing", 0.1, 0.75),
        Task(
            f"{half} x {half} to {size} x {size}",
            0.05,
            operator=lambda images: F.avg_pool2d(images, 2),
        ),
        Task("blurred", 0.05, operator=lambda images: blur(images, deviation)),
        Task("a quarter missing", 0.1, "quarter"),
    ]


def title_of(task: Task, size: int, error: float | str, linear: float | str) -> str:
    """Return the title of a panel: the task, whether it was in training, and mean squared errors."""
    known = task.operator is None and task.missing in ((0.0,) if size == 8 else (0.0, 0.5, 0.75))
    mine, other = (f"{each:.4f}" if isinstance(each, float) else each for each in (error, linear))
    name = task.name if known else f"{task.name} (task not in training)"
    return f"{name}\nmean squared error {mine}, best linear answer {other}"


@torch.no_grad()
def best_linear(task: Task, y: Tensor, weight: Tensor, images: Tensor) -> Tensor:
    """Return ``mean + C A^T (A C A^T + s^2 I)^-1 (y - A mean)`` of observed pixels, C the covariance."""
    flat = images.flatten(1).double()
    mean, covariance, shape = flat.mean(0), torch.cov(flat.T), images.shape[1:]
    basis = torch.eye(flat.shape[1], dtype=torch.float64).view(-1, *shape)
    matrix = (basis if task.operator is None else task.operator(basis)).flatten(1).T
    cross = covariance @ matrix.T
    seen = matrix @ cross + task.sigma**2 * torch.eye(len(matrix)).double()
    answers = []
    for pixels, known in zip(y.flatten(1).double(), weight.flatten(1) > 0, strict=True):
        gap = (pixels - matrix @ mean)[known]
        answers.append(mean + cross[:, known] @ torch.linalg.solve(seen[known][:, known], gap))
    return torch.stack(answers).to(y.dtype).view(-1, *shape)


def descend(
    model: nn.Module, loss: Callable[[], Tensor], *, rate: float, steps: int, clip: float = 1.0,
    title: str = "training",
) -> None:  # fmt: skip
    """Minimise a loss by Adam with a rate that decreases linearly to a hundredth."""
    optimiser = torch.optim.Adam(model.parameters(), rate)
    for step in progress(range(steps), title):
        optimiser.param_groups[0]["lr"] = rate * (1 - 0.99 * step / steps)
        optimiser.zero_grad()
        loss().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()


def noisy(
    clean: Tensor, sigma: tuple[float, float], generator: torch.Generator, missing: bool = False
) -> tuple[Tensor, Tensor]:
    """Add noise of random standard deviations and, if ``missing``, mask pixels of half of the images."""
    shape = (len(clean), 1, 1, 1)
    s = sigma[0] + (sigma[1] - sigma[0]) * torch.rand(shape, generator=generator)
    keep = torch.ones_like(clean)
    if missing:
        hidden = torch.rand(shape, generator=generator) > 0.5
        share = 0.3 + 0.5 * torch.rand(shape, generator=generator)
        keep = (~hidden | (torch.rand(clean.shape, generator=generator) > share)).to(clean)
        s = torch.where(hidden, torch.tensor(0.1), s)
    return keep * (clean + s * torch.randn(clean.shape, generator=generator)), keep / s**2


def train_digits(images: Tensor, epochs: int, seed: int) -> Restorer:
    """Train a restorer of 8 x 8 digits on noise only: 256 memories and a metric, 20,739 weights."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(images), generator=generator)[:256]
    prior = Memories(images[chosen].flatten(1)).weighted(1.1)
    options = {"tolerance": 1e-3, "max_steps": 60, "on_failure": "ignore"}
    model = Restorer(prior, images.mean(0), factor=0.025, layer=options)

    def loss() -> Tensor:
        clean = images[torch.randint(len(images), (48,), generator=generator)]
        return (model(*noisy(clean, (0.05, 0.5), generator)) - clean).square().mean()

    descend(model, loss, rate=3e-3, steps=epochs * (len(images) // 48), title=f"seed {seed}")
    return model.eval()


@torch.no_grad()
def restore(
    model: Restorer, task: Task, y: Tensor, weight: Tensor, rtol: float = 1e-3
) -> solvers.Solution:
    """Restore images (B, C, S, S) with the trained energy and the data term of the task."""
    start = task.start(y, weight, model.mean)
    options: Any = {"start": start, "max_steps": 400, "tolerance": rtol, "on_failure": "ignore"}
    return model.solve(y, weight, task.operator, **options)


def draw(panels: dict[str, dict[str, Tensor]], titles: dict[str, str]) -> Any:
    """Draw a panel for each task with observed, restored and true images."""
    figure = new_figure(
        (11, 6.8), "One trained energy, six tasks (blue: not observed; error, lower is better)"
    )
    for axes, (name, rows) in zip(figure.subplots(3, 2).flat, panels.items(), strict=True):
        size = rows["true"].shape[2:]
        # A pixel that was not observed is NaN and has the colour HIDDEN.
        scaled = [F.interpolate(images, size).clamp(0, 1) for images in rows.values()]
        lines = [torch.cat([*F.pad(images, (1, 1, 1, 1))[:, 0]], 1) for images in scaled]
        shades = 1 - torch.cat(lines).unsqueeze(-1).expand(-1, -1, 3)
        shades = torch.where(shades.isnan(), torch.tensor(HIDDEN), shades)
        axes.imshow(shades.numpy(), interpolation="nearest")
        axes.set_yticks([(size[0] + 2) * (k + 0.5) for k in range(len(lines))], list(rows))
        axes.set_xticks([])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(titles[name], fontsize=10)
    return figure
