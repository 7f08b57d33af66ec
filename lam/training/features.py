"""The items of a data set as what a frozen network makes of them: computed once, in place of once an epoch."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from lam.datasets import Dataset
from lam.datasets.augmented import Augmented
from lam.models.frozen import KEPT_BYTES, frozen_in
from lam.utils import distributed

_BATCH = 64


class FeatureItems:
    """A data set whose items are features and targets; whatever else there is of each item is as in the data set.

    Args:
        dataset: of (input, target).
        features: (N, P) of its items.
    """

    def __init__(self, dataset: Dataset, features: Float[Tensor, "N P"]) -> None:
        self.dataset, self.features = dataset, features

    def __len__(self) -> int:
        return len(self.features)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while a copy is made
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: int) -> tuple[Float[Tensor, " P"], Tensor]:
        return self.features[index], torch.as_tensor(self.dataset.targets[index])

    def __getitems__(self, indices: list[int]) -> list[tuple[Float[Tensor, " P"], Tensor]]:
        return [self[index] for index in indices]


def with_features(network: nn.Module, dataset: Any, *, num_workers: int = 0, progress: bool = False) -> Any:
    """The items of a data set as features of a network's frozen part, as its head trains on them in every epoch.

    They are computed at the first call for a network and a data set.

    Args:
        network: any.
        dataset: of (input, target).
        num_workers: processes that read.
        progress: show a progress bar on standard error.

    Returns:
        A data set of features; the one given where the network has no frozen part, what is read differs each time, or
        the features would take too much memory.
    """
    frozen = frozen_in(network)
    is_plain = isinstance(dataset, Dataset) and not isinstance(dataset, Augmented)
    if frozen is None or not is_plain or 4 * frozen.width * len(dataset) > KEPT_BYTES:
        return dataset
    if (features := frozen.of_data.get(dataset)) is None:
        frozen.keep()
        device = next(network.parameters()).device
        context = distributed.worker_context(num_workers)
        loader = DataLoader(
            dataset, _BATCH, num_workers=num_workers, multiprocessing_context=context, generator=torch.Generator()
        )
        batches = tqdm(loader, desc="features", unit="batch", disable=not progress)
        features = torch.cat([frozen(inputs.to(device)).cpu() for inputs, _ in batches])
        frozen.of_data[dataset] = features
    return FeatureItems(dataset, features)
