"""Several random views of every image: two that match each other alone, or one of each of several kinds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lam.datasets.augmented import AugmentationOptions, Augmented, without_augmentation


@dataclass(frozen=True)
class Views(AugmentationOptions):
    """What is drawn for each view of an image.

    Args:
        jitter: in [0, 1): contrast and brightness of a view are drawn from 1 ± jitter and ± jitter / 2 of the image's
            standard deviation.

    Raises:
        ValueError: for an option outside its range.
    """

    jitter: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {self.jitter}")


class TwoViews:
    """A data set whose batches hold two random views of each image, with the image's number in place of its label.

    First come the first views of all images of a batch, then the second ones; a batch is twice as long as it was asked
    for. It draws from torch's global generator, which `lam.training` reseeds for every batch.

    Args:
        dataset: of images with values in about [0, 1] or standardised; its labels are not read. Of one that is
            augmented already the images behind are taken.
        options: what is drawn for a view.

    Raises:
        ValueError: for items that are no images.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> items = TwoViews(images, Views(crop_scale=0.5)).__getitems__([2, 0])
        >>> [number for _, number in items]
        [2, 0, 2, 0]
    """

    views = 2
    """Items of a batch for each one that was asked for."""

    def __init__(self, dataset: Any, options: Views) -> None:
        check_images(dataset, "take a method that learns from labels")
        self.images, self.jitter = Augmented(without_augmentation(dataset), options), options.jitter

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        images = [image for _ in range(2) for image, _ in self.images.__getitems__(indices)]
        return [(self._jittered(image), index) for image, index in zip(images, [*indices, *indices], strict=True)]

    def _jittered(self, image: Tensor) -> Tensor:
        if not self.jitter:
            return image
        contrast, brightness = (2 * torch.rand(2) - 1) * self.jitter
        centre = image.mean()
        spread = (image - centre).square().mean().sqrt()
        return centre + (1 + contrast) * (image - centre) + brightness / 2 * spread


class ViewsOfKinds:
    """A data set whose batches hold a view of each kind of every image, with its target.

    First come the views of the first kind of all images of a batch, then those of the second; a batch is so many times
    as long as it was asked for.

    Args:
        dataset: of images; of one that is augmented already the images behind are taken.
        kinds: crops and flips of each kind.

    Raises:
        ValueError: for items that are no images.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> kinds = [AugmentationOptions(), AugmentationOptions(crop_scale=0.5)]
        >>> [label for _, label in ViewsOfKinds(images, kinds).__getitems__([2, 0])]
        [1, 0, 1, 0]
    """

    def __init__(self, dataset: Any, kinds: Sequence[AugmentationOptions]) -> None:
        check_images(dataset, "take a single member")
        self.kinds = [Augmented(without_augmentation(dataset), options) for options in kinds]
        self.views = len(self.kinds)

    def __len__(self) -> int:
        return len(self.kinds[0])

    def __getattr__(self, name: str) -> Any:
        """Labels, and whatever else there is one of for each item: that of the images."""
        if name == "kinds":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.kinds[0], name)

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int | Tensor]]:
        return [item for images in self.kinds for item in images.__getitems__(indices)]


def check_images(dataset: Any, advice: str) -> None:
    """Refuse what no view can be taken of.

    Raises:
        ValueError: for items that are no images.
    """
    shape = tuple(without_augmentation(dataset)[0][0].shape)
    if len(shape) != 3:
        raise ValueError(f"views are random crops of images (C, H, W), and these items are of shape {shape}: {advice}")
