"""What is embedded: images and texts by name, in three disjoint splits, and out-of-distribution (OOD) sets.

`load` and `load_ood` find a data set by its name. One file a source; what they share is in `lam.datasets.base`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from lam.datasets import digits, docstrings, folder, intents, lfw, msls, places, spots, texts
from lam.datasets.base import Dataset, MissingDataError, ReadAnew, Splits, TensorImages
from lam.datasets.cars196 import cars
from lam.datasets.cifar import cifar10, svhn
from lam.datasets.cub200 import birds
from lam.datasets.folder import FolderImages
from lam.datasets.idx import fashionmnist, mnist
from lam.datasets.place_images import PlaceImages
from lam.datasets.texts import Texts
from lam.inputs import Preprocessing
from lam.utils.checks import check_options

__all__ = [
    "Dataset",
    "FolderImages",
    "MissingDataError",
    "PlaceImages",
    "Splits",
    "TensorImages",
    "Texts",
    "load",
    "load_ood",
]

T = TypeVar("T")


def _folder_like(*, root: str | Path, like: Dataset) -> Dataset:
    return folder.read(root=root, preprocessing=Preprocessing.of(_preprocessing_of_images(like)))


def _preprocessing_of_images(like: Dataset) -> Preprocessing | None:
    return like.preprocessing if isinstance(like.preprocessing, Preprocessing) else None


DATASETS: dict[str, Callable[..., Splits]] = {
    "digits": digits.splits,
    "fashionmnist": fashionmnist.splits,
    "mnist": mnist.splits,
    "folder": folder.splits,
    "cifar10": cifar10.splits,
    "svhn": svhn.splits,
    "cub200": birds.splits,
    "cars196": cars.splits,
    "lfw": lfw.splits,
    "msls": msls.splits,
    "places": places.splits,
    "texts": texts.splits,
    "clinc150": intents.clinc150,
    "banking77": intents.banking77,
    "docstrings": docstrings.splits,
    "spots": spots.splits,
}
OOD_SETS: dict[str, Callable[..., Dataset]] = {  # beside these, the test split of any data set
    "digits_held_out": digits.held_out,
    "digits_patches": digits.patches,
    "fashionmnist": fashionmnist.test_images,
    "mnist": mnist.test_images,
    "folder": _folder_like,
    "cifar10": cifar10.test_images,
    "svhn": svhn.test_images,
    "texts": texts.outsiders,
    "clinc150_oos": intents.clinc150_oos,
    "descriptions": docstrings.descriptions,
    "portrait": spots.portrait,
}


def load(
    name: str,
    *,
    root: str | Path | None = None,
    seed: int = 0,
    preprocessing: Any = None,
    **options: Any,
) -> Splits:
    """Load a data set in three disjoint splits.

    Args:
        name: one of `DATASETS`, such as "digits" or "folder"; docs/reference/methods.md has the layout of each.
        root: where its files are; digits, docstrings and spots have none, folder, places and texts need it, all others
            have a default.
        seed: of every random choice.
        preprocessing: how an image becomes an input, as a record or the fields that differ from ImageNet's at 224
            pixels; by default as the data set has it.
        options: those of the data set: `lam.datasets.published.HalvedClasses.splits` of cub200 and cars196,
            `lam.datasets.published.SmallImages.splits` of fashionmnist, mnist, cifar10 and svhn, those in
            `lam.datasets.intents` of clinc150 and banking77, else `splits` in the module of its name.

    Raises:
        ValueError: If the name or an option is unknown, an option is of another type, the items are texts where a
            preprocessing of images is given, or what the data set itself raises.
        MissingDataError: If files are missing.

    Example:
        >>> load("digits").train.shape
        (1, 8, 8)
    """
    loader = _find(DATASETS, name, "data set")
    reads = "preprocessing" in inspect.signature(loader).parameters
    own = {"preprocessing": preprocessing} if reads and preprocessing is not None else {}
    splits = _call(loader, name, options | own, root=root, seed=seed)
    return splits if reads or preprocessing is None else _read_anew(splits, Preprocessing.of(preprocessing))


def _read_anew(splits: Splits, preprocessing: Preprocessing) -> Splits:
    """Images that are in memory, read as files of them would be."""
    parts: dict[str, Any] = {}
    for name, part in splits.parts().items():
        if not isinstance(part, TensorImages):
            raise ValueError(
                f"{part.name} holds no images to read so: leave preprocessing out, or take a network for it"
            )
        parts[name] = part if part.preprocessing == preprocessing else ReadAnew(part, preprocessing)
    return replace(splits, **parts)


def load_ood(name: str, *, like: Dataset, root: str | Path | None = None, seed: int = 0, **options: Any) -> Dataset:
    """Load items that are out of the distribution of `like`, in its shape.

    Args:
        name: one of `OOD_SETS`, or any other data set of `load`, of which the test split is taken; of a folder without
            parts, and of texts, it is all. Images are read with the preprocessing of `like`, those of another
            shape too.
        like: an in-distribution set.
        root: where its files are, as for `load`.
        seed: of every random choice.
        options: those of the data set.

    Raises:
        ValueError: If the name or an option is unknown, or the items are no images where those of `like` are.
        MissingDataError: If files are missing.

    Example:
        >>> load_ood("digits_held_out", like=load("digits").test).classes
        ('8', '9')
    """
    _find(DATASETS | OOD_SETS, name, "OOD set")
    if name in OOD_SETS:
        items = _call(OOD_SETS[name], name, options, root=root, seed=seed, like=like)
    else:
        preprocessing = _preprocessing_of_images(like)
        items = _call(DATASETS[name], name, options, root=root, seed=seed, preprocessing=preprocessing).test
    if isinstance(items, TensorImages) and items.shape != like.shape and isinstance(like.preprocessing, Preprocessing):
        items = ReadAnew(items, like.preprocessing)
    if items.shape != like.shape:
        raise ValueError(f"{name} has items of shape {items.shape}, but {like.name} of {like.shape}; take another set")
    return items


def _find(known: Mapping[str, T], name: str, kind: str) -> T:
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}; allowed: {', '.join(known)}")
    return known[name]


def _call(loader: Callable[..., T], name: str, options: dict[str, Any], **common: Any) -> T:
    parameters = inspect.signature(loader).parameters
    allowed = [option for option in parameters if option not in common]
    if unknown := sorted(set(options) - set(allowed)):
        advice = f"allowed: {', '.join(allowed)}" if allowed else "it has none"
        raise ValueError(f"{name} has no option {', '.join(unknown)}; {advice}")
    if common["root"] is None:
        del common["root"]
        if "root" in parameters and parameters["root"].default is inspect.Parameter.empty:
            raise MissingDataError(f"{name} needs a root: the file or folder of its items")
    elif "root" not in parameters:
        raise ValueError(f"{name} ships with a library and has no root, got {common['root']}")
    try:
        return loader(**{key: value for key, value in common.items() if key in parameters}, **options)
    except (AttributeError, TypeError):
        check_options(name, loader, options)
        raise
