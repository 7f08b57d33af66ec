"""What the readers of published data sets share: where the files are, which are missing, and splits by class.

The layouts themselves are in the file of each data set. Nothing is downloaded here.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from lam.datasets.base import Dataset, MissingDataError, Splits, fraction_of, stratified_split
from lam.datasets.folder import FolderImages
from lam.inputs.preprocessing import Preprocessing

DEFAULT_SIZE = 227
_LISTED = 5


@dataclass(frozen=True)
class Source:
    """A published data set.

    Args:
        name: what it is called here.
        advice: how to get its files, in a sentence.
    """

    name: str
    advice: str

    def root(self, root: str | Path | None) -> Path:
        """The root itself, or $LAM_DATA/<name> where it is None.

        Raises:
            MissingDataError: If there is neither.
        """
        if root is not None:
            return Path(root).expanduser()
        if data := os.environ.get("LAM_DATA"):
            return Path(data).expanduser() / self.name
        raise MissingDataError(f"{self.name} needs root=<folder>, or LAM_DATA in the environment. {self.advice}")

    def folder(self, root: str | Path | None, *, needed: Sequence[str], below: Sequence[str] = ()) -> Path:
        """The folder that has every needed file.

        Args:
            root: as for `root`.
            needed: files and folders, relative to the folder that is looked for.
            below: folders of the root where they may be, too.

        Raises:
            MissingDataError: If no folder has them all; it names what the fullest one lacks.
        """
        top = self.root(root)
        places = [top, *(top / place for place in below)]
        missing = {place: [place / path for path in needed if not (place / path).exists()] for place in places}
        fullest = min(places, key=lambda place: len(missing[place]))
        if missing[fullest]:
            raise self.missing(missing[fullest], looked_in=places)
        return fullest

    def missing(self, paths: Sequence[Path], *, looked_in: Sequence[Path] = ()) -> MissingDataError:
        """The error that names every missing path, where it was looked for, and how to get it."""
        lines = "".join(f"\n  {path}" for path in paths)
        places = f"\nLooked in {', '.join(map(str, looked_in))}." if looked_in else ""
        return MissingDataError(f"{self.name}: these are missing:{lines}{places}\n{self.advice}")


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
    names = {folder: {file.name for file in folder.iterdir()} if folder.is_dir() else set() for folder in folders}
    present = [path.name in names[path.parent] for path in paths]  # many times faster than asking for each
    absent = [path for path, is_present in zip(paths, present, strict=True) if not is_present]
    if absent:
        first = ", ".join(map(str, absent[:_LISTED])) + (", ..." if len(absent) > _LISTED else "")
        message = f"{annotated_in} names {len(absent)} of {len(paths)} images that do not exist: {first}"
        if not allow_missing:
            raise MissingDataError(f"{message}; get them, or leave them out with allow_missing=True")
        warnings.warn(f"{message}; they are left out", stacklevel=2)
    return torch.tensor(present, dtype=torch.bool)


def annotated_images(
    paths: Sequence[Path],
    labels: Sequence[int],
    *,
    name: str,
    classes: Sequence[str],
    preprocessing: Preprocessing,
    annotated_in: Path,
    allow_missing: bool,
) -> FolderImages:
    """The annotated images that exist, at least one; arguments as of `FolderImages` and `check_present`."""
    present = check_present(paths, annotated_in=annotated_in, allow_missing=allow_missing)
    kept, kept_labels = list(compress(paths, present.tolist())), torch.tensor(labels, dtype=torch.int64)[present]
    return FolderImages(kept, kept_labels, name=name, classes=classes, preprocessing=preprocessing)


def resolve_preprocessing(
    preprocessing: Preprocessing | Mapping[str, Any] | None, image_size: int | None
) -> Preprocessing:
    """A record as it is, ImageNet's but for some fields, or ImageNet's at `image_size` pixels (227 as in the paper).

    Raises:
        ValueError: If both are given, or as `Preprocessing.from_options`.
    """
    if preprocessing is None:
        return Preprocessing.imagenet(DEFAULT_SIZE if image_size is None else image_size)
    if image_size is not None:
        raise ValueError(f"preprocessing has a size of its own: leave out image_size, got {image_size}")
    return preprocessing if isinstance(preprocessing, Preprocessing) else Preprocessing.from_options(preprocessing)


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
    return Splits(**{part: images.subset(mask.nonzero().flatten()) for part, mask in masks.items()})


def open_set(images: Dataset, *, validation: float, seed: int) -> Splits:
    """Splits by class: the first half of the classes trains and validates, the last half tests."""
    is_test = torch.arange(len(images.classes)) >= len(images.classes) // 2
    return split_by_class(images, is_test, validation=validation, seed=seed)


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
