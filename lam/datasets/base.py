"""What every data set is: labelled tensors of one shape, subsets of them, and three disjoint splits.

Images in memory live here (`TensorImages`); images in files, texts and what ships with a library have files of their
own. How an image or a text becomes a tensor is `lam.inputs`.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int64, Integer, Shaped, UInt8
from PIL import Image
from torch import Tensor
from torch.utils import data

from lam.inputs import AnyPreprocessing, Preprocessing
from lam.inputs.thumbnails import SIZE, thumbnail
from lam.utils.checks import check_at_least, integers
from lam.utils.notes import Note

Items = TypeVar("Items", bound="Dataset")
GalleryKind = Literal["classes", "identities"]
"""What the items of a gallery are: examples of classes, of which one is sought, or single things that may be there."""

PARTS = {"train": ("train",), "validation": ("validation", "val", "valid", "dev"), "test": ("test", "eval")}
"""What a folder or a file of each part may be called."""

_LEAST_TRAINED_ON = 5  # items that pairs may leave to train on, as a run asks for
_PER_CLASS = 4  # items of one class where there are too many classes to draw from each


class MissingDataError(FileNotFoundError, ValueError):
    """Files of a data set are not where they were looked for; the message names each and says how to get them."""


@dataclass(frozen=True)
class Shown:
    """How an item is shown to people: by a picture or by its text.

    Attributes:
        path: its file, or else what it is called.
        picture: a small PNG or JPEG, or None.
        text: None of an image.
        metadata: what else is known of it, by name.
    """

    path: str
    picture: bytes | None = None
    text: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


class Dataset(data.Dataset[tuple[Tensor, int | Tensor]], ABC):
    """N labelled inputs of one shape, images or texts, by position; an item is an input and its target.

    Args:
        labels: (N,) int64, positions in `classes`.
        name: what the data set is called in tables.
        classes: the name of every class, by default the labels themselves; parts of one data set share them, so that
            some may have no item here.
        preprocessing: how an image file, or a text, becomes an input.
        per_item: what else there is one of for each item, as tensors, tuples or data sets, or None: attributes, of
            which a subset has those of its items.

    Attributes:
        shape: of an input.
        is_query: (N,) whether each item is a query, else it belongs to the gallery; None where every item is both, and
            a query is not found as its own match.
        soft_labels: (N, C) how often people gave each class to each item; None where that is not known.

    Raises:
        ValueError: If there is no item, a label is no position in `classes`, `preprocessing` leaves the shape open, or
            something of each item is not as many as they are.
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
        for what, values in per_item.items():
            if values is not None and len(values) != len(labels):
                raise ValueError(f"{what} must be as many as the {len(labels)} labels, got {len(values)}")
        self.labels = labels
        self.name = name
        self.classes = tuple(classes)
        self.preprocessing: Any = preprocessing  # of images or of texts, as each data set knows
        self.shape: tuple[int, ...] = preprocessing.shape
        vars(self).update(per_item)
        self._per_item = ("labels", "is_query", "soft_labels", *per_item)

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[Shaped[Tensor, "..."], int | Tensor]: ...

    @property
    def targets(self) -> Shaped[Tensor, "N ..."]:
        """What says which items match, one an item: the labels, or for places their positions."""
        return self.labels

    @property
    def groups(self) -> Int64[Tensor, " N"]:
        """Items of one number match (N,): the labels, or of places those that are close together."""
        return self.labels

    @property
    def names(self) -> Sequence[str]:
        """What tells items from others of the same targets, such as names of files; none where nothing does."""
        return ()

    @property
    def files(self) -> Sequence[Path]:
        """The image files that items are read from, one an item; none where they are in memory."""
        return ()

    @property
    def queries(self: Items) -> Items:
        """The items that are searched for: all, where none is of the gallery alone."""
        return self if self.is_query is None else self.subset(self.is_query.nonzero().flatten())

    @property
    def candidates(self: Items) -> Items:
        """The items that are found: all, where none is a query alone."""
        return self if self.is_query is None else self.subset((~self.is_query).nonzero().flatten())

    def shown(self, index: int, *, side: int = SIZE) -> Shown:
        """How the item at a position is shown to people."""
        return Shown(f"{self.name} {index}")

    def subset(self: Items, indices: Sequence[int] | Integer[Tensor, " R"]) -> Items:
        """The items at these positions, in this order.

        Args:
            indices: (R,) positions from 0 to N − 1.

        Raises:
            ValueError: If there is none, or one is no position.
        """
        positions = integers("indices", indices)
        if positions.ndim != 1 or len(positions) == 0:
            raise ValueError(f"indices must be a non-empty list of positions, got {indices!r}")
        outside = ((positions < 0) | (positions >= len(self))).nonzero()
        if len(outside):
            raise ValueError(f"indices must be from 0 to {len(self) - 1}, got {int(positions[outside[0]])}")
        part = copy.copy(self)
        for name in self._per_item:
            setattr(part, name, _at(getattr(self, name), positions))
        return part

    def limit(self: Items, n: int, *, seed: int = 0) -> Items:
        """At most n items, drawn at random so that most have a match; all of them where there are no more.

        Each class is in proportion where that gives it two items on average. Where it would not, n items are of few
        classes: up to four of each, classes with a single item last.

        Raises:
            ValueError: If n is below 1.
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


def _at(values: Any, positions: Int64[Tensor, " R"]) -> Any:
    """Those of some positions, of a tensor, a tuple or a data set."""
    if values is None or isinstance(values, Tensor):
        return None if values is None else values[positions]
    return values.subset(positions) if isinstance(values, Dataset) else tuple(values[row] for row in positions.tolist())


class TensorImages(Dataset):
    """Images held in memory; 8-bit ones are scaled and normalised when they are read.

    Args:
        images: (N, C, H, W), 1 or 3 channels; uint8, or floating point for values that a network takes as they are.
        labels, name, classes: as of `Dataset`.
        preprocessing: how an image file becomes such an item, and how 8-bit values are normalised; by default they are
            resized to (H, W) and scaled to [0, 1].

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
        modes = {1: "L", 3: "RGB"}
        is_float = images.is_floating_point()
        if images.ndim != 4 or images.shape[1] not in modes or not (is_float or images.dtype == torch.uint8):
            actual = f"{images.dtype} of shape {tuple(images.shape)}"
            raise ValueError(f"images must be uint8 or floating point of shape (N, 1 or 3, H, W), got {actual}")
        if is_float and not images.isfinite().all():
            first = int((~images.flatten(1).isfinite().all(1)).nonzero()[0])
            raise ValueError(f"images must be finite, got NaN or infinity in the image at index {first}")
        shape = (images.shape[1], images.shape[2], images.shape[3])
        if preprocessing is None:
            preprocessing = Preprocessing(mode="L" if shape[0] == 1 else "RGB", size=shape[1:])
        if preprocessing.shape != shape:
            raise ValueError(f"images are of shape {shape}, but preprocessing gives {preprocessing.shape}")
        super().__init__(labels, name=name, classes=classes, preprocessing=preprocessing, pixels=images)

    @property
    def images(self) -> Float[Tensor, "N C H W"]:
        """All images at once, as items are: (N, C, H, W)."""
        return self._scaled(self.pixels)

    def batch(self, indices: Sequence[int] | Integer[Tensor, " R"]) -> Float[Tensor, "R C H W"]:
        """The images at these positions, stacked."""
        return self._scaled(self.pixels[torch.as_tensor(indices)])

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int]:
        return self._scaled(self.pixels[index]), int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        # DataLoader calls this, where it exists, with a whole batch.
        images = self.batch(indices).unbind()
        return list(zip(images, self.labels[indices].tolist(), strict=True))

    def shown(self, index: int, *, side: int = SIZE) -> Shown:
        """The image itself, in small."""
        return Shown(f"{self.name} {index}", thumbnail(self.picture(index), side))

    def picture(self, index: int) -> Image.Image:
        """The image at a position, as a file would hold it."""
        pixels = self.preprocessing.denormalize(self[index][0]).mul(255).round().byte().permute(1, 2, 0).numpy()
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

    def _scaled(self, images: Tensor) -> Tensor:
        return images if images.is_floating_point() else self.preprocessing.normalize(images)


