"""The digits: held-out classes are in no part, OOD sets have the same shape and scale."""

import pytest
import torch
from sklearn.datasets import load_digits as sklearn_digits

from lam.datasets import digits, load, load_ood
from lam.datasets.base import TensorImages
from lam.inputs.preprocessing import Preprocessing


def rows(images: TensorImages) -> torch.Tensor:
    return (images.images * 16).flatten(1)


def test_parts_are_disjoint_and_together_the_digits_that_are_kept():
    parts = load("digits")
    kept = [rows(part) for part in (parts.train, parts.validation, parts.test)]
    expected = sklearn_digits()
    expected = torch.from_numpy(expected.data[expected.target < 8]).float()
    assert torch.equal(torch.cat(kept).unique(dim=0), expected.unique(dim=0))
    assert sum(map(len, kept)) == len(expected) == len(expected.unique(dim=0))


def test_shape_scale_and_labels():
    train = load("digits").train
    assert train.shape == (1, 8, 8)
    assert train.classes == tuple("01234567")
    assert (train.images.min(), train.images.max()) == (0, 1)
    assert train.preprocessing == Preprocessing(mode="L", size=(8, 8))
    loaded = sklearn_digits()
    labels = {tuple(row): label for row, label in zip(loaded.data.tolist(), loaded.target.tolist(), strict=True)}
    assert [labels[tuple(row)] for row in rows(train).tolist()] == train.labels.tolist()


def test_every_class_is_in_every_part_in_proportion():
    parts = load("digits", validation=0.1, test=0.3)
    for part, share in ((parts.train, 0.6), (parts.validation, 0.1), (parts.test, 0.3)):
        assert (torch.bincount(part.labels) / len(part) - 1 / 8).abs().max() < 0.02
        assert abs(len(part) / 1443 - share) < 0.001


def test_other_classes_can_be_held_out():
    parts = load("digits", held_out=(0, 3))
    assert parts.train.classes == tuple("12456789")
    out = load_ood("digits_held_out", like=parts.test)
    assert out.classes == ("0", "3")
    loaded = sklearn_digits()
    assert torch.bincount(out.labels).tolist() == [(loaded.target == digit).sum() for digit in (0, 3)]
    assert out.name == "digits_held_out"


def test_patches_are_as_many_grey_and_of_both_photographs():
    like = load("digits").test
    patches = load_ood("digits_patches", like=like)
    assert (len(patches), patches.shape, patches.classes) == (len(like), like.shape, ("china", "flower"))
    assert patches.labels.bincount().min() > 1
    assert 0 <= patches.images.min() < 0.1 < 0.9 < patches.images.max() <= 1
    assert len(patches.images.unique(dim=0)) > 0.95 * len(patches)
    assert torch.equal(patches.images, load_ood("digits_patches", like=like).images)
    assert not torch.equal(patches.images, load_ood("digits_patches", like=like, seed=1).images)


@pytest.mark.parametrize("held_out", [(10,), (-1,), tuple(range(9)), ("8",)])
def test_wrong_held_out_classes(as_in_production, held_out):
    with pytest.raises(ValueError, match="held_out.*digits.*0.*9"):
        digits.splits(held_out=held_out)


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({"validation": 0.0}, r"validation.*\(0, 1\).*0.0"),
        ({"test": 1.5}, r"test.*\(0, 1\).*1.5"),
        ({"test": 0.5, "validation": 0.5}, "digits.*1443 items.*test and validation"),
    ],
)
def test_wrong_fractions(fractions, message):
    with pytest.raises(ValueError, match=message):
        digits.splits(**fractions)


def test_held_out_digits_belong_to_the_digits():
    other = TensorImages(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="digits.*got tensors.*OOD set"):
        digits.held_out(like=other)
    with pytest.raises(ValueError, match="digit.*held out"):
        digits.held_out(like=load("digits", held_out=()).test)


def test_a_data_set_prints_as_one_line() -> None:
    assert repr(load("digits").test) == "TensorImages('digits', 289 items of shape (1, 8, 8), 8 classes)"
