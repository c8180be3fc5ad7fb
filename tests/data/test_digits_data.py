"""The embedded digits: shapes, scale, split, and what happens without scikit-learn."""

from __future__ import annotations

import sys

import pytest
import torch
from sklearn import datasets

from implicit_attn.data import load, load_digits


def test_shapes_dtypes_and_range() -> None:
    data = load("digits")
    assert (data.name, data.classes) == ("digits", 10)
    assert data.train_images.shape == (len(data.train_labels), 1, 8, 8)
    assert data.test_images.shape == (len(data.test_labels), 1, 8, 8)
    assert len(data.train_labels) + len(data.test_labels) == 1797
    assert data.train_images.dtype == torch.float32
    assert data.train_images.min() == 0
    assert data.train_images.max() == 1


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("holdout", [0.2, 0.5])
def test_the_split_is_stratified_and_loses_nothing(holdout: float, seed: int) -> None:
    data = load_digits(holdout=holdout, seed=seed)
    source = datasets.load_digits(return_X_y=True)
    every = torch.tensor(source[1]).bincount()
    assert data.test_labels.bincount().tolist() == [round(holdout * n) for n in every.tolist()]
    assert torch.equal(data.train_labels.bincount() + data.test_labels.bincount(), every)
    # The images, put together again, are scikit-learn's; label and pixels stay together.
    images = torch.cat([data.train_images, data.test_images]).flatten(1) * 16
    labels = torch.cat([data.train_labels, data.test_labels])
    ours = sorted(torch.cat([images, labels[:, None]], 1).tolist())
    theirs = torch.cat([torch.tensor(source[0]), torch.tensor(source[1])[:, None]], 1)
    assert ours == sorted(theirs.tolist())


def test_the_split_depends_on_the_seed_alone() -> None:
    first, again, other = load_digits(seed=0), load_digits(seed=0), load_digits(seed=1)
    assert torch.equal(first.test_images, again.test_images)
    assert torch.equal(first.train_labels, again.train_labels)
    assert not torch.equal(first.test_images[:300], other.test_images[:300])


@pytest.mark.parametrize("holdout", [0.0, 1.0, -0.1, 2.0])
def test_an_impossible_holdout_is_refused(holdout: float) -> None:
    with pytest.raises(ValueError, match=f"fraction is {holdout}"):
        load_digits(holdout=holdout)


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install "implicit-attn\[examples\]"'):
        load_digits()


@pytest.mark.parametrize("name", ["cifar", "MNIST", ""])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*'digits', 'mnist', 'fashion-mnist'"):
        load(name)
