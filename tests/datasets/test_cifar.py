"""CIFAR-10 and SVHN from files made in their true formats; what is missing, damaged or strange is named."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from lam.datasets import MissingDataError, load, load_ood
from tests.datasets import layouts


def positions(images) -> list[int]:
    return (images.images[:, 0, 0, 1] * 255).round().int().tolist()


def test_cifar10_parts(tmp_path):
    parts = load("cifar10", root=layouts.cifar10(tmp_path), validation=20)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [80, 20, 30]
    assert sorted(positions(parts.train) + positions(parts.validation)) == sorted(list(range(20)) * 5)
    assert positions(parts.test) == list(range(30))
    assert torch.bincount(parts.validation.labels).tolist() == [2] * 10
    for part in (parts.train, parts.validation, parts.test):
        assert [position % 10 for position in positions(part)] == part.labels.tolist()
        assert (part.name, part.shape, part.classes[3]) == ("cifar10", (3, 32, 32), "cat")
        assert part.images[:, 0].max() < 0.2
        assert (part.images[:, 1:] == 1).all()


def test_svhn_parts(tmp_path):
    parts = load("svhn", root=layouts.svhn(tmp_path), validation=10)
    assert [len(part) for part in (parts.train, parts.validation, parts.test)] == [30, 10, 20]
    assert positions(parts.test) == list(range(20))
    assert parts.test.labels.tolist() == [position % 10 for position in range(20)]  # 10 means the digit 0
    assert parts.test.shape == (3, 32, 32)


def test_each_is_out_of_the_distribution_of_the_other(tmp_path):
    cifar10 = load("cifar10", root=layouts.cifar10(tmp_path / "a"), validation=20)
    (tmp_path / "b").mkdir()
    layouts.svhn(tmp_path / "b")
    (tmp_path / "b" / "train_32x32.mat").unlink()  # the test part alone will do
    svhn = load_ood("svhn", root=tmp_path / "b", like=cifar10.test)
    assert (svhn.name, len(svhn), svhn.shape) == ("svhn", 20, cifar10.test.shape)
    assert load_ood("cifar10", root=tmp_path / "a", like=svhn).labels.tolist() == cifar10.test.labels.tolist()


def test_the_folder_itself_or_the_environment_will_do(tmp_path, monkeypatch):
    layouts.cifar10(tmp_path / "cifar10")
    monkeypatch.setenv("LAM_DATA", str(tmp_path))
    inside = tmp_path / "cifar10" / "cifar-10-batches-bin"
    assert len(load("cifar10", validation=20).test) == len(load("cifar10", root=inside, validation=20).test) == 30


@pytest.mark.parametrize("validation", [0, 100])
def test_validation_leaves_training_images(tmp_path, validation):
    with pytest.raises(ValueError, match=f"validation must be from 1 to 99 images, got {validation}"):
        load("cifar10", root=layouts.cifar10(tmp_path), validation=validation)


class TestMissing:
    def test_every_file_is_named_with_the_way_to_get_it(self, tmp_path):
        layouts.cifar10(tmp_path)
        folder = tmp_path / "cifar-10-batches-bin"
        (folder / "data_batch_2.bin").unlink()
        (folder / "data_batch_5.bin").unlink()
        with pytest.raises(MissingDataError) as caught:
            load("cifar10", root=tmp_path)
        message = str(caught.value)
        assert f"\n  {folder}/data_batch_2.bin\n  {folder}/data_batch_5.bin\nLooked in {tmp_path}, {folder}." in message
        assert "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz" in message
        assert "download=True" in message

    def test_the_pickled_version_is_not_read(self, tmp_path):
        (tmp_path / "cifar-10-batches-py").mkdir()
        (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        with pytest.raises(MissingDataError, match="the Python version is pickled, which is never read"):
            load("cifar10", root=tmp_path)

    def test_svhn(self, tmp_path):
        with pytest.raises(MissingDataError, match=r"svhn: these are missing:\n  .*/train_32x32\.mat\n"):
            load("svhn", root=tmp_path)

    def test_no_root(self, monkeypatch):
        monkeypatch.delenv("LAM_DATA", raising=False)
        with pytest.raises(MissingDataError, match="svhn needs root=<folder>, or LAM_DATA in the environment. Put"):
            load("svhn")


class TestDamaged:
    @pytest.mark.parametrize("content", [b"", b"\0" * (layouts.RECORD - 1), b"\0" * (layouts.RECORD + 1)])
    def test_records_that_are_cut(self, tmp_path, content):
        layouts.cifar10(tmp_path)
        (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").write_bytes(content)
        with pytest.raises(
            ValueError, match=rf"test_batch\.bin must hold records of 3073 bytes, got {len(content)} by"
        ):
            load("cifar10", root=tmp_path, validation=20)

    def test_a_label_that_is_none(self, tmp_path):
        layouts.cifar10(tmp_path)
        (tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin").write_bytes(b"\x0b" * layouts.RECORD)
        with pytest.raises(ValueError, match=r"data_batch_3\.bin must hold labels from 0 to 9, got 11"):
            load("cifar10", root=tmp_path)

    @pytest.mark.parametrize(
        ("variables", "message"),
        [
            ({"X": np.zeros((32, 32, 3, 4), np.uint8)}, "has no variable y"),
            (
                {"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.ones(3)},
                r"got X uint8 \(32, 32, 3, 4\) and y \(3",
            ),
            ({"X": np.zeros((32, 32, 3, 4)), "y": np.ones(4)}, "must hold X, bytes of shape"),
            ({"X": np.zeros((32, 3, 32, 4), np.uint8), "y": np.ones(4)}, "must hold X, bytes of shape"),
            ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": np.arange(4)}, r"labels from 1 to 10, got \[0, 1, 2, 3\]"),
            ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": np.array([1.5, np.nan])}, r"1 to 10, got \[1.5, nan\]"),
            ({"X": np.zeros((32, 32, 3, 4), np.uint8), "y": "four"}, r"and y \(1,\); get it again"),
            ({"X": np.array(["a", "b"], dtype=object), "y": np.ones(2)}, r"got X object \(2, 1\) and y \(2,\)"),
        ],
    )
    def test_svhn_with_other_variables(self, tmp_path, variables, message):
        layouts.svhn(tmp_path)
        savemat(tmp_path / "test_32x32.mat", variables)
        with pytest.raises(ValueError, match=rf"test_32x32\.mat .*{message}"):
            load("svhn", root=tmp_path, validation=10)

    @pytest.mark.parametrize("content", [b"", b"no MATLAB file at all", b"MATLAB 5.0" + b"\0" * 200])
    def test_svhn_that_is_no_matlab_file(self, tmp_path, content):
        layouts.svhn(tmp_path)
        (tmp_path / "test_32x32.mat").write_bytes(content)
        with pytest.raises(ValueError, match=r"test_32x32\.mat cannot be read as a MATLAB file"):
            load_ood("svhn", root=tmp_path, like=load("digits").test)


class TestDownload:
    @pytest.fixture
    def downloads(self, monkeypatch):
        """Calls of torchvision, which make the files as the real ones do."""
        calls = []

        def download_cifar(url, root, md5):
            calls.append((url, md5))
            layouts.cifar10(Path(root))

        def download_svhn(root, split, download):
            calls.append((split, download))
            if split == "train":
                raise RuntimeError("File not found or corrupted.")
            layouts.svhn(Path(root))

        monkeypatch.setattr("torchvision.datasets.utils.download_and_extract_archive", download_cifar)
        monkeypatch.setattr("torchvision.datasets.SVHN", download_svhn)
        return calls

    def test_never_happens_unasked(self, downloads, tmp_path):
        for name in ("cifar10", "svhn"):
            with pytest.raises(MissingDataError):
                load(name, root=tmp_path)
        assert downloads == []

    def test_happens_on_request_and_once(self, downloads, tmp_path):
        for _ in range(2):
            assert len(load("cifar10", root=tmp_path, validation=20, download=True).test) == 30
        assert [url for url, _ in downloads] == ["https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"]
        assert len(
            load_ood("svhn", root=tmp_path, like=load("cifar10", root=tmp_path, validation=9).test, download=True)
        )
        assert downloads[1:] == [("test", True)]

    def test_failure_is_passed_on_with_the_place(self, downloads, tmp_path):
        with pytest.raises(
            MissingDataError, match=r"could not download svhn to .*: File not found or corrupted\.. Put"
        ):
            load("svhn", root=tmp_path, download=True)
