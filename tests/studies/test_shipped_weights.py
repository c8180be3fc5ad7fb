"""The weights in implicit_attn/weights: what docs/results.md says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from implicit_attn import studies
from implicit_attn.weights import weights_path

pytest.importorskip("safetensors", reason="the weights are read by safetensors")
pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytestmark = pytest.mark.slow
UNROLLED, SOLVED, MNIST = "digits-hyperset", "digits-hyperset-equilibrium", "mnist-hyperset"
HAS_MNIST = (Path(os.environ.get("IMPLICIT_ATTN_DATA", "/nowhere")) / "mnist").is_dir()
needs_mnist = pytest.mark.skipif(not HAS_MNIST, reason="no MNIST under IMPLICIT_ATTN_DATA")


@pytest.mark.parametrize("name", [UNROLLED, SOLVED, MNIST])
def test_small_enough_to_ship(name: str) -> None:
    assert weights_path(name).stat().st_size <= 2**20


def test_digits_hold_at_four_times_the_iterations() -> None:
    subject = studies.open_subject(UNROLLED)
    assert subject.trained == 12
    once, twice, more = studies.accuracy_by_iterations(subject, [12, 24, 48])
    assert once["accuracy"] >= 0.99
    assert min(twice["accuracy"], more["accuracy"]) >= once["accuracy"] - 0.002


def test_the_equilibrium_is_found_for_every_digit_and_from_anywhere() -> None:
    for row in studies.paths(studies.open_subject(SOLVED), starts=1).summary:
        assert row["distance_largest"] < 1e-2 and row["residual"] < 1e-5
        assert row["accuracy"] >= 0.985 and row["agreement"] == 1.0


def test_acceleration_needs_half_the_evaluations_of_forward_iteration() -> None:
    """To the loss, and at least the accuracy, that forward iteration has after training's number."""
    subject = studies.open_subject(SOLVED)
    reach = {row["method"]: row for row in studies.extrapolation(subject, factor=1).reach}
    for name in ("Anderson", "L-BFGS"):
        assert max(reach[name]["to_loss"], reach[name]["to_accuracy"]) <= subject.trained / 2


@needs_mnist
def test_mnist_holds_at_twice_the_iterations() -> None:
    subject = studies.open_subject(MNIST, samples=2000)
    once, twice = studies.accuracy_by_iterations(subject, [12, 24])
    assert once["accuracy"] >= 0.975
    assert twice["accuracy"] >= once["accuracy"] - 0.002


@needs_mnist
def test_energies_end_lower_and_the_tokens_wider_apart_on_mnist() -> None:
    """From the first to the last iteration; in between they do not move in one direction."""
    found = studies.geometry(studies.open_subject(MNIST, samples=128))
    first, last = found.energies[0], found.energies[-1]
    for term in ("attention_energy", "feedforward_energy"):
        assert last[term] < first[term]
    for head in {row["head"] for row in found.heads}:
        begin, *_, end = [row for row in found.heads if row["head"] == head]
        assert end["effective_rank"] > begin["effective_rank"] and end["angle"] > begin["angle"]


@needs_mnist
def test_spins_have_their_report() -> None:
    """Their couplings were kept epoch by epoch, and the accuracy is the one that is told."""
    subject = studies.open_subject("mnist-spins", samples=500)
    found = studies.report(subject, subject.observations)
    assert found.couplings is not None and len(found.couplings) == 1 + len(found.epochs)
    assert found.extrapolation[-1]["accuracy"] >= 0.98
