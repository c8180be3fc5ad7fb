"""Train a small language model on the characters of a text, its sublayers steps of descent; write with it.

    python examples/train_language.py                                      # the help topics of Python
    python examples/train_language.py --text austen --descent momentum     # the shipped model, an hour
    python examples/train_language.py --text austen --model equilibrium    # one block at its fixed point
    python examples/train_language.py --generate 300 --prompt "It was "    # writes, trains nothing

The last 5 % of the text are held out. The loss is in nats a character; next to it stand the losses of models
that count pairs and triples of characters. --attention and --descent choose among the layers of Ren et al.,
"Transformers as Intrinsic Optimizers" (https://arxiv.org/abs/2511.00907).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
import tyro
from options import Run, refuse
from runner import STYLE
from torch import Tensor
from torch.nn import functional as F
from training import Pair, Sums, Task, Training

import solvers
from implicit_attn.data import HELP, TextData, load_text, ngram_loss
from implicit_attn.models import build_model, load_model
from implicit_attn.weights import weights_file

SHARED: dict[str, Any] = {
    "dim": 96, "heads": 4, "length": 128, "dropout": 0.1, "batch": 32, "rate": 3e-3, "warmup": 0.1,
    "floor": 0.0, "decay": "linear", "decayed": "matrices",
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "decoder": {"attention": "softmax", "layers": 6, "descent": "plain", "lookahead": "literal"},
    "equilibrium": {
        "dim": 64, "length": 64, "dropout": 0.0, "batch": 16, "rate": 1e-2, "betas": (0.9, 0.95),
        "iterations": (4, 20), "gradient": "all",
    },
}  # fmt: skip
KINDS = {"decoder": "language-model", "equilibrium": "equilibrium-language-model"}
SHIPPED = {"decoder": "austen-language", "equilibrium": "austen-equilibrium"}
SIZES = ("dim", "heads", "length", "dropout", "attention", "layers", "descent", "lookahead", "iterations",
         "gradient")  # fmt: skip


@dataclass(kw_only=True)
class Language(Run):
    """What is trained, and how; or what is written."""

    text: str = HELP
    """name of a text in the data folder, or path of any UTF-8 file"""
    model: Literal["decoder", "equilibrium"] = "decoder"
    attention: str | None = None
    """form of attention: softmax, light-newton-taylor, newton-taylor, ..."""
    descent: Literal["plain", "momentum", "nesterov", "gain"] | None = None
    """step of every sublayer of a decoder"""
    lookahead: Literal["literal", "scaled", "queries"] | None = None
    """of nesterov"""
    iterations: tuple[int, ...] | None = None
    """of the equilibrium's block: a number, or two between which each step draws one"""
    gradient: str | None = None
    """of the equilibrium: all, implicit, or the number of last iterations"""
    steps: int = 1200
    """of the training"""
    evaluate_every: int = 100
    """steps between validations"""
    windows: int = 256
    """of the validation"""
    dim: int | None = None
    heads: int | None = None
    layers: int | None = None
    length: int | None = None
    """characters that the model sees"""
    dropout: float | None = None
    generate: int | None = None
    """write so many characters, and train nothing"""
    prompt: str = "The "
    """text to go on from"""
    temperature: float = 0.8
    """0 takes the likeliest character"""
    most: int | None = None
    """draw among so many likeliest characters"""
    weights: str | None = None
    """a file, or a name of shipped weights, to write with"""


