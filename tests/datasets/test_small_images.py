"""MNIST, FashionMNIST, CIFAR-10 and SVHN from files in their true formats; errors name missing and damaged files."""

import gzip
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat
from torch.utils.data import DataLoader

from lam.datasets import MissingDataError, TensorImages, load
from lam.datasets.small_images import SmallImages, cifar10, fashionmnist, mnist, read_idx, svhn
from tests.datasets import layouts

MAKE = {"mnist": layouts.mnist, "fashionmnist": layouts.mnist, "cifar10": layouts.cifar10, "svhn": layouts.svhn}
SETS = {"mnist": mnist, "fashionmnist": fashionmnist, "cifar10": cifar10, "svhn": svhn}
SIZES = {"mnist": (60, 20), "fashionmnist": (60, 20), "cifar10": (100, 30), "svhn": (40, 20)}
FIRST = {
    **{"mnist": "train-images-idx3-ubyte", "fashionmnist": "train-images-idx3-ubyte"},
    **{"cifar10": "data_batch_1.bin", "svhn": "train_32x32.mat"},
}


def with_system_root(folder: Path) -> SmallImages:
    """FashionMNIST, as if a system package installed its files into this folder."""
    return replace(fashionmnist, source=replace(fashionmnist.source, system_root=str(folder)))


def positions(images: TensorImages) -> list[int]:
    return (images.images[:, 0, 0, 1] * 255).round().int().tolist()


@pytest.mark.parametrize("name", SETS)
class TestEverySet:
    def test_validation_is_carved_out_of_training(self, tmp_path, name):
        parts = load(name, root=MAKE[name](tmp_path), validation=10)
        n_train, n_test = SIZES[name]
        assert [len(part) for part in parts.parts().values()] == [n_train - 10, 10, n_test]
        in_files = list(range(20)) * 5 if name == "cifar10" else list(range(n_train))
        assert sorted(positions(parts.train) + positions(parts.validation)) == sorted(in_files)
        assert positions(parts.test) == list(range(n_test))
        assert torch.bincount(parts.validation.labels).tolist() == [1] * 10
        for part in parts.parts().values():
            assert [position % 10 for position in positions(part)] == part.labels.tolist()
            assert (part.name, len(part.classes)) == (name, 10)
            assert part.shape == ((3, 32, 32) if name in ("cifar10", "svhn") else (1, 28, 28))

    def test_validation_leaves_training_images(self, tmp_path, name):
        root, n_train = MAKE[name](tmp_path), SIZES[name][0]
        for validation in (0, n_train):
            with pytest.raises(ValueError, match=f"from 1 to {n_train - 1} images, got {validation}"):
                load(name, root=root, validation=validation)

    def test_missing_files_are_named_with_the_way_to_get_them(self, tmp_path, monkeypatch, name):
        with pytest.raises(MissingDataError, match=rf"{name}: these are missing:\n  .*{FIRST[name]}") as caught:
            load(name, root=tmp_path)
        assert "download=True" in str(caught.value)
        monkeypatch.delenv("LAM_DATA", raising=False)
        with pytest.raises(MissingDataError, match=f"{name} needs root=<folder>, or LAM_DATA"):
            replace(SETS[name], source=replace(SETS[name].source, system_root=None)).test_images()

    def test_the_folder_of_the_environment_is_the_default(self, tmp_path, monkeypatch, name):
        MAKE[name](tmp_path / name)
        monkeypatch.setenv("LAM_DATA", str(tmp_path))
        assert len(load(name, validation=10).test) == SIZES[name][1]


