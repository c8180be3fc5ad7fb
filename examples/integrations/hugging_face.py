"""Hugging Face: a ``transformers`` model of equilibrium blocks, trained, saved and loaded.

    pip install ".[examples,integrations]"
    python examples/integrations/hugging_face.py --out runs/hugging-face

``model.push_to_hub(name)`` uploads it. ``hub_mixin.py`` is shorter and does not need ``transformers``.
"""

from pathlib import Path
from typing import Any

import torch
import transformers as hf  # pyright: ignore[reportMissingImports]
import tyro
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from implicit_attn.data import load_digits
from implicit_attn.models import EquilibriumTransformer, ImageClassifier


class EquilibriumConfig(hf.PretrainedConfig):
    model_type = "equilibrium-vit"

    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self.dim, self.heads, self.layers = dim, heads, layers


def build(config: Any) -> ImageClassifier:
    backbone = EquilibriumTransformer(config.dim, config.heads, layers=config.layers)
    return ImageClassifier(backbone, 8, 1, config.num_labels, readout="mean")


def restore_constants(model: nn.Module, fresh: nn.Module) -> None:
    """Copy the buffers that are in no state dict, which ``from_pretrained`` leaves empty."""
    for module, other in zip(model.modules(), fresh.modules(), strict=True):
        for name, buffer in other.named_buffers(recurse=False):
            if name in other._non_persistent_buffers_set:
                setattr(module, name, buffer.clone())


class EquilibriumForImages(hf.PreTrainedModel):
    config_class = EquilibriumConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.vit = build(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.vit:
            restore_constants(self.vit, build(self.config))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.vit(pixel_values)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return hf.modeling_outputs.ImageClassifierOutput(loss=loss, logits=logits)


def main(out: Path = Path("runs/hugging-face"), epochs: int = 5, limit: int | None = None) -> Any:
    data = load_digits().first(limit)
    pairs = zip(data.train_images, data.train_labels, strict=True)
    samples = [{"pixel_values": image, "labels": label} for image, label in pairs]
    torch.manual_seed(0)
    model = EquilibriumForImages(EquilibriumConfig(num_labels=10))
    settings: Any = {"per_device_train_batch_size": 32, "learning_rate": 3e-3}
    arguments = hf.TrainingArguments(str(out / "trainer"), num_train_epochs=epochs, **settings)
    hf.Trainer(model=model, args=arguments, train_dataset=samples).train()
    model.save_pretrained(out / "model")
    loaded = EquilibriumForImages.from_pretrained(out / "model")
    with torch.no_grad():
        right = loaded(data.test_images).logits.argmax(1) == data.test_labels
    linear = LogisticRegression().fit(data.train_images.flatten(1), data.train_labels)
    baseline = linear.score(data.test_images.flatten(1), data.test_labels)
    print(f"test digits: {right.double().mean():.1%}, logistic regression {baseline:.1%}")
    return model


if __name__ == "__main__":
    tyro.cli(main)
