"""Random views of images for training: crops and horizontal flips, drawn anew whenever an image is read."""

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from lam.datasets.base import Dataset
from lam.datasets.folder import FolderImages
from lam.inputs.preprocessing import Preprocessing


@dataclass(frozen=True)
class AugmentationOptions:
    """Random crops and flips of every image, both off by default.

    The area of a crop, as a share of the image's area, is uniform in [crop_scale, 1]. The ratio of a crop's width to
    its height is log-uniform in [1/crop_ratio, crop_ratio]. If ten draws in a row do not fit into the image, a centre
    crop is taken. Crops are resized to the size of the data set's images.

    Source: Szegedy et al. (2015), "Going deeper with convolutions", section 6. Warburg et al. (2023), appendix G.1,
    augment CUB-200 and LFW; their code has `crop_scale=0.08`, `flip=0.5` and `crop_ratio=4/3`.

    Args:
        crop_scale: least share of the image's area in a crop, in (0, 1]; None for no crop.
        crop_ratio: greatest ratio of width to height, at least 1.
        flip: probability of mirroring an image left to right.
    """

    crop_scale: float | None = None
    crop_ratio: float = 4 / 3
    flip: float = 0.0

    def __post_init__(self) -> None:
        if self.crop_scale is not None and not 0 < self.crop_scale <= 1:
            raise ValueError(f"crop_scale must be in (0, 1], or None for no crop, got {self.crop_scale}")
        if not 1 <= self.crop_ratio < math.inf:
            raise ValueError(f"crop_ratio must be at least 1 and finite, got {self.crop_ratio}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be a probability in [0, 1], got {self.flip}")


class Augmented(Dataset):
    """A data set of images that are cropped and flipped anew whenever they are read.

    Image files (`FolderImages`) are cropped at full resolution. Random numbers come from torch's global generator.
    `lam.training` reseeds this generator for every batch, so a resumed run draws the same views as an uninterrupted
    run.

    Args:
        dataset: a data set of images; labels, targets, classes and size are kept.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> view, label = Augmented(images, AugmentationOptions(crop_scale=0.5, flip=0.5))[2]
        >>> view.shape, label
        (torch.Size([1, 8, 8]), 1)
    """

    dataset: Dataset
    _source: Dataset

    def __init__(self, dataset: Dataset, options: AugmentationOptions) -> None:
        _torchvision_transforms()  # imported here, once, before reading processes are forked
        self.options = options
        self._reads_files = isinstance(dataset, FolderImages)
        source = dataset
        if self._reads_files:
            source = copy.copy(dataset)
            source.preprocessing = _RandomViews(**vars(dataset.preprocessing), options=options)
        common = {"name": dataset.name, "classes": dataset.classes, "preprocessing": dataset.preprocessing}
        super().__init__(dataset.labels, **common, dataset=dataset, _source=source)

    @property
    def targets(self) -> Tensor:
        return self.dataset.targets

    @property
    def groups(self) -> Int64[Tensor, " N"]:
        return self.dataset.groups

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int | Tensor]:
        return self._view(self._source[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int | Tensor]]:
        read_batch: Any = getattr(self._source, "__getitems__", None)
        items = [self._source[index] for index in indices] if read_batch is None else read_batch(indices)
        return [self._view(item) for item in items]

    def _view(self, item: tuple[Tensor, int | Tensor]) -> tuple[Tensor, int | Tensor]:
        image, target = item
        return (image if self._reads_files else random_view(image, self.options)), target


def without_augmentation(dataset: Any) -> Any:
    """The data set inside an `Augmented`; any other data set unchanged. Posteriors are fitted on plain images."""
    return dataset.dataset if isinstance(dataset, Augmented) else dataset


@dataclass(frozen=True)
class _RandomViews(Preprocessing):
    """Preprocessing with a random view instead of the centre crop."""

    options: AugmentationOptions = AugmentationOptions()

    def _resize_and_crop(self, image: Image.Image) -> Image.Image:
        shape = self.shape
        if self.options.crop_scale is None or shape is None:
            image = super()._resize_and_crop(image)
        else:
            top, left, height, width = _draw_box(image, self.options)
            part = image.crop((left, top, left + width, top + height))
            image = Preprocessing(self.mode, size=shape[1:], resampling=self.resampling)._resize_and_crop(part)
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if _draw_flip(self.options) else image


def random_view(image: Float[Tensor, "C H W"], options: AugmentationOptions) -> Float[Tensor, "C H W"]:
    """A random view with the size of the image."""
    if options.crop_scale is not None:
        box, size = _draw_box(image, options), list(image.shape[1:])
        image = _torchvision_transforms().functional.resized_crop(image, *box, size=size, antialias=True)
    return image.flip(-1) if _draw_flip(options) else image


def _draw_box(image: Image.Image | Tensor, options: AugmentationOptions) -> tuple[int, int, int, int]:
    """Random (top, left, height, width) of a crop."""
    ratio = [1 / options.crop_ratio, options.crop_ratio]
    return _torchvision_transforms().RandomResizedCrop.get_params(image, [options.crop_scale, 1.0], ratio)


def _draw_flip(options: AugmentationOptions) -> bool:
    return options.flip > 0 and torch.rand(()).item() < options.flip


def _torchvision_transforms() -> Any:
    from torchvision import transforms

    return transforms
