"""The training items that a method looks at once its network is trained."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Subset

from lam.datasets.augmented import without_augmentation
from lam.training.batches import Batches

REFERENCE_BATCH = 250


def reference_inputs(dataset: Any, size: int, *, seed: int) -> Iterator[Any]:
    """Give batches of inputs of items drawn at random without replacement, none of them augmented.

    Args:
        dataset: of (input, label).
        size: how many items; all of them where there are no more.
        seed: of the draw, and of what the data set itself draws; torch's global generator is left as it was.
    """
    chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    batches = Batches(Subset(without_augmentation(dataset), chosen), batch_size=REFERENCE_BATCH, seed=seed, epoch=0)
    return (batches[number][0] for number in range(len(batches)))
