"""IDX files made here in their true format, then the real ones; what is damaged, missing or strange is named."""

import gzip
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lam.datasets import MissingDataError, load, load_ood
from lam.datasets.idx import fashionmnist, mnist, read_idx
from lam.datasets.published import SmallImages


def idx_bytes(values: torch.Tensor) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + values.numpy().tobytes()


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def make(folder: Path, *, suffix: str = "", n_train: int = 60, n_test: int = 20) -> Path:
    """Four small files; pixel (0, 0) of every image is its position."""
    for prefix, n in (("train", n_train), ("t10k", n_test)):
        images = torch.full((n, 28, 28), 255 if prefix == "train" else 100, dtype=torch.uint8)
        images[:, 0, 0] = torch.arange(n)
        write(folder / f"{prefix}-images-idx3-ubyte{suffix}", idx_bytes(images))
        write(folder / f"{prefix}-labels-idx1-ubyte{suffix}", idx_bytes((torch.arange(n) % 10).byte()))
    return folder


def with_system_root(folder: Path) -> SmallImages:
    """FashionMNIST as where a system package would put its files into this folder."""
    return replace(fashionmnist, source=replace(fashionmnist.source, system_root=str(folder)))


def positions(images) -> list[int]:
    return (images.images[:, 0, 0, 0] * 255).round().int().tolist()


