"""Training items drawn for a method that looks at some once its network is trained."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Subset

from lam.datasets.augmented import without_augmentation
from lam.training.batches import Batches

REFERENCE_BATCH = 250


def reference_inputs(dataset: Any, size: int, *, seed: int) -> Iterator[Any]:
    """Batches of inputs of items drawn at random without replacement, none of them augmented.

    Args:
        dataset: of (input, label).
        size: how many items; all of them where there are no more.
        seed: of the draw, and of what the data set itself draws; torch's global generator is left as it was.
    """
    positions = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    batches = Batches(Subset(without_augmentation(dataset), positions), batch_size=REFERENCE_BATCH, seed=seed, epoch=0)
    return (batches[number][0] for number in range(len(batches)))
