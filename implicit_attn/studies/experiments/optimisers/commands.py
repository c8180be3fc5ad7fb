"""The sub-commands about optimisers and local learning."""

from __future__ import annotations

import argparse
from functools import partial

from implicit_attn.command_line import positive, seed_number, whole
from implicit_attn.data import load_digits, load_text
from implicit_attn.data.text import HELP, ngram_loss
from implicit_attn.studies.experiments.experiment import Advance, Experiment
from implicit_attn.studies.experiments.optimisers.figures import descent_figure, learning_figure
from implicit_attn.studies.experiments.optimisers.fixed_energy import compare_methods
from implicit_attn.studies.experiments.optimisers.local_digits import (
    BACKWARD,
    FIXED,
    LOCAL,
    RULES,
    DigitSettings,
    learn_digits,
)
from implicit_attn.studies.experiments.optimisers.local_text import TextSettings, learn_text
from implicit_attn.studies.experiments.optimisers.own_energies import OwnEnergy
from implicit_attn.studies.tables import Result, Table


def run_descent(options: argparse.Namespace, advance: Advance) -> Result:
    """attention forms as optimisers of one query's energy: steps until its gradient vanishes"""
    methods, curves = compare_methods(
        keys=options.keys,
        dim=options.dim,
        temperature=options.temperature,
        starts=options.starts,
        draws=options.draws,
        steps=options.steps,
        bound=options.bound,
        seed=options.seed,
        advance=advance,
    )
    draw = partial(descent_figure, methods=methods, curves=curves, bound=options.bound)
    return Result({"methods": methods, "curves": curves}, ("methods",), draw)


def run_local_learning(options: argparse.Namespace, advance: Advance) -> Result:
    """attention that learns by local rules, beside fixed weights and back-propagation"""
    digits, text = load_digits(), load_text(options.text)
    loops = TextSettings(steps=options.steps, seed=options.seed)
    shortest = min(len(text.train), len(text.validation))
    if shortest <= loops.length:
        raise ValueError(f"text must have parts of over {loops.length} characters, got {shortest}")
    settings = DigitSettings(epochs=options.epochs, seed=options.seed)
    backward = DigitSettings(epochs=options.passes, seed=options.seed)
    by_digits: Table = []
    for rule in RULES:
        chosen = backward if rule == BACKWARD else settings
        by_digits += learn_digits(digits, rule, chosen, advance=advance)
    by_text: Table = []
    for rule in RULES:
        by_text += learn_text(text, rule, loops, advance=advance)
    # Which weights are learned matters: with W1 the identity the order is another one.
    plain = TextSettings(steps=options.steps, seed=options.seed, query=False)
    by_keys: Table = []
    for rule in (FIXED, LOCAL):
        by_keys += learn_text(text, rule, plain, advance=advance)
    alone = TextSettings(steps=options.steps, seed=options.seed, loops=0)
    by_token = learn_text(text, FIXED, alone, advance=advance)
    inner = DigitSettings(epochs=options.inner, records=options.inner, kind="inner")
    diverging = learn_digits(digits, LOCAL, inner, advance=advance)
    ends = [
        *({"task": "digits", **_last(by_digits, rule, "test_accuracy")} for rule in RULES),
        *({"task": "text", **_last(by_text, rule, "loss")} for rule in RULES),
        *({"task": "text, W1 = I", **_last(by_keys, rule, "loss")} for rule in (FIXED, LOCAL)),
        {"task": "text, no attention", **_last(by_token, FIXED, "loss")},
        {"task": "digits, inner energy", **_last(diverging, LOCAL, "test_accuracy")},
    ]
    floors = (
        OwnEnergy("elastic", settings.temperature).floor(16),
        OwnEnergy("elastic", loops.temperature, causal=True).floor(loops.length),
    )
    bars = {"without attention": ends[-2]["value"], "counts of pairs": ngram_loss(text, 2)}
    draw = partial(
        learning_figure, digits=by_digits, text=by_text, floors=floors, bars=bars, name=text.name
    )
    tables = {"ends": ends, "digits": by_digits, "text": by_text}
    tables |= {"text-keys": by_keys, "text-token": by_token, "inner": diverging}
    return Result(tables, ("ends",), draw)


def _last(table: Table, rule: str, measure: str) -> dict[str, float | str]:
    """Where a rule ends."""
    row = [each for each in table if each["rule"] == rule][-1]
    kept = {name: row[name] for name in ("rule", "free_energy", "spread")}
    return {**kept, "measure": measure.replace("_", " "), "value": row[measure]}


EXPERIMENTS = {
    "descent": Experiment(
        run_descent,
        "Attention forms as optimisers of one query's free energy",
        (
            ("--keys", whole(1, 1000), 9, "keys, drawn from N(0, I)"),
            ("--dim", whole(1, 200), 4, "dimension of queries and keys"),
            ("--temperature", positive, 1.6, "T of the energy"),
            ("--starts", whole(1, 1000), 5, "queries, drawn from N(0, I)"),
            (
                "--draws",
                whole(1, 1000),
                20,
                "sets of keys and starts; the first is drawn as curves",
            ),
            ("--steps", whole(1, 100_000), 600, "at most"),
            ("--bound", positive, 1e-10, "norm of the gradient that is to be reached"),
            ("--seed", seed_number, 0, "of keys and starts"),
        ),
        quick=("--draws", "2", "--steps", "12", "--bound", "0.01"),
    ),
    "local-learning": Experiment(
        run_local_learning,
        "Attention that learns by a local rule: free energy, spread of the states, what is learned",
        (
            ("--epochs", whole(1, 10_000), 200, "of digits by the local rule and by fixed weights"),
            ("--passes", whole(1, 10_000), 60, "through the digits by back-propagation"),
            ("--steps", whole(1, 100_000), 400, "on the text"),
            ("--inner", whole(1, 20), 12, "epochs of the inner energy, which diverges"),
            ("--text", str, HELP, "python-help, austen, or the path of a text in UTF-8"),
            ("--seed", seed_number, 0, "of embeddings, weights and batches"),
        ),
        quick=("--epochs", "3", "--passes", "1", "--steps", "2", "--inner", "2"),
    ),
}
