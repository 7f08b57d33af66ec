"""Features of a data set's items from the frozen part of a network, computed once instead of every epoch."""

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
