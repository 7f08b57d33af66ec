"""Several random views of each image: two views that match only each other, or one view for each augmentation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lam.datasets.augmented import AugmentationOptions, Augmented, random_view, without_augmentation
from lam.datasets.base import Dataset
from lam.utils.checks import check_at_least


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
    """Random views of images in a data set that is no `Dataset`, such as a list of images with targets."""

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
    which `lam.training` reseeds for every batch.

    Args:
        dataset: images with values in about [0, 1], or standardised; labels and augmentation are ignored.

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
        return [(self._noisy(self._jittered(image)), number) for (image, _), number in zip(items, numbers, strict=True)]

    def _noisy(self, image: Tensor) -> Tensor:
        if not self.noise:
            return image
        return image + self.noise * torch.rand(()) * image.std() * torch.randn_like(image)

    def _jittered(self, image: Tensor) -> Tensor:
        if not self.jitter:
            return image
        contrast, brightness = (2 * torch.rand(2) - 1) * self.jitter
        centre = image.mean()
        spread = (image - centre).square().mean().sqrt()
        return centre + (1 + contrast) * (image - centre) + brightness / 2 * spread


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
