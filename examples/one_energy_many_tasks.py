"""Can an energy that is trained for denoising also inpaint, upsample and deblur images?

    python examples/one_energy_many_tasks.py                  # 8 x 8 digits, three seeds: ten minutes
    python examples/one_energy_many_tasks.py --data mnist     # 28 x 28, hours on one core
    python examples/one_energy_many_tasks.py --data mnist --shipped    # the shipped weights: a minute

A layer returns argmin_z c/2 |sqrt(w) (A z - y)|^2 + R(z). Training learns R and c with A = I. At test time
the data term is replaced by that of another task. On the digits R is a mixture of learned memories with a
metric, trained on noise only. On MNIST R is |z - N(z)|^2 / 2 of a network N, trained first to remove noise in
one gradient step, then through the layer on noise and missing pixels. Baselines are the best linear estimate
of each task (from the mean and covariance of the training images, the operator and the noise), a network
trained on noise, and a network trained for each task. On the digits the energy is better than the linear
estimate in five of six tasks.
"""

import itertools
from pathlib import Path
from typing import Any, Literal

import torch
from runner import Result, Table, run
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from implicit_attn.data import load
from implicit_attn.demo.restoration import (
    Task,
    best_linear,
    descend,
    draw,
    noisy,
    restore,
    tasks_of,
    title_of,
    train_digits,
)
from implicit_attn.models import ImageRestorer
from implicit_attn.models.restoration import ConvolutionalNetwork
from implicit_attn.weights import load_pretrained

ENERGY, LINEAR = "one energy", "best linear answer of each task"
NOISE_NETWORK, TASK_NETWORK = "a network trained on noise", "a network trained for each task"


