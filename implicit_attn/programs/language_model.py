"""A model of a text's characters, its sublayers steps of descent: ``implicit-attn train language-model``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch

import solvers
from implicit_attn.data import HELP, load_text, ngram_loss
from implicit_attn.models import EquilibriumLanguageModel, build_model, load_model
from implicit_attn.models.language import SymbolModel
from implicit_attn.programs import (
    Job,
    Program,
    Values,
    choose_threads,
    mistakes,
    save_weights,
    take_recipe,
)
from implicit_attn.training import NextToken, Training
from implicit_attn.weights import weights_file, weights_path

SHARED: Values = {
    "dim": 96, "heads": 4, "length": 128, "dropout": 0.1, "batch": 32,
    "rate": 3e-3, "warmup": 0.1, "floor": 0.0, "weight_decay": 0.01, "decay": "linear",
    "decayed": "matrices", "windows": 256, "evaluate_every": 100,
}  # fmt: skip
# Those of a model of its own.
OWN: dict[str, Values] = {
    "decoder": {"attention": "softmax", "layers": 6, "descent": "plain", "lookahead": "literal"},
    "equilibrium": {
        "dim": 64, "length": 64, "dropout": 0.0, "batch": 16, "rate": 1e-2, "betas": [0.9, 0.95],
        "iterations": [4, 20], "gradient": "all",
    },
}  # fmt: skip
KINDS = {"decoder": "language-model", "equilibrium": "equilibrium-language-model"}
# The row "momentum" of benchmarks/trainings.py forms --size small, and "drawn, 1e-2" of equilibrium; seeds 0.
SHIPPED = {"decoder": "austen-language", "equilibrium": "austen-equilibrium"}
# Options that writing takes.
WRITING = {
    "generate", "prompt", "temperature", "most", "weights", "model", "iterations", "seed", "out",
}  # fmt: skip


@dataclass(kw_only=True)
class Language(Program):
    """Train a small language model on the characters of a text, its sublayers steps of descent.

    implicit-attn train language-model: the help topics of Python, no download. With --text austen
    --descent momentum: the shipped model; --model equilibrium: one block, solved for its fixed point;
    --generate 500 --prompt "It was ": write text and train nothing.

    --text is the name of a text in $IMPLICIT_ATTN_DATA/text or the path of any file in UTF-8, of which the
    last 5 % are held out. The loss is in nats a character; beside it stand the losses of models that
    count pairs and triples of characters. --attention and --descent choose among the layers of Ren et
    al., "Transformers as Intrinsic Optimizers" (https://arxiv.org/abs/2511.00907). --generate takes the
    weights of --weights, of an earlier run in --out, or those that come along, of English novels.
    """

    folder = "language-{model}"
    text: str = HELP
    """name or path of the text"""
    model: Literal["decoder", "equilibrium"] = "decoder"
    attention: str | None = None
    """form of attention: softmax, light-newton-taylor, newton-taylor, ..."""
    descent: Literal["plain", "momentum", "nesterov", "gain"] | None = None
    """step of every sublayer of a decoder"""
    iterations: int | None = None
    """evaluations of an equilibrium's block; drawn from a pair by --options iterations=[4,20]"""
    steps: int = 1200
    """of the training; a validation every 100 (--options evaluate_every=100)"""
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

    def run(self) -> None:
        if self.generate is None:
            super().run()
        else:
            self._write(self.generate)

    def defaults(self) -> Values:
        return SHARED | OWN[self.model]

    def job(self, first: bool) -> Job:
        if self.epochs is not None:
            raise ValueError("epochs must be left out, steps say how long the training is")
        data = load_text(self.text)
        values = self.values("attention", "descent", "iterations")
        own = {name: values.pop(name) for name in ("windows", "evaluate_every")}
        self.windows, self.length = own["windows"], values["length"]
        # Each ends in a validation.
        values["epochs"] = max(1, round(self.steps / own["evaluate_every"]))
        samples = -(-self.steps // values["epochs"]) * values["batch"]
        task = NextToken(data, self.length, self.windows, samples=samples)
        recipe = take_recipe(values, self.seed)
        if "order" in values:  # terms of the series of a -taylor form
            values["form"] = {"order": values.pop("order")}
        self.trained = values.get("iterations")
        if isinstance(self.trained, list):
            self.trained = sum(self.trained) // 2
        built = {"kind": KINDS[self.model], "vocabulary": len(data.alphabet), **values}
        layer = None
        if values.get("gradient") == "implicit":  # samples that do not converge are counted
            layer = {"adjoint": solvers.Implicit(on_failure="ignore")}
        torch.manual_seed(self.seed)
        model = build_model(built, layer=layer)
        if first:
            held = f"{len(data.train)} + {len(data.validation)} characters"
            print(f"text: {data.name}, {held}, {len(data.alphabet)} different ones")
        kept = {"text": data.name, "alphabet": data.alphabet}
        kept |= {"digest": data.digest, "steps": self.steps}
        return Job(model, task, recipe, {**kept, **own, "model": built})

    def report(self, training: Training) -> None:
        """The weights alone, and the loss beside those of counting models.

        In every process, because the validation windows are split among them; the first one writes.
        """
        data, measures = training.task.data, {"": training.evaluate()}
        if self.trained is not None:
            numbers = (self.trained, 2 * self.trained, 4 * self.trained)
            measures = {f", {n} evaluations": training.evaluate(n) for n in numbers}
        if training.fabric.global_rank != 0:
            return
        save_weights(training)
        parameters = sum(parameter.numel() for parameter in training.model.parameters())
        print(f"\n{data.name}, {self.model}, {parameters} parameters; {training.summary()}")
        print("validation loss in nats a character:")
        for name, found in measures.items():
            print(f"  {found['validation_loss']:.4f}  this model{name}")
        for order, words in ((1, "characters"), (2, "pairs"), (3, "triples")):
            if len(data.validation) >= order:
                print(f"  {ngram_loss(data, order):.4f}  counts of {words}")
        shown = f"{self.windows} windows of {self.length} characters, each read from its beginning"
        print(f"(the model: {shown}; the counts: the whole held-out text)")
        print(f"tables, checkpoint and weights: {self.place}")

    def _write(self, number: int) -> None:
        """Text from a trained model, on the standard output."""
        for field in fields(self):
            if field.name not in WRITING and getattr(self, field.name) != field.default:
                raise SystemExit(f"{field.name} is for a training, and --generate trains nothing")
        with mistakes():
            path = self.place / "weights.safetensors"
            if self.weights is not None:
                path = weights_file(self.weights)
            elif self.out is None and not path.exists():
                path = weights_path(SHIPPED[self.model])
                print(f"no run in {self.place}: the weights that come along", file=sys.stderr)
            model, _ = load_model(path)
            if not isinstance(model, SymbolModel) or model.alphabet is None:
                raise ValueError(f"{path} is no language model with its alphabet")
            choose_threads(model)
            if self.iterations is not None and not isinstance(model, EquilibriumLanguageModel):
                raise ValueError(f"iterations must be left out, {path} is a decoder")
            options: Any = {"temperature": self.temperature, "most": self.most}
            options |= {"generator": torch.Generator().manual_seed(self.seed)}
            print(model.generate(self.prompt, number, iterations=self.iterations, **options))
