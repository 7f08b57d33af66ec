"""Two views of every image, for training without labels: an item's only match is the other view of its image."""

from typing import Any

import torch
from torch import Tensor

from lam.datasets.augmented import AugmentationOptions, Augmented, without_augmentation


class TwoViews:
    """A data set whose batches hold two random views of each image, with the image's number in place of its label.

    First come the first views of all images of a batch, then the second ones; a batch is twice as long as it was asked
    for. It draws from torch's global generator, which `lam.training` reseeds for every batch.

    Args:
        dataset: of images with values in about [0, 1] or standardised; its labels are not read. Of one that is
            augmented already the images behind are taken.
        options: crops and flips of a view.
        jitter: in [0, 1): contrast and brightness of a view are drawn from 1 ± jitter and ± jitter / 2 of the image's
            standard deviation.

    Raises:
        ValueError: for a jitter outside [0, 1), or items that are no images.

    Example:
        >>> from lam.datasets import TensorImages
        >>> images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1]))
        >>> items = TwoViews(images, AugmentationOptions(crop_scale=0.5)).__getitems__([2, 0])
        >>> [number for _, number in items]
        [2, 0, 2, 0]
    """

    views = 2
    """Items of a batch for each one that was asked for."""

    def __init__(self, dataset: Any, options: AugmentationOptions, *, jitter: float = 0.0) -> None:
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter must be in [0, 1), got {jitter}")
        shape = tuple(without_augmentation(dataset)[0][0].shape)
        if len(shape) != 3:
            raise ValueError(
                f"views are random crops of images (C, H, W), and these items are of shape {shape}: take a method that "
                "learns from labels"
            )
        self.images, self.jitter = Augmented(without_augmentation(dataset), options), jitter

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