class ReadAnew(Dataset):
    """Images of a data set, read as files of them would be: of another size, in colour or in grey.

    Args:
        images: of any shape.
        preprocessing: how an image file becomes an input.
    """

    images: TensorImages

    def __init__(self, images: TensorImages, preprocessing: Preprocessing) -> None:
        classes, name = images.classes, images.name
        super().__init__(images.labels, name=name, classes=classes, preprocessing=preprocessing, images=images)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, "C H W"], int]:
        return self.preprocessing(self.images.picture(index)), int(self.labels[index])

    def shown(self, index: int, *, side: int = SIZE) -> Shown:
        """The image itself, in small."""
        return self.images.shown(index, side=side)


@dataclass(frozen=True)
class Splits:
    """Disjoint parts of a data set: to train and fit on, to tune and choose on, and to report on.

    Attributes:
        train, validation, test: the three.
        strangers: items of classes that none of the three holds, see `lam.datasets.strangers`; None where none were set
            aside.
        gallery: what a gallery of such items is asked: of classes "which is it?", of identities "is it here?".
        answers: whether it holds answers to questions, so that none of its items is a query like those of the parts.
        notes: what was said while they were read, such as how a table was understood.

    Raises:
        ValueError: If their items differ in shape or their labels in meaning.
    """

    train: Dataset
    validation: Dataset
    test: Dataset
    strangers: "Dataset | None" = None
    gallery: GalleryKind = "classes"
    answers: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, part in (("validation", self.validation), ("test", self.test)):
            if part.shape != self.train.shape:
                raise ValueError(f"train has items of shape {self.train.shape}, {name} of shape {part.shape}")
            if part.classes != self.train.classes:
                raise ValueError(f"train and {name} must share one list of classes, so that labels mean the same")

    @classmethod
    def of(cls, parts: Mapping[str, Dataset], gallery: GalleryKind = "classes", *, answers: bool = False) -> "Splits":
        """Splits of the parts `train`, `validation` and `test`."""
        return cls(parts["train"], parts["validation"], parts["test"], gallery=gallery, answers=answers)

    def parts(self) -> dict[str, Dataset]:
        """The parts by name, with the strangers where some were set aside."""
        return {name: part for name, part in vars(self).items() if isinstance(part, Dataset)}


