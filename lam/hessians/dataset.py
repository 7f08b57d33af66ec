"""GGN of the last layer over every pair of a whole data set: exact, streamed and blocked.

`fixed` needs the unit outputs alone for its sums over pairs, a blocked pass over similarities in which each unordered
pair is met once, and then one streamed matmul with φ². `positive` factorises by class, so it needs no pair at all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lam.hessians.batch import ALL_ZERO, Sums, check_feature_values, check_layer, outputs
from lam.hessians.losses.contrastive import ContrastiveCurvature
from lam.hessians.losses.items import OfPartners
from lam.hessians.relations import LabelRelation, NeighbourRelation, cost
from lam.hessians.structures.diagonal import Diagonal
from lam.pairs.neighbours import Neighbours
from lam.utils.autocast import without_autocast

ROWS = 4096
"""How many items of a feature matrix are streamed at once."""


@without_autocast()
def ggn_of_dataset(
    empty: Sums,
    features: Float[Tensor, "N P"] | Iterable[Tensor],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    *,
    labels: Int[Tensor, " N"] | None = None,
    neighbours: Neighbours | None = None,
    block_size: int = 1024,
    progress: bool = True,
) -> Sums:
    """GGN over every pair of a data set, as `ggn_of_batch` would give for one batch of all items.

    Similarities are in the type of the features, sums over the data set in float64. The result does not depend on how
    the data were cut into batches or blocks.

    Args:
        empty: the structure of no item at all, with the curvature of a contrastive loss: `fixed` or `positive`; `full`
            would need an array of all pairs.
        features: (N, P) what enters the layer; or batches of it that can be iterated twice, always in the same order.
        weight: (D, P) the layer's weight.
        bias: (D,) its bias, or None.
        labels: (N,) one label an item; or
        neighbours: which pairs are near; exactly one of the two.
        block_size: how many items a block of similarities has on a side.
        progress: show how many pairs and bytes it takes, and a progress bar, on standard error.

    Returns:
        The sums behind h, float64.

    Raises:
        ValueError: for what `ggn_of_batch` refuses, `full`, both or neither of labels and neighbours, another number of
            labels than items, and no positive pair at all.
    """
    curvature: Any = empty.curvature
    if curvature.fix == "full":
        raise ValueError("fix must be fixed or positive for a whole data set, got 'full': fit it in batches instead")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if curvature.fix == "positive":
        features = features if isinstance(features, Tensor) else torch.cat(list(features))
    n, r = _all_outputs(features, weight, bias, curvature)
    relation = _relation(len(n), labels, neighbours, block_size)
    if relation.n_positives == 0:
        raise ValueError(f"there is no positive pair among {len(n)} items: the loss has no curvature")

    terms = [relation.positive_partners(n)]
    if curvature.fix == "fixed":
        terms.append(_negative_partners(n, relation, curvature.least_cosine, block_size, progress))
    count, partners = (torch.stack(part) for part in zip(*terms, strict=True))
    items = OfPartners(curvature.split, n.double(), r.double(), count, partners)
    total = _summed(empty, features, items)
    if isinstance(features, Tensor) and curvature.fix == "positive":
        total = replace(total, sums=total.sums + relation.cross_terms(features, weight, bias, progress=progress))
    return replace(total, counts=(relation.n_positives, relation.n_negatives)[: len(terms)])


def diagonal_ggn_dataset(
    features: Float[Tensor, "N P"] | Iterable[Tensor],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    curvature: ContrastiveCurvature,
    **options: Any,
) -> Diagonal:
    """Diagonal GGN over every pair: `ggn_of_dataset` of a `Diagonal`, with its options."""
    empty = Diagonal.zeros(weight, curvature, has_bias=bias is not None)
    return ggn_of_dataset(empty, features, weight, bias, **options)


def contrastive_ggn_dataset(
    features: Float[Tensor, "N P"] | Iterable[Tensor],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    *,
    labels: Int[Tensor, " N"] | None = None,
    neighbours: Neighbours | None = None,
    block_size: int = 1024,
    progress: bool = True,
    **settings: Any,
) -> Diagonal:
    """Diagonal GGN over every pair: `diagonal_ggn_dataset` of a `ContrastiveCurvature` with these settings."""
    options: dict[str, Any] = {"block_size": block_size, "progress": progress}
    curvature = ContrastiveCurvature(**settings)
    return diagonal_ggn_dataset(features, weight, bias, curvature, labels=labels, neighbours=neighbours, **options)


def _relation(
    size: int, labels: Tensor | None, neighbours: Neighbours | None, block_size: int
) -> LabelRelation | NeighbourRelation:
    if (labels is None) == (neighbours is None):
        raise ValueError("give either labels or neighbours")
    n_related = len(labels) if labels is not None else 0 if neighbours is None else neighbours.size
    if n_related != size:
        raise ValueError(f"there are {size} items, but the labels or neighbours are of {n_related}")
    return LabelRelation(labels) if labels is not None else NeighbourRelation(neighbours, block_size)  # pyright: ignore


def _negative_partners(
    n: Tensor, relation: LabelRelation | NeighbourRelation, cosine: float, block_size: int, progress: bool
) -> tuple[Tensor, Tensor]:
    """Sums of 1 and of n over the negative partners of each item that are nearer than the margin."""
    extended = torch.cat([n, n.new_ones(len(n), 1)], 1)[relation.order]
    blocks = [slice(i, min(i + block_size, len(n))) for i in range(0, len(n), block_size)]
    total = torch.zeros_like(extended, dtype=torch.float64)
    title = cost(len(n) * (len(n) - 1) // 2, bytes_of_blocks(n, block_size))
    with tqdm(total=len(blocks) * (len(blocks) + 1) // 2, desc=title, disable=not progress, unit="block") as bar:
        for index, rows in enumerate(blocks):
            for columns in blocks[index:]:
                bar.update()
                t = (extended[rows, :-1] @ extended[columns, :-1].T).gt_(cosine)
                if not relation.exclude(t, rows, columns):
                    continue
                total[rows] += t @ extended[columns]
                if rows != columns:
                    total[columns] += t.T @ extended[rows]
    unsorted = torch.empty_like(total)
    unsorted[relation.order] = total
    return unsorted[:, -1:], unsorted[:, :-1]


def bytes_of_blocks(n: Float[Tensor, "N D"], block_size: int) -> int:
    """Memory that a pass over the similarities of all pairs takes beside the features."""
    N, D = n.shape
    return n.element_size() * (N * (D + 1) + 2 * min(block_size, N) ** 2) + 8 * N * (D + 1)


def _all_outputs(
    features: Tensor | Iterable[Tensor], weight: Tensor, bias: Tensor | None, curvature: ContrastiveCurvature
) -> tuple[Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor]] = []
    n_items, any_nonzero = 0, False
    for batch in _stream(features, weight.device):
        check_layer(batch, weight, bias) if not parts else check_feature_values(batch, n_items)
        _, n, r = outputs(batch, weight, bias, curvature.working_dtype(batch), offset=n_items)
        parts.append((n, r))
        n_items, any_nonzero = n_items + len(batch), any_nonzero or bool(batch.any())
    if n_items < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {n_items}")
    if not any_nonzero:
        raise ValueError(ALL_ZERO)
    return torch.cat([n for n, _ in parts]), torch.cat([r for _, r in parts])


def _summed(empty: Sums, features: Tensor | Iterable[Tensor], items: OfPartners) -> Sums:
    """The structure of all items, in one stream of their features."""
    total, start = empty, 0
    for batch in _stream(features, items.n.device):
        inputs = batch.to(empty.curvature.working_dtype(batch))
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], 1) if empty.has_bias else inputs
        total = total + empty.of_items(inputs, items[start : start + len(batch)])
        start += len(batch)
    if start != len(items.n):
        raise ValueError(f"the features gave {len(items.n)} items at first and {start} later: they must not change")
    return total


def _stream(features: Tensor | Iterable[Tensor], device: torch.device) -> Iterator[Tensor]:
    if isinstance(features, Tensor):
        if features.ndim != 2:
            raise ValueError(f"features must be of shape (N, P), got {tuple(features.shape)}")
        features = features.split(ROWS)
    for batch in features:
        yield batch.to(device)
