"""Random numbers of a training step: of its batch and its process, of nothing before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases.training import Recorder, toy_data
from implicit_attn.data import epoch_generator
from implicit_attn.training import Recipe, Training, start_processes
from implicit_attn.training.processes import seed_generators, step_seed

for module in ("safetensors", "tqdm", "lightning_fabric"):
    pytest.importorskip(module, reason="needs the extra [training]")

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def test_every_batch_of_every_process_has_its_own_seed() -> None:
    numbers = [(s, e, b, r) for s in range(3) for e in range(4) for b in range(5) for r in range(4)]
    seeds = {step_seed(*each) for each in numbers}
    assert len(seeds) == len(numbers)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert step_seed(1, 2, 3, 0) == step_seed(1, 2, 3, 0)
    orders = {epoch_generator(s, e).initial_seed() for s in range(3) for e in range(4)}
    batches = {epoch_generator(s, e, b).initial_seed() for s, e, b, _ in numbers}
    assert not seeds & (orders | batches)


@pytest.mark.parametrize("place", range(4))
def test_negative_numbers_are_refused(place: int) -> None:
    numbers = [0, 0, 0, 0]
    numbers[place] = -1
    name = ("seed", "epoch", "batch", "rank")[place]
    with pytest.raises(ValueError, match=f"{name} must be >= 0, got -1"):
        step_seed(*numbers)


@pytest.mark.parametrize("name", DEVICES)
def test_masks_depend_on_batch_and_process_alone(name: str) -> None:
    device = torch.device(name)

    def mask(seed: int, epoch: int, batch: int, rank: int) -> Tensor:
        seed_generators(seed, epoch, batch, rank, device)
        return nn.functional.dropout(torch.ones(64, device=device))

    first = mask(0, 1, 2, 0)
    for other in ((0, 1, 2, 1), (0, 1, 3, 0), (0, 2, 2, 0), (1, 1, 2, 0)):
        assert not torch.equal(mask(*other), first), other
    torch.rand(5, device=device)
    assert torch.equal(mask(0, 1, 2, 0), first)


class OneOfTwo:
    """The fabric of one of two processes, without the other: its sums are those of its own part."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.global_rank, self.alone = rank, start_processes(accelerator="cpu")

    def all_reduce(self, values: Tensor, reduce_op: str) -> Tensor:
        return values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone, name)


class Masked(Recorder):
    """Keeps the mask that it drew for ones."""

    def forward(self, images: Tensor, iterations: int | None = None) -> Tensor:
        self.mask = nn.functional.dropout(torch.ones(images.shape), training=self.training)
        return super().forward(images * self.mask, iterations)


def test_two_processes_draw_different_masks(tmp_path: Path) -> None:
    data = toy_data()
    masks: list[Tensor] = []
    for rank in (0, 0, 1):
        torch.manual_seed(0)  # as a script with one seed for all processes
        model = Masked()
        training = Training(model, data, Recipe(1, 10, 0.1), tmp_path / "c", fabric=OneOfTwo(rank))
        training.step(data.train_images, data.train_labels)
        masks.append(model.mask)
    assert torch.equal(masks[0], masks[1])
    assert masks[1].shape == masks[2].shape
    assert not torch.equal(masks[1], masks[2])


def test_a_model_without_randomness_does_not_see_the_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weights() -> Tensor:
        torch.manual_seed(0)
        model = Recorder()
        Training(model, toy_data(), Recipe(2, 5, 0.1), tmp_path / "c").run(overwrite=True)
        return model.linear.weight.detach()

    seeded = weights()
    monkeypatch.setattr("implicit_attn.training.loop.seed_generators", lambda *_: None)
    assert torch.equal(weights(), seeded)
