"""Published data sets: their files, annotations, splits by class, and soft labels."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor

from lam.datasets.base import Dataset, MissingDataError, stratified_split
from lam.datasets.folder import FolderImages
from lam.datasets.splits import fraction_of
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import check_distributions, first_of

SIZE = 227  # default side of photographs in pixels, as in Warburg et al. (2023)
CIFAR10H = "cifar10h-probs.npy"


@dataclass(frozen=True)
class Source:
    """A published data set: its name in lam, and a sentence of advice on how to get its files.

    A package of the operating system may install the files in `system_root`. If `compressed`, each file may have the
    suffix .gz.
    """

    name: str
    advice: str
    system_root: str | None = None
    compressed: bool = False

    def roots(self, root: str | Path | None) -> list[Path]:
        """The folders to search: the root if it is given, else $LAM_DATA/<name> and `system_root`."""
        if root is not None:
            return [Path(root).expanduser()]
        data = os.environ.get("LAM_DATA")
        roots = [Path(data).expanduser() / self.name] if data else []
        roots += [Path(self.system_root)] if self.system_root is not None else []
        if not roots:
            raise MissingDataError(f"{self.name} needs root=<folder>, or LAM_DATA in the environment. {self.advice}")
        return roots

    def file(self, folder: Path, name: str) -> Path:
        """The path of a file, or of its compressed form if the plain file does not exist."""
        plain = folder / name
        return plain if plain.exists() or not self.compressed else plain.with_name(f"{plain.name}.gz")

    def folder(self, root: str | Path | None, *, needed: Sequence[str], below: Sequence[str] = ()) -> Path:
        """The root or sub-folder (`below`) that has every needed file; a `MissingDataError` names missing files."""
        places = [place for top in self.roots(root) for place in (top, *(top / name for name in below))]
        missing = {place: [place / path for path in needed if not self.file(place, path).exists()] for place in places}
        fullest = min(places, key=lambda place: len(missing[place]))
        if missing[fullest]:
            raise self.missing(missing[fullest], looked_in=places)
        return fullest

    def missing(self, paths: Sequence[Path], *, looked_in: Sequence[Path] = ()) -> MissingDataError:
        """The error that names every missing path, the folders searched, and how to get the files."""
        lines = "".join(f"\n  {path}{'[.gz]' if self.compressed else ''}" for path in paths)
        places = f"\nLooked in {', '.join(map(str, looked_in))}." if looked_in else ""
        return MissingDataError(f"{self.name}: these are missing:{lines}{places}\n{self.advice}")


def check_present(paths: Sequence[Path], *, annotated_in: Path, allow_missing: bool) -> Bool[Tensor, " N"]:
    """Whether each of N annotated images exists; a missing image is an error, or with `allow_missing` a warning."""
    files: dict[Path, set[str]] = {}
    for folder in filter(Path.is_dir, {path.parent for path in paths}):
        with os.scandir(folder) as entries:  # many times faster than a call for each file
            files[folder] = {entry.name for entry in entries if entry.is_file()}
    present = [path.name in files.get(path.parent, ()) for path in paths]
    absent = [path for path, is_present in zip(paths, present, strict=True) if not is_present]
    if absent:
        message = f"{annotated_in} names {len(absent)} of {len(paths)} images that do not exist: {first_of(absent)}"
        if not allow_missing:
            raise MissingDataError(f"{message}; get them, or leave them out with allow_missing=True")
        warnings.warn(f"{message}; they are left out", stacklevel=2)
    return torch.tensor(present, dtype=torch.bool)


@dataclass(frozen=True)
class Annotations:
    """N annotated photographs; `path` is the file of the annotations, or a pattern for several files."""

    paths: Sequence[Path]
    labels: Int64[Tensor, " N"]
    classes: Sequence[str]
    path: Path

    def images(self, name: str, preprocessing: Preprocessing, *, allow_missing: bool) -> FolderImages:
        """The photographs that exist; see `check_present`."""
        present = check_present(self.paths, annotated_in=self.path, allow_missing=allow_missing)
        paths = list(compress(self.paths, present.tolist()))
        return FolderImages(paths, self.labels[present], name=name, classes=self.classes, preprocessing=preprocessing)


def split_by_class(images: Dataset, is_test: Bool[Tensor, " C"], *, validation: float, seed: int) -> dict[str, Any]:
    """The splits `train`, `validation` and `test`, with each class in only one split.

    The validation split gets the fraction `validation` of the classes outside the test split. The draw is stratified by
    whether a class has one image or several.

    Source: K. Musgrave, S. Belongie and S.-N. Lim (2020), A metric learning reality check, section 3.
    """
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    candidates = ((counts > 0) & ~is_test).nonzero().flatten()
    n_tested = int((is_test & (counts > 0)).sum())
    if len(candidates) < 2 or n_tested == 0:
        raise ValueError(
            f"{images.name} needs images of at least two classes for training and validation, and of one for testing, "
            f"got {len(candidates)} and {n_tested}"
        )
    n_held_out = min(fraction_of(len(candidates), validation, name="validation"), len(candidates) - 1)
    (held_out,) = stratified_split((counts[candidates] > 1).long(), (n_held_out,), seed=seed)
    in_validation = torch.isin(images.labels, candidates[held_out])
    in_test = is_test[images.labels]
    masks = {"train": ~in_validation & ~in_test, "validation": in_validation, "test": in_test}
    return {part: images.subset(mask.nonzero().flatten()) for part, mask in masks.items()}


def read_lines(path: Path) -> list[tuple[int, str]]:
    """The non-empty lines of a text file in UTF-8, stripped, with their numbers."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}; get it again") from None
    return [(number, stripped) for number, line in enumerate(lines, 1) if (stripped := line.strip())]


def read_mat(path: Path, *names: str) -> list[Any]:
    """Variables of a MATLAB file, without axes of length one."""
    from scipy.io import loadmat  # slow to import, and needed by only two data sets

    try:
        variables = loadmat(path, squeeze_me=True, variable_names=names)
    except Exception as error:  # errors of damaged files have no common class
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}; get it again") from error
    if absent := [name for name in names if name not in variables]:
        raise ValueError(f"{path} has no variable {', '.join(absent)}; get it again")
    return [variables[name] for name in names]


def read_soft_labels(path: str | Path, n_items: int) -> Float32[Tensor, "N C"]:
    """Probabilities of classes for each item, such as CIFAR-10H for the 10,000 test images of CIFAR-10.

    The path is a .npy file with rows in the order of the items, or a folder with CIFAR-10H's `cifar10h-probs.npy`.

    Source: Peterson, Battleday, Griffiths and Russakovsky (2019), "Human uncertainty makes classification more robust".
    """
    path = Path(path)
    path = path / CIFAR10H if path.is_dir() else path
    if not path.is_file():
        source = "get it from CIFAR-10H, as its authors publish it"
        advice = source if path.name == CIFAR10H else "give a .npy file of class probabilities, or CIFAR-10H's folder"
        raise MissingDataError(f"{path} is missing: {advice}")
    try:
        with path.open("rb") as file:
            values = np.lib.format.read_array(file, allow_pickle=False).astype(np.float32)
    except ValueError as error:
        raise ValueError(f"{path} is not a NumPy file of numbers: {error}; write it with numpy.save") from None
    if values.ndim != 2 or len(values) != n_items:
        raise ValueError(f"{path} must hold a row for each of {n_items} images, got shape {values.shape}")
    labels = torch.from_numpy(values)
    check_distributions(f"probabilities in {path}", labels)
    return labels
