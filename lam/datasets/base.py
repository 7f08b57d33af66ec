"""`Dataset`: labelled items of one shape, and their subsets; and images in memory."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from jaxtyping import Bool, Float, Int64, Integer, Shaped, UInt8
from PIL import Image
from torch import Tensor
from torch.utils import data

from lam.inputs import AnyPreprocessing, Preprocessing
from lam.inputs.decoding import THUMBNAIL_SIDE, thumbnail
from lam.utils.checks import check_at_least, check_tensor, integers

Items = TypeVar("Items", bound="Dataset")
ImageOptions = Preprocessing | Mapping[str, Any] | None
"""A preprocessing; a dict of the fields that differ from ImageNet's preprocessing; or None for the default."""

_PER_CLASS = 4  # greatest number of items that `limit` draws from a class, if it cannot draw two from every class


class MissingDataError(FileNotFoundError, ValueError):
    """Files of a data set are missing; the message names them and says how to get them."""


@dataclass(frozen=True)
class Preview:
    """A small picture (PNG or JPEG) or the text of an item, for display, with further values by name.

    `path` is the file of the item, or its name.
    """

    path: str
    picture: bytes | None = None
    text: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Dataset(data.Dataset[tuple[Tensor, int | Tensor]], ABC):
    """N labelled inputs of one shape; an item is an input and its target.

    Args:
        labels: (N,) int64, positions in `classes`.
        name: name of the data set in tables.
        classes: names of the classes; by default, the labels as text. A class may have no item.
        preprocessing: preprocessing of images or texts.
        per_item: further attributes with one value for each item: tensors, tuples or data sets. Subsets keep them.

    Attributes:
        shape: shape of an input.
        is_query: (N,) True for queries, False for the gallery; None if every item is a query and searches all others.
        soft_labels: (N, C) share of people who chose each class; None if unknown.

    Raises:
        ValueError: For no items, a label without a class, an attribute without N values, or inputs of unknown shape.
    """

    is_query: Bool[Tensor, " N"] | None = None
    soft_labels: Float[Tensor, "N _"] | None = None

    def __init__(
        self,
        labels: Int64[Tensor, " N"],
        *,
        name: str,
        classes: Sequence[str] | None,
        preprocessing: AnyPreprocessing,
        **per_item: Any,
    ) -> None:
        check_tensor("labels", labels)
        if labels.ndim != 1 or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 of shape (N,), got {labels.dtype} of shape {tuple(labels.shape)}")
        if len(labels) == 0:
            raise ValueError(f"data set {name!r} has no items; give at least one")
        if classes is None:
            classes = tuple(map(str, range(int(labels.max()) + 1)))
        outside = ((labels < 0) | (labels >= len(classes))).nonzero()
        if len(outside):
            index = int(outside[0])
            raise ValueError(f"labels must be from 0 to {len(classes) - 1}, got {int(labels[index])} at index {index}")
        if preprocessing.shape is None:
            raise ValueError(f"items of a data set need one shape: set a crop or an exact size in {preprocessing}")
        for attribute, values in per_item.items():
            if values is not None and len(values) != len(labels):
                raise ValueError(f"{attribute} must have one value for each of {len(labels)} labels, got {len(values)}")
        self.labels = labels
        self.name = name
        self.classes = tuple(classes)
        self.preprocessing: Any = preprocessing  # for images or texts, by the data set
        self.shape: tuple[int, ...] = preprocessing.shape
        vars(self).update(per_item)
        self._per_item = ("labels", "is_query", "soft_labels", *per_item)

    def __repr__(self) -> str:
        shape, classes = self.shape, len(self.classes)
        return f"{type(self).__name__}({self.name!r}, {len(self)} items of shape {tuple(shape)}, {classes} classes)"

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Shaped[Tensor, "..."], int | Tensor]: ...

    @property
    def targets(self) -> Shaped[Tensor, "N ..."]:
        """Values that decide which items match: labels, or positions for places."""
        return self.labels

    @property
    def groups(self) -> Int64[Tensor, " N"]:
        """The group (N,) of each item: its label; for a place, its grid cell. Items of one group mostly match."""
        return self.labels

    @property
    def present_classes(self) -> set[str]:
        """Names of the classes that have items."""
        return {self.classes[label] for label in self.labels.unique().tolist()}

    @property
    def names(self) -> Sequence[str]:
        """Names that distinguish items with equal targets, such as file names; may be empty."""
        return ()

    @property
    def files(self) -> Sequence[Path]:
        """The image file of each item; empty for items in memory."""
        return ()

    @property
    def queries(self: Items) -> Items:
        """The queries; without `is_query`, all items."""
        return self if self.is_query is None else self.subset(self.is_query.nonzero().flatten())

    @property
    def candidates(self: Items) -> Items:
        """The items of the gallery; without `is_query`, all items."""
        return self if self.is_query is None else self.subset((~self.is_query).nonzero().flatten())

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        """The preview of an item, with a picture of at most `side` pixels."""
        return Preview(f"{self.name} {index}")

    def subset(self: Items, indices: Sequence[int] | Integer[Tensor, " R"]) -> Items:
        """The items at R ≥ 1 positions, in the order of the positions."""
        positions = integers("indices", indices)
        if positions.ndim != 1 or len(positions) == 0:
            raise ValueError(f"indices must be a non-empty list of positions, got {indices!r}")
        outside = ((positions < 0) | (positions >= len(self))).nonzero()
        if len(outside):
            raise ValueError(f"indices must be from 0 to {len(self) - 1}, got {int(positions[outside[0]])}")
        part = copy.copy(self)
        for name in self._per_item:
            values = getattr(self, name)
            if isinstance(values, Tensor):
                values = values[positions]
            elif isinstance(values, Dataset):
                values = values.subset(positions)
            elif values is not None:
                values = tuple(values[row] for row in positions.tolist())
            setattr(part, name, values)
        return part

    def joined(self: Items, *others: Items) -> Items:
        """The items of data sets, in order; an attribute that some data sets lack becomes None.

        If the data sets are of different kinds, the result keeps only items, labels and previews.
        """
        parts = (self, *others)
        if len({type(part) for part in parts}) > 1:
            return cast(Items, _Mixed(parts))
        whole = copy.copy(self)
        for name in self._per_item:
            values: list[Any] = [getattr(part, name) for part in parts]
            if any(value is None for value in values):
                joined = None
            elif isinstance(values[0], Dataset):
                joined = values[0].joined(*values[1:])
            else:
                joined = torch.cat(values) if isinstance(values[0], Tensor) else tuple(chain.from_iterable(values))
            setattr(whole, name, joined)
        return whole

    def limit(self: Items, n: int, *, seed: int = 0) -> Items:
        """At most n random items, drawn so that most have a match.

        If n is at least twice the number of classes, the classes keep their proportions. Otherwise the items come from
        random classes, up to four from each; classes with a single item come last.
        """
        check_at_least("limit", n, 1)
        return self if n >= len(self) else self.subset(self._draw(n, seed))

    def _draw(self, n: int, seed: int) -> Int64[Tensor, " n"]:
        classes, counts = self.labels.unique(return_counts=True)
        if n >= 2 * len(classes):
            return stratified_split(self.labels, (n,), seed=seed)[0]
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(classes), generator=generator)
        order = order[(counts[order] == 1).int().argsort(stable=True)]
        drawn: list[int] = []
        for label in classes[order].tolist():
            members = (self.labels == label).nonzero().flatten()
            drawn += members[torch.randperm(len(members), generator=generator)[:_PER_CLASS]].tolist()
            if len(drawn) >= n:
                break
        return top_up(drawn, n, len(self), generator)


