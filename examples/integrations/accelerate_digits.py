"""Accelerate: a training loop with gradient accumulation and bfloat16, on all available devices.

    pip install ".[examples,integrations]"
    accelerate launch examples/integrations/accelerate_digits.py     # several devices, as configured
    python examples/integrations/accelerate_digits.py --precision bf16

``accelerator.prepare`` wraps model, optimizer and loader as usual. In bfloat16 the solves automatically use
a tolerance that bfloat16 can meet. The baseline is the same training of an explicit transformer with as many
layers, heads and parameters of the blocks.
"""

import torch
import tyro
from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from implicit_attn.data import load_digits
from implicit_attn.models import EquilibriumTransformer, ImageClassifier, SharedTransformer


def train(
    model: nn.Module, accelerator: Accelerator, samples: tuple[Tensor, Tensor], epochs: int
) -> nn.Module:
    """The trained model; ``samples`` are images and labels."""
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*samples), 32, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    return model


def main(
    epochs: int = 5, limit: int | None = None, precision: str = "bf16", accumulate: int = 2
) -> dict[str, nn.Module]:
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
    )
    data = load_digits().first(limit)
    torch.manual_seed(0)
    explicit = SharedTransformer(32, 4, 64, layers=2, iterations=1)
    backbones = {"equilibrium": EquilibriumTransformer(32, 4, layers=2), "explicit": explicit}
    models: dict[str, nn.Module] = {}
    for name, backbone in backbones.items():
        model = ImageClassifier(backbone, 8, 1, 10, readout="mean")
        samples = data.train_images, data.train_labels
        models[name] = train(model, accelerator, samples, epochs).eval()
        with torch.no_grad():
            found = models[name](data.test_images.to(accelerator.device)).argmax(1).cpu()
        accuracy = (found == data.test_labels).double().mean().item()
        accelerator.print(f"{name}, {precision}: {accuracy:.1%} of the test digits")
    converged = [block.last.converged.all().item() for block in backbones["equilibrium"].blocks]
    accelerator.print(f"every solve of the last batch converged: {all(converged)}")
    return models


if __name__ == "__main__":
    tyro.cli(main)
