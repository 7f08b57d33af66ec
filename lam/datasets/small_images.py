"""MNIST, FashionMNIST, CIFAR-10 and Street View House Numbers (SVHN): small images of ten classes, in memory.

MNIST and FashionMNIST are four IDX files, compressed or not. CIFAR-10 is read only from its binary version: the Python
version, which torchvision reads, is pickled. The files are in the root, or in torchvision's folders below it. CIFAR-10
and SVHN are tested on generated files in these layouts, not on the original files.
"""

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lam.datasets.base import MissingDataError, TensorImages
from lam.datasets.published import Source, read_mat
from lam.datasets.splits import Splits, carve

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTES = 8
_CHUNK = 1 << 20
_RECORD = 1 + 3 * 32 * 32
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # as published with the file
_SVHN_URL = "http://ufldl.stanford.edu/housenumbers"


@dataclass(frozen=True)
class SmallImages:
    """A data set of small images in memory, published in a training and a test split.

    Args:
        files: names of the files of each published split.
        below: sub-folders of a root that are searched for the files, too.
        read: maps the files of a split to images (N, C, H, W) and labels (N,).
        fetch: downloads the files of a split ("train" or "test") to a folder, by torchvision.datasets.
    """

    source: Source
    classes: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    below: tuple[str, ...]
    read: Callable[[list[Path]], tuple[Tensor, Tensor]]
    fetch: Callable[[Any, str, str], object]

    def splits(
        self, *, root: str | Path | None = None, seed: int = 0, validation: int = 5000, download: bool = False
    ) -> Splits:
        """Splits with pixels in [0, 1]; validation images come from the training files.

        Args:
            root: folder of the files; by default $LAM_DATA/<name>, or the folder of a system package.
            validation: number of validation images, drawn by the seed and stratified by class.
            download: whether torchvision downloads missing files to the root.
        """
        training = self._part("train", root, download)
        if not 0 < validation < len(training):
            raise ValueError(f"validation must be from 1 to {len(training) - 1} images, got {validation}")
        validated, trained = carve(training, (validation,), seed=seed)
        return Splits(train=trained, validation=validated, test=self._part("test", root, download))

    def test_images(self, *, root: str | Path | None = None, download: bool = False) -> TensorImages:
        """Only the published test split; arguments as for `splits`."""
        return self._part("test", root, download)

    def _part(self, part: str, root: str | Path | None, download: bool) -> TensorImages:
        # if there are several roots, one must have every file: files of two roots may be different versions
        needed = self.files[part] if self.source.system_root is None else sum(self.files.values(), start=())
        try:
            folder = self.source.folder(root, needed=needed, below=self.below)
        except MissingDataError:
            if not download:
                raise
            self._download(part, self.source.roots(root)[0])
            folder = self.source.folder(root, needed=needed, below=self.below)
        images, labels = self.read([self.source.file(folder, name) for name in self.files[part]])
        return TensorImages(images, labels, name=self.source.name, classes=self.classes)

    def _download(self, part: str, root: Path) -> None:
        if str(root) == self.source.system_root:
            raise MissingDataError(f"{self.source.name}: download=True needs a folder for the files, root=<folder>")
        from torchvision import datasets

        try:
            self.fetch(datasets, part, str(root))
        except (OSError, RuntimeError) as error:
            raise MissingDataError(
                f"torchvision could not download {self.source.name} to {root}: {error}. {self.source.advice}"
            ) from error


