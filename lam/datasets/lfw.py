"""Labeled Faces in the Wild: 13,233 photographs of 5,749 people, in the layout of its authors.

    lfw-deepfunneled/ (or lfw_funneled/, lfw/)      <Person_Name>/<Person_Name>_0001.jpg, ...
    peopleDevTrain.txt, peopleDevTest.txt           number of people, then lines "<Person_Name> TAB <number of images>"

The lists are next to the folder of people; without them, people are split at random. Tested on generated files in this
layout, not on the original files.
"""

from pathlib import Path

import torch

from lam.datasets.base import ImageOptions, MissingDataError, labels_of, stratified_split
from lam.datasets.folder import image_files
from lam.datasets.published import SIZE, Annotations, Source, read_lines, split_by_class
from lam.datasets.splits import Splits, fraction_of
from lam.inputs.preprocessing import Preprocessing

_FOLDERS = ("lfw-deepfunneled", "lfw_funneled", "lfw")
_TRAIN, _TEST = "peopleDevTrain.txt", "peopleDevTest.txt"
_SOURCE = Source(
    "lfw",
    "Unpack lfw-deepfunneled.tgz there, and put peopleDevTrain.txt and peopleDevTest.txt beside its folder: from "
    "http://vis-www.cs.umass.edu/lfw/, or if it does not answer from "
    "https://www.kaggle.com/datasets/jessicali9530/lfw-dataset.",
)


def splits(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    preprocessing: ImageOptions = None,
    validation: float = 0.1,
    test: float = 0.3,
    allow_missing: bool = False,
) -> Splits:
    """Faces in the published split of people.

    Classes are people; no person is in two splits. Most people have a single image, which has no match.

    Source: G. B. Huang, M. Ramesh, T. Berg and E. Learned-Miller (2007), view 1: 4,038 people for training, 1,711 for
        testing. Here, some training people are held out for validation.

    Args:
        root: folder that contains the folder of people and the lists; $LAM_DATA/lfw by default.
        seed: seed of the held-out people, and of the test people if there are no lists.
        preprocessing: as for `lam.datasets.load`, by default at 227 pixels.
        validation: fraction of the training people that is held out.
        test: fraction of all people for testing, if there are no lists.
        allow_missing: whether missing images are left out with a warning.
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
    annotations = Annotations(paths, labels_of((path.parent.name for path in paths), names), names, named_in)
    images = annotations.images("lfw", preprocessing, allow_missing=allow_missing)
    if test_people is None:
        is_test = torch.zeros(len(names), dtype=torch.bool)
        has_match = torch.bincount(images.labels, minlength=len(names)) > 1
        is_test[stratified_split(has_match.long(), (fraction_of(len(names), test, name="test"),), seed=seed)[0]] = True
    else:
        is_test = torch.tensor([name in test_people for name in names])
    return Splits(**split_by_class(images, is_test, validation=validation, seed=seed), gallery="identities")


def _people_folder(root: Path) -> Path:
    """The folder of people in the root, or in the folder of an unpacked archive."""
    for top in (root, root / "lfw-py"):  # torchvision's folder
        for name in _FOLDERS:
            for folder in (top / name / name, top / name):
                if folder.is_dir():
                    return folder
    if any(root.glob("*/*_0001.jpg")):
        return root
    raise _SOURCE.missing([root / " or ".join(_FOLDERS)])


def _lists(people: Path) -> tuple[Path, Path] | None:
    """The two published lists beside the folder of people, in this folder or one level up; None if both are missing."""
    for folder in (people.parent, people, people.parent.parent):
        lists = folder / _TRAIN, folder / _TEST
        missing = [path for path in lists if not path.is_file()]
        if len(missing) == 1:
            raise _SOURCE.missing(missing)
        if not missing:
            return lists
    return None


def _read_list(path: Path) -> dict[str, int]:
    (_, head), *lines = read_lines(path) or [(1, "")]
    people: dict[str, int] = {}
    for number, line in lines:
        name, _, count = line.partition("\t")
        if not (name and count.isdecimal() and int(count) > 0) or name in people:
            raise ValueError(f"{path} must give each person once, a tab and a count, got {line!r} in line {number}")
        people[name] = int(count)
    if head != str(len(people)):
        raise ValueError(f"{path} must say in its first line how many people follow, {len(people)}, got {head!r}")
    return people
