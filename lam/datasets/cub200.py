"""Caltech-UCSD Birds-200-2011: 11,788 photographs of 200 species, in the layout of its authors.

    CUB_200_2011/images.txt               lines "<image> <path below images/>"
    CUB_200_2011/image_class_labels.txt   lines "<image> <class>"
    CUB_200_2011/classes.txt              lines "<class> <name>", classes from 1
    CUB_200_2011/images/<name>/*.jpg

Source: C. Wah, S. Branson, P. Welinder, P. Perona and S. Belongie (2011).

As in Warburg et al. (2023), images are not cropped to bounding boxes. The authors' split is ignored, because both of
its parts hold every class. Tested on generated files in this layout, not on the original files.
"""

from pathlib import Path

from lam.datasets.base import labels_of
from lam.datasets.published import Annotations, HalvedClasses, Source, read_lines

_IMAGES, _LABELS, _CLASSES = "images.txt", "image_class_labels.txt", "classes.txt"


def _annotations(source: Source, root: str | Path | None) -> Annotations:
    folder = source.folder(root, needed=(_IMAGES, _LABELS, _CLASSES, "images"), below=("CUB_200_2011",))
    names, label_of, classes = (_read(folder / file) for file in (_IMAGES, _LABELS, _CLASSES))
    for image in names:
        if (label := label_of.get(image)) not in classes:
            raise ValueError(
                f"{folder / _LABELS} must give every image of {_IMAGES} a class of {_CLASSES}, got {label} for image "
                f"{image}; get it again"
            )
    paths = [folder / "images" / name for name in names.values()]
    labels = labels_of((label_of[image] for image in names), classes)
    return Annotations(paths, labels, tuple(classes.values()), folder / _IMAGES)


def _read(path: Path) -> dict[str, str]:
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
    _annotations,
)