def read_idx(path: Path) -> UInt8[Tensor, "..."]:
    """Values of an IDX file, decompressed if its suffix is .gz.

    The file holds two zero bytes, the type, the number of axes, the big-endian sizes of the axes, and the values.

    Source: Y. LeCun, C. Cortes and C. J. C. Burges, The MNIST database of handwritten digits.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _parse(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from error


def _parse(stream: BufferedIOBase, path: Path) -> UInt8[Tensor, "..."]:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTES)) or magic[3] == 0:
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it begins with {magic.hex(' ') or 'nothing'}")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise ValueError(f"{path} is truncated within its header; get it again")
    shape = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    expected = math.prod(shape)
    values = bytearray()  # grows with the data: a damaged header may state any size, and a small .gz may be huge
    while len(values) <= expected and (chunk := stream.read(_CHUNK)):
        values += chunk
    if len(values) != expected:
        amount = "more" if len(values) > expected else f"only {len(values)}"
        raise ValueError(f"{path} must hold {expected} values of shape {tuple(shape)}, got {amount}; get it again")
    return torch.frombuffer(values, dtype=torch.uint8).reshape(shape) if expected else torch.empty(shape).byte()


def _read_pair(paths: list[Path]) -> tuple[UInt8[Tensor, "N 1 28 28"], Int64[Tensor, " N"]]:
    image_path, label_path = paths
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28) or len(images) == 0:
        raise ValueError(f"{image_path} must hold images of 28 x 28, got an array of shape {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        counts = f"{tuple(labels.shape)} for {len(images)} images"
        raise ValueError(f"{label_path} must hold one label for every image of {image_path}, got {counts}")
    _check_digits(label_path, labels)
    return images[:, None], labels.long()


def _check_digits(path: Path, labels: Tensor) -> None:
    if labels.max() > 9:
        raise ValueError(f"{path} must hold labels from 0 to 9, got {labels.max()}; get it again")


def _read_cifar(paths: list[Path]) -> tuple[UInt8[Tensor, "N 3 32 32"], Int64[Tensor, " N"]]:
    """Images and labels from records: one byte for the label, and 3072 for the image (red, green, blue; by rows)."""
    files: list[Tensor] = []
    for path in paths:
        content = bytearray(path.read_bytes())
        if not content or len(content) % _RECORD:
            raise ValueError(f"{path} must hold records of {_RECORD} bytes, got {len(content)} bytes; get it again")
        files.append(torch.frombuffer(content, dtype=torch.uint8).reshape(-1, _RECORD))
        _check_digits(path, files[-1][:, 0])
    records = torch.cat(files)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _read_svhn(paths: list[Path]) -> tuple[UInt8[Tensor, "N 3 32 32"], Int64[Tensor, " N"]]:
    """Images and labels from X (32, 32, 3, N) and y (N,); in y, the digit 0 has the label 10."""
    (path,) = paths
    pixels, target = map(np.asarray, read_mat(path, "X", "y"))
    pixels, target = pixels.reshape(*pixels.shape[:3], -1), target.reshape(-1)
    if pixels.dtype != np.uint8 or pixels.shape[:3] != (32, 32, 3) or pixels.shape[3] != len(target):
        shapes = f"X {pixels.dtype} {pixels.shape} and y {target.shape}"
        raise ValueError(f"{path} must hold X, bytes of shape (32, 32, 3, N), and y (N,), got {shapes}; get it again")
    if len(target) == 0 or not np.isin(target, range(1, 11)).all():
        raise ValueError(f"{path} must hold labels from 1 to 10, got {np.unique(target).tolist()}; get it again")
    images = torch.from_numpy(np.ascontiguousarray(pixels.transpose(3, 2, 0, 1)))
    return images, torch.from_numpy(target.astype(np.int64)) % 10


def _images(torchvision_name: str, classes: tuple[str, ...], source: Source) -> SmallImages:
    def fetch(datasets: Any, part: str, root: str) -> None:
        getattr(datasets, torchvision_name)(root, train=True, download=True)

    return SmallImages(source, classes, _FILES, (f"{torchvision_name}/raw",), _read_pair, fetch)


fashionmnist = _images(
    "FashionMNIST",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    Source(
        "fashionmnist",
        "Install them with `apt-get install dataset-fashion-mnist`, name their folder with root=<folder>, put them "
        "into $LAM_DATA/fashionmnist, or let torchvision fetch them with download=True.",
        system_root="/usr/share/datasets/fashion-mnist",
        compressed=True,
    ),
)

mnist = _images(
    "MNIST",
    tuple(map(str, range(10))),
    Source(
        "mnist",
        "Name the folder that has them with root=<folder>, put them into $LAM_DATA/mnist, or let torchvision fetch "
        "them there with download=True.",
        compressed=True,
    ),
)

cifar10 = SmallImages(
    source=Source(
        "cifar10",
        f"Unpack the binary version, {_CIFAR_URL}, there (lam never reads the pickled Python version), or let "
        "torchvision fetch it with download=True.",
    ),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    files={"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
    below=("cifar-10-batches-bin",),
    read=_read_cifar,
    fetch=lambda datasets, _, root: datasets.utils.download_and_extract_archive(_CIFAR_URL, root, md5=_CIFAR_MD5),
)

svhn = SmallImages(
    source=Source(
        "svhn",
        f"Put {_SVHN_URL}/train_32x32.mat and {_SVHN_URL}/test_32x32.mat there, or let torchvision fetch them with "
        "download=True.",
    ),
    classes=tuple(map(str, range(10))),
    files={"train": ("train_32x32.mat",), "test": ("test_32x32.mat",)},
    below=(),
    read=_read_svhn,
    fetch=lambda datasets, part, root: datasets.SVHN(root, split=part, download=True),
)