def stratified_split(labels: Int64[Tensor, " N"], sizes: Sequence[int], *, seed: int) -> tuple[Tensor, ...]:
    """Disjoint random parts with each class in proportion.

    The items of each class, in random order, are spread evenly over one sequence, each class from its own random start;
    parts are consecutive pieces of it. A class that divides evenly is divided exactly, and a small one has
    its fair chance to be in any part.

    Args:
        labels: (N,) int64.
        sizes: how many items each part has; what they leave is in no part.
        seed: of the draw.

    Returns:
        The positions of each part, int64, rising.

    Raises:
        ValueError: If a size is below 1 or together they exceed N.

    Example:
        >>> [len(part) for part in stratified_split(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), (2, 6), seed=0)]
        [2, 6]
    """
    if any(size < 1 for size in sizes) or sum(sizes) > len(labels):
        raise ValueError(f"every part needs an item, and {len(labels)} are there, got sizes {tuple(sizes)}")
    sequence = _interleaved(labels, torch.Generator().manual_seed(seed))
    parts = sequence[: sum(sizes)].split(list(sizes))
    return tuple(part.sort().values for part in parts)


def carve(dataset: Items, sizes: Sequence[int], *, seed: int) -> tuple[Items, ...]:
    """Random subsets of these sizes, with each class in proportion, and, last, the one of all that remains."""
    rest = len(dataset) - sum(sizes)
    parts = stratified_split(dataset.labels, (*sizes, rest), seed=seed)
    return tuple(dataset.subset(part) for part in parts)


def carve_missing(
    parts: Mapping[str, Items], *, validation: float, test: float, seed: int, source: object, by_class: bool = True
) -> dict[str, Items]:
    """The parts `train`, `validation` and `test`: those that are missing carved at random out of `train`.

    Each part gets items of each class in proportion. Small classes would leave a part's items without a match: then
    each part gets whole classes instead, as is usual for faces and products, or, of fewer than six classes, pairs of
    items of one class. A note says so.

    Args:
        parts: by name, `train` at least.
        validation, test: the fractions of `train` that these are, where they are missing.
        seed: of the draw.
        source: what errors call the data.
        by_class: allow parts of whole classes; False for questions, whose answers lie outside the parts.

    Raises:
        ValueError: for a fraction that is not between 0 and 1, or too few items to leave some to train on.
    """
    missing = {part: share for part, share in (("test", test), ("validation", validation)) if part not in parts}
    sizes = [fraction_of(len(parts["train"]), share, name=part) for part, share in missing.items()]
    if sum(sizes) >= len(parts["train"]):
        raise ValueError(
            f"{source} has {len(parts['train'])} items, too few to carve {' and '.join(missing)} out of them"
        )
    dataset = parts["train"]
    carved = carve(dataset, sizes, seed=seed)
    if by_class and any(_share_matched(part) < _share_matched(dataset) / 2 for part in carved):
        carved = _carve_matched(dataset, missing, seed=seed, source=source) or carved
    *held_out, train = carved
    return {**parts, **dict(zip(missing, held_out, strict=True)), "train": train}


