"""MNIST and FashionMNIST from their four IDX files, compressed or not.

The pixels stay 8-bit in memory. Where the files are: in the given folder itself, or below it in torchvision's layout
(FashionMNIST/raw). Nothing is downloaded unless asked for.
"""

import gzip
import math
import os
import zlib
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from lam.datasets.base import MissingDataError, Splits, TensorImages, carve

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_UNSIGNED_BYTES = 8
_CHUNK = 1 << 20


@dataclass(frozen=True)
class IdxImages:
    """A data set of 28 × 28 grey images in ten classes, 60,000 to train on and 10,000 to test on.

    Args:
        name: what the data set is called here.
        torchvision_name: its class in torchvision, which also names the folder of torchvision's layout.
        classes: the names of the ten classes.
        system_root: where a package of the operating system puts the files, if there is one.
        advice: how to get the files.
    """

    name: str
    torchvision_name: str
    classes: tuple[str, ...]
    system_root: str | None
    advice: str

    def splits(
        self, *, root: str | Path | None = None, seed: int = 0, validation: int = 5000, download: bool = False
    ) -> Splits:
        """The data set as (1, 28, 28) images in [0, 1], with a validation part carved out of the training files.

        Args:
            root: folder of the files; by default the first of $LAM_DATA/<name> and the place where a system package
                puts them that has them all.
            seed: of the validation part.
            validation: how many images it has, each class in proportion.
            download: fetch missing files through torchvision, to `root` or $LAM_DATA/<name>.

        Raises:
            MissingDataError: If files are missing; a ValueError and a FileNotFoundError.
            ValueError: If a file is not what it should be (named), or `validation` leaves nothing to train on.
        """
        folder = self._folder(root, download=download)
        training = self._read(folder, "train")
        if not 0 < validation < len(training):
            raise ValueError(f"validation must be from 1 to {len(training) - 1} images, got {validation}")
        validated, trained = carve(training, (validation,), seed=seed)
        return Splits(train=trained, validation=validated, test=self._read(folder, "test"))

    def test_images(self, *, root: str | Path | None = None, download: bool = False) -> TensorImages:
        """The test part alone, with `root` and `download` as for `splits`."""
        return self._read(self._folder(root, download=download), "test")

    def _folder(self, root: str | Path | None, *, download: bool) -> Path:
        roots = self._roots(root)
        candidates = [place for top in roots for place in (top, top / self.torchvision_name / "raw")]
        if download and all(map(_missing, candidates)):
            if str(roots[0]) == self.system_root:
                raise MissingDataError(f"{self.name}: say where download=True may put files, with root=<folder>")
            _download(self.torchvision_name, roots[0])
        folder = min(candidates, key=lambda candidate: len(_missing(candidate)))
        if missing := _missing(folder):
            listed = "".join(f"\n  {path}[.gz]" for path in missing)
            places = ", ".join(map(str, candidates))
            raise MissingDataError(f"{self.name}: these files are missing:{listed}\nLooked in {places}.\n{self.advice}")
        return folder

    def _roots(self, root: str | Path | None) -> list[Path]:
        if root is not None:
            return [Path(root).expanduser()]
        data = os.environ.get("LAM_DATA")
        roots = [Path(data).expanduser() / self.name] if data else []
        roots += [Path(self.system_root)] if self.system_root is not None else []
        if not roots:
            raise MissingDataError(f"{self.name} needs root=<folder>, or LAM_DATA in the environment. {self.advice}")
        return roots

    def _read(self, folder: Path, part: str) -> TensorImages:
        image_path, label_path = (_present(folder, name) for name in _FILES[part])
        images, labels = read_idx(image_path), read_idx(label_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28) or len(images) == 0:
            raise ValueError(f"{image_path} must hold images of 28 x 28, got an array of shape {tuple(images.shape)}")
        if labels.shape != images.shape[:1]:
            have = f"{tuple(labels.shape)} for {len(images)} images"
            raise ValueError(f"{label_path} must hold one label for every image of {image_path}, got {have}")
        if labels.max() >= len(self.classes):
            raise ValueError(f"{label_path} must hold labels from 0 to {len(self.classes) - 1}, got {labels.max()}")
        return TensorImages(images[:, None], labels.long(), name=self.name, classes=self.classes)


fashionmnist = IdxImages(
    name="fashionmnist",
    torchvision_name="FashionMNIST",
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    system_root="/usr/share/datasets/fashion-mnist",
    advice="Install them with `apt-get install dataset-fashion-mnist`, name their folder with root=<folder>, put them "
    "into $LAM_DATA/fashionmnist, or let torchvision fetch them with download=True.",
)  # fmt: skip

mnist = IdxImages(
    name="mnist",
    torchvision_name="MNIST",
    classes=tuple(map(str, range(10))),
    system_root=None,
    advice="Name the folder that has them with root=<folder>, put them into $LAM_DATA/mnist, or let torchvision fetch "
    "them there with download=True.",
)


def read_idx(path: str | Path) -> UInt8[Tensor, "..."]:
    """Read a file in the IDX format: two zero bytes, type, number of axes, their sizes (big-endian), then the values.

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


def _missing(folder: Path) -> list[Path]:
    names = [name for part in _FILES.values() for name in part]
    return [folder / name for name in names if not _present(folder, name).is_file()]


def _present(folder: Path, name: str) -> Path:
    plain = folder / name
    return plain if plain.is_file() else plain.with_name(f"{name}.gz")


def _download(torchvision_name: str, root: Path) -> None:
    from torchvision import datasets

    dataset = getattr(datasets, torchvision_name)
    try:
        dataset(str(root), train=True, download=True)
    except (OSError, RuntimeError) as error:
        raise MissingDataError(f"torchvision could not download {torchvision_name} to {root}: {error}") from error
