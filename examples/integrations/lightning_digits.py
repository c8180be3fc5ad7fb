"""Lightning: a Trainer that logs evaluations and converged solves, and resumes from checkpoints.

    pip install ".[examples,integrations]"
    python examples/integrations/lightning_digits.py --out runs/lightning

``block.last`` reports a block's latest solve. ``--resume`` continues from the last checkpoint.
"""

from pathlib import Path
from typing import Any

import lightning  # pyright: ignore[reportMissingImports]
import torch
import tyro
from lightning.pytorch.callbacks import ModelCheckpoint  # pyright: ignore[reportMissingImports]
from lightning.pytorch.loggers import CSVLogger  # pyright: ignore[reportMissingImports]
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from implicit_attn.data import load_digits
from implicit_attn.models import EquilibriumTransformer, ImageClassifier


class Digits(lightning.LightningModule):
    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 2, rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.rate, self.backbone = rate, EquilibriumTransformer(dim, heads, layers=layers)
        self.model = ImageClassifier(self.backbone, 8, 1, 10, readout="mean")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        self._log_solves("train")
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())
        self._log_solves("test")

    def _log_solves(self, part: str) -> None:
        """Evaluations of the update, and the share of samples that converged: means over the blocks."""
        solves = [block.last for block in self.backbone.blocks]
        for name in ("evaluations", "converged"):
            means = torch.stack([getattr(solve, name).float().mean() for solve in solves])
            self.log(f"{part}_{name}", means.mean(), on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.rate)


def main(
    out: Path = Path("runs/lightning"),
    epochs: int = 5,
    resume: bool = False,
    limit: int | None = None,
) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    data = load_digits().first(limit)
    keep = ModelCheckpoint(out, filename="{epoch}", save_last=True, enable_version_counter=False)
    settings: Any = {"enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"max_epochs": epochs, "callbacks": [keep], "logger": CSVLogger(out)}
    trainer = lightning.Trainer(**settings)
    train = DataLoader(TensorDataset(data.train_images, data.train_labels), 64, shuffle=True)
    test = DataLoader(TensorDataset(data.test_images, data.test_labels), 360)
    trainer.fit(Digits(), train, test, ckpt_path=str(out / "last.ckpt") if resume else None)
    figures = trainer.callback_metrics
    print("  ".join(f"{name} {value:.3g}" for name, value in sorted(figures.items())))
    pixels, labels = data.train_images.flatten(1), data.train_labels
    linear = LogisticRegression(max_iter=1000).fit(pixels, labels)
    baseline = linear.score(data.test_images.flatten(1), data.test_labels)
    print(f"test digits: {figures['accuracy']:.1%}, logistic regression {baseline:.1%}")
    return trainer


if __name__ == "__main__":
    tyro.cli(main)
