"""From batches of features and targets to the curvature of the last layer.

The two ways to go through a data set: batch by batch, where pairs never cross batches, and all at once.
`lam.pairs.Relation` says what makes two items a pair; the formulas are in `batch` and `dataset`.
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
    """Refuse a curvature with a term that nothing was counted for.

    Raises:
        ValueError: naming what no batch holds.
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
    """Curvature summed over batches of (features, targets).

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
    total, n_items = Diagonal.zeros(weight, curvature, has_bias=bias is not None), 0
    for features, targets in batches:
        targets = targets_of(features, targets)
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
    """Curvature over every pair of all batches; features are kept in a temporary file meanwhile.

    Of several processes each gives its own batches; the first one keeps the features of all and forms the curvature.

    Args, Returns, Raises: as `curvature_in_batches`.
    """

    def compute() -> tuple[Diagonal, int]:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            features = torch.frombuffer(mapped, dtype=weight.dtype).view(-1, weight.shape[1])
            diagonal = curvature_over_all_pairs(features, targets, weight, bias, relation, curvature, progress=progress)
            n_items = len(features)
            del features  # the map closes only when nothing looks into it
        return diagonal.to("cpu"), n_items

    with tempfile.TemporaryFile() as file:
        targets = _write_features(file, batches, weight.dtype)
        diagonal, n_items = distributed.broadcast_from_rank_zero(compute)
    return diagonal.to(weight.device), n_items


def _write_features(file: IO[bytes], batches: Iterable[tuple[Tensor, Any]], dtype: torch.dtype) -> Tensor:
    """Write the features of all processes to the file of the first; returns their targets."""
    targets = []
    for features, batch_targets in distributed.batches_of_all(batches):
        targets.append(targets_of(features, batch_targets))
        if distributed.is_rank_zero():
            file.write(features.to(device="cpu", dtype=dtype).numpy().tobytes())
    if not targets:
        raise ValueError("at least 2 items are needed to form a pair, got 0")
    file.flush()
    return torch.cat(targets)


def curvature_over_all_pairs(
    features: Float[Tensor, "N P"],
    targets: Tensor,
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    curvature: Curvature,
    *,
    progress: bool,
) -> Diagonal:
    """Curvature over every pair of features in memory, with (N,) labels or (N, X) positions as targets."""
    targets = targets_of(features, targets).to(weight.device)
    if not isinstance(curvature, ContrastiveCurvature) or curvature.fix == "full":
        return diagonal_ggn(features, weight, bias, relation.pairs(targets), curvature)
    if relation.positive_within is None:
        check_labels(targets)
        return diagonal_ggn_dataset(features, weight, bias, curvature, labels=targets, progress=progress)
    neighbours = relation.neighbours(targets)
    diagonal = diagonal_ggn_dataset(features, weight, bias, curvature, neighbours=neighbours, progress=progress)
    if 0 in (diagonal.counts or ()):
        raise ValueError(f"all {len(features)} places are near each other: there is no negative pair")
    return diagonal


def targets_of(features: Tensor, targets: Any) -> Tensor:
    """Targets as a tensor on the device of the features.

    Raises:
        ValueError: where they are missing, or not as many as there are items.
    """
    if targets is None:
        raise ValueError("a posterior needs batches of inputs with targets: (inputs, labels)")
    targets = as_targets(targets).to(features.device)
    if len(targets) != len(features):
        raise ValueError(f"there are {len(features)} items and {len(targets)} labels in a batch")
    return targets
