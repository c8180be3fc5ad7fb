"""timm: replace the last blocks of a ViT by equilibrium blocks and train them with the rest frozen.

    pip install ".[examples,integrations]"
    python examples/integrations/timm_vit.py

An equilibrium block maps tokens to tokens like a block of timm, so it can replace one directly. The small ViT
is first trained on the digits, in place of weights that you would load with ``pretrained=True``. The
baseline has new blocks of timm in the same positions, trained in the same way.
"""

import copy
from typing import Any

import timm  # pyright: ignore[reportMissingImports]
import torch
import tyro
from torch import nn
from torch.nn import functional as F

from implicit_attn import EquilibriumBlock
from implicit_attn.data import ImageData, load_digits


def replace(model: Any, number: int, equilibrium: bool = True) -> Any:
    """A copy whose last ``number`` blocks are new ones; they, the last norm and the head are trained."""
    model = copy.deepcopy(model).requires_grad_(False)
    for place in range(len(model.blocks) - number, len(model.blocks)):
        old = model.blocks[place]
        heads, hidden = old.attn.num_heads, old.mlp.fc1.out_features
        if equilibrium:
            model.blocks[place] = EquilibriumBlock(model.embed_dim, heads, hidden)
        else:
            model.blocks[place] = type(old)(model.embed_dim, heads, qkv_bias=True)
    model.norm.requires_grad_(True)
    model.head.requires_grad_(True)
    return model


def train(model: nn.Module, data: ImageData, epochs: int) -> float:
    """Accuracy on the test images after ``epochs``."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for index in torch.randperm(len(data.train_labels), generator=generator).split(64):
            loss = F.cross_entropy(model(data.train_images[index]), data.train_labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        found = model.eval()(data.test_images).argmax(1)
    return (found == data.test_labels).double().mean().item()


def main(epochs: int = 15, blocks: int = 2, limit: int | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    data = load_digits().first(limit)
    options: dict[str, Any] = {"embed_dim": 48, "depth": 4, "num_heads": 4, "num_classes": 10}
    vit = timm.create_model("vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, **options)
    print(f"ViT of timm, all of it trained: {train(vit, data, epochs):.1%} of the test digits")
    models = {name: replace(vit, blocks, name == "equilibrium") for name in ("timm", "equilibrium")}
    for name, model in models.items():
        print(f"last {blocks} blocks fresh, {name}: {train(model, data, epochs):.1%}")
    solve = models["equilibrium"].blocks[-1].last
    print(f"evaluations of the last block: {solve.evaluations.double().mean().item():.1f}")
    return {"vit": vit, **models}


if __name__ == "__main__":
    tyro.cli(main)
