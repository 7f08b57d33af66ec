"""Labeled Faces in the Wild: 13,233 photographs of 5,749 people, in the layout of its authors.

    lfw-deepfunneled/ (or lfw_funneled/, lfw/)      <Person_Name>/<Person_Name>_0001.jpg, ...
    peopleDevTrain.txt, peopleDevTest.txt           how many people, then "<Person_Name> TAB <number of images>" a line

The lists stand beside the folder of people; without them the people are split at random. Tested on files made in this
layout, not on the real ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lam.datasets.base import MissingDataError, Splits, fraction_of, stratified_split
from lam.datasets.folder import image_files
from lam.datasets.published import SIZE, Annotations, Source, read_lines, split_by_class
from lam.inputs.preprocessing import Preprocessing

_FOLDERS = ("lfw-deepfunneled", "lfw_funneled", "lfw")
_TRAIN, _TEST = "peopleDevTrain.txt", "peopleDevTest.txt"
_SOURCE = Source(
    "lfw",
    "Unpack lfw-deepfunneled.tgz there, and put peopleDevTrain.txt and peopleDevTest.txt beside its folder: from "
    "http://vis-www.cs.umass.edu/lfw/, or where that does not answer from "
    "https://www.kaggle.com/datasets/jessicali9530/lfw-dataset.",
)


def splits(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    validation: float = 0.1,
    test: float = 0.3,
    allow_missing: bool = False,
) -> Splits:
    """Faces with the published split of people, as networks for ImageNet expect them.

    Classes are people; no person is in two parts. Most people have a single image: as queries they have no match.

    Source: G. B. Huang, M. Ramesh, T. Berg and E. Learned-Miller (2007), view 1: 4,038 people to train on, 1,711 to
        test on. The paper does not say what it chose epochs on: here it is people that are held out of training.

    Args:
        root: the folder that has the folder of people and the lists; $LAM_DATA/lfw by default.
        seed: of the people that are held out, and of those tested on where there are no lists.
        preprocessing: how a file becomes an item, as a record or the fields that differ from ImageNet's; by default
            ImageNet's at 227 pixels.
        validation: fraction of the training people that is held out.
        test: fraction of all people to test on, where there are no lists.
        allow_missing: leave out images that are listed but do not exist, with a warning, instead of refusing.

    Raises:
        MissingDataError: If files are missing (each named), or listed images (counted, the first five named).
        ValueError: If a list is not what it should be; it names the file and the line.
    """
    preprocessing = Preprocessing.of(preprocessing, SIZE)
    people = _people_folder(*_SOURCE.roots(root))
    lists = _lists(people)
    if lists is None:
        names = sorted(path.name for path in people.iterdir() if path.is_dir() and not path.name.startswith("."))
        paths = [path for name in names for path in image_files(people / name)]
        test_people, named_in = None, people
    else:
        train_people, test_people = map(_read_list, lists)
        if shared := sorted(train_people.keys() & test_people.keys()):
            raise ValueError(f"{lists[0]} and {lists[1]} must share no person, got {shared[0]} in both; get them again")
        counts = train_people | test_people
        names, named_in = sorted(counts), lists[0].with_name("peopleDev*.txt")
        paths = [people / name / f"{name}_{i:04d}.jpg" for name in names for i in range(1, counts[name] + 1)]
    if not paths:
        raise MissingDataError(f"{people} has no images <Person_Name>/<Person_Name>_0001.jpg. {_SOURCE.advice}")
    label_of = {name: label for label, name in enumerate(names)}
    annotations = Annotations(paths, [label_of[path.parent.name] for path in paths], names, named_in)
    images = annotations.images("lfw", preprocessing, allow_missing=allow_missing)
    if test_people is None:
        is_test = torch.zeros(len(names), dtype=torch.bool)
        has_match = torch.bincount(images.labels, minlength=len(names)) > 1
        is_test[stratified_split(has_match.long(), (fraction_of(len(names), test, name="test"),), seed=seed)[0]] = True
    else:
        is_test = torch.tensor([name in test_people for name in names])
    return replace(split_by_class(images, is_test, validation=validation, seed=seed), gallery="identities")


def _people_folder(root: Path) -> Path:
    """The folder of people below the root, also where an archive unpacked into a folder of its own name."""
    tops = (root, root / "lfw-py")  # torchvision's
    candidates = [place for top in tops for name in _FOLDERS for place in (top / name / name, top / name)]
    if folders := [folder for folder in candidates if folder.is_dir()]:
        return folders[0]
    if any(root.glob("*/*_0001.jpg")):
        return root
    raise _SOURCE.missing([root / " or ".join(_FOLDERS)])


def _lists(people: Path) -> tuple[Path, Path] | None:
    """Both published lists, beside the folder of people, in it or above; None where there is neither."""
    for folder in (people.parent, people, people.parent.parent):
        train, test = folder / _TRAIN, folder / _TEST
        if train.is_file() and test.is_file():
            return train, test
        if train.is_file() or test.is_file():
            raise _SOURCE.missing([test if train.is_file() else train])
    return None


def _read_list(path: Path) -> dict[str, int]:
    head, *lines = read_lines(path) or [""]
    people: dict[str, int] = {}
    for number, line in enumerate(lines, start=2):
        name, _, count = line.strip().partition("\t")
        if not line.strip():
            continue
        if not (name and count.isdecimal() and int(count) > 0) or name in people:
            raise ValueError(f"{path} must give each person once, a tab and a count, got {line!r} in line {number}")
        people[name] = int(count)
    if head.strip() != str(len(people)):
        raise ValueError(f"{path} must say in its first line how many people follow, {len(people)}, got {head!r}")
    return people
