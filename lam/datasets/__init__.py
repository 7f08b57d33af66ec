"""Data sets by name: images, texts and places, each in three disjoint splits; and out-of-distribution (OOD) sets."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lam.datasets import digits, docstrings, folder, intents, msls, places, spots, texts
from lam.datasets.base import Dataset, ImagesAsFiles, MissingDataError, TensorImages
from lam.datasets.by_class import birds, cars, faces
from lam.datasets.folder import FolderImages
from lam.datasets.places import PlaceImages
from lam.datasets.small_images import cifar10, fashionmnist, mnist, svhn
from lam.datasets.splits import Splits
from lam.datasets.texts import Texts
from lam.inputs import Preprocessing
from lam.utils.checks import check_choice, check_options
from lam.utils.registry import enter

__all__ = [
    "DATASETS",
    "OOD_SETS",
    "Dataset",
    "FolderImages",
    "MissingDataError",
    "PlaceImages",
    "Splits",
    "TensorImages",
    "Texts",
    "load",
    "load_ood",
    "register",
]

T = TypeVar("T")

DATASETS: dict[str, Callable[..., Splits]] = {
    "digits": digits.splits,
    "fashionmnist": fashionmnist.splits,
    "mnist": mnist.splits,
    "folder": folder.splits,
    "cifar10": cifar10.splits,
    "svhn": svhn.splits,
    "cub200": birds.splits,
    "cars196": cars.splits,
    "lfw": faces,
    "msls": msls.splits,
    "places": places.splits,
    "texts": texts.splits,
    "clinc150": intents.clinc150,
    "banking77": intents.banking77,
    "docstrings": docstrings.splits,
    "spots": spots.splits,
}
"""The loader of each data set, a function that returns `Splits`. `register` adds another."""

OOD_SETS: dict[str, Callable[..., Dataset]] = {  # the test split of any data set can serve as an OOD set, too
    "digits_held_out": digits.held_out,
    "digits_patches": digits.patches,
    "fashionmnist": fashionmnist.test_images,
    "mnist": mnist.test_images,
    "folder": folder.ood_items,
    "cifar10": cifar10.test_images,
    "svhn": svhn.test_images,
    "texts": texts.ood_items,
    "clinc150_oos": intents.clinc150_oos,
    "descriptions": docstrings.descriptions,
    "portrait": spots.portrait,
}


def load(
    name: str, *, root: str | Path | None = None, seed: int = 0, preprocessing: Any = None, **options: Any
) -> Splits:
    """Load a data set in three disjoint splits.

    Args:
        name: one of `DATASETS`, such as "digits" or "folder"; docs/reference/methods.md has the layout of each.
        root: folder or file of the data. digits, docstrings and spots take no root; folder, places and texts need it;
            other data sets have a default.
        seed: seed of every random choice.
        preprocessing: a `Preprocessing` of images, or a dict of the fields that differ from ImageNet's preprocessing,
            such as {"size": 32}. Each data set has its default.
        options: arguments of the data set's loader in `lam.datasets`. The loader is `splits` in the module with the
            data set's name, except for

            - cub200, cars196: `by_class.HalvedClasses.splits`; lfw: `by_class.faces`
            - fashionmnist, mnist, cifar10, svhn: `small_images.SmallImages.splits`
            - clinc150, banking77: a function in `intents`
            - texts: options are fields of `texts.TextOptions`

    Raises:
        ValueError: If the name or an option is unknown, an option or a file is invalid, or texts get a preprocessing.
        MissingDataError: If files are missing.

    Example:
        >>> load("digits").train.shape
        (1, 8, 8)
    """
    check_choice("data set", name, DATASETS)
    loader = DATASETS[name]
    reads = "preprocessing" in inspect.signature(loader).parameters
    own = {"preprocessing": preprocessing} if reads and preprocessing is not None else {}
    splits = _call(loader, name, options | own, root=root, seed=seed)
    if not isinstance(splits, Splits):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the loader of {name} must return lam.datasets.Splits, got {type(splits).__name__}")
    if reads or preprocessing is None:
        return splits
    preprocessing, parts = Preprocessing.of(preprocessing), dict[str, Any]()
    for name, part in splits.parts().items():
        if not isinstance(part, TensorImages):
            raise ValueError(f"{part.name} has no images to preprocess: leave preprocessing out")
        parts[name] = part if part.preprocessing == preprocessing else ImagesAsFiles(part, preprocessing)
    return replace(splits, **parts)


def load_ood(name: str, *, like: Dataset, root: str | Path | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load out-of-distribution items with the shape of the items in `like`.

    Args:
        name: a key of `OOD_SETS`, or of `DATASETS` for that data set's test split. Images get `like`'s preprocessing.
        like: an in-distribution set.
        root: as for `load`.
        seed: seed of every random choice.
        options: options of the data set.

    Raises:
        ValueError: If the name or an option is unknown, or the items differ in shape from the items in `like`.
        MissingDataError: If files are missing.

    Example:
        >>> load_ood("digits_held_out", like=load("digits").test).classes
        ('8', '9')
    """
    loaders = DATASETS | OOD_SETS
    check_choice("OOD set", name, loaders)
    preprocessing = like.preprocessing if isinstance(like.preprocessing, Preprocessing) else None
    items = _call(loaders[name], name, options, root=root, seed=seed, like=like, preprocessing=preprocessing)
    if isinstance(items, Splits):
        items = items.test
    if isinstance(items, TensorImages) and preprocessing not in (None, items.preprocessing):
        items = ImagesAsFiles(items, preprocessing)
    if items.shape != like.shape:
        raise ValueError(f"{name} has items of shape {items.shape}, but {like.name} of {like.shape}; use another set")
    return items


def register(name: str, loader: Callable[..., Splits]) -> None:
    """Register a data set under a new name, for `load` and configurations.

    Args:
        loader: function that returns `Splits`. It takes `seed` and options, and `root` if it reads files.

    Raises:
        ValueError: If another data set has the name.
    """
    enter(DATASETS, "data set", name, loader)


def _call(loader: Callable[..., T], name: str, options: dict[str, Any], **common: Any) -> T:
    """Call a loader with its options, and with the common arguments that it takes."""
    parameters = inspect.signature(loader).parameters
    record = parameters["options"].annotation if "options" in parameters else None  # texts have a record
    allowed = [option for option in inspect.signature(record or loader).parameters if option not in common]
    if unknown := sorted(set(options) - set(allowed)):
        advice = f"allowed: {', '.join(allowed)}" if allowed else "it has none"
        raise ValueError(f"{name} has no option {', '.join(unknown)}; {advice}")
    if common["root"] is None:
        del common["root"]
        if "root" in parameters and parameters["root"].default is inspect.Parameter.empty:
            raise MissingDataError(f"{name} needs a root: the file or folder of its items")
    elif "root" not in parameters:
        raise ValueError(f"{name} takes no root, got {common['root']}: leave root out")
    common = {key: value for key, value in common.items() if key in parameters}
    try:
        return loader(**common, **({"options": record(**options)} if record else options))
    except (AttributeError, TypeError):
        check_options(name, record or loader, options)
        raise
