"""CUB-200-2011, Stanford Cars and Labeled Faces in the Wild, in the layouts of their authors, split by class.

Images are not cropped to bounding boxes, as in Warburg et al. (2023). The authors' splits of birds and cars are
ignored, because both of their parts hold every class. Tests use generated files in these layouts, not the original
files.

Caltech-UCSD Birds-200-2011 has 11,788 photographs of 200 species:

    CUB_200_2011/images.txt               lines "<image> <path below images/>"
    CUB_200_2011/image_class_labels.txt   lines "<image> <class>"
    CUB_200_2011/classes.txt              lines "<class> <name>", classes from 1
    CUB_200_2011/images/<name>/*.jpg

Stanford Cars has 16,185 photographs of 196 models of cars. Papers on metric learning use the layout with all
annotations in one file:

    cars_annos.mat    `annotations` with the fields relative_im_path and class, `class_names`
    car_ims/*.jpg

The other layout has a development kit, at the root or in torchvision's folder stanford_cars:

    devkit/cars_meta.mat                                            `class_names`
    devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat     `annotations` with the fields fname and class
    cars_train/*.jpg, cars_test/*.jpg

Labeled Faces in the Wild has 13,233 photographs of 5,749 people. The lists are next to the folder of people; without
them, people are split at random:

    lfw-deepfunneled/ (or lfw_funneled/, lfw/)      <Person_Name>/<Person_Name>_0001.jpg, ...
    peopleDevTrain.txt, peopleDevTest.txt           number of people, then lines "<Person_Name> TAB <number of images>"

Source: C. Wah, S. Branson, P. Welinder, P. Perona and S. Belongie (2011); J. Krause, M. Stark, J. Deng and L. Fei-Fei
(2013).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lam.datasets.base import ImageOptions, MissingDataError, labels_of, stratified_split
from lam.datasets.folder import image_files
from lam.datasets.published import SIZE, Annotations, Source, read_lines, read_mat, split_by_class
from lam.datasets.splits import Splits, fraction_of
from lam.inputs.preprocessing import Preprocessing

_IMAGES, _LABELS, _CLASSES = "images.txt", "image_class_labels.txt", "classes.txt"
_ONE_FILE = "cars_annos.mat"
_META = "devkit/cars_meta.mat"
_KIT = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}

_FOLDERS = ("lfw-deepfunneled", "lfw_funneled", "lfw")
_TRAIN, _TEST = "peopleDevTrain.txt", "peopleDevTest.txt"
_FACES = Source(
    "lfw",
    "Unpack lfw-deepfunneled.tgz there, and put peopleDevTrain.txt and peopleDevTest.txt beside its folder: from "
    "http://vis-www.cs.umass.edu/lfw/, or if it does not answer from "
    "https://www.kaggle.com/datasets/jessicali9530/lfw-dataset.",
)


@dataclass(frozen=True)
class HalvedClasses:
    """Photographs split by class: the first half of the classes is for training and validation, the second for testing.

    `read` returns the annotations of `source` in a root; see `Source.roots`.

    Source: K. Musgrave, S. Belongie and S.-N. Lim (2020). Here, validation classes are held out of the first half:
        training sees neither validation nor test classes.
    """

    source: Source
    read: Callable[[Source, str | Path | None], Annotations]

    def splits(
        self,
        *,
        root: str | Path | None = None,
        seed: int = 0,
        preprocessing: ImageOptions = None,
        validation: float = 0.2,
        allow_missing: bool = False,
    ) -> Splits:
        """The data set in `root`, by default $LAM_DATA/<name>, at 227 pixels; see `lam.datasets.load`.

        Args:
            validation: fraction of the training classes that is held out, drawn by the seed.
            allow_missing: whether missing images are left out with a warning.
        """
        annotations = self.read(self.source, root)
        preprocessing = Preprocessing.of(preprocessing, SIZE)
        images = annotations.images(self.source.name, preprocessing, allow_missing=allow_missing)
        is_test = torch.arange(len(images.classes)) >= len(images.classes) // 2
        return Splits(**split_by_class(images, is_test, validation=validation, seed=seed))


def _bird_annotations(source: Source, root: str | Path | None) -> Annotations:
    folder = source.folder(root, needed=(_IMAGES, _LABELS, _CLASSES, "images"), below=("CUB_200_2011",))
    names, label_of, classes = (_read_names(folder / file) for file in (_IMAGES, _LABELS, _CLASSES))
    for image in names:
        if (label := label_of.get(image)) not in classes:
            raise ValueError(
                f"{folder / _LABELS} must give every image of {_IMAGES} a class of {_CLASSES}, got {label} for image "
                f"{image}; get it again"
            )
    paths = [folder / "images" / name for name in names.values()]
    labels = labels_of((label_of[image] for image in names), classes)
    return Annotations(paths, labels, tuple(classes.values()), folder / _IMAGES)


def _read_names(path: Path) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in read_lines(path):
        key, _, value = line.partition(" ")
        if not value or key in values:
            raise ValueError(f"{path} must give each number once, then a name, got {line!r} in line {number}")
        values[key] = value
    return values


birds = HalvedClasses(
    Source(
        "cub200",
        "Unpack CUB_200_2011.tgz there, from https://data.caltech.edu/records/65de6-vp158 (doi 10.22002/D1.20098).",
    ),
    _bird_annotations,
)


def _car_annotations(source: Source, root: str | Path | None) -> Annotations:
    (top,) = source.roots(root)
    if (top / _ONE_FILE).is_file():
        path = meta = top / _ONE_FILE
        field, files = "relative_im_path", {top: path}
    else:
        folder = source.folder(root, needed=(_META, *_KIT.values(), *_KIT), below=("stanford_cars",))
        path, meta = folder / "**/cars_*_annos*.mat", folder / _META
        field, files = "fname", {folder / images: folder / annotations for images, annotations in _KIT.items()}
    classes = tuple(map(str, np.atleast_1d(read_mat(meta, "class_names")[0])))
    rows = [(at / name, label) for at, file in files.items() for name, label in _rows(file, field, len(classes))]
    labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
    return Annotations([file for file, _ in rows], labels, classes, path)


def _rows(path: Path, field: str, n_classes: int) -> Iterator[tuple[str, int]]:
    (annotations,) = read_mat(path, "annotations")
    annotations = np.atleast_1d(annotations)
    fields = annotations.dtype.names or ()
    if absent := [name for name in (field, "class") if name not in fields]:
        raise ValueError(
            f"{path}: annotations have no field {', '.join(absent)}; they have {', '.join(fields) or 'none'}"
        )
    numbers = annotations["class"]
    if wrong := [number for number in numbers if np.ndim(number) or number not in range(1, n_classes + 1)]:
        raise ValueError(f"{path}: classes must be from 1 to {n_classes}, got {wrong[0]}; get it again")
    return zip(map(str, annotations[field]), (int(number) - 1 for number in numbers), strict=True)


cars = HalvedClasses(
    Source(
        "cars196",
        "Put cars_annos.mat and the folder car_ims there, or the folders devkit, cars_train and cars_test with "
        "cars_test_annos_withlabels.mat. Their page, https://ai.stanford.edu/~jkrause/cars/car_dataset.html, no longer "
        "offers them; https://github.com/pytorch/vision/issues/7545 lists copies.",
    ),
    _car_annotations,
)


def faces(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    preprocessing: ImageOptions = None,
    validation: float = 0.1,
    test: float = 0.3,
    allow_missing: bool = False,
) -> Splits:
    """Faces in the published split of people, at 227 pixels; see `lam.datasets.load`.

    Classes are people; no person is in two splits. Most people have a single image, which has no match.

    Source: G. B. Huang, M. Ramesh, T. Berg and E. Learned-Miller (2007), view 1: 4,038 people for training, 1,711 for
        testing. Here, some training people are held out for validation.

    Args:
        root: folder that contains the folder of people and the lists; $LAM_DATA/lfw by default.
        validation: fraction of the training people that is held out, drawn by the seed.
        test: fraction of all people for testing, drawn by the seed, if there are no lists.
        allow_missing: whether missing images are left out with a warning.
    """
    preprocessing = Preprocessing.of(preprocessing, SIZE)
    people = _people_folder(*_FACES.roots(root))
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
        raise MissingDataError(f"{people} has no images <Person_Name>/<Person_Name>_0001.jpg. {_FACES.advice}")
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
    raise _FACES.missing([root / " or ".join(_FOLDERS)])


def _lists(people: Path) -> tuple[Path, Path] | None:
    """The two published lists beside the folder of people, in this folder or one level up; None if both are missing."""
    for folder in (people.parent, people, people.parent.parent):
        lists = folder / _TRAIN, folder / _TEST
        missing = [path for path in lists if not path.is_file()]
        if len(missing) == 1:
            raise _FACES.missing(missing)
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
