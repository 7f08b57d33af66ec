"""Stanford Cars: 16,185 photographs of 196 models of cars, in one of two layouts of its authors.

Papers on metric learning use the layout with all annotations in one file:

    cars_annos.mat    `annotations` with the fields relative_im_path and class, `class_names`
    car_ims/*.jpg

The other layout has a development kit, at the root or in torchvision's folder stanford_cars:

    devkit/cars_meta.mat                                            `class_names`
    devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat     `annotations` with the fields fname and class
    cars_train/*.jpg, cars_test/*.jpg

Source: J. Krause, M. Stark, J. Deng and L. Fei-Fei (2013).

Bounding boxes are ignored. So is the authors' split, because both of its parts hold every class. Tested on generated
files in these layouts, not on the original files.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from lam.datasets.published import Annotations, HalvedClasses, Source, read_mat

_ONE_FILE = "cars_annos.mat"
_META = "devkit/cars_meta.mat"
_KIT = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}


def _annotations(source: Source, root: str | Path | None) -> Annotations:
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
    """Name and label of each photograph."""
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
    _annotations,
)
