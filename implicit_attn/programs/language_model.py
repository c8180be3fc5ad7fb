"""Train a small language model on the characters of a text, its sublayers steps of descent.

    implicit-attn train language-model                          # the help topics of Python, no download
    implicit-attn train language-model --text austen --descent momentum
    implicit-attn train language-model --attention light-newton-taylor
    implicit-attn train language-model --model equilibrium      # one block, solved for its fixed point
    implicit-attn train language-model --resume                 # go on where a run stopped
    implicit-attn train language-model --generate 500 --prompt "It was "

``--text`` is the name of a text in $IMPLICIT_ATTN_DATA/text or the path of any file in UTF-8, of which the
last 5 % are held out. The loss is in nats a character; beside it stand the losses of models that count
pairs and triples of characters. ``--attention`` and ``--descent`` choose among the layers of Ren et al.,
"Transformers as Intrinsic Optimizers" (https://arxiv.org/abs/2511.00907). ``--generate`` writes text with
the weights of an earlier run in ``--out``, or of a file, and trains nothing; where there is neither it
takes the weights that come along, of a model of English novels.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import solvers
from implicit_attn.checkpoint.files import RunLock
from implicit_attn.command_line import (
    Parser,
    amount,
    command,
    count,
    learning_rate,
    mistakes,
    number,
    place,
    refuse_huge,
    seed_number,
    share,
    size,
    whole,
)
from implicit_attn.data import HELP, TextData, load_text, ngram_loss
from implicit_attn.data.text import decode, encode
from implicit_attn.models import (
    ATTENTION_FORMS,
    EquilibriumLanguageModel,
    build_model,
    generate,
    load_model,
)
from implicit_attn.models.language.equilibrium import SOLVES
from implicit_attn.models.language.language_model import SymbolModel
from implicit_attn.training import NextToken, Training, run_script
from implicit_attn.training.options import add_process_options, add_result_options, given, settings
from implicit_attn.training.script import build_training, claim, save_weights, start
from implicit_attn.updates.momentum import DESCENTS, LOOKAHEADS
from implicit_attn.weights import weights_path

# Which options belong to one of the models only, with their defaults.
OWN: dict[str, dict[str, Any]] = {
    "decoder": {"layers": 6, "descent": "plain", "lookahead": "literal"},
    "equilibrium": {"iterations": 12, "gradient": "truncated", "damping": 1.0},
}
KINDS = {"decoder": "language-model", "equilibrium": "equilibrium-language-model"}
# Trained by the row "momentum" of benchmarks/language/forms.py --size small, seed 0.
SHIPPED = weights_path("austen-language")
# How text is written, not what is trained, with their defaults.
WRITING: dict[str, Any] = {"prompt": "The ", "temperature": 0.8, "most": None, "weights": None}
# What may stand beside --generate besides these.
BESIDE = ("generate", "model", "iterations", "seed", "out")
UNKEPT = (*WRITING, "generate", "shipped", "asked", "text")  # not of the settings of a run


def command_line() -> Parser:
    parser = Parser(description=__doc__.split("\n")[0] if __doc__ else None)
    # What training scripts share and this one does not offer.
    parser.set_defaults(
        random_iterations=None, epochs=1, decay="linear", decayed="matrices", floor=0.0
    )
    add = parser.add_argument
    add("--text", default=HELP, help=f"name or path of the text (default {HELP})")
    add("--model", choices=KINDS, default="decoder")
    add("--attention", choices=ATTENTION_FORMS, default="softmax", help="form of attention")
    add("--order", type=whole(0, 100), help="terms of the series of a -taylor form (default 1)")
    add("--dim", type=size, default=96, help="features of a character")
    add("--heads", type=size, default=4)
    add("--length", type=size, default=128, help="characters that the model sees")
    add("--dropout", type=share, default=0.1)
    add = parser.add_argument_group("decoder").add_argument
    add("--layers", type=whole(1, 1000), help="blocks (default 6)")
    add("--descent", choices=DESCENTS, help="step of every sublayer (default plain)")
    add("--lookahead", choices=LOOKAHEADS, help="of --descent nesterov (default literal)")
    add = parser.add_argument_group("equilibrium").add_argument
    add("--iterations", type=whole(2, 100_000), help="evaluations of the block (default 12)")
    add("--gradient", choices=SOLVES, help="(default truncated)")
    add(
        "--damping", type=number(0, 1, above=True), help="share of a step that is taken (default 1)"
    )
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=count, default=1200)
    add("--batch", type=count, default=32, help="windows of a step")
    add("--rate", type=learning_rate, default=3e-3, help="peak learning rate (falls linearly to 0)")
    add("--warmup", type=share, default=0.1, help="share of the steps in which the rate rises")
    add("--weight-decay", type=learning_rate, default=0.01, help="of matrices")
    add("--seed", type=seed_number, default=0)
    add("--windows", type=count, default=256, help="windows of the validation text")
    add("--evaluate-every", type=count, default=100, help="validation every so many steps")
    add_process_options(parser, save_every=100)
    add_result_options(parser, "folder of the results (default runs/language-MODEL)")
    add = parser.add_argument_group("text from a trained model").add_argument
    add("--generate", type=count, metavar="N", help="write N characters, and train nothing")
    add("--prompt", help="text to go on from (default 'The ')")
    add("--temperature", type=amount, help="0 takes the likeliest character (default 0.8)")
    add("--most", type=count, help="draw among so many likeliest characters")
    add(
        "--weights",
        type=place,
        help="of the model (default: of the run in --out, or those that come along)",
    )
    return parser


def arguments(
    words: Sequence[str] | None = None, parser: Parser | None = None
) -> argparse.Namespace:
    parser = parser or command_line()
    options = parser.parse_args(words)
    check_writing(parser, options)
    options.asked = options.iterations  # of a model that is trained already
    for model, own in OWN.items():
        for name, default in own.items():
            if model == options.model:
                if getattr(options, name) is None:
                    setattr(options, name, default)
            elif getattr(options, name) is not None:
                parser.error(f"argument --{name}: is for --model {model}, got {options.model}")
    if options.lookahead not in (None, "literal") and options.descent != "nesterov":
        parser.error(f"argument --lookahead: needs --descent nesterov, got {options.descent}")
    if options.order is not None and "taylor" not in options.attention:
        parser.error(
            f"argument --order: needs a -taylor form of attention, got {options.attention}"
        )
    options.shipped = options.out is None  # text may be written without a training
    options.out = options.out or Path("runs") / f"language-{options.model}"
    return options


def check_writing(parser: Parser, options: argparse.Namespace) -> None:
    """Refuse what would be ignored, with --generate and without; fill in its defaults."""
    if options.generate is None:
        for name in WRITING:
            if getattr(options, name) is not None:
                parser.error(
                    f"argument --{name}: goes with --generate, and nothing is trained then"
                )
    else:
        for name, value in vars(options).items():
            if name not in WRITING and name not in BESIDE and value != parser.get_default(name):
                said = name.replace("_", "-")
                parser.error(f"argument --{said}: is for a training, and --generate trains nothing")
    for name, default in WRITING.items():
        if getattr(options, name) is None:
            setattr(options, name, default)


def specification(options: argparse.Namespace, data: TextData) -> dict[str, Any]:
    """From which ``build_model`` builds the model, and ``load_model`` builds it again."""
    shared = given(options, "dim", "heads", "length", "dropout", "attention")
    own = {name: getattr(options, name) for name in OWN[options.model]}
    if options.order is not None:
        own["form"] = {"order": options.order}
    return {"kind": KINDS[options.model], "vocabulary": len(data.alphabet), **shared, **own}


def build(options: argparse.Namespace, data: TextData) -> nn.Module:
    torch.manual_seed(options.seed)
    layer = None
    if options.gradient == "implicit":  # samples that did not converge are counted and shown
        layer = {"adjoint": solvers.Implicit(on_failure="ignore")}
    return build_model(specification(options, data), layer=layer)


def report(training: Training, options: argparse.Namespace) -> None:
    """The weights alone, and the loss beside those of counting models.

    Called by every process, because the validation windows are split among them; the first one writes.
    """
    data, measures = training.data, {"": training.evaluate()}
    if options.model == "equilibrium":
        numbers = (options.iterations, 2 * options.iterations, 4 * options.iterations)
        measures = {f", {n} evaluations": training.evaluate(n) for n in numbers}
    if training.fabric.global_rank != 0:
        return
    save_weights(training)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    print(f"\n{data.name}, {options.model}, {parameters} parameters; {training.summary()}")
    print("validation loss in nats a character:")
    for name, found in measures.items():
        print(f"  {found['validation_loss']:.4f}  this model{name}")
    for order, words in ((1, "characters"), (2, "pairs"), (3, "triples")):
        if len(data.validation) >= order:
            print(f"  {ngram_loss(data, order):.4f}  counts of {words}")
    shown = (
        f"{options.windows} windows of {options.length} characters, each read from its beginning"
    )
    print(f"(the model: {shown}; the counts: the whole held-out text)")
    print(f"tables, checkpoint and weights: {options.out}")


def write(options: argparse.Namespace) -> None:
    """Text from a trained model, on the standard output."""
    path = options.weights or options.out / "weights.safetensors"
    comes = options.shipped and options.model == "decoder"
    if options.weights is None and comes and not path.exists():
        path = SHIPPED
        print(f"no run in {options.out}: the weights that come along, {path}", file=sys.stderr)
    with mistakes("--weights"):
        model, progress = load_model(path)
        alphabet = progress["settings"].get("alphabet")
        if not isinstance(model, SymbolModel) or not isinstance(alphabet, str):
            raise ValueError(f"{path} is no language model with its alphabet")
        if not len(set(alphabet)) == len(alphabet) == model.vocabulary:
            raise ValueError(
                f"{path} has an alphabet of {len(set(alphabet))} different characters among "
                f"{len(alphabet)}, its model expects {model.vocabulary}"
            )
        iterated = isinstance(model, EquilibriumLanguageModel)
        if options.asked is not None and not iterated:
            raise ValueError(f"{path} is a decoder, which takes no --iterations")
    with mistakes("--prompt"):
        if not options.prompt:
            raise ValueError("must hold a character at least, got none")
        prompt = encode(options.prompt, alphabet)
    generator = torch.Generator().manual_seed(options.seed)
    ids = generate(
        model, prompt[None], options.generate, temperature=options.temperature, most=options.most,
        generator=generator, iterations=options.asked,
    )  # fmt: skip
    print(decode(ids[0], alphabet))


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = arguments(words, parser)
        if options.generate is not None:
            write(options)
        else:
            run(options)


def run(options: argparse.Namespace) -> None:
    with mistakes("--text"):
        data = load_text(options.text)
    with mistakes():
        refuse_huge(lambda: build(options, data))
        fabric = start(options)
    with claim(options, fabric) as lock:
        train(options, data, fabric, lock)


def train(options: argparse.Namespace, data: TextData, fabric: Any, lock: RunLock) -> None:
    first = fabric.global_rank == 0
    with mistakes(first=first):
        samples = options.steps * options.batch
        task = NextToken(data, options.length, options.windows, samples=samples)
    if first:
        held = f"{len(data.train)} + {len(data.validation)} characters"
        print(f"text: {data.name}, {held}, {len(data.alphabet)} different ones")
    kept: dict[str, Any] = {
        "text": data.name,
        "symbols": [len(data.train), len(data.validation)],
        "alphabet": data.alphabet,
        "digest": data.digest,
        "model": specification(options, data),
    }
    with mistakes(first=first):
        run_settings = {**settings(options, *UNKEPT), **kept}
        training = build_training(options, build(options, data), task, run_settings, fabric=fabric)
    run_script(training, resume=options.resume, overwrite=options.overwrite, lock=lock)
    report(training, options)


if __name__ == "__main__":
    main()
