"""Bare self-attention learns digits without backpropagation, and fills in hidden patches.

    implicit-attn run bare-attention                 # about 15 seconds
    implicit-attn run bare-attention --rule source --cap 8

Pixels are points on circles, 2 x 2 patches are tokens, and the only parameters are couplings between the
16 patches. Every step of the training multiplies tokens of pairs of patches; no graph is recorded. Then
four patches of each test image are hidden and filled in, and noisy images run to their attractors:
they pass the original on the way and leave it again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from implicit_attn.command_line import (
    Parser,
    command,
    count,
    mistakes,
    positive,
    seed_number,
    threads,
)
from implicit_attn.data import CircleTokens, load_digits
from implicit_attn.energies import BareAttention
from implicit_attn.optional import require
from implicit_attn.training import fit_locally
from implicit_attn.updates import BareAttentionStep
from solvers import TorusSite

NOISE, HIDDEN = 0.8, 4  # of the angles, and patches
SHOWN = (0, 1, 2, 3, 5, 10, 30, 100)


def command_line() -> Parser:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--rule", choices=("exact", "source", "hebb"), default="exact", help="of learning")
    add("--cap", type=positive, help="largest norm of a coupling; needed but by the rule exact")
    add("--steps", type=count, default=400, help="of training")
    add("--batch", type=count, default=128)
    add("--rate", type=positive, default=0.03, help="learning rate")
    add("--limit", type=count, help="training and test images each; all by default")
    add("--seed", type=seed_number, default=0)
    add("--threads", type=threads, default=1)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line()
    with command(parser):
        options = parser.parse_args(arguments)
        if options.rule != "exact" and options.cap is None:
            parser.error(f"argument --cap: --rule {options.rule} has no minimum without one")
        torch.set_num_threads(options.threads)
        run(options)


def run(options: argparse.Namespace) -> None:
    with mistakes():
        images = load_digits()
    codec = CircleTokens(channels=1, height=8, width=8, patch=2)
    parts = (images.train_images, images.test_images)
    train, test = (codec.encode(pictures[: options.limit]) for pictures in parts)
    torch.manual_seed(options.seed)
    model = BareAttention(codec.sites, codec.dim, site=TorusSite(codec.values))
    generator = torch.Generator().manual_seed(options.seed)
    with mistakes():
        tqdm = require("tqdm", extra="training").tqdm
    bar = tqdm(total=options.steps, desc="training", leave=False, disable=None)
    with bar, mistakes():  # a rate that is too large
        fit_locally(
            model,
            train,
            rule=options.rule,
            steps=options.steps,
            batch=options.batch,
            rate=options.rate,
            cap=options.cap,
            generator=generator,
            watch=lambda step: bar.update(),
        )
    with torch.no_grad():
        guess = model.conditionals(test).mean()
        likelihood = model.log_prob(test).sum(1).mean().item()
    print(f"rule {options.rule}: log-likelihood of a test image {likelihood:.2f}")
    print(f"a patch from all others: error {error(codec, guess, test):.4f}")
    print(f"the mean of each patch:  error {error(codec, train.mean(0).expand_as(test), test):.4f}")
    fill_in(codec, model, test, generator)
    denoise(codec, model, test, generator)


def fill_in(
    codec: CircleTokens, model: BareAttention, test: Tensor, generator: torch.Generator
) -> None:
    """Hide patches, and iterate the conditional means of the hidden ones."""
    order = torch.rand(test.shape[:2], generator=generator).argsort(1)
    hidden = (order < HIDDEN).unsqueeze(-1)
    state = torch.where(hidden, codec.random(len(test), generator), test)
    print(
        f"\n{HIDDEN} hidden patches at random angles, then their conditional means, step by step:"
    )
    with torch.no_grad():
        for step in range(6):
            seen = error(codec, state[hidden.squeeze(-1)], test[hidden.squeeze(-1)])
            print(f"  step {step}: error {seen:.4f}")
            state = torch.where(hidden, model.conditionals(state).mean(), state)


def denoise(
    codec: CircleTokens, model: BareAttention, test: Tensor, generator: torch.Generator
) -> None:
    """The step of bare attention from noisy images: the overlap with the original has a maximum."""
    step = BareAttentionStep(model, gamma=0.5, radius=codec.values**0.5, circles=codec.values)
    states = step.trajectory(codec.noisy(test, NOISE, generator), max(SHOWN))
    print(f"\nnoise {NOISE} on every angle, then bare attention:")
    for number in SHOWN:
        overlap = (states[number] * test).sum(-1).mean() / codec.values
        print(f"  step {number:3}: overlap with the original {overlap:.4f}")


def error(codec: CircleTokens, guess: Tensor, truth: Tensor) -> float:
    """Root mean square of the pixels in [0, 1]."""
    difference = codec.decode_patches(guess) - codec.decode_patches(truth)
    return difference.square().mean().sqrt().item()


if __name__ == "__main__":
    main()