class _Mixed(Dataset):
    """Items of data sets of different kinds."""

    sources: tuple[tuple[Dataset, int], ...]

    def __init__(self, parts: Sequence[Dataset]) -> None:
        first, sources = parts[0], tuple((part, row) for part in parts for row in range(len(part)))
        labels, preprocessing = torch.cat([part.labels for part in parts]), first.preprocessing
        super().__init__(labels, name=first.name, classes=first.classes, preprocessing=preprocessing, sources=sources)

    def __getitem__(self, index: int) -> tuple[Shaped[Tensor, "..."], int | Tensor]:
        part, row = self.sources[index]
        return part[row]

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        part, row = self.sources[index]
        return part.preview(row, side=side)


def labels_of(names: Iterable[str], classes: Iterable[str]) -> Int64[Tensor, " N"]:
    """The position (N,) of each name among the classes."""
    positions = {name: position for position, name in enumerate(classes)}
    return torch.tensor([positions[name] for name in names], dtype=torch.int64)


class TensorImages(Dataset):
    """Images in memory; 8-bit images are scaled and normalised when they are read.

    Args:
        images: (N, C, H, W), C = 1 or 3; uint8, or floating point if they are already inputs of a network.
        labels, name, classes: as for `Dataset`.
        preprocessing: preprocessing of 8-bit images, and of image files that are compared with them. By default, files
            are resized to (H, W), and values are scaled to [0, 1].

    Raises:
        ValueError: If shapes do not match or a value is not finite.

    Example:
        >>> images = TensorImages(torch.full((4, 1, 2, 2), 51, dtype=torch.uint8), torch.tensor([0, 0, 1, 1]))
        >>> image, label = images[2]
        >>> image.shape, round(image.mean().item(), 3), label
        (torch.Size([1, 2, 2]), 0.2, 1)
    """

    pixels: UInt8[Tensor, "N C H W"] | Float[Tensor, "N C H W"]

    def __init__(
        self,
        images: UInt8[Tensor, "N C H W"] | Float[Tensor, "N C H W"],
        labels: Int64[Tensor, " N"],
        *,
        name: str = "tensors",
        classes: Sequence[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> None:
        modes: dict[int, Literal["L", "RGB"]] = {1: "L", 3: "RGB"}
        is_float = images.is_floating_point()
        if images.ndim != 4 or images.shape[1] not in modes or not (is_float or images.dtype == torch.uint8):
            actual = f"{images.dtype} of shape {tuple(images.shape)}"
            raise ValueError(f"images must be uint8 or floating point of shape (N, 1 or 3, H, W), got {actual}")
        if is_float and not images.isfinite().all():
            first = int((~images.flatten(1).isfinite().all(1)).nonzero()[0])
            raise ValueError(f"images must be finite, got NaN or infinity in the image at index {first}")
        shape = (images.shape[1], images.shape[2], images.shape[3])
        if preprocessing is None:
            preprocessing = Preprocessing(mode=modes[shape[0]], size=shape[1:])
        if preprocessing.shape != shape:
            raise ValueError(f"images are of shape {shape}, but preprocessing gives {preprocessing.shape}")
        super().__init__(labels, name=name, classes=classes, preprocessing=preprocessing, pixels=images)

    @property
    def images(self) -> Float[Tensor, "N C H W"]:
        """All images as inputs (N, C, H, W)."""
        return self._scaled(self.pixels)

    def batch(self, indices: Sequence[int] | Integer[Tensor, " R"]) -> Float[Tensor, "R C H W"]:
        """The images at R positions as inputs (R, C, H, W)."""
        return self._scaled(self.pixels[torch.as_tensor(indices)])

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int]:
        return self._scaled(self.pixels[index]), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        # DataLoader calls this with a whole batch.
        images = self.batch(indices).unbind()
        return list(zip(images, self.labels[indices].tolist(), strict=True))

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        return Preview(f"{self.name} {index}", thumbnail(self.picture(index), side))

    def picture(self, index: int) -> Image.Image:
        """The image as a Pillow image, without normalisation."""
        pixels = self.preprocessing.denormalize(self[index][0]).mul(255).round().byte().permute(1, 2, 0).numpy()
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def _scaled(self, images: Tensor) -> Tensor:
        return images if images.is_floating_point() else self.preprocessing.normalize(images)


class ImagesAsFiles(Dataset):
    """Images in memory that are preprocessed like image files: resized, in colour or grey."""

    images: TensorImages

    def __init__(self, images: TensorImages, preprocessing: Preprocessing) -> None:
        classes, name = images.classes, images.name
        super().__init__(images.labels, name=name, classes=classes, preprocessing=preprocessing, images=images)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int]:
        return self.preprocessing(self.images.picture(index)), int(self.labels[index])

    def preview(self, index: int, *, side: int = THUMBNAIL_SIDE) -> Preview:
        return self.images.preview(index, side=side)


