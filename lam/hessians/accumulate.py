"""From batches of features and targets to the curvature of the last layer.

The two ways to go through a data set: batch by batch, where pairs never cross batches, and all at once. What makes two
items a pair is told by `lam.pairs.Relation`; the formulas are in `lam.hessians.batch` and `lam.hessians.dataset`.
"""

import mmap
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import IO, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians import Diagonal, contrastive_ggn, contrastive_ggn_dataset
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.pairs import as_targets, check_labels
from lam.pairs.relation import Relation
from lam.utils import distributed
from lam.utils.autocast import without_autocast


def check_pairs(curvature: Diagonal, n_items: int) -> None:
    """Refuse a curvature that both kinds of pairs have not gone into.

    Raises:
        ValueError: saying which kind there is none of.
    """
    if n_items < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {n_items}")
    for kind, count in (("positive", curvature.n_positives), ("negative", curvature.n_negatives)):
        if count == 0:
            raise ValueError(
                f"no batch of the {n_items} items holds a {kind} pair: shuffle them, take larger batches, or form the "
                'pairs over the whole data set with pairs="dataset"'
            )


def curvature_in_batches(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[Diagonal, int]:
    """Sum the curvature over batches of (features, targets).

    Args:
        batches: (N, P) features with (N,) labels or (N, X) positions each.
        weight: (D, P) of the head.
        bias: (D,) of the head, or None.
        relation: what makes a pair, and which of the pairs of a batch count, chosen by the head's output.
        seed: of what the mining draws, the same in every batch: what a batch adds does not depend on those before it.
        options: of `contrastive_ggn`.

    Returns:
        The sums, in float64 even of a single batch, and the number of items.

    Raises:
        ValueError: for no batch, one without targets, or one with another number of targets than items.
    """
    total: Diagonal | None = None
    n_items = 0
    for features, targets in batches:
        targets = checked_targets(features, targets)
        pairs = relation.pairs(targets)
        if relation.mining != ALL_PAIRS:
            with without_autocast():
                embeddings = F.normalize(F.linear(features, weight, bias))
            generator = torch.Generator().manual_seed(seed)
            margin = relation.triplet_margin or options["margin"]
            pairs = relation.mining.choose(embeddings, pairs, targets, margin=margin, generator=generator)
        part = contrastive_ggn(features, weight, bias, pairs, **options)
        total = part if total is None else total + part
        n_items += len(features)
    if total is None:
        raise ValueError("there is no batch of items")
    return replace(total, positive=total.positive.double(), negative=total.negative.double()), n_items


def curvature_of_processes(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    *,
    seed: int = 0,
    **options: Any,
) -> tuple[Diagonal, int]:
    """Sum the curvature over the batches of all processes, each of which gives its own, or none, in float64.

    Args, Returns, Raises: as `curvature_in_batches`, which this is in one process; `options` are complete.
    """
    if distributed.world_size() == 1:
        return curvature_in_batches(batches, weight, bias, relation, seed=seed, **options)
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        nothing = weight.new_zeros(len(weight), weight.shape[1] + (bias is not None), dtype=torch.float64)
        own, n_items = Diagonal(nothing, nothing, 0, 0, bias is not None, **options), 0
    else:
        own, n_items = curvature_in_batches(chain([first], batches), weight, bias, relation, seed=seed, **options)
    sums = distributed.all_reduce(torch.stack([own.positive, own.negative]))
    counts = distributed.all_reduce(torch.tensor([own.n_positives, own.n_negatives, n_items], device=weight.device))
    n_positives, n_negatives, n_items = counts.tolist()
    total = replace(own, positive=sums[0], negative=sums[1], n_positives=n_positives, n_negatives=n_negatives)
    return total, n_items


def curvature_of_dataset(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    *,
    progress: bool,
    **options: Any,
) -> tuple[Diagonal, int]:
    """Form the curvature over every pair of all batches; features are kept in a temporary file meanwhile.

    Of several processes each gives its own batches; the first one keeps the features of all and forms the curvature.

    Args, Returns, Raises: as `curvature_in_batches`.
    """
    options |= {"progress": progress}
    with tempfile.TemporaryFile() as file:
        targets = _written(file, batches, weight.dtype)
        formed = distributed.broadcast_from_rank_zero(
            lambda: _of_written(file, targets, weight, bias, relation, **options)
        )
    return formed[0].to(weight.device), formed[1]


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


def _of_written(
    file: IO[bytes], targets: Tensor, weight: Tensor, bias: Tensor | None, relation: Relation, **options: Any
) -> tuple[Diagonal, int]:
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        features = torch.frombuffer(mapped, dtype=weight.dtype).view(-1, weight.shape[1])
        diagonal = all_pairs(features, targets, weight, bias, relation, **options)
        n_items = len(features)
        del features  # the map closes only when nothing looks into it
    return diagonal.to("cpu"), n_items


def all_pairs(
    features: Float[Tensor, "N P"],
    targets: Tensor,
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    *,
    progress: bool,
    **options: Any,
) -> Diagonal:
    """Form the curvature over every pair of features held at once: (N,) labels or (N, X) positions as targets."""
    targets = checked_targets(features, targets).to(weight.device)
    if options["fix"] == "full":
        return contrastive_ggn(features, weight, bias, relation.pairs(targets), **options)
    if relation.positive_within is not None:
        near = relation.neighbours(targets)
        diagonal = contrastive_ggn_dataset(features, weight, bias, neighbours=near, progress=progress, **options)
        if diagonal.n_negatives == 0:
            raise ValueError(f"all {len(features)} places are near each other: there is no negative pair")
        return diagonal
    check_labels(targets)
    return contrastive_ggn_dataset(features, weight, bias, labels=targets, progress=progress, **options)


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
