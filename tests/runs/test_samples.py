"""Samples of a run: their items, their files, and no sample for items without picture and text."""

import io
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from lam import datasets
from lam.datasets import Dataset, Splits, TensorImages, Texts
from lam.datasets.splits import hold_out_classes
from lam.runs.finished import Run
from lam.runs.samples import COUNT, Sample, draw_samples, read_samples, write_samples
from lam.utils.files import CorruptFileError, seal
from tests.conftest import FinishedRun
from tests.text_runs import faq, text_run, topics


def images(labels: list[int], *, shade: int, is_query: list[bool] | None = None) -> TensorImages:
    """Images of one shade, a pixel wider in each class."""
    pixels = torch.full((len(labels), 1, 4, 4), shade, dtype=torch.uint8)
    pixels[:, 0, 0] = torch.tensor(labels, dtype=torch.uint8)[:, None]
    found = TensorImages(pixels, torch.tensor(labels), classes=tuple("abcdefgh"))
    found.is_query = None if is_query is None else torch.tensor(is_query)
    return found


def of(sample: Sample) -> tuple[int, int]:
    """Shade and class of an image."""
    assert sample.image is not None
    picture = Image.open(io.BytesIO(sample.image))
    return picture.getpixel((0, 3)), picture.getpixel((0, 0))


def test_a_run_has_three_that_are_known_and_a_stranger(finished_run: FinishedRun) -> None:
    run = Run(finished_run.folder)
    known, strangers = run.samples[:COUNT], run.samples[COUNT:]
    assert [(sample.source, sample.stranger) for sample in known] == [("validation", False)] * 3
    assert [(sample.source, sample.stranger) for sample in strangers] == [("digits_patches", True)]
    test = datasets.load("digits")
    validation = {test.validation.preview(row).picture: int(test.validation.labels[row]) for row in range(289)}
    assert len({validation[sample.image] for sample in known}) == 3


def test_of_which_items_they_are() -> None:
    train, everywhere = images([0, 0, 1, 1], shade=10), torch.arange(6)
    known = Splits(train, images([0, 0, 1, 5], shade=20), images([0, 0, 1, 1, 2, 3], shade=30))
    drawn = draw_samples(known, {}, everywhere, seed=0)
    assert {of(sample) for sample in drawn} == {(20, 0), (20, 1)}
    assert len(drawn) == 3
    assert [sample.stranger for sample in drawn] == [False] * 3
    assert drawn == draw_samples(known, {}, everywhere, seed=0)

    apart = images([3, 3, 3, 4, 4, 2], shade=30, is_query=[True, False, False, True, False, False])
    people = Splits(train, images([0, 1], shade=20), apart)
    assert {of(sample) for sample in draw_samples(people, {}, torch.tensor([1, 2, 4]), seed=0)} == {(30, 3), (30, 4)}

    outside: dict[str, Dataset] = {"far": images([6], shade=70), "near": images([7], shade=80)}
    assert of(draw_samples(known, outside, everywhere, seed=0)[-1]) == (70, 6)
    assert draw_samples(known, outside, everywhere, seed=0)[-1].stranger
    aside = hold_out_classes(known, 0.2, seed=0)
    assert aside.strangers is not None
    last = draw_samples(aside, {}, torch.arange(len(aside.test)), seed=0)[-1]
    assert (last.source, last.stranger) == ("strangers", True)
    assert of(last)[1] in aside.strangers.labels.tolist()


def test_what_cannot_be_shown_is_no_sample(tmp_path: Path) -> None:
    class Hidden(TensorImages):
        def preview(self, index: int, **_: int) -> datasets.base.Preview:
            return datasets.base.Preview(str(index))

    hidden = Hidden(torch.zeros(4, 1, 2, 2), torch.tensor([0, 0, 1, 1]))
    samples = draw_samples(Splits(hidden, hidden, hidden), {"far": hidden}, torch.arange(4), seed=0)
    assert samples == []
    (tmp_path / "other.json").write_text("{}")
    seal(tmp_path, ["other.json", *write_samples(tmp_path, samples)])
    assert read_samples(tmp_path) == ()


@pytest.mark.long
def test_texts_are_kept_as_they_are(tmp_path: Path) -> None:
    labelled = text_run(tmp_path / "labelled", topics(tmp_path / "topics.json"), "--training.epochs=1")
    texts = {row["text"] for row in json.loads((tmp_path / "topics.json").read_text())}
    assert {sample.text for sample in labelled.samples[:COUNT]} <= texts
    assert {sample.image for sample in labelled.samples} == {None}
    asked = text_run(tmp_path / "asked", faq(tmp_path / "faq.json"), "--training.epochs=1").samples
    assert all(sample.text is not None and sample.text.startswith("where is") for sample in asked[:COUNT])


def test_the_stranger_among_texts_of_ones_own_is_a_sentence_of_python() -> None:
    sentences = datasets.load("docstrings", seed=0).test.texts
    for classes, strangers in ((("a", "b"), ["docstrings"]), (("a", "math"), [])):
        texts = Texts(["one", "two", "three", "four"], torch.tensor([0, 0, 1, 1]), classes=classes)
        samples = draw_samples(Splits(texts, texts, texts), {}, torch.arange(4), seed=0)
        assert [sample.source for sample in samples if sample.stranger] == strangers
        assert len(samples) == COUNT + len(strangers)
        assert all(sample.text in sentences for sample in samples[COUNT:])


@pytest.mark.parametrize("name", ["samples.json", "2.png"])
def test_a_damaged_sample_is_named(run_copy: Path, name: str) -> None:
    assert len(Run(run_copy).samples) == 4
    with (run_copy / "samples" / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(CorruptFileError, match=f"samples/{name}.*truncated"):
        _ = Run(run_copy).samples