class TestPlaces:
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    @pytest.mark.parametrize("inside", [".", "MNIST/raw"])
    def test_files_may_be_compressed_and_in_the_layout_of_torchvision(self, tmp_path, suffix, inside):
        layouts.mnist(tmp_path / inside, suffix=suffix)
        parts = load("mnist", root=tmp_path, validation=20)
        assert parts.train.images[0, 0, 1, 1] == 1
        torch.testing.assert_close(parts.test.images[0, 0, 1, 1], torch.tensor(100 / 255))

    def test_colours_are_in_their_channels(self, tmp_path):
        inside = layouts.cifar10(tmp_path) / "cifar-10-batches-bin"
        for part in load("cifar10", root=inside, validation=20).parts().values():
            assert part.classes[3] == "cat"
            assert part.images[:, 0].max() < 0.2
            assert (part.images[:, 1:] == 1).all()

    def test_the_test_part_alone_will_do(self, tmp_path):
        (layouts.svhn(tmp_path) / "train_32x32.mat").unlink()
        assert svhn.test_images(root=tmp_path).labels.tolist() == [position % 10 for position in range(20)]

    def test_every_missing_file_is_named(self, tmp_path):
        folder = layouts.cifar10(tmp_path) / "cifar-10-batches-bin"
        for number in (2, 5):
            (folder / f"data_batch_{number}.bin").unlink()
        with pytest.raises(MissingDataError) as caught:
            load("cifar10", root=tmp_path)
        message = str(caught.value)
        assert f"\n  {folder}/data_batch_2.bin\n  {folder}/data_batch_5.bin\nLooked in {tmp_path}, {folder}." in message
        assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in message

    def test_missing_files_may_be_compressed(self, tmp_path):
        layouts.mnist(tmp_path)
        for name in ("t10k-labels", "train-images"):
            next(tmp_path.glob(f"{name}*")).unlink()
        with pytest.raises(MissingDataError) as caught:
            load("fashionmnist", root=tmp_path)
        message = str(caught.value)
        assert f"{tmp_path}/t10k-labels-idx1-ubyte[.gz]" in message
        assert f"{tmp_path}/train-images-idx3-ubyte[.gz]" in message
        assert "t10k-images" not in message
        assert "apt-get install dataset-fashion-mnist" in message

    def test_the_first_place_that_has_the_files_is_taken(self, tmp_path, monkeypatch):
        system = with_system_root(layouts.mnist(tmp_path / "system", n_test=10))
        layouts.mnist(tmp_path / "mine" / "mnist")
        monkeypatch.setenv("LAM_DATA", str(tmp_path / "mine"))
        assert len(system.test_images()) == 10
        layouts.mnist(tmp_path / "mine" / "fashionmnist", n_test=20)
        assert len(system.test_images()) == 20
        (tmp_path / "mine" / "fashionmnist" / "train-labels-idx1-ubyte").unlink()
        assert len(system.test_images()) == 10

    def test_every_place_looked_in_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("LAM_DATA", str(tmp_path / "mine"))
        with pytest.raises(MissingDataError) as caught:
            with_system_root(tmp_path / "system").splits()
        mine = tmp_path / "mine" / "fashionmnist"
        places = f"{mine}, {mine}/FashionMNIST/raw, {tmp_path}/system, {tmp_path}/system/FashionMNIST/raw"
        assert f"Looked in {places}." in str(caught.value)
        assert "$LAM_DATA/fashionmnist" in str(caught.value)

    def test_the_pickled_version_is_not_read(self, tmp_path):
        (tmp_path / "cifar-10-batches-py").mkdir()
        (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        with pytest.raises(MissingDataError, match="pickled Python version"):
            load("cifar10", root=tmp_path)


class TestReadIdx:
    @pytest.mark.parametrize("name", ["a-idx", "a-idx.gz"])
    @pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 28, 28), (1 << 12, 300)])
    def test_reads_what_was_written(self, tmp_path, name, shape):
        values = torch.randint(0, 256, shape, dtype=torch.uint8)
        assert torch.equal(read_idx(layouts.packed(tmp_path / name, layouts.idx(values.numpy()))), values)

    @pytest.mark.parametrize("name", ["bad-idx", "bad-idx.gz"])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "IDX file.*: .*nothing"),
            (b"\0\0\x08", "IDX file.*: .*00 00 08"),
            (b"\0\0\x08\0", "IDX file of"),
            (b"\x89PNG....", "IDX file.*: .*89 50 4e 47"),
            (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "IDX file.*: .*00 00 0d 01"),
            (b"\0\0\x08\x03\0\0\0\x01\0\0", "truncated.*header"),
            (layouts.idx(np.zeros((5, 2)))[:-1], r"must hold 10 values of shape \(5, 2\), got only 9"),
            (layouts.idx(np.zeros((5, 2))) + b"\0", r"must hold 10 values of shape \(5, 2\), got more"),
            (b"\0\0\x08\x03" + b"\xff" * 12 + b"abc", "got only 3"),
        ],
    )
    def test_what_is_not_exact_is_refused_and_named(self, tmp_path, name, content, message):
        with pytest.raises(ValueError, match=rf"bad-idx.* {message}"):
            read_idx(layouts.packed(tmp_path / name, content))

    def test_damaged_compression_is_named(self, tmp_path):
        whole = gzip.compress(layouts.idx(torch.randint(0, 256, (50, 50)).numpy()))
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        for content in (b"no gzip at all", whole[:-20], whole[: len(whole) // 2], whole + b"tail", bytes(flipped)):
            (tmp_path / "damaged.gz").write_bytes(content)
            with pytest.raises(ValueError, match=r"damaged\.gz"):
                read_idx(tmp_path / "damaged.gz")

    def test_no_more_is_unpacked_than_the_header_says(self, tmp_path):
        path = layouts.packed(tmp_path / "large.gz", layouts.idx(np.zeros((5, 2))) + bytes(100 << 20))
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=r"10 values.*\(5, 2\).*got more"):
                read_idx(path)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(
        ("file", "values", "message"),
        [
            ("labels-idx1", np.zeros(19), r"label for every.*\(19,\) for 20"),
            ("labels-idx1", np.zeros((20, 1)), r"label for every.*\(20, 1\)"),
            ("labels-idx1", np.full(20, 10), "labels from 0 to 9, got 10"),
            ("images-idx3", np.zeros((20, 28, 27)), r"images of 28 x 28, got .*\(20, 28, 27\)"),
            ("images-idx3", np.zeros((0, 28, 28)), "images of 28 x 28"),
            ("images-idx3", np.zeros(20), "images of 28 x 28"),
        ],
    )
    def test_files_that_do_not_belong_together(self, tmp_path, file, values, message):
        layouts.packed(layouts.mnist(tmp_path) / f"t10k-{file}-ubyte", layouts.idx(values))
        with pytest.raises(ValueError, match=rf"t10k-{file}.*{message}"):
            mnist.test_images(root=tmp_path)


class TestDamaged:
    @pytest.mark.parametrize("content", [b"", b"\0" * (layouts.RECORD - 1), b"\0" * (layouts.RECORD + 1)])
    def test_records_that_are_cut(self, tmp_path, content):
        (layouts.cifar10(tmp_path) / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
        with pytest.raises(ValueError, match=rf"test_batch\.bin .* 3073 bytes, got {len(content)}"):
            load("cifar10", root=tmp_path, validation=20)

    def test_a_label_that_is_none(self, tmp_path):
        (layouts.cifar10(tmp_path) / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(b"\x0b" * layouts.RECORD)
        with pytest.raises(ValueError, match=r"data_batch_3\.bin.*0 to 9, got 11"):
            load("cifar10", root=tmp_path)

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, "no variable y"),
            ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones(3)}, r"got X uint8 \(32, 32, 3, 4\) and y \(3"),
            ({"X": np.zeros((32, 32, 3, 4)), "y": np.ones(4)}, "must hold X, bytes of shape"),
            ({"X": np.zeros((32, 3, 32, 4), np.uint8), "y": np.ones(4)}, "must hold X, bytes of shape"),
            ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.arange(4)}, r"labels from 1 to 10, got \[0, 1, 2, 3\]"),
            ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([1.5, np.nan])}, r"1 to 10, got \[1.5, nan\]"),
            ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": "four"}, r"and y \(1,\); get it again"),
            ({"X": np.array(["a", "b"], dtype=object), "y": np.ones(2)}, r"got X object \(2, 1\) and y \(2,\)"),
        ],
    )
    def test_svhn_with_other_variables(self, tmp_path, variables, message):
        savemat(layouts.svhn(tmp_path) / "test_32x32.mat", variables)
        with pytest.raises(ValueError, match=rf"test_32x32\.mat .*{message}"):
            load("svhn", root=tmp_path, validation=10)

    @pytest.mark.parametrize("content", [b"", b"no MATLAB file at all", b"MATLAB 5.0" + b"\0" * 200])
    def test_svhn_that_is_no_matlab_file(self, tmp_path, content):
        (layouts.svhn(tmp_path) / "test_32x32.mat").write_bytes(content)
        with pytest.raises(ValueError, match=r"test_32x32\.mat.*MATLAB"):
            svhn.test_images(root=tmp_path)


