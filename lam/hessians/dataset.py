"""GGN of the last layer over every pair of a whole data set: exact, streamed and blocked.

`fixed` needs the unit outputs alone for its sums over pairs, a blocked pass over similarities in which each unordered
pair is met once, and then one streamed matmul with φ². `positive` factorises by class, so it needs no pair at all.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lam.hessians.batch import ALL_ZERO, Sums, check_feature_values, check_layer, outputs
from lam.hessians.losses import ContrastiveCurvature, Curvature
from lam.hessians.losses.items import OfItems
from lam.hessians.relations import LabelRelation, NeighbourRelation
from lam.hessians.structures.diagonal import Diagonal
from lam.pairs.neighbours import Neighbours
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least

ROWS = 4096
"""How many items of a feature matrix are streamed at once."""

BLOCK_SIZE = {"cpu": 1 << 10, "cuda": 1 << 14}
"""How many items a block of similarities has on a side, by the kind of device; float32 takes 2 GiB on a GPU."""


@without_autocast()
def ggn_of_dataset(
    empty: Sums,
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    *,
    labels: Int[Tensor, " N"] | None = None,
    neighbours: Neighbours | None = None,
    block_size: int | None = None,
    progress: bool = True,
) -> Sums:
    """GGN over every pair of a data set, as `ggn_of_batch` would give for one batch of all items.

    Similarities are in the type of the features, sums over the data set in float64. The result does not depend on how
    the data were cut into batches or blocks.

    Args:
        empty: the structure of no item at all, with the curvature of a loss that can be formed block by block: that of
            the contrastive loss, but for `full`, which would need an array of all pairs, and those with a softmax over
            pairs, `fixed` or `projected`.
        features: (N, P) what enters the layer, on any device: some rows at a time are taken to that of the weight.
        weight: (D, P) the layer's weight.
        bias: (D,) its bias, or None.
        labels: (N,) one label an item; or
        neighbours: which pairs are near; exactly one of the two.
        block_size: how many items a block of similarities has on a side; that of `BLOCK_SIZE` by default.
        progress: show how many pairs and bytes it takes, and a progress bar, on standard error.

    Returns:
        The sums behind h, float64.

    Raises:
        ValueError: for what `ggn_of_batch` refuses, a curvature that is formed in batches alone, both or neither of
            labels and neighbours, another number of labels than items, and no positive pair at all.
    """
    curvature = empty.curvature
    curvature.check_scope("dataset")
    check_at_least("block_size", block_size, 1)
    n, r = _all_outputs(features, weight, bias, curvature)
    relation = _relation(len(n), labels, neighbours)
    if relation.n_positives == 0:
        raise ValueError(f"there is no positive pair among {len(n)} items: the loss has no curvature")
    block_size = block_size or BLOCK_SIZE.get(n.device.type, BLOCK_SIZE["cpu"])
    items = curvature.over_dataset(n, r, relation, block_size=block_size, progress=progress)
    total = _summed(empty, features, items, progress=progress)
    if curvature.has_cross_terms:
        total = replace(total, sums=total.sums + relation.cross_terms(features, weight, bias, progress=progress))
    return replace(total, counts=curvature.counts(relation))


def diagonal_ggn_dataset(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    curvature: Curvature,
    **options: Any,
) -> Diagonal:
    """Diagonal GGN over every pair: `ggn_of_dataset` of a `Diagonal`, with its options."""
    empty = Diagonal.zeros(weight, curvature, has_bias=bias is not None)
    return ggn_of_dataset(empty, features, weight, bias, **options)


def contrastive_ggn_dataset(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    *,
    labels: Int[Tensor, " N"] | None = None,
    neighbours: Neighbours | None = None,
    block_size: int | None = None,
    progress: bool = True,
    **settings: Any,
) -> Diagonal:
    """Diagonal GGN over every pair: `diagonal_ggn_dataset` of a `ContrastiveCurvature` with these settings."""
    options: dict[str, Any] = {"block_size": block_size, "progress": progress}
    curvature = ContrastiveCurvature(**settings)
    return diagonal_ggn_dataset(features, weight, bias, curvature, labels=labels, neighbours=neighbours, **options)


def _relation(size: int, labels: Tensor | None, neighbours: Neighbours | None) -> LabelRelation | NeighbourRelation:
    if (labels is None) == (neighbours is None):
        raise ValueError("give either labels or neighbours")
    n_related = len(labels) if labels is not None else 0 if neighbours is None else neighbours.size
    if n_related != size:
        raise ValueError(f"there are {size} items, but the labels or neighbours are of {n_related}")
    return LabelRelation(labels) if labels is not None else NeighbourRelation(neighbours)  # pyright: ignore


def _all_outputs(features: Tensor, weight: Tensor, bias: Tensor | None, curvature: Curvature) -> tuple[Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor]] = []
    any_nonzero = False
    for start, batch in _stream(features, weight.device):
        check_layer(batch, weight, bias) if start == 0 else check_feature_values(batch, start)
        parts.append(outputs(batch, weight, bias, curvature.working_dtype(batch), offset=start)[1:])
        any_nonzero = any_nonzero or bool(batch.any())
    if len(features) < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {len(features)}")
    if not any_nonzero:
        raise ValueError(ALL_ZERO)
    return torch.cat([n for n, _ in parts]), torch.cat([r for _, r in parts])


def _summed(empty: Sums, features: Tensor, items: OfItems, *, progress: bool) -> Sums:
    """The structure of all items, in one stream of their features."""
    total = empty
    batches = tqdm(_stream(features, items.n.device), desc=items.cost, disable=not (progress and items.cost))
    for start, batch in batches:
        features = batch.to(empty.curvature.working_dtype(batch))
        total = total + empty.of_items(features, items[start : start + len(batch)])
    return total


def _stream(features: Tensor, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    """Some items at a time, with the number of the first."""
    for start in range(0, len(features), ROWS):
        yield start, features[start : start + ROWS].to(device)
