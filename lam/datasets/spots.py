"""Views of spots in two photographs, as a small data set of places; and, as OOD set, views of a portrait."""

import math
from itertools import product

import numpy as np
import torch
from PIL import Image, ImageEnhance
from torch import Tensor

from lam.datasets.base import Dataset, TensorImages
from lam.datasets.splits import Splits, carve_missing

_SIDE = 96  # pixels of a view, and of its part of the photograph on average
_STRIDE = 68  # pixels between spots: neighbours share a third of their pixels
_SHIFT, _ZOOM, _ANGLE, _DARKER, _CONTRAST = 8.0, 1.3, 10.0, 1.5, 1.3
_MARGIN = math.ceil(_SHIFT + _ZOOM * _SIDE / 2 * (math.cos(math.radians(_ANGLE)) + math.sin(math.radians(_ANGLE))))
_VIEWS, _VIEWS_OUTSIDE = 15, 4


def splits(*, seed: int = 0, validation: float = 0.2, test: float = 0.2) -> Splits:
    """960 views (3, 96, 96) in [0, 1] of a temple in China and a flower: 64 spots with fifteen views each.

    A view is shifted by up to 8 pixels, rotated by up to 10°, and darkened by a factor of up to 1.5. Zoom and contrast
    change by factors of up to 1.3. The label is the spot. The seed divides the views, which are always the same;
    `validation` and `test` are fractions.

    Source: scikit-learn's `load_sample_images`, CC BY 2.0.

    Example:
        >>> parts = splits()
        >>> len(parts.train), len(parts.validation), len(parts.test), len(parts.train.classes)
        (576, 192, 192, 64)
    """
    from sklearn.datasets import load_sample_images  # heavy, and needed only here

    photographs = map(Image.fromarray, load_sample_images().images)
    views = _views(dict(zip(("china", "flower"), photographs, strict=True)), "spots", _VIEWS)
    return Splits(**carve_missing({"train": views}, validation=validation, test=test, seed=seed, source="spots"))


def portrait(*, like: Dataset) -> TensorImages:
    """Views of 42 spots of a portrait of Grace Hopper, four views each.

    Source: matplotlib's sample data, in the public domain.
    """
    from matplotlib.cbook import get_sample_data  # heavy, and needed only here

    with Image.open(get_sample_data("grace_hopper.jpg", asfileobj=False)) as image:
        return _views({"portrait": image.convert("RGB")}, "portrait", _VIEWS_OUTSIDE)


def _views(photographs: dict[str, Image.Image], name: str, each: int) -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    pixels: list[Tensor] = []
    classes: list[str] = []
    for title, photograph in photographs.items():
        for y, x in product(*(range(_MARGIN, side - _MARGIN + 1, _STRIDE) for side in reversed(photograph.size))):
            classes.append(f"{title}-{x}-{y}")
            pixels += [_view(photograph, x, y, generator) for _ in range(each)]
    labels = torch.arange(len(classes)).repeat_interleave(each)
    return TensorImages(torch.stack(pixels), labels, name=name, classes=classes)


def _view(photograph: Image.Image, x: int, y: int, generator: torch.Generator) -> Tensor:
    """One view (3, H, W) of a spot, uint8."""
    across, down, zoom, angle, brightness, contrast = (2 * torch.rand(6, generator=generator) - 1).tolist()
    scale, angle = _ZOOM**zoom, math.radians(_ANGLE * angle)
    a, b = scale * math.cos(angle), scale * math.sin(angle)
    left, top = x + _SHIFT * across - (a + b) * _SIDE / 2, y + _SHIFT * down - (a - b) * _SIDE / 2
    matrix = (a, b, left, -b, a, top)  # from pixels of the view to pixels of the photograph
    view = photograph.transform((_SIDE, _SIDE), Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC)
    view = ImageEnhance.Brightness(view).enhance(_DARKER ** (-(1 + brightness) / 2))
    view = ImageEnhance.Contrast(view).enhance(_CONTRAST**contrast)
    return torch.from_numpy(np.array(view)).permute(2, 0, 1)
