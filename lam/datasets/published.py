"""What the readers of published data sets share: where the files are, which are missing, and splits by class.

The layouts themselves are in the file of each data set. Nothing is downloaded unless asked for.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets.base import Dataset, MissingDataError, Splits, TensorImages, carve, fraction_of, stratified_split
from lam.datasets.folder import FolderImages
from lam.inputs.preprocessing import Preprocessing

SIZE = 227
"""Pixels of each side of photographs, as in the paper, unless their preprocessing says otherwise."""

_LISTED = 5


@dataclass(frozen=True)
class Source:
    """A published data set.

    Args:
        name: what it is called here.
        advice: how to get its files, in a sentence.
        system_root: where a package of the operating system puts them, if there is one.
        compressed: whether each may have the suffix .gz.
    """

    name: str
    advice: str
    system_root: str | None = None
    compressed: bool = False

    def roots(self, root: str | Path | None) -> list[Path]:
        """The root itself; where it is None, $LAM_DATA/<name> and the system's.

        Raises:
            MissingDataError: If there is none.
        """
        if root is not None:
            return [Path(root).expanduser()]
        data = os.environ.get("LAM_DATA")
        roots = [Path(data).expanduser() / self.name] if data else []
        roots += [Path(self.system_root)] if self.system_root is not None else []
        if not roots:
            raise MissingDataError(f"{self.name} needs root=<folder>, or LAM_DATA in the environment. {self.advice}")
        return roots

    def file(self, folder: Path, name: str) -> Path:
        """The path of a file, compressed where only that is there."""
        plain = folder / name
        return plain if plain.exists() or not self.compressed else plain.with_name(f"{plain.name}.gz")

    def folder(self, root: str | Path | None, *, needed: Sequence[str], below: Sequence[str] = ()) -> Path:
        """The folder that has every needed file.

        Args:
            root: as for `roots`.
            needed: files and folders, relative to the folder that is looked for.
            below: folders of the root where they may be, too.

        Raises:
            MissingDataError: If no folder has them all; it names what the fullest one lacks.
        """
        places = [place for top in self.roots(root) for place in (top, *(top / name for name in below))]
        missing = {place: [place / path for path in needed if not self.file(place, path).exists()] for place in places}
        fullest = min(places, key=lambda place: len(missing[place]))
        if missing[fullest]:
            raise self.missing(missing[fullest], looked_in=places)
        return fullest

    def missing(self, paths: Sequence[Path], *, looked_in: Sequence[Path] = ()) -> MissingDataError:
        """The error that names every missing path, where it was looked for, and how to get it."""
        lines = "".join(f"\n  {path}{'[.gz]' if self.compressed else ''}" for path in paths)
        places = f"\nLooked in {', '.join(map(str, looked_in))}." if looked_in else ""
        return MissingDataError(f"{self.name}: these are missing:{lines}{places}\n{self.advice}")


@dataclass(frozen=True)
class SmallImages:
    """A data set of small images, held in memory, published in one part to train and one to test on.

    Args:
        source: its name and how to get it.
        classes: the names of the classes.
        files: of each published part.
        below: folders of a root where the files may be, too.
        read: maps the files of a part to images (N, C, H, W) and labels (N,).
        fetch: downloads the files of a part ("train" or "test") to a folder.
    """

    source: Source
    classes: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    below: tuple[str, ...]
    read: Callable[[list[Path]], tuple[Tensor, Tensor]]
    fetch: Callable[[str, Path], None]

    def splits(
        self, *, root: str | Path | None = None, seed: int = 0, validation: int = 5000, download: bool = False
    ) -> Splits:
        """The data set, in [0, 1], with a validation part carved out of the training files.

        Args:
            root: folder of the files; by default $LAM_DATA/<name>, or where a system package puts them.
            seed: of the validation part.
            validation: how many images it has, each class in proportion.
            download: fetch missing files through torchvision, to the root.

        Raises:
            MissingDataError: If files are missing; a ValueError and a FileNotFoundError.
            ValueError: If a file is not what it should be (named), or `validation` leaves nothing to train on.
        """
        training = self._part("train", root, download)
        if not 0 < validation < len(training):
            raise ValueError(f"validation must be from 1 to {len(training) - 1} images, got {validation}")
        validated, trained = carve(training, (validation,), seed=seed)
        return Splits(train=trained, validation=validated, test=self._part("test", root, download))

    def test_images(self, *, root: str | Path | None = None, download: bool = False) -> TensorImages:
        """The published test part alone, with `root` and `download` as for `splits`."""
        return self._part("test", root, download)

    def _part(self, part: str, root: str | Path | None, download: bool) -> TensorImages:
        # where there are several roots, one must have every file: parts from two would not belong together
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
            raise MissingDataError(f"{self.source.name}: say where download=True may put files, with root=<folder>")
        try:
            self.fetch(part, root)
        except (OSError, RuntimeError) as error:
            raise MissingDataError(
                f"torchvision could not download {self.source.name} to {root}: {error}. {self.source.advice}"
            ) from error


def check_present(paths: Sequence[Path], *, annotated_in: Path, allow_missing: bool) -> Bool[Tensor, " N"]:
    """Which of the annotated images exist.

    Args:
        paths: N image files.
        annotated_in: the file that names them.
        allow_missing: leave out those that do not exist, with a warning, instead of refusing.

    Returns:
        (N,) whether each exists.

    Raises:
        MissingDataError: If some do not: how many, and the first five.
    """
    folders = {path.parent for path in paths}
    files = {folder: _files_in(folder) if folder.is_dir() else set() for folder in folders}
    present = [path.name in files[path.parent] for path in paths]  # many times faster than asking for each
    absent = [path for path, is_present in zip(paths, present, strict=True) if not is_present]
    if absent:
        first = ", ".join(map(str, absent[:_LISTED])) + (", ..." if len(absent) > _LISTED else "")
        message = f"{annotated_in} names {len(absent)} of {len(paths)} images that do not exist: {first}"
        if not allow_missing:
            raise MissingDataError(f"{message}; get them, or leave them out with allow_missing=True")
        warnings.warn(f"{message}; they are left out", stacklevel=2)
    return torch.tensor(present, dtype=torch.bool)


def _files_in(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries if entry.is_file()}


@dataclass(frozen=True)
class Annotations:
    """N photographs that files name, and their classes.

    Attributes:
        paths: the photographs.
        labels: positions in `classes`.
        classes: the name of every class.
        path: of the file that names them, or a pattern of several.
    """

    paths: list[Path]
    labels: list[int]
    classes: Sequence[str]
    path: Path

    def images(self, name: str, preprocessing: Preprocessing, *, allow_missing: bool) -> FolderImages:
        """Those that exist, at least one; see `check_present`."""
        present = check_present(self.paths, annotated_in=self.path, allow_missing=allow_missing)
        paths, labels = list(compress(self.paths, present.tolist())), torch.tensor(self.labels, dtype=torch.int64)
        return FolderImages(paths, labels[present], name=name, classes=self.classes, preprocessing=preprocessing)


@dataclass(frozen=True)
class HalvedClasses:
    """A data set of photographs whose first half of the classes trains and validates, whose last half tests.

    Source: K. Musgrave, S. Belongie and S.-N. Lim (2020). The paper does not say what it chose epochs on: here it is
        classes that are held out of the first half, so that validation meets classes that training did not, as the
        test does.

    Args:
        source: its name and how to get it.
        read: its annotations, from a root as of `Source.roots`.
    """

    source: Source
    read: Callable[[Source, str | Path | None], Annotations]

    def splits(
        self,
        *,
        root: str | Path | None = None,
        seed: int = 0,
        preprocessing: Preprocessing | Mapping[str, Any] | None = None,
        validation: float = 0.2,
        allow_missing: bool = False,
    ) -> Splits:
        """The data set, as networks for ImageNet expect it.

        Args:
            root: the folder of its files; $LAM_DATA/<name> by default.
            seed: of the classes that are held out.
            preprocessing: how a file becomes an item, as a record or the fields that differ from ImageNet's; by default
                ImageNet's at 227 pixels.
            validation: fraction of the training classes that is held out.
            allow_missing: leave out annotated images that do not exist, with a warning, instead of refusing.

        Raises:
            MissingDataError: If files are missing (each named), or annotated images (counted, the first five named).
            ValueError: If an annotation is not what it should be; it names the file.
        """
        annotations = self.read(self.source, root)
        preprocessing = Preprocessing.of(preprocessing, SIZE)
        images = annotations.images(self.source.name, preprocessing, allow_missing=allow_missing)
        is_test = torch.arange(len(images.classes)) >= len(images.classes) // 2
        return split_by_class(images, is_test, validation=validation, seed=seed)


def split_by_class(images: Dataset, is_test: Bool[Tensor, " C"], *, validation: float, seed: int) -> Splits:
    """Splits by class, none in two parts: as in testing, validation meets classes that training never saw.

    Source: K. Musgrave, S. Belongie and S.-N. Lim (2020), A metric learning reality check, section 3.

    Args:
        images: N images.
        is_test: (C,) which classes are tested on.
        validation: fraction of the other classes that is held out, those with one image and those with more in
            proportion.
        seed: of the classes that are held out.

    Raises:
        ValueError: If a part is left without a class, or `validation` is no fraction.
    """
    counts = torch.bincount(images.labels, minlength=len(images.classes))
    candidates = ((counts > 0) & ~is_test).nonzero().flatten()
    if len(candidates) < 2 or not bool((is_test & (counts > 0)).any()):
        raise ValueError(
            f"{images.name} needs images of at least two classes to train and validate on and of one to test on, got "
            f"{len(candidates)} and {int((is_test & (counts > 0)).sum())}"
        )
    n_held_out = min(fraction_of(len(candidates), validation, name="validation"), len(candidates) - 1)
    (held_out,) = stratified_split((counts[candidates] > 1).long(), (n_held_out,), seed=seed)
    in_validation = torch.isin(images.labels, candidates[held_out])
    in_test = is_test[images.labels]
    masks = {"train": ~in_validation & ~in_test, "validation": in_validation, "test": in_test}
    return Splits.of({part: images.subset(mask.nonzero().flatten()) for part, mask in masks.items()})


def read_lines(path: Path) -> list[str]:
    """The lines of a text file in UTF-8.

    Raises:
        ValueError: If it is in another encoding; it names the file.
    """
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not in UTF-8: {error}; get it again") from None


def read_mat(path: Path, *names: str) -> list[Any]:
    """Variables of a MATLAB file, axes of length one squeezed.

    Raises:
        ValueError: If the file is no MATLAB file or lacks one of them; it names the file.
    """
    from scipy.io import loadmat  # slow to import, and needed by two data sets alone

    try:
        variables = loadmat(path, squeeze_me=True, variable_names=names)
    except Exception as error:  # what damaged bytes raise has no common class
        raise ValueError(f"{path} cannot be read as a MATLAB file: {error}; get it again") from error
    if absent := [name for name in names if name not in variables]:
        raise ValueError(f"{path} has no variable {', '.join(absent)}; get it again")
    return [variables[name] for name in names]
