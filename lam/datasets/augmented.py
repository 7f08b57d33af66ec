"""Random views of images for training: crops, flips and changes of values, drawn anew whenever an image is read."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor

from lam.datasets.base import Dataset
from lam.datasets.folder import FolderImages
from lam.inputs.preprocessing import Preprocessing
from lam.utils.checks import check_at_least


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
    """A data set of images that are cropped and flipped anew whenever they are read; other items are a `ValueError`.

    Image files (`FolderImages`) are read at a resolution that is enough for the smallest possible crop, then cropped,
    then resized. Random numbers come from torch's global generator. `lam.training` reseeds this generator for every
    batch, so a resumed run draws the same views as an uninterrupted run.

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
        if len(dataset.shape) != 3:  # flipped bytes would be another text
            raise ValueError(
                f"crops and flips need images (C, H, W), got items of shape {dataset.shape}: leave augmentation out"
            )
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

    @property
    def reduced_to(self) -> int | None:
        """Large enough that each side of the smallest crop has twice as many pixels as the view."""
        least, shape, scale = super().reduced_to, self.shape, self.options.crop_scale
        if least is None or shape is None or scale is None:
            return least
        return max(least, math.ceil(2 * max(shape[1:]) * math.sqrt(self.options.crop_ratio / scale)))

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


@dataclass(frozen=True)
class Views(AugmentationOptions):
    """Random changes of each view of an image.

    Args:
        jitter: strength in [0, 1) of random changes: contrast changes by a factor in 1 ± jitter, brightness by up to
            jitter / 2 standard deviations of the image.
        noise: greatest standard deviation of Gaussian noise, as a multiple of the image's standard deviation.
    """

    jitter: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")
        check_at_least("noise", self.noise, 0.0)


class _ViewsOfImages:
    """A data set whose batches hold the first views of all images, then the second views, and so on."""

    def __init__(self, dataset: Any, options: Sequence[AugmentationOptions], advice: str) -> None:
        check_images(dataset, advice)
        plain = without_augmentation(dataset)
        kind: Any = Augmented if isinstance(plain, Dataset) else _PlainViews
        self.kinds = [kind(plain, of_view) for of_view in options]
        self.views = len(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds[0])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Any]]:
        return [item for images in self.kinds for item in images.__getitems__(indices)]


class _PlainViews:
    """Random views of images in a data set that is not a `Dataset`, such as a list of images with targets."""

    def __init__(self, dataset: Any, options: AugmentationOptions) -> None:
        self._dataset, self._options = dataset, options

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Any]]:
        items = [self._dataset[index] for index in indices]
        return [(random_view(image, self._options), target) for image, target in items]


class TwoViews(_ViewsOfImages):
    """A data set of two random views of each image, with the image's number instead of its label.

    A batch holds the first views of all images, then the second views. Views are drawn from torch's global generator,
    which `lam.training` reseeds for every batch. Images have values in about [0, 1], or are standardised; their labels
    and augmentation are ignored.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> items = TwoViews(images, Views(crop_scale=0.5)).__getitems__([2, 0])
        >>> [number for _, number in items]
        [2, 0, 2, 0]
    """

    def __init__(self, dataset: Any, options: Views) -> None:
        super().__init__(dataset, [options, options], "take a method that learns from labels")
        self.jitter, self.noise = options.jitter, options.noise

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        items = super().__getitems__(indices)
        numbers = 2 * [*indices]
        return [(self._augment(image), number) for (image, _), number in zip(items, numbers, strict=True)]

    def _augment(self, image: Tensor) -> Tensor:
        if self.jitter:
            contrast, brightness = (2 * torch.rand(2) - 1) * self.jitter
            centre = image.mean()
            spread = (image - centre).square().mean().sqrt()
            image = centre + (1 + contrast) * (image - centre) + brightness / 2 * spread
        if self.noise:
            image = image + self.noise * torch.rand(()) * image.std() * torch.randn_like(image)
        return image


class ViewsOfKinds(_ViewsOfImages):
    """A data set that holds, for each kind of augmentation, one view of every image; a view has the image's target.

    A batch holds all images in the first kind, then all in the second kind, and so on. The data set's own augmentation
    is ignored.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> kinds = [AugmentationOptions(), AugmentationOptions(crop_scale=0.5)]
        >>> [label for _, label in ViewsOfKinds(images, kinds).__getitems__([2, 0])]
        [1, 0, 1, 0]
    """

    def __init__(self, dataset: Any, kinds: Sequence[AugmentationOptions]) -> None:
        super().__init__(dataset, kinds, "take a single member")

    def __getattr__(self, name: str) -> Any:
        """Labels and other attributes of the items."""
        if name == "kinds":  # not set yet while the object is copied
            raise AttributeError(name)
        return getattr(self.kinds[0], name)


def check_images(dataset: Any, advice: str) -> None:
    """Require images as items, with advice in the error."""
    shape = tuple(without_augmentation(dataset)[0][0].shape)
    if len(shape) != 3:
        raise ValueError(f"views are random crops of images (C, H, W), got items of shape {shape}: {advice}")
