"""The 1,797 handwritten digits of 8 × 8 pixels in scikit-learn, and two OOD sets for them."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from lam.datasets.base import Dataset, TensorImages
from lam.datasets.splits import Splits, carve_missing

_SIDE = 8
_LARGEST = 16  # grey values are from 0 to 16


def splits(*, seed: int = 0, held_out: Sequence[int] = (8, 9), validation: float = 0.2, test: float = 0.2) -> Splits:
    """The digits as (1, 8, 8) images in [0, 1], without the classes `held_out`, at most eight.

    `validation` and `test` are fractions of the images.

    Source: E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI; test split.

    Example:
        >>> parts = splits()
        >>> len(parts.train), len(parts.validation), len(parts.test), parts.train.shape
        (865, 289, 289, (1, 8, 8))
    """
    if not set(held_out) <= set(range(10)) or len(set(held_out)) > 8:
        raise ValueError(f"held_out must be at most eight digits from 0 to 9, got {tuple(held_out)}")
    digits = _images([digit for digit in range(10) if digit not in held_out], name="digits")
    return Splits(**carve_missing({"train": digits}, validation=validation, test=test, seed=seed, source="digits"))


def held_out(*, like: Dataset) -> TensorImages:
    """Images of all digits except the classes of `like`, a split of the data set digits."""
    if like.name != "digits":
        raise ValueError(f"digits_held_out belongs to the data set digits, got {like.name}; take another OOD set")
    rest = [digit for digit in range(10) if str(digit) not in like.classes]
    if not rest:
        raise ValueError("no digit is held out: load digits with held_out=(8, 9), for example")
    return _images(rest, name="digits_held_out")


def patches(*, like: Dataset, seed: int = 0) -> TensorImages:
    """Random grey patches (1, 8, 8), one for each item of `like`; labels are the two photographs in scikit-learn."""
    from sklearn.datasets import load_sample_images  # heavy, and needed only here

    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(like)) % 2
    images = torch.empty(len(like), 1, _SIDE, _SIDE, dtype=torch.uint8)
    for label, photograph in enumerate(load_sample_images().images):
        grey = torch.from_numpy(np.array(Image.fromarray(photograph).convert("L")))
        windows = grey.unfold(0, _SIDE, 1).unfold(1, _SIDE, 1)
        n = int((labels == label).sum())
        top, left = (torch.randint(extent, (n,), generator=generator) for extent in windows.shape[:2])
        images[labels == label, 0] = windows[top, left]
    return TensorImages(images, labels, name="digits_patches", classes=("china", "flower"))


def _images(digits: Sequence[int], *, name: str) -> TensorImages:
    from sklearn.datasets import load_digits  # heavy, and needed only here

    pixels, target = map(torch.from_numpy, load_digits(return_X_y=True))
    mask = torch.isin(target, torch.tensor(digits))
    images = pixels[mask].reshape(-1, 1, _SIDE, _SIDE).float() / _LARGEST
    labels = torch.searchsorted(torch.tensor(digits), target[mask])
    return TensorImages(images, labels, name=name, classes=tuple(map(str, digits)))
