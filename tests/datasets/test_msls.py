"""Mapillary Street-Level Sequences in its layout: cities, roles, positions, images left out and missing files."""

import math

import pytest
import torch

from lam.datasets import MissingDataError, load
from lam.datasets.msls import TEST, TRAIN, UNPUBLISHED, VALIDATION
from tests.datasets import layouts

CITIES = {"train_cities": ["boston", "goa"], "validation_cities": ["amman"], "test_cities": ["cph", "sf"]}
OPTIONS = {**CITIES, "preprocessing": {"crop": 8}}


@pytest.fixture
def root(tmp_path):
    return layouts.msls(tmp_path, [city for part in CITIES.values() for city in part])


def keys(images) -> list[str]:
    return [path.stem for path in images.paths]


def test_cities_are_in_one_part_each():
    assert (len(TRAIN) + len(VALIDATION), len(TEST), len(UNPUBLISHED)) == (22, 2, 6)
    assert len({*TRAIN, *VALIDATION, *TEST, *UNPUBLISHED}) == 30


def test_parts_are_cities_with_queries_and_a_database(root):
    parts = load("msls", root=root, **OPTIONS)
    assert keys(parts.train) == [f"{city}_{role}{i}" for city in ("boston", "goa") for role in "qd" for i in range(5)]
    assert parts.train.is_query.tolist() == ([True] * 5 + [False] * 5) * 2
    assert parts.train.labels.tolist() == [0] * 10 + [1] * 10
    assert parts.train.classes == parts.test.classes == ("boston", "goa", "amman", "cph", "sf")
    assert {"_".join(key.split("_")[:1]) for key in keys(parts.validation)} == {"amman"}
    assert parts.test.labels.unique().tolist() == [3, 4]
    assert parts.train.angles is None
    assert parts.gallery == "identities"


def test_positions_are_those_of_the_city(root):
    train = load("msls", root=root, **OPTIONS).train
    for key, position, label in zip(keys(train), train.positions.tolist(), train.labels.tolist(), strict=True):
        number, shift = int(key[-1]), 3 if "_d" in key else 0
        assert position == [5e5 + 8 * number + shift, 6e6 + label, label * 1e7]


def test_panoramas_are_left_out_and_subtasks_are_for_evaluation(root):
    parts = load("msls", root=root, **OPTIONS)
    assert not any(key.endswith("5") for part in (parts.train, parts.validation, parts.test) for key in keys(part))
    assert keys(parts.validation) == [f"amman_{role}{i}" for role in "qd" for i in range(1, 5)]
    assert "cph_q0" not in keys(parts.test)
    with pytest.raises(ValueError, match="'msls'.*no items"):
        load("msls", root=root, subtask="n2d", **OPTIONS)


def test_angles_on_request(root):
    train = load("msls", root=root, angles=True, **OPTIONS).train
    expected = [math.nan if key.endswith("1") else 30.5 * int(key[-1]) for key in keys(train)]
    torch.testing.assert_close(train.angles, torch.tensor(expected, dtype=torch.float64), equal_nan=True)
    assert train.targets.shape == (20, 4)


def test_missing_files_are_named_with_the_way_to_get_them(root):
    (root / "train_val" / "goa" / "query" / "raw.csv").unlink()
    (root / "train_val" / "cph" / "database" / "subtask_index.csv").unlink()
    (root / "train_val" / "boston" / "query" / "subtask_index.csv").unlink()  # not needed in training
    with pytest.raises(MissingDataError) as caught:
        load("msls", root=root, **OPTIONS)
    message = str(caught.value)
    top = root / "train_val"
    assert f"missing:\n  {top}/goa/query/raw.csv\n  {top}/cph/database/subtask_index.csv\nUnpack" in message
    assert "https://www.mapillary.com/dataset/places" in message
    with pytest.raises(MissingDataError, match=r"train_val/trondheim/query/postprocessed\.csv"):
        load("msls", root=root)


def test_images_that_do_not_exist(root):
    (root / "train_val" / "goa" / "query" / "images" / "goa_q2.jpg").unlink()
    (root / "train_val" / "goa" / "query" / "images" / "goa_q5.jpg").unlink()  # a panorama
    message = r"goa/query/postprocessed\.csv.*1 of 5 images.*goa_q2\.jpg; get"
    with pytest.raises(MissingDataError, match=message):
        load("msls", root=root, **OPTIONS)
    with pytest.warns(UserWarning, match="names 1 of 5"):
        train = load("msls", root=root, allow_missing=True, **OPTIONS).train
    assert len(train) == 19
    assert "goa_q2" not in keys(train)
    assert train.positions[keys(train).index("goa_q3")].tolist() == [5e5 + 24, 6e6 + 1, 1e7]


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("postprocessed.csv", "500016.0", "here", r"easting must be numbers, got 'here' in line 4 \(1 such line\)"),
        ("postprocessed.csv", "northing", "north", "has no column northing; it has"),
        ("raw.csv", "goa_q4", "goa_q9", "lacks 1 of 6 images, the first goa_q4"),
        ("raw.csv", "True", "yes", "pano.*True, False, 1, 0.*'yes' in line 2"),
    ],
)
def test_tables_that_are_wrong(root, file, old, new, message):
    path = root / "train_val" / "goa" / "query" / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"goa/query/{file}.*{message}"):
        load("msls", root=root, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test_cities": ["miami", "cph"]}, "test_cities: .*miami"),
        ({"test_cities": ["goa"]}, "one split.*goa"),
        ({"validation_cities": []}, r"validation_cities.*\[\]"),
        ({"train_cities": "goa"}, "train_cities.*'goa'"),
    ],
)
def test_cities_that_cannot_be(root, change, message):
    with pytest.raises(ValueError, match=message):
        load("msls", root=root, **{**OPTIONS, **change})


@pytest.mark.usefixtures("as_in_production")
def test_subtasks_that_are_none(root):
    with pytest.raises(ValueError, match="subtask.*all, s2w, w2s, o2n, n2o, d2n, n2d.*'x2y'"):
        load("msls", root=root, subtask="x2y", **OPTIONS)
