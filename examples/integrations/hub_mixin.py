"""Hugging Face Hub: save, load and upload any module that contains equilibrium layers.

    pip install ".[integrations]"
    python examples/integrations/hub_mixin.py --out runs/hub-mixin

``PyTorchModelHubMixin`` saves the arguments of ``__init__`` as config.json and the weights as
model.safetensors. The model is not trained. ``--push-to USER/NAME`` uploads it (after ``hf auth login``).
"""

from pathlib import Path

import torch
import tyro
from huggingface_hub import PyTorchModelHubMixin  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn

from implicit_attn import EquilibriumBlock


class DigitHead(nn.Module, PyTorchModelHubMixin):
    """Rows of an 8x8 image as tokens, one equilibrium block, and scores."""

    def __init__(self, classes: int = 10, heads: int = 2) -> None:
        super().__init__()
        self.block, self.head = EquilibriumBlock(8, heads), nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.block(images.squeeze(1)).flatten(1))


def main(out: Path = Path("runs/hub-mixin"), push_to: str | None = None) -> DigitHead:
    torch.manual_seed(0)
    model = DigitHead(classes=4).eval()
    model.save_pretrained(out)
    loaded = DigitHead.from_pretrained(out)
    images = torch.rand(3, 1, 8, 8)
    print(f"largest difference after loading: {(model(images) - loaded(images)).abs().max():.1e}")
    if push_to is not None:
        model.push_to_hub(push_to)
    return model


if __name__ == "__main__":
    tyro.cli(main)
