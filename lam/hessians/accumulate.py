"""From batches of features and targets to the curvature of the last layer.

The two ways to go through a data set: batch by batch, where pairs never cross batches, and all at once. What makes two
items a pair is told by `lam.pairs.Relation`; the formulas are in `lam.hessians.batch` and `lam.hessians.dataset`.
"""

import mmap
import tempfile
from collections.abc import Iterable
from typing import IO, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians.batch import diagonal_ggn
from lam.hessians.dataset import diagonal_ggn_dataset
from lam.hessians.losses import ContrastiveCurvature, Curvature
from lam.hessians.structures.diagonal import Diagonal
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.pairs import as_targets, check_labels
from lam.pairs.relation import Relation
from lam.utils import distributed
from lam.utils.autocast import without_autocast


def check_counts(total: Diagonal, n_items: int) -> None:
    """Refuse a curvature that not every term has something in.

    Raises:
        ValueError: saying what there is none of.
    """
    if n_items < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {n_items}")
    for name, count in zip(total.curvature.terms, total.counts or (), strict=True):
        if count == 0:
            raise ValueError(
                f"no batch of the {n_items} items holds a {name}: shuffle them, take larger batches, or form the "
                'pairs over the whole data set with pairs="dataset"'
            )


def curvature_in_batches(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    curvature: Curvature,
    *,
    seed: int = 0,
) -> tuple[Diagonal, int]:
    """Sum the curvature over batches of (features, targets).

    Args:
        batches: (N, P) features with (N,) labels or (N, X) positions each.
        weight: (D, P) of the head.
        bias: (D,) of the head, or None.
        relation: what makes a pair, and which of the pairs of a batch count, chosen by the head's output.
        curvature: of the loss.
        seed: of what the mining draws, the same in every batch: what a batch adds does not depend on those before it.

    Returns:
        The sums, in float64, and the number of items.

    Raises:
        ValueError: for a batch without targets, or with another number of targets than items.
    """
    total, n_items = Diagonal.nothing(weight, curvature, has_bias=bias is not None), 0
    for features, targets in batches:
        targets = checked_targets(features, targets)
        pairs = relation.pairs(targets)
        if relation.mining != ALL_PAIRS:
            with without_autocast():
                embeddings = F.normalize(F.linear(features, weight, bias))
            generator = torch.Generator().manual_seed(seed)
            margin = relation.triplet_margin
            pairs = relation.mining.choose(embeddings, pairs, targets, margin=margin, generator=generator)
        total = total + diagonal_ggn(features, weight, bias, pairs, curvature)
        n_items += len(features)
    return total, n_items


def curvature_of_dataset(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    curvature: Curvature,
    *,
    progress: bool,
) -> tuple[Diagonal, int]:
    """Form the curvature over every pair of all batches; features are kept in a temporary file meanwhile.

    Of several processes each gives its own batches; the first one keeps the features of all and forms the curvature.

    Args, Returns, Raises: as `curvature_in_batches`.
    """

    def formed() -> tuple[Diagonal, int]:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            features = torch.frombuffer(mapped, dtype=weight.dtype).view(-1, weight.shape[1])
            diagonal = all_pairs(features, targets, weight, bias, relation, curvature, progress=progress)
            n_items = len(features)
            del features  # the map closes only when nothing looks into it
        return diagonal.to("cpu"), n_items

    with tempfile.TemporaryFile() as file:
        targets = _written(file, batches, weight.dtype)
        diagonal, n_items = distributed.broadcast_from_rank_zero(formed)
    return diagonal.to(weight.device), n_items


def _written(file: IO[bytes], batches: Iterable[tuple[Tensor, Any]], dtype: torch.dtype) -> Tensor:
    """Put the features of all processes into the first one's file, and give their targets."""
    targets = []
    for features, batch_targets in distributed.batches_of_all(batches):
        targets.append(checked_targets(features, batch_targets))
        if distributed.is_rank_zero():
            file.write(features.to(device="cpu", dtype=dtype).numpy().tobytes())
    if not targets:
        raise ValueError("at least 2 items are needed to form a pair, got 0")
    file.flush()
    return torch.cat(targets)


def all_pairs(
    features: Float[Tensor, "N P"],
    targets: Tensor,
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    curvature: Curvature,
    *,
    progress: bool,
) -> Diagonal:
    """Form the curvature over every pair of features held at once: (N,) labels or (N, X) positions as targets."""
    targets = checked_targets(features, targets).to(weight.device)
    if not isinstance(curvature, ContrastiveCurvature) or curvature.fix == "full":
        return diagonal_ggn(features, weight, bias, relation.pairs(targets), curvature)
    options: dict[str, Any] = {"progress": progress}
    if relation.positive_within is None:
        check_labels(targets)
        return diagonal_ggn_dataset(features, weight, bias, curvature, labels=targets, **options)
    near = relation.neighbours(targets)
    diagonal = diagonal_ggn_dataset(features, weight, bias, curvature, neighbours=near, **options)
    if 0 in (diagonal.counts or ()):
        raise ValueError(f"all {len(features)} places are near each other: there is no negative pair")
    return diagonal


def checked_targets(features: Tensor, targets: Any) -> Tensor:
    """Give targets as a tensor on the device of the features.

    Raises:
        ValueError: where they are missing, or not as many as there are items.
    """
    if targets is None:
        raise ValueError("a posterior needs batches of inputs with targets: (inputs, labels)")
    targets = as_targets(targets).to(features.device)
    if len(targets) != len(features):
        raise ValueError(f"there are {len(features)} items and {len(targets)} labels in a batch")
    return targets
