"""Entries from images: ids, what belongs together, and what cannot be fused. Whole runs are in `test_gallery`."""

import hashlib
from typing import Any

import pytest
import torch

from lam.gallery.enrolment import Entry, enrol, name_of, named_id
from lam.vmf.embeddings import Embeddings


def embeddings(count: int) -> Embeddings:
    mean = torch.nn.functional.normalize(torch.randn(count, 4), dim=1)
    return Embeddings(mean, torch.arange(1.0, count + 1), *torch.ones(2, count))


@pytest.mark.parametrize("name", ["007", "-1", "1.0", "٣", str(2**63), "vase", " 1"])
def test_what_is_no_number_of_an_index_is_hashed(name: str) -> None:
    assert named_id(name) == int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) // 2


@pytest.mark.parametrize("name", ["0", "42", str(2**63 - 1)])
def test_numbers_are_their_own_ids(name: str) -> None:
    assert named_id(name) == int(name)


def test_one_image_is_one_entry_unless_ids_differ() -> None:
    entries = [Entry("a", "x", 5), Entry("b", "x", 6), Entry("c", "x", 5), Entry("d", "x", 5, "9")]
    made = enrol(entries, embeddings(4))
    assert made.ids.tolist() == [5, 6, 9]
    assert [item["path"] for item in made.items] == ["a", "b", "d"]
    assert made.embeddings.kappa.tolist() == [1, 2, 4]


def test_the_gate_looks_at_images_before_they_are_fused() -> None:
    entries = [Entry(path, "x", number) for number, path in enumerate("abcd")]
    given = embeddings(4)
    made = enrol(entries, given, flag_below=2.5, fuse=True)
    assert made.poor == (("a", 1.0), ("b", 2.0))
    assert (made.items[0]["poor"], made.items[0]["fused"]["images"]) == (1.0, 4)
    made = enrol(entries, given, flag_below=2.5, skip_poor=True, fuse=True)
    assert made.items[0]["fused"]["paths"] == ["c", "d"]
    assert made.skipped
    assert "poor" not in made.items[0]


def test_a_label_is_another_identity_than_an_id_of_the_same_name() -> None:
    made = enrol([Entry("a", "3", 1), Entry("b", "3", 2, "3")], embeddings(2), fuse=True)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        (
            {"name": "shelf 3/é"},
            r"a.jpg: the id must have 1 to 128 letters, digits, spaces or ._:@\+=-, .* got 'shelf 3/é'",
        ),
        ({"name": ""}, "the id must have 1 to 128 letters"),
        ({"label": "x" * 1025}, "a.jpg: the label may have 1024 characters, got 1025"),
        ({"metadata": {"text": "x" * 20_000}}, "a.jpg: metadata may have 16384 characters as JSON, got 20012"),
    ],
)
def test_what_the_service_could_not_know_is_refused_before_it_is_embedded(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Entry(**{"path": "a.jpg", "label": "", "content": 1, **wrong})


def test_what_is_kept_under_a_number_has_the_name_of_its_list() -> None:
    assert name_of(5, {"label": "", "path": ""}) == "5"
    assert name_of(named_id("vase"), Entry("a.jpg", "", 1, "vase").item) == "vase"


def test_what_cannot_be_fused_is_refused() -> None:
    with pytest.raises(ValueError, match="b has neither id nor label: images are fused by their id, or else"):
        enrol([Entry("a", "x", 1), Entry("b", "", 2)], embeddings(2), fuse=True)
    with pytest.raises(ValueError, match="must have one label: id '7' has 'x' for a, 'y' for b"):
        enrol([Entry("a", "x", 1, "7"), Entry("b", "y", 2, "7")], embeddings(2), fuse=True)
