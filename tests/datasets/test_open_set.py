"""Birds, cars and faces in generated layouts: no class is in two splits; errors name missing and wrong entries."""

import re
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch.utils.data import DataLoader

from lam.datasets import MissingDataError, load, load_ood
from lam.datasets.by_class import faces as lfw_splits
from lam.inputs.preprocessing import Preprocessing
from tests.datasets import layouts

SMALL = {"preprocessing": {"crop": 8}}
MAKE = {"cub200": layouts.cub200, "cars196": layouts.cars196}
TRAIN = {f"Ann_{i}": 1 + i % 3 for i in range(20)}
TEST = {f"Bob_{i}": 1 + i % 2 for i in range(6)}


def people(images) -> set[str]:
    return {images.classes[label] for label in images.labels.tolist()}


class TestClasses:
    @pytest.mark.parametrize("make", [layouts.cub200, layouts.cars196, layouts.cars196_kit])
    def test_the_last_half_is_tested_and_a_part_of_the_first_held_out(self, tmp_path, make):
        name = make.__name__.removesuffix("_kit")
        parts = load(name, root=make(tmp_path), validation=0.25, **SMALL)
        assert sorted(parts.test.labels.tolist()) == [label for label in range(4, 8) for _ in range(4)]
        together = parts.train.labels.unique().tolist() + parts.validation.labels.unique().tolist()
        assert sorted(together) == [0, 1, 2, 3]
        assert (len(parts.train), len(parts.validation)) == (12, 4)
        for part in (parts.train, parts.validation, parts.test):
            assert (part.name, part.shape, len(part.classes)) == (name, (3, 8, 8), 8)
        images, labels = next(iter(DataLoader(parts.train, batch_size=5)))
        assert (images.shape, labels.dtype) == ((5, 3, 8, 8), torch.int64)
        assert torch.equal(labels, parts.train.targets[:5])

    def test_labels_belong_to_their_images(self, tmp_path):
        birds = load("cub200", root=layouts.cub200(tmp_path / "birds", each=3), **SMALL)
        cars = load("cars196", root=layouts.cars196(tmp_path / "cars", each=3), **SMALL)
        for part in (birds.train, birds.validation, birds.test):
            assert [path.parent.name for path in part.paths] == [part.classes[label] for label in part.labels.tolist()]
        for part in (cars.train, cars.validation, cars.test):
            assert [(int(path.stem) - 1) // 3 for path in part.paths] == part.labels.tolist()

    def test_the_paper_s_preprocessing_is_the_default(self, tmp_path):
        assert load("cub200", root=layouts.cub200(tmp_path)).test.preprocessing == Preprocessing.imagenet(227)
        fields = {"size": [16, 16]}
        parts = load("cub200", root=tmp_path / "CUB_200_2011", preprocessing=fields)
        assert parts.test.preprocessing == Preprocessing.of({"size": [16, 16]})

    def test_any_of_them_is_out_of_the_distribution_of_another(self, tmp_path):
        birds = load("cub200", root=layouts.cub200(tmp_path / "birds"), **SMALL).test
        cars = load_ood("cars196", root=layouts.cars196_kit(tmp_path / "cars" / "stanford_cars").parent, like=birds)
        assert (cars.name, cars.preprocessing, len(cars)) == ("cars196", birds.preprocessing, 16)
        assert cars.labels.unique().tolist() == [4, 5, 6, 7]
        people = load("lfw", root=layouts.lfw(tmp_path / "faces", TRAIN, TEST), **SMALL)
        assert people.gallery == "identities"
        faces = people.test
        assert load_ood("cub200", root=tmp_path / "birds", like=faces).labels.tolist() == birds.labels.tolist()
        small = load("svhn", root=layouts.svhn(tmp_path / "svhn"), validation=10).test
        assert load_ood("lfw", root=tmp_path / "faces", like=small).shape == (3, 32, 32)

    def test_limit_keeps_images_that_have_a_match(self, tmp_path):
        train = load("cub200", root=layouts.cub200(tmp_path, n_classes=40, each=4), **SMALL).train
        part = train.limit(12)
        assert torch.bincount(part.labels).max() == 4
        assert len(part.labels.unique()) == 3
        assert torch.equal(part.labels, train.limit(12, seed=0).labels)

    @pytest.mark.parametrize("validation", [0.0, 1.0])
    def test_bad_fractions(self, tmp_path, validation):
        with pytest.raises(ValueError, match=r"validation.*\(0, 1\)"):
            load("cub200", root=layouts.cub200(tmp_path), validation=validation)

    def test_too_few_classes(self, tmp_path):
        with pytest.raises(ValueError, match="cub200.*two classes"):
            load("cub200", root=layouts.cub200(tmp_path, n_classes=3))


class TestMissing:
    @pytest.mark.parametrize(
        ("name", "paths"),
        [
            ("cub200", ["images.txt", "image_class_labels.txt", "classes.txt", "images"]),
            ("cars196", ["devkit/cars_meta.mat", "devkit/cars_train_annos.mat", "cars_test_annos_withlabels.mat",
                         "cars_train", "cars_test"]),
            ("lfw", ["lfw-deepfunneled or lfw_funneled or lfw"]),
        ],
    )  # fmt: skip
    def test_every_path_is_named_with_the_way_to_get_it(self, tmp_path, name, paths):
        with pytest.raises(MissingDataError) as caught:
            load(name, root=tmp_path)
        for path in paths:
            assert f"\n  {tmp_path}/{path}\n" in str(caught.value)
        assert "http" in str(caught.value)

    @pytest.mark.parametrize("name", MAKE)
    def test_annotated_images_that_do_not_exist(self, tmp_path, name):
        root = MAKE[name](tmp_path)
        lost = sorted(root.rglob("*.jpg"))[3:10]
        for path in lost:
            path.unlink()
        message = rf"7 of 32 images.*{lost[0]}, .*{lost[4]}, \.\.\.; "
        with pytest.raises(MissingDataError, match=message) as caught:
            load(name, root=root)
        assert str(lost[5]) not in str(caught.value)
        with pytest.warns(UserWarning, match="7 of 32 images.*left out"):
            parts = load(name, root=root, allow_missing=True, **SMALL)
        kept = [path for part in (parts.train, parts.validation, parts.test) for path in part.paths]
        assert sorted(kept) == sorted(root.rglob("*.jpg"))

    @pytest.mark.parametrize("name", MAKE)
    def test_folders_and_links_to_nothing_are_no_images(self, tmp_path, name):
        root = MAKE[name](tmp_path)
        linked, folder = sorted(root.rglob("*.jpg"))[:2]
        linked.unlink()
        linked.symlink_to(tmp_path / "nothing.jpg")
        folder.unlink()
        folder.mkdir()
        with pytest.raises(MissingDataError, match=f"2 of 32 images.*{linked}, {folder}; "):
            load(name, root=root)
        with pytest.warns(UserWarning, match="2 of 32 images.*left out"):
            parts = load(name, root=root, allow_missing=True, **SMALL)
        kept = {path for part in parts.parts().values() for path in part.files}
        assert len(kept) == 30
        assert kept.isdisjoint({linked, folder})

    def test_links_to_images_are_images(self, tmp_path):
        root = layouts.cub200(tmp_path / "birds")
        first = min(root.rglob("*.jpg"))
        first.rename(tmp_path / "elsewhere.jpg")
        first.symlink_to(tmp_path / "elsewhere.jpg")
        assert sum(map(len, load("cub200", root=root, **SMALL).parts().values())) == 32

    def test_no_image_at_all(self, tmp_path):
        root = layouts.cub200(tmp_path)
        for path in root.rglob("*.jpg"):
            path.unlink()
        with (
            pytest.warns(UserWarning, match="names 32 of 32"),
            pytest.raises(ValueError, match="'cub200'.*no items"),
        ):
            load("cub200", root=root, allow_missing=True)


class TestBadAnnotations:
    def test_lines_that_say_nothing(self, tmp_path):
        folder = layouts.cub200(tmp_path) / "CUB_200_2011"
        layouts.lines(folder / "images.txt", "1 001.Bird_1/Bird_0000_001.jpg", "2")
        with pytest.raises(ValueError, match=r"images\.txt.*number once.*'2' in line 2"):
            load("cub200", root=tmp_path)

    def test_numbers_that_are_given_twice(self, tmp_path):
        folder = layouts.cub200(tmp_path) / "CUB_200_2011"
        layouts.lines(folder / "classes.txt", "1 one", "1 two")
        with pytest.raises(ValueError, match=r"classes\.txt.*number once.*'1 two' in line 2"):
            load("cub200", root=tmp_path)

    @pytest.mark.parametrize(("content", "got"), [(("1 1",), "None for image 2"), (("1 1", "2 9"), "9 for image 2")])
    def test_images_without_a_class(self, tmp_path, content, got):
        layouts.lines(layouts.cub200(tmp_path) / "CUB_200_2011" / "image_class_labels.txt", *content)
        with pytest.raises(ValueError, match=f"images.txt.*classes.txt.*{got}"):
            load("cub200", root=tmp_path)

    def test_structs_without_a_field(self, tmp_path):
        layouts.cars196(tmp_path)
        rows, names = [("car_ims/000001.jpg", 1)], np.array([["A", "B"]], dtype=object)
        fields = ("relative_im_path", "test")
        savemat(tmp_path / "cars_annos.mat", {"annotations": layouts.structs(rows, fields), "class_names": names})
        with pytest.raises(ValueError, match=r"cars_annos\.mat: .* no field class; they have relative_im_path"):
            load("cars196", root=tmp_path)
        savemat(tmp_path / "cars_annos.mat", {"annotations": np.ones(3), "class_names": names})
        with pytest.raises(ValueError, match="no field relative_im_path, class"):
            load("cars196", root=tmp_path)

    @pytest.mark.parametrize("label", [0, 3, 1.5, np.nan, "A", np.zeros(0), np.array([1, 2])])
    def test_classes_that_are_none(self, tmp_path, label):
        names = np.array([["A", "B"]], dtype=object)
        annotations = layouts.structs([("x.jpg", label)], ("relative_im_path", "class"))
        savemat(tmp_path / "cars_annos.mat", {"annotations": annotations, "class_names": names})
        message = rf"cars_annos\.mat: .*1 to 2.*got {re.escape(str(label))}; "
        with pytest.raises(ValueError, match=message):
            load("cars196", root=tmp_path)


class TestEncodings:
    @pytest.fixture(params=["cub200", "lfw"])
    def published(self, tmp_path, request):
        """The name of a data set, its folder, and its lists, which are text files."""
        layouts.cub200(tmp_path) if request.param == "cub200" else layouts.lfw(tmp_path, TRAIN, TEST)
        return request.param, tmp_path, sorted(tmp_path.rglob("*.txt"))

    def test_a_byte_order_mark_and_lines_of_windows_are_read(self, published):
        name, root, lists = published
        plain = load(name, root=root, **SMALL)
        for path in lists:
            path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
        marked = load(name, root=root, **SMALL)
        assert (marked.test.classes, marked.test.files) == (plain.test.classes, plain.test.files)

    @pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
    def test_a_list_in_another_encoding_is_named(self, published, encoding):
        name, root, (*_, last) = published
        last.write_text(last.read_text(encoding="utf-8") + "é", encoding=encoding)
        with pytest.raises(ValueError, match=f"{last}.*UTF-8"):
            load(name, root=root)


class TestFaces:
    @pytest.mark.parametrize("place", ["lfw-deepfunneled", "lfw", "lfw_funneled", "lfw-py/lfw", "lfw/lfw"])
    def test_the_published_split_of_people(self, tmp_path, place):
        layouts.lfw(tmp_path, TRAIN, TEST)
        (tmp_path / "lfw-deepfunneled").rename(tmp_path / "moving")
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / "moving").rename(tmp_path / place)
        parts = load("lfw", root=tmp_path, **SMALL) if place != "lfw-py/lfw" else None
        if parts is None:
            for file in tmp_path.glob("*.txt"):
                file.rename(tmp_path / "lfw-py" / file.name)
            parts = load("lfw", root=tmp_path, **SMALL)
        assert people(parts.test) == TEST.keys()
        assert people(parts.train) | people(parts.validation) == TRAIN.keys()
        assert len(people(parts.validation)) == 2
        assert not people(parts.train) & people(parts.validation)
        assert len(parts.test) == sum(TEST.values())
        assert len(parts.train) + len(parts.validation) == sum(TRAIN.values())
        counts = Counter(parts.test.classes[label] for label in parts.test.labels.tolist())
        assert counts == TEST

    def test_without_lists_the_people_are_drawn(self, tmp_path):
        root = layouts.lfw(tmp_path, TRAIN, TEST, lists=False)
        parts = [lfw_splits(root=root, seed=seed, test=0.5, **SMALL) for seed in (0, 0, 1)]
        assert people(parts[0].test) == people(parts[1].test) != people(parts[2].test)
        assert len(people(parts[0].test)) == 13
        assert people(parts[0].test).isdisjoint(people(parts[0].train) | people(parts[0].validation))
        itself = load("lfw", root=root / "lfw-deepfunneled", test=0.5, **SMALL)
        assert people(itself.test) == people(parts[0].test)

    def test_without_lists_upper_case_counts_and_hidden_files_do_not(self, tmp_path):
        root = layouts.lfw(tmp_path, TRAIN, TEST, lists=False)
        plain = load("lfw", root=root, **SMALL)
        for path in sorted(root.rglob("*.jpg")):
            (path.parent / f"._{path.name}").write_bytes(b"of another system")
            path.rename(path.with_suffix(".JPG"))
        (root / "lfw-deepfunneled" / ".cache").mkdir()
        upper = load("lfw", root=root, **SMALL)
        for part, other in zip(plain.parts().values(), upper.parts().values(), strict=True):
            assert [path.stem for path in part.files] == [path.stem for path in other.files]
            assert part.classes == other.classes

    def test_one_list_needs_the_other(self, tmp_path):
        layouts.lfw(tmp_path, TRAIN, TEST)
        (tmp_path / "peopleDevTrain.txt").unlink()
        with pytest.raises(MissingDataError, match=r"lfw: these are missing:\n  .*/peopleDevTrain\.txt\n"):
            load("lfw", root=tmp_path)

    def test_listed_images_that_do_not_exist(self, tmp_path):
        layouts.lfw(tmp_path, TRAIN, TEST)
        layouts.lines(tmp_path / "peopleDevTest.txt", "1", "Bob_0\t3")
        message = r"2 of \d+ images.*Bob_0_0002\.jpg, .*Bob_0_0003\.jpg"
        with pytest.raises(MissingDataError, match=message):
            load("lfw", root=tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (("2", "Bob_0\t1"), "first line.*1, got '2'"),
            (("1", "Bob_0 1"), "tab and a count.*'Bob_0 1' in line 2"),
            (("2", "Bob_0\t1", "Bob_0\t1"), r"got 'Bob_0\\t1' in line 3"),
            (("1", "Bob_0\tmany"), r"got 'Bob_0\\tmany' in line 2"),
            ((), r"how many people follow, 0, got ''"),
            (("1", "Ann_0\t1"), r"must share no person, got Ann_0 in both"),
        ],
    )
    def test_lists_that_are_none(self, tmp_path, content, message):
        layouts.lfw(tmp_path, TRAIN, TEST)
        layouts.lines(tmp_path / "peopleDevTest.txt", *content)
        with pytest.raises(ValueError, match=rf"peopleDevTest\.txt .*{message}"):
            load("lfw", root=tmp_path)

    def test_a_folder_without_people(self, tmp_path):
        (tmp_path / "lfw").mkdir()
        with pytest.raises(MissingDataError, match=r"lfw.*<Person_Name>/<Person_Name>_0001\.jpg"):
            load("lfw", root=tmp_path)
