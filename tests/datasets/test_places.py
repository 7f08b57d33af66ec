"""Places: positions in metres that keep areas apart, splits with different places, and errors."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from lam.datasets import MissingDataError, PlaceImages, load
from lam.datasets.places import earth_centred
from lam.inputs.preprocessing import Preprocessing
from lam.pairs.relation import Relation
from tests.datasets import layouts

SMALL = {"preprocessing": {"crop": 8}}


def street(n: int = 20, **more) -> list[dict]:
    """One image every 5 m to the east, with further columns that are constant or functions of the row."""
    rows = [{"path": f"images/{i}.png", "x": 5.0 * i, "y": 7.0} for i in range(n)]
    return [{**row, **{k: v(i) if callable(v) else v for k, v in more.items()}} for i, row in enumerate(rows)]


def numbers(images: PlaceImages) -> list[int]:
    return [int(path.stem) for path in images.paths]


class TestParts:
    def test_without_a_column_they_are_strips_along_the_longer_side(self, tmp_path):
        parts = load("places", root=layouts.places(tmp_path, street()[::-1]), validation=0.2, test=0.3, **SMALL)
        assert parts.gallery == "identities"
        assert sorted(numbers(parts.train)) == list(range(10))
        assert sorted(numbers(parts.validation)) == list(range(10, 14))
        assert sorted(numbers(parts.test)) == list(range(14, 20))

    def test_every_area_is_cut(self, tmp_path):
        rows = street(20, city=lambda i: "north" if i < 10 else "south")
        parts = load("places", root=layouts.places(tmp_path, rows), **SMALL)
        assert parts.train.classes == ("north", "south")
        for part, count in ((parts.train, 6), (parts.validation, 2), (parts.test, 2)):
            assert torch.bincount(part.labels).tolist() == [count, count]

    def test_the_column_decides(self, tmp_path):
        rows = street(9, split=lambda i: ("train", "val", "TEST")[i % 3])
        parts = load("places", root=layouts.places(tmp_path, rows), **SMALL)
        assert numbers(parts.train) == [0, 3, 6]
        assert numbers(parts.validation) == [1, 4, 7]
        assert numbers(parts.test) == [2, 5, 8]

    def test_paths_of_windows_are_read(self, tmp_path):
        root = layouts.places(tmp_path, street())
        table = root / "places.csv"
        table.write_text(table.read_text(encoding="utf-8").replace("images/", "images\\"), encoding="utf-8")
        assert sorted(numbers(load("places", root=root, **SMALL).test)) == [16, 17, 18, 19]

    def test_another_file_and_the_paper_s_size(self, tmp_path):
        layouts.places(tmp_path, street(), name="mine.csv")
        test = load("places", root=tmp_path, csv="mine.csv").test
        assert test.preprocessing == Preprocessing.imagenet(227)
        assert (test.name, test.classes, test.is_query, test.angles) == ("places", ("everywhere",), None, None)


class TestPositions:
    @pytest.mark.parametrize("names", [("x", "y"), ("easting", "northing")])
    def test_metres_are_taken_as_they_are(self, tmp_path, names):
        rows = [{"path": f"{i}.png", names[0]: 6e6 + 0.125 * i, names[1]: -i, "city": "ba"[i % 2]} for i in range(12)]
        train = load("places", root=layouts.places(tmp_path, rows), **SMALL).train
        assert train.positions.dtype == torch.float64
        for i, position, label in zip(numbers(train), train.positions.tolist(), train.labels.tolist(), strict=True):
            assert train.classes[label] == "ba"[i % 2]
            assert position == [6e6 + 0.125 * i, -i, label * 1e7]

    def test_areas_are_never_near(self, tmp_path):
        rows = [{**row, "x": 0.0, "area": i % 2} for i, row in enumerate(street(40))]
        train = load("places", root=layouts.places(tmp_path, rows), **SMALL).train
        pairs = Relation("batch", 10.0, 25.0).pairs(train.targets)
        same = train.labels[:, None] == train.labels[None]
        assert torch.equal(pairs.positive, same & ~torch.eye(len(train), dtype=torch.bool))
        assert torch.equal(pairs.negative, ~same)

    def test_degrees_become_metres(self, tmp_path):
        rows = [{"path": f"{i}.png", "lat": 55.0 + i * 1e-4, "lon": 12.5} for i in range(10)]
        train = load("places", root=layouts.places(tmp_path, rows), **SMALL).train
        steps = train.positions.diff(dim=0).norm(dim=1)
        torch.testing.assert_close(steps, torch.full_like(steps, 11.132), rtol=0, atol=1e-3)  # 111.32 km a degree

    def test_a_preview_holds_the_position_as_in_the_table(self, tmp_path):
        rows = [{"path": f"{i}.png", "lat": 55.0 + i * 1e-4, "lon": 12.5} for i in range(10)]
        test = load("places", root=layouts.places(tmp_path, rows), **SMALL).test.subset([1])
        assert test.preview(0).metadata == {"lat": 55.0 + numbers(test)[0] * 1e-4, "lon": 12.5}

    def test_degrees_against_the_radii_of_curvature(self):
        a, e_square = 6378137.0, 0.00669437999014
        for latitude in (-89.0, -33.9, 0.0, 51.5, 78.2):
            w = math.sqrt(1 - e_square * math.sin(math.radians(latitude)) ** 2)
            north, east = a * (1 - e_square) / w**3, a / w * math.cos(math.radians(latitude))
            degrees = torch.tensor([[0.0, 0.0], [1e-4, 0.0], [0.0, 1e-4]], dtype=torch.float64)
            here, above, beside = earth_centred(degrees + torch.tensor([latitude, 179.99995], dtype=torch.float64))
            step = math.radians(1e-4)
            assert float((above - here).norm()) == pytest.approx(north * step, rel=2e-6)
            assert float((beside - here).norm()) == pytest.approx(east * step, rel=2e-6)


class TestItems:
    def test_targets_are_positions_and_last_an_angle(self, tmp_path):
        rows = street(20, angle=lambda i: "" if i == 3 else 20 * i, role=lambda i: ("query", "Database")[i % 2])
        root = layouts.places(tmp_path, rows)
        plain, turned = (load("places", root=root, angles=angles, **SMALL).train for angles in (False, True))
        assert torch.equal(plain.targets, plain.positions)
        assert torch.equal(turned.targets[:, :-1], plain.positions)
        torch.testing.assert_close(turned.targets[:, -1], turned.angles, rtol=0, atol=0, equal_nan=True)
        assert [i for i, angle in enumerate(turned.angles.tolist()) if math.isnan(angle)] == [3]
        assert turned.is_query.tolist() == [i % 2 == 0 for i in range(12)]
        for part in (plain, turned):
            images, targets = next(iter(DataLoader(part, batch_size=5)))
            assert images.shape == (5, 3, 8, 8)
            torch.testing.assert_close(targets, part.targets[:5], rtol=0, atol=0, equal_nan=True)

    def test_subsets_keep_everything(self, tmp_path):
        rows = street(20, angle=lambda i: i, area=lambda i: i % 2, role=lambda i: ("query", "database")[i % 2])
        train = load("places", root=layouts.places(tmp_path, rows), angles=True, **SMALL).train
        for name in ("labels", "positions", "angles", "is_query"):
            assert torch.equal(getattr(train.subset([4, 1]), name), getattr(train, name)[[4, 1]])

    @pytest.mark.parametrize("roles", [False, True])
    def test_limit_draws_places_with_their_matches(self, tmp_path, roles):
        role = {"role": lambda i: ("query", "database")[i % 2]} if roles else {}
        rows = street(200, **role)
        for i, row in enumerate(rows):
            row["x"] = 1000.0 * (i // 4) + i % 4  # four images a place
        train = load("places", root=layouts.places(tmp_path, rows), **SMALL).train
        part = train.limit(12, seed=1)
        near = torch.cdist(part.positions, part.positions) < 25
        if roles:
            has_match = (near & ~part.is_query[None])[part.is_query].any(1)
        else:
            has_match = near.sum(1) > 1
        assert has_match.all()
        assert len(part) == 12
        assert not near.all()
        assert torch.equal(part.positions, train.limit(12, seed=1).positions)
        assert not torch.equal(part.positions, train.limit(12, seed=2).positions)
        assert len(train.limit(1)) == 1
        assert len(train.limit(10**6)) == len(train)

    def test_a_limit_without_queries_or_database(self, tmp_path):
        train = load("places", root=layouts.places(tmp_path, street(30, role="query")), **SMALL).train
        assert len(train.limit(5)) == 5


class TestWrong:
    def test_missing_file(self, tmp_path):
        message = r"places: .*/places\.csv is missing: "
        with pytest.raises(MissingDataError, match=message):
            load("places", root=tmp_path)
        with pytest.raises(ValueError, match="needs a root"):
            load("places")

    @pytest.mark.parametrize("value", ["abc", "", "nan", "inf"])
    def test_positions_that_are_no_numbers(self, tmp_path, value):
        rows = street()
        rows[3]["y"] = rows[5]["y"] = value
        with pytest.raises(ValueError, match=rf"y must.*'{value}' in line 5 \(2.*: 5, 7\)"):
            load("places", root=layouts.places(tmp_path, rows))

    def test_images_that_do_not_exist(self, tmp_path):
        root = layouts.places(tmp_path, street())
        for i in (2, 3, 4, 5, 6, 7):
            (root / "images" / f"{i}.png").unlink()
        with pytest.raises(MissingDataError, match=r"places\.csv names 6 of 20 images .*6\.png, \.\.\."):
            load("places", root=root)
        with pytest.warns(UserWarning, match="names 6 of 20 images"):
            parts = load("places", root=root, allow_missing=True, **SMALL)
        assert numbers(parts.train) == [0, 1, 8, 9, 10, 11]

    @pytest.mark.parametrize("path", ["", "images"])
    def test_a_path_of_a_folder(self, tmp_path, path):
        rows = street()
        rows[3]["path"] = path
        layouts.table(layouts.places(tmp_path, street()) / "places.csv", rows)
        message = rf"places\.csv.*1 of 20 images.*{tmp_path / path}; "
        with pytest.raises(MissingDataError, match=message):
            load("places", root=tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"split": "holdout"}, "split.*train, .*validation, val, .* eval.*'holdout' in line 2"),
            ({"split": "train"}, "no image for validation.*column split"),
            ({"role": "gallery"}, "role.*query, database.*'gallery'.*line 2"),
            ({"area": lambda i: "a" * (i > 0)}, "area.*''.*line 2"),
            ({"path": "same.png"}, r"image once.*same\.png 20"),
            ({"angle": "east"}, r"angle must be numbers, got 'east' in line 2 \(20 such lines: 2, 3, 4, 5, 6, ...\)"),
            ({}, "has no column angle; leave out angles=True"),
        ],
    )
    def test_values_that_are_not_allowed(self, tmp_path, change, message):
        root = layouts.places(tmp_path, street(**change))
        with pytest.raises(ValueError, match=rf"places\.csv.*{message}"):
            load("places", root=root, angles="angle" in change or not change)

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ("image,x,y", "no column path.*image, x, y"),
            ("path,x,northing", "no positions.*x and y, .*path, x, northing"),
            ("path,x,y,z", "4 columns.*3.*line 2"),
        ],
    )
    def test_other_columns(self, tmp_path, header, message):
        layouts.lines(tmp_path / "places.csv", header, "a.png,1,2")
        with pytest.raises(ValueError, match=message):
            load("places", root=tmp_path)

    @pytest.mark.parametrize(
        ("place", "message"),
        [
            ((91, 0), "lat.*-90.*90 degrees.*'91'.*line 2"),
            ((0, -181), "lon.*-180.*180 degrees.*'-181'"),
            ((0, 0), "lat and lon.*0 in 1 rows.*line 2"),
        ],
    )
    def test_places_off_the_earth(self, tmp_path, place, message):
        layouts.lines(tmp_path / "places.csv", "path,lat,lon", f"a.png,{place[0]},{place[1]}")
        with pytest.raises(ValueError, match=message):
            load("places", root=tmp_path)

    def test_files_that_are_no_tables(self, tmp_path):
        layouts.lines(tmp_path / "places.csv", "path,x,y")
        with pytest.raises(ValueError, match=r"places\.csv names no image"):
            load("places", root=tmp_path)
        layouts.lines(tmp_path / "places.csv", "", "path,x,y,,", "", '"two\nlines.png",1,2,,', "a.png,1,here,,")
        with pytest.raises(ValueError, match="y must.*'here' in line 6"):
            load("places", root=tmp_path)
        layouts.lines(tmp_path / "places.csv", "path,x,y,x")
        with pytest.raises(ValueError, match="columns.*path, x, y, x"):
            load("places", root=tmp_path)
        (tmp_path / "places.csv").write_bytes(b"path,x,y\n\xff\xfe,1,2\n")
        with pytest.raises(ValueError, match=r"places\.csv.*UTF-8"):
            load("places", root=tmp_path)
        (tmp_path / "places.csv").write_bytes(b"")
        with pytest.raises(ValueError, match="no column path.*none"):
            load("places", root=tmp_path)

    @pytest.mark.parametrize(("validation", "test"), [(0.5, 0.5), (0.0, 0.2), (0.2, 1.0)])
    def test_fractions(self, tmp_path, validation, test):
        with pytest.raises(ValueError, match=r"\(0, 1\)|sum below 1"):
            load("places", root=layouts.places(tmp_path, street()), validation=validation, test=test)

    @pytest.mark.usefixtures("as_in_production")
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"positions": torch.zeros(3, 2)}, "positions.*2 labels.*3"),
            ({"angles": torch.zeros(3)}, "angles.*2 labels.*3"),
            ({"is_query": torch.ones(1).bool()}, "is_query.*2 labels.*1"),
            ({"positions": torch.zeros(2, 2).bool()}, r"positions.*\(N, X\).*torch.bool"),
            ({"positions": torch.tensor([[0.0, 1.0], [math.nan, 0.0]])}, r"must be finite, got \[nan, 0.0\] for .*b"),
            ({"angles": torch.tensor([math.nan, math.inf])}, "angles.*NaN.*got inf for .*b"),
        ],
    )  # fmt: skip
    def test_tensors_that_do_not_fit(self, tmp_path, change, message):
        arguments = {"positions": torch.zeros(2, 2)} | change
        with pytest.raises(ValueError, match=message):
            PlaceImages(
                [tmp_path / "a", tmp_path / "b"],
                torch.tensor([0, 0]),
                name="x",
                classes=("a",),
                preprocessing=Preprocessing(size=(8, 8)),
                **arguments,
            )
