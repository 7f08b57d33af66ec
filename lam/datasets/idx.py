"""MNIST and FashionMNIST from their four IDX files, compressed or not.

The files are in the root itself, or below it in torchvision's layout (FashionMNIST/raw).
"""

import gzip
import math
import zlib
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lam.datasets.published import SmallImages, Source, check_digits

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTES = 8


def read_idx(path: Path) -> UInt8[Tensor, "..."]:
    """Values of an IDX file: two zero bytes, type, number of axes, their big-endian sizes, the values.

    torchvision's reader takes no compressed file, and checks by `assert`.

    Source: Y. LeCun, C. Cortes and C. J. C. Burges, The MNIST database of handwritten digits.

    Args:
        path: a file of unsigned bytes; with the suffix .gz it is decompressed.

    Returns:
        The values, uint8, in the shape of the header.

    Raises:
        ValueError: If the header is not of an IDX file of unsigned bytes, the number of values does not fit it, or the
            compressed data are damaged. The message names the file.
    """
    try:
        content = bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from error
    magic, n_axes = content[:4], content[3] if len(content) > 3 else 0
    if magic[:3] != bytes((0, 0, _UNSIGNED_BYTES)) or n_axes == 0:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it begins with {magic.hex(' ') or 'nothing'}")
    start = 4 + 4 * n_axes
    if len(content) < start:
        raise ValueError(f"{path} is truncated within its header; get it again")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    expected, n_values = math.prod(shape), len(content) - start
    if n_values != expected:
        amount = "more" if n_values > expected else f"only {n_values}"
        raise ValueError(f"{path} must hold {expected} values of shape {tuple(shape)}, got {amount}; get it again")
    return torch.frombuffer(content, dtype=torch.uint8)[start:].reshape(shape)


def _read_pair(paths: list[Path]) -> tuple[UInt8[Tensor, "N 1 28 28"], Int64[Tensor, " N"]]:
    image_path, label_path = paths
    images, labels = read_idx(image_path), read_idx(label_path)
    if images.ndim != 3 or images.shape[1:] != (28, 28) or len(images) == 0:
        raise ValueError(f"{image_path} must hold images of 28 x 28, got an array of shape {tuple(images.shape)}")
    if labels.shape != images.shape[:1]:
        counts = f"{tuple(labels.shape)} for {len(images)} images"
        raise ValueError(f"{label_path} must hold one label for every image of {image_path}, got {counts}")
    check_digits(label_path, labels)
    return images[:, None], labels.long()


def _images(torchvision_name: str, classes: tuple[str, ...], source: Source) -> SmallImages:
    def fetch(part: str, root: Path) -> None:
        from torchvision import datasets

        getattr(datasets, torchvision_name)(str(root), train=True, download=True)

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
