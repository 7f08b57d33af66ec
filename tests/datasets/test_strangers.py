"""Classes held out of training: the same in every run, and in no split afterwards."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from lam import datasets
from lam.datasets import Splits, TensorImages
from lam.datasets.splits import hold_out_classes


def splits_of(n_classes: int, *, per_class: int = 2) -> Splits:
    labels = torch.arange(n_classes).repeat(per_class)
    pixels = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Splits(*(TensorImages(pixels, labels, name=name) for name in ("train", "validation", "test")))


def parts(splits: Splits) -> tuple[TensorImages, ...]:
    return splits.train, splits.validation, splits.test


@pytest.mark.parametrize(
    ("n_classes", "share", "count"), [(20, None, 2), (150, None, 15), (10, 0.3, 3), (10, 0.01, 1), (40, 0.25, 10)]
)
def test_whole_classes_are_set_aside(n_classes: int, share: float | None, count: int) -> None:
    splits = hold_out_classes(replace(splits_of(n_classes), gallery="identities"), share, seed=3)
    assert splits.gallery == "identities"
    strange = set(splits.strangers.labels.tolist())
    assert len(strange) == count
    assert len(splits.strangers) == 3 * 2 * count
    for part in parts(splits):
        assert strange.isdisjoint(part.labels.tolist())
        assert len(part.labels.unique()) == n_classes - count
        assert part.classes == splits.strangers.classes
    again, other = (hold_out_classes(splits_of(n_classes), share, seed=seed) for seed in (3, 4))
    assert torch.equal(again.strangers.labels, splits.strangers.labels)
    assert n_classes < 40 or set(other.strangers.labels.tolist()) != strange


@pytest.mark.parametrize(("n_classes", "share"), [(19, None), (10, None), (100, 0.0)])
def test_of_few_classes_none_is_set_aside_unless_asked(n_classes: int, share: float | None) -> None:
    splits = splits_of(n_classes)
    assert hold_out_classes(splits, share, seed=0) is splits
    assert splits.strangers is None


def test_of_classes_that_occur_once_none_is_set_aside() -> None:
    texts = datasets.Texts([f"text {number}" for number in range(30)], torch.arange(30))
    once = Splits(texts.subset(range(20)), texts.subset(range(20, 25)), texts.subset(range(25, 30)))
    assert hold_out_classes(once, seed=0).strangers is None
    assert hold_out_classes(once, 0.1, seed=0).strangers is not None


def test_strangers_are_the_items_themselves() -> None:
    before = splits_of(20)
    strangers = hold_out_classes(before, seed=0).strangers
    (image, label), known = strangers[0], before.train
    position = int((known.labels == label).nonzero()[0, 0])
    assert torch.equal(image, known[position][0])
    few = strangers.limit(4, seed=1)
    assert len(few) == 4
    assert few[0][0].shape == (1, 2, 2)


def test_strangers_of_files_are_named(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).mkdir()
        for number in range(6):
            Image.new("L", (8, 8), 10 * number).save(tmp_path / name / f"{number}.png")
    splits = hold_out_classes(datasets.load("folder", root=tmp_path), 0.25, seed=0)
    assert len(splits.strangers) == len(splits.strangers.names) == 6
    assert len({Path(name).parent for name in splits.strangers.names}) == 1
    assert ["/".join(path.parts[-2:]) for path in splits.strangers.files] == splits.strangers.names
    assert all(path.is_file() for path in splits.strangers.limit(3).files)


def test_what_cannot_be_set_aside_is_refused() -> None:
    one, other = TensorImages(torch.zeros(2, 1, 2, 2), torch.tensor([0, 0]), classes="ab"), splits_of(2).train
    both = TensorImages(other.images, other.labels, classes="ab")
    seed = next(seed for seed in range(9) if 0 in hold_out_classes(splits_of(2), 0.5, seed=seed).strangers.labels)
    with pytest.raises(ValueError, match="1 of 2 classes.*test split"):
        hold_out_classes(Splits(both, both, one), 0.5, seed=seed)


def test_places_have_no_classes_to_set_aside() -> None:
    class Places(TensorImages):
        @property
        def targets(self) -> torch.Tensor:
            return torch.zeros(len(self), 2)

    part = Places(torch.zeros(40, 1, 2, 2), torch.arange(40))
    splits = Splits(part, part, part)
    assert hold_out_classes(splits, seed=0) is splits
    with pytest.raises(ValueError, match="places.*no classes"):
        hold_out_classes(splits, 0.1, seed=0)


def test_of_questions_with_answers_questions_are_the_strangers() -> None:
    """Every split holds all answers, so as strangers, an answer's copies from the splits would match each other."""
    labels = torch.arange(40).repeat(4)
    asked = torch.arange(160) < 120
    texts = datasets.Texts([f"text {number}" for number in range(160)], labels, is_query=asked)
    answers = range(120, 160)
    parts = [texts.subset([*range(40 * number, 40 * number + 40), *answers]) for number in range(3)]
    splits = hold_out_classes(Splits(*parts), 0.1, seed=0)
    strangers = splits.strangers
    assert len(set(strangers.names)) == len(strangers) == 3 * 4
    for part in (splits.train, splits.validation, splits.test):
        assert part.is_query is not None
        assert int(part.is_query.sum()) == int((~part.is_query).sum()) == 36
        assert set(strangers.labels.tolist()).isdisjoint(part.labels.tolist())
    alone = datasets.Texts(
        ["one", "two"], torch.tensor([0, 1]), classes=["a", "b"], is_query=torch.tensor([True, False])
    )
    splits = Splits(alone, alone, alone)
    orders = (torch.randperm(2, generator=torch.Generator().manual_seed(seed)) for seed in range(9))
    seed = next(seed for seed, order in enumerate(orders) if order[0] == 0)  # of the class of the only question
    with pytest.raises(ValueError, match="1 of 2 classes.*train split"):
        hold_out_classes(splits, 0.5, seed=seed)