class NextCharacter(Task):
    """Cross-entropy of each next character, on windows of the text that begin anywhere."""

    size = 64

    def __init__(self, data: TextData, length: int, windows: int, samples: int = 1) -> None:
        self.text, self.length = data.train, length
        self.inputs = self.targets = torch.arange(samples)  # of an epoch; each draws its own window
        most = len(data.validation) - length - 1
        if min(most, len(data.train) - length) < 1:
            raise SystemExit(f"--length must be below the characters of the text, got {length}")
        starts = torch.linspace(0, most, windows, dtype=torch.float64).round().long()
        self.tests = self.read(data.validation, starts)

    def read(self, ids: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows (B, n) that begin at ``starts`` (B,), and the characters that follow each of theirs."""
        found = ids[starts[:, None] + torch.arange(self.length + 1, device=starts.device)]
        return found[:, :-1], found[:, 1:]

    def augmented(self, inputs: Tensor, targets: Tensor, generator: torch.Generator) -> Pair:
        most = len(self.text) - self.length
        size, device = (len(inputs),), generator.device
        return self.read(self.text, torch.randint(most, size, generator=generator, device=device))

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.text = self.text.to(device)

    def loss(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Any]:
        logits = outputs.flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum"), targets.numel()

    def measures(self, outputs: Tensor, inputs: Tensor, targets: Tensor) -> Sums:
        total, number = self.loss(outputs, inputs, targets)
        return {"validation_loss": (total.item(), number)}


def build(options: Language, alphabet: str) -> tuple[Any, dict[str, Any]]:
    """The model, and the settings of its weights."""
    options.fill(SHARED | OWN[options.model])
    sizes = {name: getattr(options, name) for name in SIZES if getattr(options, name) is not None}
    if isinstance(options.iterations, tuple) and len(options.iterations) == 1:
        sizes["iterations"] = options.iterations[0]
    if str(options.gradient).isdecimal():
        sizes["gradient"] = int(options.gradient or 0)
    further = options.further()
    if "order" in further:  # terms of the series of a -taylor form
        further["form"] = {"order": further.pop("order")}
    built = {"kind": KINDS[options.model], "vocabulary": len(alphabet), **sizes, **further}
    ignore = {"adjoint": solvers.Implicit(on_failure="ignore")}
    torch.manual_seed(options.seed)
    model = build_model(built, layer=ignore if options.gradient == "implicit" else None)
    settings = {"text": options.text, "alphabet": alphabet, "windows": options.windows}
    return model, settings | {"evaluate_every": options.evaluate_every, "model": built}


def write(options: Language, folder: Path) -> None:
    """Print text from a trained model."""
    path: str | Path = options.weights or (options.out or folder) / "weights.safetensors"
    if options.weights is None and options.out is None and not Path(path).exists():
        path = SHIPPED[options.model]
    try:
        model: Any = load_model(weights_file(path))[0]
    except ValueError as error:
        raise refuse("weights", path, error) from None
    generator = torch.Generator().manual_seed(options.seed)
    drawn: Any = {"temperature": options.temperature, "most": options.most, "generator": generator}
    iterations = options.iterations[0] if options.iterations else None
    try:
        print(model.generate(options.prompt, options.generate, iterations=iterations, **drawn))
    except ValueError as error:  # a symbol that the model does not know
        raise refuse("prompt", repr(options.prompt), error) from None


def main(options: Language) -> list[dict[str, float]]:
    """Train, report, draw; the rows of the history."""
    folder = Path("runs") / f"language-{options.model}"
    if options.generate is not None:
        write(options, folder)
        return []
    try:
        data = load_text(options.text)
    except (FileNotFoundError, ValueError) as error:
        raise refuse("text", options.text, error) from None
    # Each epoch ends in a validation.
    options.epochs = max(1, round(options.steps / options.evaluate_every))
    model, settings = build(options, data.alphabet)
    samples = -(-options.steps // options.epochs) * (options.batch or 1)
    task = NextCharacter(data, options.length or 1, options.windows, samples)
    training = Training(options, model, task, settings, folder)
    show = training.fabric.print
    show(f"{data.name}: {len(data.train):,} + {len(data.validation):,} characters")
    if training.run():
        times = options.iterations or ()
        training.report([k * sum(times) // len(times) for k in (1, 2, 4)] if times else [])
        losses = {name: ngram_loss(data, order) for order, name in ((2, "pairs"), (3, "triples"))}
        show(*(f"counts of {name}: {loss:.4f}" for name, loss in losses.items()), sep="\n")
        if training.fabric.global_rank == 0:
            with plt.rc_context(STYLE):
                figure, axes = plt.subplots(figsize=(5, 3.6))
                steps = [options.evaluate_every * row["epoch"] for row in training.history]
                for name in ("loss", "validation_loss"):
                    values = [row[name] for row in training.history]
                    axes.plot(steps, values, "o-", markersize=3, label=name.replace("_", " "))
                for name, loss in losses.items():
                    axes.axhline(loss, color="C4", linestyle=":", label=f"counts of {name}")
                axes.set(xlabel="step", ylabel="nats a character")
                axes.legend(frameon=False)
                figure.savefig(training.folder / "losses.png")
                plt.close(figure)
    return training.history


if __name__ == "__main__":
    main(tyro.cli(Language, description=__doc__))
