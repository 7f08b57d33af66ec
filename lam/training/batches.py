"""The batches of an epoch, each with its own random state.

The state depends only on the run's seed, the epoch and the batch. So neither the number of worker processes nor an
interruption changes the batches.

Features from the frozen part of a network are computed once, instead of every epoch.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils import data
from torch.utils.data import DataLoader, default_collate
from tqdm import tqdm

from lam.datasets import Dataset
from lam.datasets.augmented import Augmented
from lam.models.frozen import KEPT_BYTES, frozen_in
from lam.utils import distributed
from lam.utils.random import derive_seed, derive_seed_of_part, seeded

_BATCH = 64


class Batches(data.Dataset):
    """The batches of one epoch of a data set in random order, read by the data's `__getitems__` if there is one.

    Args:
        dataset: data set of (input, label, ...), with a length.
        batch_size: items in a batch; the last batch may be smaller.
        seed: seed of the run.
        epoch: counted from 0.
        process: rank of the process and number of processes. Each process reads a part of every batch. In order of
            rank, the parts form the batch of a single process, but only the first part has the same random numbers.
        per_class: items of each class in a batch; the classes are the data set's `groups`, or else its labels. Each
            batch draws classes, and items of these classes, without replacement. A class with fewer items gives all;
            a class of one item is never drawn. The last class is cut at the batch size. For large classes this is
            pytorch-metric-learning's `MPerClassSampler`, with other random numbers.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        epoch: int,
        per_class: int | None = None,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        self.dataset, self.batch_size, self.per_class = dataset, batch_size, per_class
        self.place, self.process = (seed, epoch), process
        if per_class is None:
            generator = torch.Generator().manual_seed(derive_seed(*self.place, "order"))
            self.order = torch.randperm(len(dataset), generator=generator)
        else:
            self.classes = classes_of(dataset)

    def __len__(self) -> int:
        return math.ceil(len(self.dataset) / self.batch_size)

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Number of items of a batch that each process reads, larger parts first.

        Empty if each process reads all items: with one process, or fewer than two items for each process.
        """
        n, processes = len(self.indices(batch)), self.process[1]
        if processes == 1 or n < 2 * processes:
            return ()
        return tuple(n // processes + (number < n % processes) for number in range(processes))

    def indices(self, batch: int) -> list[int]:
        """Positions of a batch's items in the data set."""
        if self.per_class is None:
            return self.order[batch * self.batch_size : (batch + 1) * self.batch_size].tolist()
        generator = torch.Generator().manual_seed(derive_seed(*self.place, batch, "classes"))
        drawn: list[int] = []
        for number in torch.randperm(len(self.classes), generator=generator).tolist():
            items = self.classes[number]
            drawn += items[torch.randperm(len(items), generator=generator)[: self.per_class]].tolist()
            if len(drawn) >= self.batch_size:
                break
        return drawn[: self.batch_size]

    def __getitem__(self, batch: int) -> list[Any]:
        indices, sizes, part = self.indices(batch), self.sizes(batch), 0
        if sizes:
            part = self.process[0]
            start = sum(sizes[:part])
            indices = indices[start : start + sizes[part]]
        return read_batch(self.dataset, indices, seed=derive_seed_of_part(part, *self.place, batch, "data"))


def read_batch(dataset: Any, indices: list[int], *, seed: int) -> list[Any]:
    """Inputs and labels of some items; the data set's random numbers follow from the seed."""
    with seeded(seed):
        if hasattr(dataset, "__getitems__"):
            items = dataset.__getitems__(indices)
        else:
            items = [dataset[index] for index in indices]
    return default_collate(list(map(input_and_label, items)))


def input_and_label(item: Any) -> tuple[Any, Any]:
    """Input and label of an item (input, label, ...) of a data set; a `ValueError` for other items."""
    if not isinstance(item, tuple | list) or len(item) < 2:
        names = f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
        raise ValueError(
            f"items of a data set must be (input, label), got {type(item).__name__}{names}: wrap the data set in one "
            "whose __getitem__ returns such pairs"
        )
    return item[0], item[1]


def classes_of(dataset: Any) -> list[Tensor]:
    """Positions of the items of each class that has at least two; classes are the data's `groups`, or else labels."""
    groups = getattr(dataset, "groups", None)
    groups = torch.as_tensor(labels_of_items(dataset) if groups is None else groups)
    sizes = groups.unique(return_counts=True)[1].tolist()
    return [items for items in groups.argsort(stable=True).split(sizes) if len(items) > 1]


def labels_of_items(dataset: Any) -> Any:
    """The `labels` of a data set, or else torchvision's `targets`; None without either."""
    return getattr(dataset, "labels", getattr(dataset, "targets", None))


class FeatureItems:
    """A data set of features and targets, with all other attributes of the original data set."""

    def __init__(self, dataset: Dataset, features: Float[Tensor, "N P"]) -> None:
        self.dataset, self.features = dataset, features

    def __len__(self) -> int:
        return len(self.features)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet while copying or unpickling: avoids infinite recursion
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, " P"], Tensor]:
        return self.features[index], torch.as_tensor(self.dataset.targets[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Float[Tensor, " P"], Tensor]]:
        return [self[index] for index in indices]


def with_features(network: nn.Module, dataset: Any, *, num_workers: int = 0, progress: bool = False) -> Any:
    """A data set whose inputs are features from a network's frozen part; the network keeps these features.

    Returns the data set itself if the network has no frozen part, if the data set is augmented or is not a
    `lam.datasets.Dataset`, or if the features would exceed `KEPT_BYTES`. `num_workers` processes read the data.
    """
    frozen = frozen_in(network)
    is_plain = isinstance(dataset, Dataset) and not isinstance(dataset, Augmented)
    if frozen is None or not is_plain or 4 * frozen.width * len(dataset) > KEPT_BYTES:
        return dataset
    if (features := frozen.data_features.get(dataset)) is None:
        frozen.keep()
        device = next(network.parameters()).device
        context = distributed.worker_context(num_workers)
        loader = DataLoader(
            dataset, _BATCH, num_workers=num_workers, multiprocessing_context=context, generator=torch.Generator()
        )
        batches = tqdm(loader, desc="features", unit="batch", disable=not progress)
        features = torch.cat([frozen(inputs.to(device)).cpu() for inputs, _ in batches])
        frozen.data_features[dataset] = features
    return FeatureItems(dataset, features)
