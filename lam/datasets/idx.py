"""MNIST and FashionMNIST from their four IDX files, compressed or not.

The pixels stay 8-bit in memory. The files are in the root itself, or below it in torchvision's layout
(FashionMNIST/raw). Nothing is downloaded unless asked for.
"""

import gzip
import math
import zlib
from io import BufferedIOBase
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lam.datasets.published import SmallImages, Source

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTES = 8
_CHUNK = 1 << 20


def read_idx(path: str | Path) -> UInt8[Tensor, "..."]:
    """Values of a file in the IDX format: two zero bytes, type, number of axes, their big-endian sizes, the values.

    Source: Y. LeCun, C. Cortes and C. J. C. Burges, The MNIST database of handwritten digits.

    Args:
        path: a file of unsigned bytes; with the suffix .gz it is decompressed.

    Returns:
        The values, uint8, in the shape that the header gives.

    Raises:
        ValueError: If the header is not that of an IDX file of unsigned bytes, or the values are fewer or more than it
            says, or the compressed data are damaged. The message names the file.
    """
    path = Path(path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            return _parse(stream, path)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}; get it again") from error


def _parse(stream: BufferedIOBase, path: Path) -> Tensor:
    magic = stream.read(4)
    if len(magic) < 4 or magic[:3] != bytes((0, 0, _UNSIGNED_BYTES)) or magic[3] == 0:
        raise ValueError(f"{path} is no IDX file of unsigned bytes: it begins with {magic.hex(' ') or 'nothing'}")
    header = stream.read(4 * magic[3])
    if len(header) < 4 * magic[3]:
        raise ValueError(f"{path} is truncated within its header; get it again")
    shape = [int.from_bytes(header[i : i + 4], "big") for i in range(0, len(header), 4)]
    expected = math.prod(shape)
    values = bytearray()  # grows with the data, not with what a damaged header claims
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
    if labels.max() > 9:
        raise ValueError(f"{label_path} must hold labels from 0 to 9, got {labels.max()}")
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
