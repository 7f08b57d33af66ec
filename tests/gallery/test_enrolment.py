"""Items from images: ids, fusion, and errors of fusion. `tests.runs` tests whole runs."""

import json
import warnings
from typing import Any

import pytest
import torch

from lam.gallery.enrolment import SourceImage, enrol
from lam.vmf.embeddings import Embeddings


def embeddings(count: int) -> Embeddings:
    mean = torch.nn.functional.normalize(torch.randn(count, 4), dim=1)
    return Embeddings(mean, torch.arange(1.0, count + 1), *torch.ones(2, count))


def test_one_image_is_one_entry_unless_ids_differ() -> None:
    entries = [SourceImage(path, "x", content) for path, content in (("a", 5), ("b", 6), ("c", 5))]
    made = enrol([*entries, SourceImage("d", "x", 5, "9")], embeddings(4))
    assert [(item.id, item.path) for item in made.items] == [("5", "a"), ("6", "b"), ("9", "d")]
    assert made.embeddings.kappa.tolist() == [1, 2, 4]


def test_one_image_with_several_labels_is_said() -> None:
    images = [SourceImage("a/1.png", "a", 7), SourceImage("b/1.png", "b", 7), SourceImage("b/2.png", "b", 8)]
    with pytest.warns(UserWarning, match=r"1 item.*a/1\.png as 'a' and 'b'.*the first"):
        enrolled = enrol(images, embeddings(3))
    assert [item.label for item in enrolled.items] == ["a", "b"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enrol([images[0], images[0], images[2]], embeddings(3))


@pytest.mark.parametrize("fuse", [False, True])
def test_images_with_other_metadata_than_the_first_are_counted(fuse: bool) -> None:
    images = [SourceImage(f"{name}.png", "a", 7 + fuse * row, metadata={"sku": name}) for row, name in enumerate("xyz")]
    with pytest.warns(UserWarning, match=r"2 images.*metadata.* y\.png"):
        enrolled = enrol(images, embeddings(3), fuse=fuse)
    assert [json.loads(item.metadata) for item in enrolled.items] == [{"sku": "x"}]


def test_texts_that_share_a_listed_id_are_not_dropped() -> None:
    texts = [SourceImage(f"t.csv:{row}", "x", content, "doc") for row, content in enumerate((5, 5, 6), 1)]
    assert len(enrol(texts[:2], embeddings(2))) == 1
    assert enrol(texts, embeddings(3), fuse=True).items[0].images == 2
    with pytest.raises(ValueError, match=r"t\.csv:3: id 'doc'.*t\.csv:1.*--fuse"):
        enrol(texts, embeddings(3))


def test_the_gate_looks_at_images_before_they_are_fused() -> None:
    entries = [SourceImage(path, "x", number) for number, path in enumerate("abcd")]
    given = embeddings(4)
    made = enrol(entries, given, flag_below=2.5, fuse=True)
    assert made.uncertain == (("a", 1.0), ("b", 2.0))
    assert (made.items[0].least_image_kappa, made.items[0].images) == (1.0, 4)
    made = enrol(entries, given, flag_below=2.5, skip_uncertain=True, fuse=True)
    assert json.loads(made.items[0].paths) == ["c", "d"]
    assert made.items[0].least_image_kappa == 3.0


def test_a_label_is_another_identity_than_an_id_of_the_same_name() -> None:
    made = enrol([SourceImage("a", "3", 1), SourceImage("b", "3", 2, "3")], embeddings(2), fuse=True)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"listed_id": "shelf/../é"}, "a.jpg: .*id.*1 to 128.*'shelf/../é'"),
        ({"listed_id": ""}, "id.*1 to 128"),
        ({"label": "\ud800"}, "a.jpg: .*label.*Unicode"),
        ({"label": "x" * 1025}, "a.jpg: .*label.*1025.*1024"),
        ({"metadata": {"text": "x" * 20_000}}, "a.jpg: metadata.*20012 bytes.*16384"),
    ],
)
def test_what_the_service_could_not_know_is_refused_before_it_is_embedded(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SourceImage(**{"path": "a.jpg", "label": "", "content": 1, **wrong})


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="b has neither"):
        enrol([SourceImage("a", "x", 1), SourceImage("b", "", 2)], embeddings(2), fuse=True)
    with pytest.raises(ValueError, match="id '7'.*'x' for a, 'y' for b"):
        enrol([SourceImage("a", "x", 1, "7"), SourceImage("b", "y", 2, "7")], embeddings(2), fuse=True)
