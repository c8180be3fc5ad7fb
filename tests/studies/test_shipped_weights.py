"""The weights in implicit_attn/weights: what docs/results.md says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import solvers
from implicit_attn.studies import accuracy_by_iterations, geometry, open_subject
from implicit_attn.studies.command import SOLVED, UNROLLED
from implicit_attn.studies.extrapolation import extrapolate
from implicit_attn.studies.subjects import Subject
from implicit_attn.weights import weights_path

pytest.importorskip("safetensors", reason="the weights are read by safetensors")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
MNIST = "mnist-hyperset"
HAS_MNIST = (Path(os.environ.get("IMPLICIT_ATTN_DATA", "/nowhere")) / "mnist").is_dir()
needs_mnist = pytest.mark.skipif(not HAS_MNIST, reason="no MNIST under IMPLICIT_ATTN_DATA")


def digits(name: str) -> Subject:
    return open_subject(weights_path(name))


@pytest.mark.parametrize("name", [UNROLLED, SOLVED, MNIST])
def test_small_enough_to_ship(name: str) -> None:
    assert (weights_path(name)).stat().st_size <= 2**20


@pytest.mark.parametrize(
    ("name", "kind"), [("austen-language", "LanguageModel"), ("sudoku-solver", "BoardSolver")]
)
def test_a_model_that_no_study_takes_is_named(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"must be of an image classifier .*, got a {kind}$"):
        open_subject(weights_path(name))


def test_digits_hold_at_four_times_the_iterations() -> None:
    subject = digits(UNROLLED)
    assert subject.trained == 12
    once, twice, more = accuracy_by_iterations(subject, [12, 24, 48])
    assert once["accuracy"] >= 0.99
    assert min(twice["accuracy"], more["accuracy"]) >= once["accuracy"] - 0.002


def test_equilibrium_is_found_for_every_digit_and_from_anywhere() -> None:
    subject = digits(SOLVED)
    with torch.no_grad():
        x = subject.tokens(subject.inputs)
        options = {"tolerance": solvers.Tolerance(rtol=1e-4), "max_steps": 200}
        solution = subject.layer.solve(x, **options)
        assert solution.converged.all()
        right = subject.classify(solution.value).argmax(-1) == subject.targets
        assert right.float().mean() >= 0.985
        start = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        other = subject.layer.solve(x, z0=start, **options)
    distance = (other.value - solution.value).norm(dim=(1, 2)) / solution.value.norm(dim=(1, 2))
    assert other.converged.all() and distance.max() < 1e-2


def test_acceleration_needs_half_the_evaluations_of_forward_iteration() -> None:
    """To the loss, and at least the accuracy, that forward iteration has after training's number."""
    subject = digits(SOLVED)
    reach = {row["method"]: row for row in extrapolate(subject, factor=1).reach}
    for name in ("Anderson", "L-BFGS"):
        assert max(reach[name]["to_loss"], reach[name]["to_accuracy"]) <= subject.trained / 2


@needs_mnist
def test_mnist_holds_at_twice_the_iterations() -> None:
    once, twice = accuracy_by_iterations(open_subject(weights_path(MNIST), samples=2000), [12, 24])
    assert once["accuracy"] >= 0.975
    assert twice["accuracy"] >= once["accuracy"] - 0.002


@needs_mnist
def test_energies_end_lower_and_the_tokens_wider_apart_on_mnist() -> None:
    """From the first to the last iteration; in between they do not move in one direction."""
    subject = open_subject(weights_path(MNIST), samples=128)
    energies, heads = geometry(subject, 12)
    first, last = energies[0], energies[-1]
    for term in ("attention_energy", "feedforward_energy"):
        assert last[term] < first[term]
    for head in {row["head"] for row in heads}:
        rows = [row for row in heads if row["head"] == head]
        assert (
            rows[-1]["effective_rank"] > rows[0]["effective_rank"]
            and rows[-1]["angle"] > rows[0]["angle"]
        )
