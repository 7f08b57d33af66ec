from pathlib import Path
from typing import cast

import pytest
import torch
from PIL import Image

from lam.datasets import MissingDataError, Splits, TensorImages, Texts
from lam.pairs.relation import Relation
from lam.runs.config import DataConfig
from lam.runs.config_files import load_config
from lam.runs.data import check_files, check_splits, check_texts, load_data
from lam.runs.plan import Plan


def images(labels: list[int]) -> TensorImages:
    return TensorImages(torch.rand(len(labels), 1, 4, 4), torch.tensor(labels), classes=tuple("abcdefgh"))


ENOUGH = [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        ([0, 0, 1, 1], ENOUGH, "train split.*5 images, got 4"),
        ([0, 1, 2, 3, 4], ENOUGH, "no two images.*train split.*simclr"),
        (ENOUGH, [0], "validation split.*2 images, got 1"),
        (ENOUGH, [0, 1], "no two images.*validation split"),
        ([0, 0, 0, 0, 0], ENOUGH, "train split.*5 items.*one label"),
    ],
)
def test_splits_in_which_nothing_can_be_learned_or_found_are_refused(
    train: list[int], validation: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_splits(Splits(images(train), images(validation), images(ENOUGH)))


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize("is_query", [True, False])
def test_splits_without_queries_or_a_gallery_are_refused(name: str, is_query: bool) -> None:
    parts = {part: images(ENOUGH) for part in ("train", "validation", "test")}
    parts["train"].is_query = torch.tensor([True] * len(ENOUGH))
    parts[name].is_query = torch.tensor([is_query] * len(ENOUGH))
    message = f"{name} split.*gallery, got {6 * is_query} queries among 6"
    with pytest.raises(ValueError, match=message):
        check_splits(Splits(**parts))
    parts[name].is_query[0] = not is_query
    check_splits(Splits(**parts))


def texts(labels: list[int]) -> Texts:
    return Texts([f"text {number}" for number in range(len(labels))], torch.tensor(labels), classes=tuple("abcdefgh"))


def test_texts_that_match_no_other_are_for_runs_that_learn_nothing_of_matches() -> None:
    once = Splits(texts([0, 1, 2, 3, 4]), texts([5, 6]), texts([7, 0]))
    with pytest.raises(
        ValueError,
        match="no two texts.*train split.*question and answer.*: lam run texts knn_distance --network.head=identity",
    ):
        check_splits(once)
    with pytest.warns(UserWarning, match="no two texts.*train, validation, test split"):
        check_splits(once, learns=False)
    with pytest.warns(UserWarning, match="share a label: .*--folder FILE` "):
        check_splits(once, learns=False)
    with pytest.warns(UserWarning, match="no two texts.*test split"):
        check_splits(Splits(texts(ENOUGH), texts(ENOUGH), texts([7, 0])), learns=False)


def test_texts_that_a_gallery_could_not_keep_are_refused() -> None:
    labels, page = torch.zeros(2, dtype=torch.int64), {"page": 17_000 * "a"}
    check_texts(images(ENOUGH))
    check_texts(Texts(["a", "b"], labels, metadata=[{}, {"page": "3"}]))
    with pytest.raises(ValueError, match=r"texts 1: metadata.*170\d\d bytes"):
        check_texts(Texts(["a", "b"], labels, metadata=[{}, page]))


def test_splits_that_serve_pass() -> None:
    check_splits(Splits(images(ENOUGH), images(ENOUGH), images(ENOUGH)))


def test_a_file_of_a_class_set_aside_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for label in "abcd":
        (tmp_path / label).mkdir()
        for number in range(5):
            Image.new("L", (4, 4)).save(tmp_path / label / f"{number}.png")
    data = DataConfig("folder", root=str(tmp_path), options={"preprocessing": {"size": 4}}, strangers=0.25)
    strangers = load_data(data)[0].strangers
    assert strangers is not None
    assert check_files([strangers], progress=False) == ({}, {})
    strangers.files[-1].write_bytes(b"milk, bread")
    ((path, reason),) = check_files([strangers], progress=False)[1].items()
    assert path == strangers.files[-1]
    assert "not an image; " in reason


def test_a_hint_is_a_setting_of_the_run(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"needs a root: .* \(in a run: --data.root=DIR\)"):
        load_data(DataConfig("folder"))
    with pytest.raises(MissingDataError, match=r"--data.options='\{download: true\}'"):
        load_data(DataConfig("fashionmnist", root=str(tmp_path)))
    (tmp_path / "places.csv").write_text("path,x,y\n" + "".join(f"{i}.png,{i},0\n" for i in range(8)))
    with pytest.raises(MissingDataError, match="--allow-missing"):
        load_data(DataConfig("places", root=str(tmp_path)))


def test_a_gallery_is_what_the_data_set_says_or_the_run() -> None:
    for gallery, expected in ((None, "classes"), ("identities", "identities")):
        splits, _ = load_data(DataConfig("digits", strangers=0.2, limit=20, gallery=gallery))
        assert splits.gallery == expected
        assert list(splits.parts()) == ["train", "validation", "test", "strangers"]


def test_validation_answers_within_the_distance_of_an_answer() -> None:
    class Places(TensorImages):
        @property
        def targets(self) -> torch.Tensor:
            return torch.tensor([[0.0, 0.0], [20.0, 0.0], [900.0, 0.0], [920.0, 0.0]])

    pixels = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]).view(4, 1, 1, 2)
    places, relation = Places(pixels, torch.zeros(4, dtype=torch.int64)), Relation(positive_within=10.0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2, bias=False))
    torch.nn.init.eye_(cast(torch.nn.Linear, network[1]).weight)
    for within, expected in ((10.0, 0.0), (25.0, 1.0)):
        plan = Plan(load_config("digits laplace_posthoc", [f"--places.relevant_within={within}"]))
        assert plan.recall_at_1(network, places, relation) == expected
