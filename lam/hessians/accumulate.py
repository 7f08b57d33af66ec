"""From batches of features and targets to the curvature of the last layer.

The two ways to go through a data set: batch by batch, where pairs never cross batches, and all at once.
`lam.pairs.Relation` says what makes two items a pair; the formulas are in `batch` and `dataset`.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.hessians.batch import Sums, ggn_of_batch
from lam.hessians.dataset import ggn_of_dataset
from lam.hessians.losses import Curvature
from lam.hessians.structures import MAX_MEMORY, Ekfac, Kron, Structure
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.pairs import Pairs, as_targets, check_labels
from lam.pairs.relation import Relation
from lam.utils import distributed
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least


@dataclass(frozen=True)
class StructureOptions:
    """Which structure a curvature is summed up in.

    Attributes:
        structure: its class.
        max_memory: bytes that its sums may take.
        rank: of a `LowRank` alone: the most columns of its sketch; 256 by default.

    Raises:
        ValueError: for options outside their range, or a rank of another structure.
    """

    structure: type[Structure]
    max_memory: int = MAX_MEMORY
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.max_memory is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError("max_memory must be a number of bytes, got None")
        check_at_least("max_memory", self.max_memory, 1.0)
        if self.rank is not None:
            if self.structure.name != "low_rank":
                raise ValueError(f'rank is of structure="low_rank", got {self.rank} with "{self.structure.name}"')
            check_at_least("rank", self.rank, 1)

    def check(self, layer: nn.Linear, curvature: Curvature) -> None:
        """Refuse a layer by its shape, which is all that is looked at: for `max_memory` or cross terms."""
        weight = torch.empty(layer.out_features, layer.in_features, device="meta")
        self.empty(weight, curvature, has_bias=layer.bias is not None)

    def empty(self, weight: Float[Tensor, "D P"], curvature: Curvature, *, has_bias: bool) -> Any:
        """The structure of no batch: what a first pass over the data is summed up in."""
        if self.structure is Ekfac:  # refused now, not after the first pass
            T, D, F = len(curvature.terms), len(weight), weight.shape[1] + has_bias
            Ekfac.check(curvature, (D, F), Ekfac.n_bytes(T, D, F), self.max_memory)
        cls: Any = Kron if self.structure is Ekfac else self.structure
        rank = {} if self.rank is None else {"rank": self.rank}
        return cls.zeros(weight, curvature, has_bias=has_bias, max_memory=self.max_memory, **rank)

    def summed(self, empty: Structure, passed: Callable[[Any], tuple[Any, int]]) -> tuple[Any, int]:
        """The structure of all data, and the number of items; in two passes over them where it takes two.

        Args:
            empty: as `empty` gives it.
            passed: one pass, from the structure of no batch to that of all, and the number of items.
        """
        total, n_items = passed(empty)
        if self.structure is not Ekfac:
            return total, n_items
        total.check_finite()
        return passed(Ekfac.in_basis_of(total, max_memory=self.max_memory))


def total_of(share: Any, n_share: int) -> tuple[Any, int]:
    """The curvature of all processes and their number of items, from those of this one.

    Raises:
        ValueError: for a term that nothing was counted for, naming what no batch holds, and a curvature that is zero.
    """
    n_items = int(distributed.all_reduce(torch.tensor(n_share, device=share.sums.device)))
    total = share.all_reduce()
    if n_items < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {n_items}")
    missing = [name for name, count in zip(total.curvature.terms, total.counts, strict=True) if count == 0]
    if missing or not total.sums.any():
        what = f"holds a {missing[0]}" if missing else "has a curvature, of items that match and items that do not"
        in_blocks = isinstance(total, Structure) and total.curvature.in_blocks
        or_else = ', or form the pairs over the whole data set with pairs="dataset"' if in_blocks else ""
        whatever = {"negative pair": "; items of one class alone have none"}
        never = whatever.get(missing[0], "") if missing else "; by too small a temperature no batch has one"
        raise ValueError(
            f"no batch of the {n_items} items {what}: shuffle them, or take larger batches{or_else}{never}"
        )
    return total, n_items


def curvature_in_batches(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    empty: Sums,
    *,
    seed: int = 0,
) -> tuple[Sums, int]:
    """Curvature summed over batches of (features, targets).

    Args:
        batches: (N, P) features with (N,) labels or (N, X) positions each.
        weight: (D, P) of the head.
        bias: (D,) of the head, or None.
        relation: what makes a pair, and which of the pairs of a batch count, chosen by the head's output.
        empty: the structure of no batch, with the curvature of the loss.
        seed: of what the mining draws, the same in every batch: what a batch adds does not depend on those before it.

    Returns:
        The sums, in float64, and the number of items.

    Raises:
        ValueError: for a batch without targets, or with another number of targets than items.
    """
    total, n_items = empty, 0
    for features, targets in batches:
        pairs = pairs_of(relation, targets_of(features, targets), lambda f=features: F.linear(f, weight, bias), seed)
        total = total + ggn_of_batch(empty, features, weight, bias, pairs)
        n_items += len(features)
    return total, n_items


def pairs_of(relation: Relation, targets: Tensor, outputs: Callable[[], Tensor], seed: int) -> Pairs:
    """The pairs of a batch; where they are mined, by the directions of the outputs (N, D) that a call gives."""
    pairs = relation.pairs(targets)
    if relation.mining == ALL_PAIRS:
        return pairs
    with without_autocast():
        embeddings = F.normalize(outputs())
    generator = torch.Generator().manual_seed(seed)
    margin = relation.triplet_margin
    return relation.mining.choose(embeddings, pairs, targets, margin=margin, generator=generator)


def curvature_of_batches(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    empty: Structure,
    options: StructureOptions,
    *,
    seed: int = 0,
) -> tuple[Any, int]:
    """`curvature_in_batches` of all processes together; a second pass has its features from a temporary file.

    Args, Returns: as `curvature_in_batches`.

    Raises:
        ValueError: as `curvature_in_batches`, or for a term that no batch holds.
    """

    def passed(start: Structure) -> tuple[Any, int]:
        return total_of(*curvature_in_batches(source(), weight, bias, relation, start, seed=seed))

    with tempfile.TemporaryFile() as file:
        source = _replayed(batches, file) if options.structure is Ekfac else lambda: batches
        return options.summed(empty, passed)


def _replayed(batches: Iterable[tuple[Tensor, Any]], file: IO[bytes]) -> Callable[[], Iterator[tuple[Tensor, Any]]]:
    """Batches of features, written to a file, that can be gone through as often as is needed."""
    rest: list[tuple[torch.device, Any]] = []
    for features, targets in batches:
        np.save(file, features.cpu().numpy())
        rest.append((features.device, targets))

    def replay() -> Iterator[tuple[Tensor, Any]]:
        file.seek(0)
        for device, targets in rest:
            yield torch.from_numpy(np.load(file)).to(device), targets

    return replay


def curvature_of_dataset(
    batches: Iterable[tuple[Tensor, Any]],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    relation: Relation,
    empty: Structure,
    options: StructureOptions,
    *,
    progress: bool,
) -> tuple[Any, int]:
    """Curvature over every pair of all batches; features are kept in a temporary file meanwhile.

    Of several processes each gives its own batches; the first one keeps the features of all and forms the curvature.

    Args, Returns, Raises: as `curvature_in_batches`.
    """

    def compute() -> tuple[Any, int]:
        features = torch.from_numpy(np.memmap(file, np.uint8, "c")).view(weight.dtype).view(-1, weight.shape[1])
        arguments = features, targets, weight, bias, relation, empty, options
        return curvature_over_all_pairs(*arguments, progress=progress).to("cpu"), len(features)

    with tempfile.TemporaryFile() as file:
        targets = _write_features(file, batches, weight.dtype)
        total, n_items = distributed.broadcast_from_rank_zero(compute)
    return total.to(weight.device), n_items


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
    empty: Structure,
    options: StructureOptions,
    *,
    progress: bool,
) -> Any:
    """Curvature over every pair of features in memory, with (N,) labels or (N, X) positions as targets."""
    targets, curvature = targets_of(features, targets).to(weight.device), empty.curvature
    within: dict[str, Any] = {"progress": progress}
    if not curvature.in_blocks:
        pairs = relation.pairs(targets)
        return options.summed(empty, lambda start: (ggn_of_batch(start, features, weight, bias, pairs), 0))[0]
    if relation.positive_within is None:
        check_labels(targets)
        within["labels"] = targets
    else:
        within["neighbours"] = relation.neighbours(targets)
    total, _ = options.summed(empty, lambda start: (ggn_of_dataset(start, features, weight, bias, **within), 0))
    if 0 in total.counts and relation.positive_within is not None:
        raise ValueError(f"all {len(features)} places are near each other: there is no negative pair")
    return total


def targets_of(features: Tensor, targets: Any) -> Tensor:
    """Targets as a tensor on the device of the features.

    Raises:
        ValueError: where they are missing, or not as many as there are items.
    """
    if targets is None:
        raise ValueError("a posterior needs batches of inputs with targets: (inputs, labels)")
    targets = as_targets(targets).to(features.device)
    if len(targets) != len(features):
        raise ValueError(f"there are {len(features)} items and {len(targets)} labels")
    return targets