class TestReadIdx:
    @pytest.mark.parametrize("name", ["a-idx", "a-idx.gz"])
    @pytest.mark.parametrize("shape", [(3,), (2, 3, 4), (0, 28, 28), (1 << 12, 300)])
    def test_reads_what_was_written(self, tmp_path, name, shape):
        values = torch.randint(0, 256, shape, dtype=torch.uint8)
        assert torch.equal(read_idx(write(tmp_path / name, idx_bytes(values))), values)

    @pytest.mark.parametrize("name", ["bad-idx", "bad-idx.gz"])
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is no IDX file of unsigned bytes: it begins with nothing"),
            (b"\0\0\x08", "is no IDX file of unsigned bytes: it begins with 00 00 08"),
            (b"\0\0\x08\0", "is no IDX file"),
            (b"\x89PNG....", "is no IDX file of unsigned bytes: it begins with 89 50 4e 47"),
            (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "is no IDX file of unsigned bytes: it begins with 00 00 0d 01"),
            (b"\0\0\x08\x03\0\0\0\x01\0\0", "is truncated within its header"),
            (idx_bytes(torch.zeros(5, 2).byte())[:-1], r"must hold 10 values of shape \(5, 2\), got only 9"),
            (idx_bytes(torch.zeros(5, 2).byte()) + b"\0", r"must hold 10 values of shape \(5, 2\), got more"),
            (b"\0\0\x08\x03" + b"\xff" * 12 + b"abc", "got only 3"),
        ],
    )
    def test_what_is_not_exact_is_refused_and_named(self, tmp_path, name, content, message):
        with pytest.raises(ValueError, match=rf"bad-idx.* {message}"):
            read_idx(write(tmp_path / name, content))

    def test_damaged_compression_is_named(self, tmp_path):
        whole = gzip.compress(idx_bytes(torch.randint(0, 256, (50, 50), dtype=torch.uint8)))
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        for content in (b"no gzip at all", whole[:-20], whole[: len(whole) // 2], whole + b"tail", bytes(flipped)):
            path = tmp_path / "damaged.gz"
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"damaged\.gz"):
                read_idx(path)


class TestSplits:
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    @pytest.mark.parametrize("inside", [".", "MNIST/raw"])
    def test_validation_is_carved_out_of_training(self, tmp_path, suffix, inside):
        make(tmp_path / inside, suffix=suffix)
        parts = load("mnist", root=tmp_path, validation=20)
        assert sorted(positions(parts.train) + positions(parts.validation)) == list(range(60))
        assert torch.bincount(parts.validation.labels).tolist() == [2] * 10
        assert positions(parts.test) == list(range(20))
        assert parts.train.images[0, 0, 1, 1] == 1
        torch.testing.assert_close(parts.test.images[0, 0, 1, 1], torch.tensor(100 / 255))
        for part in (parts.train, parts.validation, parts.test):
            assert [position % 10 for position in positions(part)] == part.labels.tolist()
            assert (part.name, part.shape) == ("mnist", (1, 28, 28))

    def test_the_seed_decides(self, tmp_path):
        make(tmp_path)
        parts = [positions(load("mnist", root=tmp_path, seed=seed, validation=20).validation) for seed in (0, 0, 1)]
        assert parts[0] == parts[1] != parts[2]

    @pytest.mark.parametrize("validation", [0, 60])
    def test_validation_leaves_training_images(self, tmp_path, validation):
        with pytest.raises(ValueError, match=f"validation must be from 1 to 59 images, got {validation}"):
            load("mnist", root=make(tmp_path), validation=validation)

    def test_files_that_do_not_belong_together(self, tmp_path):
        make(tmp_path)
        labels, images = tmp_path / "t10k-labels-idx1-ubyte", tmp_path / "t10k-images-idx3-ubyte"
        for path, values, message in (
            (labels, torch.zeros(19), r"t10k-labels.* must hold one label for every image .*got \(19,\) for 20"),
            (labels, torch.zeros(20, 1), r"t10k-labels.* must hold one label for every image .*got \(20, 1\)"),
            (labels, torch.full((20,), 10), "t10k-labels.* must hold labels from 0 to 9, got 10"),
            (images, torch.zeros(20, 28, 27), r"t10k-images.* must hold images of 28 x 28, got .*\(20, 28, 27\)"),
            (images, torch.zeros(0, 28, 28), "t10k-images.* must hold images of 28 x 28"),
            (images, torch.zeros(20), "t10k-images.* must hold images of 28 x 28"),
        ):
            write(path, idx_bytes(values.byte()))
            with pytest.raises(ValueError, match=message):
                mnist.test_images(root=tmp_path)

    def test_missing_files_are_named_each_with_the_way_to_get_them(self, tmp_path):
        make(tmp_path)
        (tmp_path / "t10k-labels-idx1-ubyte").unlink()
        (tmp_path / "train-images-idx3-ubyte").unlink()
        with pytest.raises(MissingDataError) as caught:
            load("fashionmnist", root=tmp_path)
        message = str(caught.value)
        assert f"{tmp_path}/t10k-labels-idx1-ubyte[.gz]" in message
        assert f"{tmp_path}/train-images-idx3-ubyte[.gz]" in message
        assert "t10k-images" not in message
        assert "apt-get install dataset-fashion-mnist" in message
        assert "download=True" in message

    def test_default_roots(self, tmp_path, monkeypatch):
        make(tmp_path / "mnist")
        make(tmp_path / "fashionmnist")
        monkeypatch.setenv("LAM_DATA", str(tmp_path))
        assert len(load("mnist", validation=10).test) == len(load("fashionmnist", validation=10).test) == 20
        monkeypatch.delenv("LAM_DATA")
        with pytest.raises(MissingDataError, match="mnist needs root=<folder>, or LAM_DATA in the environment"):
            load("mnist")

    def test_the_first_place_that_has_the_files_is_taken(self, tmp_path, monkeypatch):
        system = with_system_root(make(tmp_path / "system", n_test=10))
        make(tmp_path / "mine" / "mnist")
        monkeypatch.setenv("LAM_DATA", str(tmp_path / "mine"))
        assert len(system.test_images()) == 10
        make(tmp_path / "mine" / "fashionmnist", n_test=20)
        assert len(system.test_images()) == 20
        (tmp_path / "mine" / "fashionmnist" / "train-labels-idx1-ubyte").unlink()
        assert len(system.test_images()) == 10

    def test_every_place_looked_in_is_named(self, tmp_path, monkeypatch):
        system = with_system_root(tmp_path / "system")
        monkeypatch.setenv("LAM_DATA", str(tmp_path / "mine"))
        with pytest.raises(MissingDataError) as caught:
            system.splits()
        mine = tmp_path / "mine" / "fashionmnist"
        places = f"{mine}, {mine}/FashionMNIST/raw, {tmp_path}/system, {tmp_path}/system/FashionMNIST/raw"
        assert f"Looked in {places}." in str(caught.value)
        assert "apt-get install dataset-fashion-mnist" in str(caught.value)
        assert "$LAM_DATA/fashionmnist" in str(caught.value)


class TestDownload:
    @pytest.fixture
    def downloads(self, monkeypatch):
        """Calls of torchvision's classes, which make the files as the real ones do."""
        calls = []

        def stand_in(name):
            def create(root, *, train, download):
                calls.append((name, root, train, download))
                make(Path(root) / name / "raw")

            return create

        for name in ("MNIST", "FashionMNIST"):
            monkeypatch.setattr(f"torchvision.datasets.{name}", stand_in(name))
        return calls

    def test_never_happens_unasked(self, downloads, tmp_path):
        with pytest.raises(MissingDataError):
            load("mnist", root=tmp_path)
        assert downloads == []

    def test_happens_on_request_and_once(self, downloads, tmp_path):
        for _ in range(2):
            assert len(load("mnist", root=tmp_path, validation=10, download=True).train) == 50
        assert len(fashionmnist.test_images(root=tmp_path, download=True)) == 20
        assert downloads == [("MNIST", str(tmp_path), True, True), ("FashionMNIST", str(tmp_path), True, True)]

    def test_goes_to_the_folder_of_the_environment(self, downloads, monkeypatch, tmp_path):
        monkeypatch.setenv("LAM_DATA", str(tmp_path))
        absent = with_system_root(tmp_path / "system")
        assert len(absent.test_images(download=True)) == 20
        assert downloads == [("FashionMNIST", str(tmp_path / "fashionmnist"), True, True)]

    def test_is_not_needed_where_the_files_are(self, downloads, tmp_path):
        load("mnist", root=make(tmp_path), validation=10, download=True)
        assert downloads == []

    def test_failure_is_passed_on_with_the_place(self, monkeypatch, tmp_path):
        def fail(root, *, train, download):
            raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

        monkeypatch.setattr("torchvision.datasets.MNIST", fail)
        with pytest.raises(MissingDataError, match=r"could not download mnist to .*: Error downloading train-images"):
            load("mnist", root=tmp_path, download=True)

    def test_never_goes_where_a_system_package_belongs(self, downloads, monkeypatch, tmp_path):
        monkeypatch.delenv("LAM_DATA", raising=False)
        with pytest.raises(MissingDataError, match="fashionmnist: say where download=True may put files, with root="):
            with_system_root(tmp_path / "system").splits(download=True)
        assert downloads == []


class TestRealFiles:
    def test_fashionmnist(self, fashionmnist_root):
        start = time.perf_counter()
        parts = load("fashionmnist", root=fashionmnist_root)
        assert time.perf_counter() - start < 10
        assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [55_000, 5_000, 10_000]
        for part in (parts.train, parts.validation, parts.test):
            assert torch.bincount(part.labels).unique().numel() == 1
        assert abs(parts.test.images.mean() - 0.2868) < 1e-3
        images, labels = next(iter(DataLoader(parts.train, batch_size=256)))
        assert (images.shape, images.dtype, labels.dtype) == ((256, 1, 28, 28), torch.float32, torch.int64)

    def test_mnist_is_out_of_distribution_for_fashionmnist(self, fashionmnist_root, mnist_root):
        like = load("fashionmnist", root=fashionmnist_root).test
        out = load_ood("mnist", root=mnist_root, like=like)
        assert (out.name, len(out), out.shape) == ("mnist", 10_000, like.shape)
        assert out.labels[:5].tolist() == [7, 2, 1, 0, 4]

    def test_mnist(self, mnist_root):
        parts = load("mnist", root=mnist_root)
        assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [55_000, 5_000, 10_000]
        assert abs(parts.test.images.mean() - 0.1325) < 1e-3
