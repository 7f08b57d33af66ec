"""CIFAR-10 and Street View House Numbers (SVHN): colour images of 32 × 32 pixels in ten classes.

CIFAR-10 is read from its binary version alone: the Python version, which torchvision reads, is pickled. Tested on files
made in these layouts, not on the real ones.
"""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from lam.datasets.published import SmallImages, Source, check_digits, read_mat

_RECORD = 1 + 3 * 32 * 32
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"  # published beside it
_SVHN_URL = "http://ufldl.stanford.edu/housenumbers"


def _read_cifar(paths: list[Path]) -> tuple[UInt8[Tensor, "N 3 32 32"], Int64[Tensor, " N"]]:
    """Records of one byte for the label and 3072 for the image: red, green and blue, row by row."""
    files: list[Tensor] = []
    for path in paths:
        content = bytearray(path.read_bytes())
        if not content or len(content) % _RECORD:
            raise ValueError(f"{path} must hold records of {_RECORD} bytes, got {len(content)} bytes; get it again")
        files.append(torch.frombuffer(content, dtype=torch.uint8).reshape(-1, _RECORD))
        check_digits(path, files[-1][:, 0])
    records = torch.cat(files)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _read_svhn(paths: list[Path]) -> tuple[UInt8[Tensor, "N 3 32 32"], Int64[Tensor, " N"]]:
    """X (32, 32, 3, N) and y (N,), where the digit 0 has the label 10."""
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


def _fetch_cifar(part: str, root: Path) -> None:
    from torchvision.datasets import utils

    utils.download_and_extract_archive(_CIFAR_URL, str(root), md5=_CIFAR_MD5)


def _fetch_svhn(part: str, root: Path) -> None:
    from torchvision.datasets import SVHN

    SVHN(str(root), split=part, download=True)


cifar10 = SmallImages(
    source=Source(
        "cifar10",
        f"Unpack the binary version, {_CIFAR_URL}, there (the Python version is pickled, which is never read), or let "
        "torchvision fetch it with download=True.",
    ),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    files={"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)},
    below=("cifar-10-batches-bin",),
    read=_read_cifar,
    fetch=_fetch_cifar,
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
    fetch=_fetch_svhn,
)
