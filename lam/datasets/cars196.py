"""Stanford Cars: 16,185 photographs of 196 models of cars, in either layout of its authors.

In one file, as metric learning uses it:

    cars_annos.mat    `annotations` with the fields relative_im_path and class, `class_names`
    car_ims/*.jpg

Or with the development kit, also below a folder stanford_cars, as torchvision has it:

    devkit/cars_meta.mat                                            `class_names`
    devkit/cars_train_annos.mat, cars_test_annos_withlabels.mat     `annotations` with the fields fname and class
    cars_train/*.jpg, cars_test/*.jpg

Bounding boxes and the authors' split within classes are not read. Tested on files made in these layouts, not on the
real ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lam.datasets.base import Splits
from lam.datasets.published import Source, annotated_images, open_set, read_mat, resolve_preprocessing
from lam.inputs.preprocessing import Preprocessing

_ONE_FILE = "cars_annos.mat"
_META = "devkit/cars_meta.mat"
_KIT = {"cars_train": "devkit/cars_train_annos.mat", "cars_test": "cars_test_annos_withlabels.mat"}
_SOURCE = Source(
    "cars196",
    "Put cars_annos.mat and the folder car_ims there, or the folders devkit, cars_train and cars_test with "
    "cars_test_annos_withlabels.mat. Their page, https://ai.stanford.edu/~jkrause/cars/car_dataset.html, offers them "
    "no more; https://github.com/pytorch/vision/issues/7545 says where copies are.",
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
    """Cars of the first 98 classes to train on, of the last 98 to test on, as networks for ImageNet expect them.

    Source: J. Krause, M. Stark, J. Deng and L. Fei-Fei (2013); the split is that of K. Musgrave, S. Belongie and
        S.-N. Lim (2020).

    Args:
        root: the folder of either layout; $LAM_DATA/cars196 by default.
        seed: of the classes that are held out.
        image_size: pixels of each side, 227 by default.
        preprocessing: how a file becomes an item, as a record or the fields that differ from ImageNet's, without
            `image_size`.
        validation: fraction of the training classes that is held out.
        allow_missing: leave out annotated images that do not exist, with a warning, instead of refusing.

    Raises:
        MissingDataError: If files are missing (each named), or annotated images (counted, the first five named).
        ValueError: If an annotation file is not what it should be; it is named.
    """
    preprocessing = resolve_preprocessing(preprocessing, image_size)
    (top,) = _SOURCE.roots(root)
    if (top / _ONE_FILE).is_file():
        annotated_in = top / _ONE_FILE
        classes = _classes(annotated_in)
        files, labels = _annotations(annotated_in, "relative_im_path", len(classes))
        paths = [top / file for file in files]
    else:
        folder = _SOURCE.folder(root, needed=(_META, *_KIT.values(), *_KIT), below=("stanford_cars",))
        annotated_in, classes = folder / "**/cars_*_annos*.mat", _classes(folder / _META)
        paths, labels = [], []
        for images, annotations in _KIT.items():
            files, numbers = _annotations(folder / annotations, "fname", len(classes))
            paths += [folder / images / file for file in files]
            labels += numbers
    images = annotated_images(
        paths,
        labels,
        name="cars196",
        classes=classes,
        preprocessing=preprocessing,
        annotated_in=annotated_in,
        allow_missing=allow_missing,
    )
    return open_set(images, validation=validation, seed=seed)


def _classes(path: Path) -> tuple[str, ...]:
    (names,) = read_mat(path, "class_names")
    return tuple(map(str, np.atleast_1d(names)))


def _annotations(path: Path, field: str, n_classes: int) -> tuple[list[str], list[int]]:
    (annotations,) = read_mat(path, "annotations")
    annotations = np.atleast_1d(annotations)
    fields = annotations.dtype.names or ()
    if absent := [name for name in (field, "class") if name not in fields]:
        raise ValueError(
            f"{path}: annotations have no field {', '.join(absent)}; they have {', '.join(fields) or 'none'}"
        )
    numbers = [int(number) for number in annotations["class"]]
    if wrong := [number for number in numbers if not 1 <= number <= n_classes]:
        raise ValueError(f"{path}: classes must be from 1 to {n_classes}, got {wrong[0]}; get it again")
    return [str(file) for file in annotations[field]], [number - 1 for number in numbers]