def stratified_split(labels: Int64[Tensor, " N"], sizes: Sequence[int], *, seed: int) -> tuple[Tensor, ...]:
    """Sorted positions of the items in disjoint random parts of these sizes, stratified by class.

    The shuffled items of each class are spread evenly over one sequence, with a random offset. The parts are
    consecutive pieces of this sequence, so a small class may be in any part.

    Example:
        >>> [len(part) for part in stratified_split(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), (2, 6), seed=0)]
        [2, 6]
    """
    if any(size < 1 for size in sizes) or sum(sizes) > len(labels):
        raise ValueError(f"sizes must be at least 1, with a sum of at most {len(labels)} items, got {tuple(sizes)}")
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    _, counts = labels.unique(return_counts=True)
    start = torch.rand(len(counts), generator=generator, dtype=torch.float64).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = (torch.arange(len(labels)) - first + start) / counts.repeat_interleave(counts)
    parts = by_class[place.argsort(stable=True)][: sum(sizes)].split(list(sizes))
    return tuple(part.sort().values for part in parts)


def top_up(positions: Sequence[int], n: int, size: int, generator: torch.Generator) -> Int64[Tensor, " n"]:
    """The first n distinct positions, sorted. If there are fewer, random positions below `size` are added."""
    rest = torch.randperm(size, generator=generator).tolist()
    return torch.tensor(list(dict.fromkeys((*positions, *rest)))[:n]).sort().values