class Network(nn.Module):
    """A first image and what was seen (B, 2, S, S) -> images, by a network of about as many weights."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers: nn.Module = ConvolutionalNetwork(2, 24)
        if size == 8:
            widths = (128, 104, 104, 64)
            linear = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
            self.layers = nn.Sequential(linear[0], nn.GELU(), linear[1], nn.GELU(), linear[2])

    def forward(self, start: Tensor, weight: Tensor) -> Tensor:
        seen = F.interpolate((weight > 0).to(start), start.shape[2:])
        x = torch.cat([start, seen], 1)
        return self.layers(x.flatten(1)).view_as(start) if self.size == 8 else self.layers(x)[:, :1]


def train_network(task: Task, images: Tensor, batch: int, steps: int, seed: int) -> Network:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    network, mean = Network(images.shape[-1]), images.mean(0)

    def loss() -> Tensor:
        clean = images[torch.randint(len(images), (batch,), generator=generator)]
        y, weight = task.observe(clean, generator)
        return (network(task.start(y, weight, mean), weight) - clean).square().mean()

    descend(network, loss, rate=2e-3, steps=steps, title=f"network, {task.name}")
    return network.eval()


def train_mnist(images: Tensor, network: str, steps: tuple[int, int], seed: int) -> ImageRestorer:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    width = 24 if network == "convolution" else 64
    options = {"tolerance": 5e-3, "max_steps": 40, "on_failure": "ignore"}
    model = ImageRestorer(28, network=network, width=width, layer=options)
    model.mean.copy_(images.mean(0))

    def first() -> Tensor:
        clean = images[torch.randint(len(images), (64,), generator=generator)]
        return (model.denoise(noisy(clean, (0.05, 0.55), generator)[0]) - clean).square().mean()

    def second() -> Tensor:
        clean = images[torch.randint(len(images), (16,), generator=generator)]
        return (model(*noisy(clean, (0.1, 0.5), generator, missing=True)) - clean).square().mean()

    descend(model.prior, first, rate=2e-3, steps=steps[0], title=f"denoiser, seed {seed}")
    descend(model, second, rate=5e-4, steps=steps[1], clip=0.5, title=f"layer, seed {seed}")
    return model.eval()


def one_energy_many_tasks(
    data: Literal["digits", "mnist"] = "digits",  # data set
    seeds: tuple[int, ...] = (0, 1, 2),  # random seeds, one training each
    test_images: int = 300,  # maximum number of test images
    epochs: int = 30,  # training epochs of the digits' energy
    steps: tuple[int, int] = (1500, 250),  # training steps of the two stages on MNIST
    network: Literal["convolution", "transformer"] = "convolution",  # network N on MNIST
    network_steps: int = 6000,  # training steps of each baseline network (0: no baseline networks)
    shipped: bool = False,  # use the MNIST weights in the package instead of training
    weights: Path = Path("runs/one-energy-many-tasks"),  # folder of trained energies to reuse
) -> Result:
    loaded = load("mnist" if shipped else data)
    train, test = loaded.train_images[:20_000], loaded.test_images[:test_images]
    small = train.shape[-1] == 8
    tasks, mean, rtol = tasks_of(train.shape[-1]), train.mean(0), 1e-3 if small else 3e-3
    errors: Table = []
    solves: Table = []
    panels: dict[str, dict[str, Tensor]] = {}
    for seed in (0,) if shipped else seeds:
        kind = str(epochs) if small else f"{network}-{steps[0]}-{steps[1]}"
        path = weights / f"{data}-{kind}-seed-{seed}.safetensors"
        if shipped:
            model: Any = load_pretrained("mnist-restorer")
        elif small:
            model = train_digits(train, 0 if path.exists() else epochs, seed)
        else:
            model = train_mnist(train, network, (0, 0) if path.exists() else steps, seed)
        if not shipped and path.exists():
            load_model(model, path)
        elif not shipped:
            weights.mkdir(parents=True, exist_ok=True)
            save_model(model, str(path))
        networks: dict[str, Network] = {}
        for task in tasks if network_steps else []:
            networks[task.name] = train_network(task, train, 64, network_steps, seed)
        for task in tqdm(tasks, "tasks", disable=None):
            y, weight = task.observe(test, torch.Generator().manual_seed(1000 + seed))
            solution = restore(model, task, y, weight, rtol)
            answers = {ENERGY: solution.value, LINEAR: best_linear(task, y, weight, train)}
            if networks:
                start = task.start(y, weight, mean)
                with torch.no_grad():
                    answers[NOISE_NETWORK] = networks[tasks[0].name](start, weight)
                    answers[TASK_NETWORK] = networks[task.name](start, weight)
            for name, answer in answers.items():
                error = (answer.clamp(0, 1) - test).square().mean().item()
                errors.append({"answer": name, "task": task.name, "seed": seed, "error": error})
            row = {
                "task": task.name,
                "seed": seed,
                "converged": solution.converged.float().mean().item(),
            }
            row |= {"evaluations": solution.evaluations.median().item()}
            solves.append(row | {"weights": sum(each.numel() for each in model.parameters())})
            seen = torch.where(weight > 0, y, torch.nan)[:9]
            panels.setdefault(
                task.name, {"seen": seen, "restored": solution.value[:9], "true": test[:9]}
            )
    summary: Table = []
    for name in dict.fromkeys(row["answer"] for row in errors):
        line: dict[str, Any] = {"mean squared error": name}
        for task in tasks:
            rows = [r["error"] for r in errors if (r["answer"], r["task"]) == (name, task.name)]
            found = torch.tensor(rows)
            line[task.name] = (
                f"{found.mean():.4f}{f' ± {found.std():.4f}' if len(rows) > 1 else ''}"
            )
        summary.append(line)
    titles = {}
    for task in tasks:
        mine, linear = (row[task.name][:6] for row in summary[:2])
        titles[task.name] = title_of(task, train.shape[-1], mine, linear)
    return {"summary": summary, "solves": solves, "errors": errors}, draw(panels, titles)


if __name__ == "__main__":
    run(one_energy_many_tasks)