class TestDownload:
    @pytest.fixture
    def downloads(self, monkeypatch) -> list[tuple[Any, ...]]:
        """Calls of torchvision's downloads, whose replacements write small files."""
        calls = []

        def stand_in(name: str, make: Callable[[Path], Path]) -> Callable[..., None]:
            def download(*arguments, **options) -> None:
                calls.append((name, *arguments, *options.values()))
                make(Path(arguments[-1]))

            return download

        for name in ("MNIST", "FashionMNIST"):
            target = f"torchvision.datasets.{name}"
            monkeypatch.setattr(target, stand_in(name, lambda root, name=name: layouts.mnist(root / name / "raw")))
        monkeypatch.setattr("torchvision.datasets.SVHN", stand_in("SVHN", layouts.svhn))
        archive = "torchvision.datasets.utils.download_and_extract_archive"
        monkeypatch.setattr(archive, stand_in("CIFAR10", layouts.cifar10))
        return calls

    @pytest.mark.parametrize("name", SETS)
    def test_happens_on_request_and_once(self, downloads, tmp_path, name):
        images = replace(SETS[name], source=replace(SETS[name].source, system_root=None))
        with pytest.raises(MissingDataError):
            images.splits(root=tmp_path)
        assert downloads == []
        for _ in range(2):
            assert len(images.splits(root=tmp_path, validation=10, download=True).test) == SIZES[name][1]
        assert len(downloads) == 1
        assert str(tmp_path) in downloads[0]

    def test_goes_to_the_folder_of_the_environment(self, downloads, monkeypatch, tmp_path):
        monkeypatch.setenv("LAM_DATA", str(tmp_path))
        assert len(with_system_root(tmp_path / "system").test_images(download=True)) == 20
        assert downloads == [("FashionMNIST", str(tmp_path / "fashionmnist"), True, True)]

    def test_never_goes_where_a_system_package_belongs(self, downloads, monkeypatch, tmp_path):
        monkeypatch.delenv("LAM_DATA", raising=False)
        with pytest.raises(MissingDataError, match="fashionmnist: download=True.*root="):
            with_system_root(tmp_path / "system").splits(download=True)
        assert downloads == []

    @pytest.mark.parametrize(("name", "called"), [("mnist", "MNIST"), ("svhn", "SVHN")])
    def test_failure_is_passed_on_with_the_place(self, monkeypatch, tmp_path, name, called):
        def fail(root, **_: object):
            raise RuntimeError("File not found or corrupted.")

        monkeypatch.setattr(f"torchvision.datasets.{called}", fail)
        with pytest.raises(MissingDataError, match=f"download {name} to {tmp_path}: "):
            load(name, root=tmp_path, download=True)


class TestRealFiles:
    @pytest.mark.parametrize(("name", "mean"), [("fashionmnist", 0.2868), ("mnist", 0.1325)])
    def test_parts(self, request, name, mean):
        root, start = request.getfixturevalue(f"{name}_root"), time.perf_counter()
        parts = load(name, root=root)
        assert time.perf_counter() - start < 10
        assert [len(part) for part in parts.parts().values()] == [55_000, 5_000, 10_000]
        assert abs(parts.test.images.mean() - mean) < 1e-3
        images, labels = next(iter(DataLoader(parts.train, batch_size=256)))
        assert (images.shape, images.dtype, labels.dtype) == ((256, 1, 28, 28), torch.float32, torch.int64)
        if name == "fashionmnist":
            assert all(torch.bincount(part.labels).unique().numel() == 1 for part in parts.parts().values())
        else:
            assert parts.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
