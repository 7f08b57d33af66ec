"""Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species, in the layout of its authors.

    CUB_200_2011/images.txt               "<image> <path below images/>" a line
    CUB_200_2011/image_class_labels.txt   "<image> <class>"
    CUB_200_2011/classes.txt              "<class> <name>", classes counted from 1
    CUB_200_2011/images/<name>/*.jpg

Bounding boxes, parts and the authors' split within classes are not read: images are taken whole, as in the paper.
Tested on files made in this layout, not on the real ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lam.datasets.base import Splits
from lam.datasets.published import Source, annotated_images, open_set, resolve_preprocessing
from lam.inputs.preprocessing import Preprocessing

_IMAGES, _LABELS, _CLASSES = "images.txt", "image_class_labels.txt", "classes.txt"
_SOURCE = Source(
    "cub200",
    "Unpack CUB_200_2011.tgz there, from https://data.caltech.edu/records/65de6-vp158 (doi 10.22002/D1.20098).",
)


def splits(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    image_size: int | None = None,
    preprocessing: Preprocessing | Mapping[str, Any] | None = None,
    validation: float = 0.2,
    allow_missing: bool = False,
) -> Splits:
    """Birds of the first 100 classes to train on, of the last 100 to test on, as networks for ImageNet expect them.

    Source: C. Wah, S. Branson, P. Welinder, P. Perona and S. Belongie (2011); the split is that of K. Musgrave,
        S. Belongie and S.-N. Lim (2020). The paper does not say what it chose epochs on: here it is classes that are
        held out of the first 100, so that validation meets species that training did not, as the test does.

    Args:
        root: the folder that has CUB_200_2011, or that folder itself; $LAM_DATA/cub200 by default.
        seed: of the classes that are held out.
        image_size: pixels of each side, 227 by default.
        preprocessing: how a file becomes an item, as a record or the fields that differ from ImageNet's, without
            `image_size`.
        validation: fraction of the training classes that is held out.
        allow_missing: leave out annotated images that do not exist, with a warning, instead of refusing.

    Raises:
        MissingDataError: If files are missing (each named), or annotated images (counted, the first five named).
        ValueError: If an annotation is not what it should be; it names the file and the line.
    """
    preprocessing = resolve_preprocessing(preprocessing, image_size)
    folder = _SOURCE.folder(root, needed=(_IMAGES, _LABELS, _CLASSES, "images"), below=("CUB_200_2011",))
    names, classes = _read(folder / _IMAGES), _read(folder / _CLASSES)
    label_of = _read(folder / _LABELS)
    number_of = {number: position for position, number in enumerate(classes)}
    if unlabelled := [image for image in names if label_of.get(image) not in number_of]:
        label = label_of.get(unlabelled[0])
        raise ValueError(
            f"{folder / _LABELS} must give every image of {_IMAGES} a class of {_CLASSES}, got {label} for image "
            f"{unlabelled[0]}; get it again"
        )
    images = annotated_images(
        [folder / "images" / name for name in names.values()],
        [number_of[label_of[image]] for image in names],
        name="cub200",
        classes=tuple(classes.values()),
        preprocessing=preprocessing,
        annotated_in=folder / _IMAGES,
        allow_missing=allow_missing,
    )
    return open_set(images, validation=validation, seed=seed)


def _read(path: Path) -> dict[str, str]:
    values: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        key, _, value = line.strip().partition(" ")
        if line.strip() and (not value or key in values):
            raise ValueError(f"{path} must give each number once, then a name, got {line!r} in line {number}")
        if value:
            values[key] = value
    return values