def _carve_matched(
    dataset: Items, shares: Mapping[str, float], *, seed: int, source: object
) -> tuple[Items, ...] | None:
    """Subsets of these shares whose items have matches, and the one of all that remains; None where there are too few.

    Each holds whole classes; where there are too few of these, pairs of items.
    """
    classes, counts = dataset.labels.unique(return_counts=True)
    classes, order = classes[counts > 1], torch.Generator().manual_seed(seed)
    n_classes = [max(2, fraction_of(len(classes), share, name=part)) for part, share in shares.items()]
    sizes = [max(3, fraction_of(len(dataset), share, name=part)) for part, share in shares.items()]
    if sum(n_classes) + 2 <= len(classes):
        drawn = classes[torch.randperm(len(classes), generator=order)][: sum(n_classes)].split(n_classes)
        held_out = [torch.isin(dataset.labels, of_part).nonzero().flatten() for of_part in drawn]
        how = f"of the {len(classes)} classes with two or more, {_by_part(shares, n_classes)} are held out as a whole"
    elif len(classes) > 1 and sum(sizes) + _LEAST_TRAINED_ON <= len(dataset):
        left = {label: items.tolist() for label, items in _shuffled_by_class(dataset.labels, order).items()}
        held_out = [torch.tensor(_drawn_in_pairs(left, size)).sort().values for size in sizes]
        how = f"pairs of one class are held out, {_by_part(shares, sizes)}"
    else:
        return None
    said = f"{source} has few items a class ({int(counts.median())}): {how}, so that their items can find each other"
    warnings.warn(said, Note, stacklevel=4)
    rest = torch.ones(len(dataset), dtype=torch.bool)
    rest[torch.cat(held_out)] = False
    return tuple(dataset.subset(part) for part in (*held_out, rest.nonzero().flatten()))


def _by_part(parts: Iterable[str], numbers: Iterable[int]) -> str:
    return " and ".join(f"{number} for {part}" for part, number in zip(parts, numbers, strict=True))


def _shuffled_by_class(labels: Int64[Tensor, " N"], generator: torch.Generator) -> dict[int, Tensor]:
    order = torch.randperm(len(labels), generator=generator)
    return {label: order[labels[order] == label] for label in labels.unique().tolist()}


def _drawn_in_pairs(left: dict[int, list[int]], size: int) -> list[int]:
    """Positions taken out of what is left of the classes, two at a time of the class with most left, of two classes."""
    drawn, last = list[int](), None
    while len(drawn) < size:
        last = max((label for label in left if label != last), key=lambda label: len(left[label]))
        count = min(2, size - len(drawn))
        drawn += left[last][:count]
        left[last] = left[last][count:]
    return drawn


def _share_matched(dataset: Dataset) -> float:
    """The share of the items that share their label with another."""
    counts = dataset.labels.unique(return_counts=True)[1]
    return float(counts[counts > 1].sum()) / max(1, len(dataset))


def top_up(positions: Sequence[int], n: int, size: int, generator: torch.Generator) -> Int64[Tensor, " n"]:
    """The first n different positions of a sequence, topped up at random from all `size` of them; rising."""
    rest = torch.randperm(size, generator=generator).tolist()
    return torch.tensor(list(dict.fromkeys((*positions, *rest)))[:n]).sort().values


def fraction_of(n: int, fraction: float, *, name: str) -> int:
    """How many of n items this fraction is: at least one.

    Raises:
        ValueError: If the fraction is not between 0 and 1.
    """
    if not (math.isfinite(fraction) and 0 < fraction < 1):
        raise ValueError(f"{name} must be a fraction between 0 and 1, got {fraction}")
    return max(1, round(n * fraction))


def _interleaved(labels: Int64[Tensor, " N"], generator: torch.Generator) -> Int64[Tensor, " N"]:
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    _, counts = labels.unique(return_counts=True)
    start = torch.rand(len(counts), generator=generator, dtype=torch.float64).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    place = (torch.arange(len(labels)) - first + start) / counts.repeat_interleave(counts)
    return by_class[place.argsort(stable=True)]
