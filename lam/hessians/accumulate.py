"""Sums of a loss's curvature over batches, for the last layer; see `lam.posteriors.layers` for several layers."""

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lam.hessians.last_layer import ggn_of_batch, ggn_of_dataset
from lam.hessians.structures.base import Structure
from lam.hessians.structures.last_layer import Ekfac, EkfacBasis
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.pairs import Pairs, check_labels, targets_of
from lam.pairs.relation import Relation
from lam.utils import distributed
from lam.utils.autocast import without_autocast

_NO_PAIR = "at least 2 items are needed to form a pair, got {}"


@dataclass(frozen=True, kw_only=True)
class Accumulator(ABC):
    """Sums up the curvature of a loss, batch by batch.

    Attributes:
        empty: the structure with all sums zero, and with the curvature of the loss.
        relation: definition of pairs, and the choice of pairs in a batch.
        seed: seed of random choices of pairs, the same in every batch, so the order of batches does not matter.
    """

    empty: Any
    relation: Relation
    seed: int = 0

    @abstractmethod
    def add(self, total: Any, inputs: Any, targets: Any, offset: int) -> Any:
        """The sum after one more batch of (N, ...) inputs, with (N,) labels or (N, X) positions as targets.

        `offset` is the index of the batch's first item, for errors.
        """

    def accumulate(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, int]:
        """Float64 sum over the batches (inputs, targets) of this process, and their number of items."""
        total, n_items = self.empty, 0
        for inputs, targets in batches:
            total = self.add(total, inputs, targets, n_items)
            n_items += len(targets)
        return total, n_items

    def fit(self, batches: Iterable[tuple[Any, Any]]) -> tuple[Any, int]:
        """Sum over the batches of all processes, and the number of items.

        Raises:
            ValueError: as `add`; also for fewer than 2 items, a zero curvature, or a term without an item or pair.
        """
        return _total_of(*self.accumulate(batches))

    def pairs(self, targets: Tensor, outputs: Callable[[], Float[Tensor, "N D"]]) -> Pairs:
        """The pairs chosen in a batch. `outputs` computes the batch's outputs; it is called only to mine pairs."""
        pairs = self.relation.pairs(targets)
        if self.relation.mining == ALL_PAIRS:
            return pairs
        with without_autocast():
            embeddings = F.normalize(outputs())
        generator = torch.Generator().manual_seed(self.seed)
        margin = self.relation.triplet_margin
        return self.relation.mining.choose(embeddings, pairs, targets, margin=margin, generator=generator)


@dataclass(frozen=True, kw_only=True)
class LastLayerAccumulator(Accumulator):
    """Sums up the curvature with respect to the weights of a linear last layer, whose inputs are features (N, P).

    Attributes:
        weight: (D, P) weight of the layer.
        bias: (D,) bias of the layer, or None.
        progress: show a progress bar on standard error, for pairs over a whole data set.
    """

    weight: Float[Tensor, "D P"]
    bias: Float[Tensor, " D"] | None
    progress: bool = False

    def add(self, total: Any, inputs: Float[Tensor, "N P"], targets: Any, offset: int) -> Any:
        pairs = self.pairs(targets_of(inputs, targets), lambda: F.linear(inputs, self.weight, self.bias))
        return total + ggn_of_batch(self.empty, inputs, self.weight, self.bias, pairs)

    def fit(self, batches: Iterable[tuple[Tensor, Any]]) -> tuple[Any, int]:
        """Sum over the pairs within batches, or over all pairs of the data set; see `Accumulator.fit`.

        For the second pass of an `Ekfac`, each process writes its features to a temporary file. For pairs over the data
        set, the first process writes the features of all processes to its file.
        """
        with tempfile.TemporaryFile() as file:
            if self.relation.in_batches:
                source = _replayed(batches, file) if isinstance(self.empty, EkfacBasis) else lambda: batches
                return self._in_passes(lambda start: _total_of(*start.accumulate(source())))
            targets = _write_features(file, batches, self.weight.dtype)

            def compute() -> tuple[Any, int]:
                flat = torch.from_numpy(np.memmap(file, np.uint8, "c")).view(self.weight.dtype)
                features = flat.view(-1, self.weight.shape[1])
                return self.over_pairs(features, targets).to("cpu"), len(features)

            total, n_items = distributed.broadcast_from_rank_zero(compute)
        return total.to(self.weight.device), n_items

    def over_pairs(self, features: Float[Tensor, "N P"], targets: Any) -> Any:
        """Sum over every pair of a data set with features in memory; targets are (N,) labels or (N, X) positions.

        Raises:
            ValueError: for data without positive or without negative pairs, or a curvature of zero.
        """
        targets = targets_of(features, targets).to(self.weight.device)
        layer, is_places = (features, self.weight, self.bias), self.relation.positive_within is not None
        if not is_places:
            check_labels(targets)
        if not self.empty.curvature.in_blocks:
            pairs = self.relation.pairs(targets)
            total, _ = self._in_passes(lambda start: (ggn_of_batch(start.empty, *layer, pairs), 0))
        else:
            related = self.relation.neighbours(targets) if is_places else targets
            total, _ = self._in_passes(
                lambda start: (ggn_of_dataset(start.empty, *layer, related, progress=self.progress), 0)
            )
        if missing := _missing_terms(total):
            reason = (
                f"all {len(features)} places are near each other: "
                if is_places and missing == ["negative pair"]
                else ""
            )
            raise ValueError(f"{reason}there is no {missing[0]} among {len(features)} items")
        if not total.sums.any():
            raise ValueError(f"the curvature of {len(features)} items is zero: raise the temperature of the loss")
        return total

    def _in_passes(self, passed: Callable[["LastLayerAccumulator"], tuple[Any, int]]) -> tuple[Any, int]:
        """The result of one pass; after an `EkfacBasis`, the result of a second pass in this basis."""
        total, n_items = passed(self)
        if not isinstance(total, EkfacBasis):
            return total, n_items
        total.check_finite()
        return passed(replace(self, empty=Ekfac.in_basis_of(total)))


def _total_of(share: Any, n_share: int) -> tuple[Any, int]:
    n_items = int(distributed.all_reduce(torch.tensor(n_share, device=share.sums.device)))
    total = share.all_reduce()
    if n_items < 2:
        raise ValueError(_NO_PAIR.format(n_items))
    missing = _missing_terms(total)
    if missing or not total.sums.any():
        problem = f"holds a {missing[0]}" if missing else "has a curvature, which takes matches and non-matches"
        in_blocks = isinstance(total, Structure) and total.curvature.in_blocks
        or_else = ', or form the pairs over the whole data set with pairs="dataset"' if in_blocks else ""
        reason = "" if missing else "; with too small a temperature the curvature is zero"
        if "negative pair" in missing[:1]:
            reason = "; items of a single class have no negative pair"
        raise ValueError(
            f"no batch of the {n_items} items {problem}: shuffle them, or take larger batches{or_else}{reason}"
        )
    return total, n_items


def _missing_terms(total: Any) -> list[str]:
    return [name for name, count in zip(total.curvature.terms, total.counts, strict=True) if count == 0]


def _replayed(batches: Iterable[tuple[Tensor, Any]], file: IO[bytes]) -> Callable[[], Iterator[tuple[Tensor, Any]]]:
    """Write the features of batches to a file, and return a function that reads the batches again."""
    rest: list[tuple[torch.device, Any]] = []
    for features, targets in batches:
        np.save(file, features.cpu().numpy())
        rest.append((features.device, targets))

    def replay() -> Iterator[tuple[Tensor, Any]]:
        file.seek(0)
        for device, targets in rest:
            yield torch.from_numpy(np.load(file)).to(device), targets

    return replay


def _write_features(file: IO[bytes], batches: Iterable[tuple[Tensor, Any]], dtype: torch.dtype) -> Tensor:
    """Write the features of all processes to the first process's file, and return the targets of all processes."""
    targets = []
    for features, batch_targets in distributed.batches_of_all(batches):
        targets.append(targets_of(features, batch_targets))
        if distributed.is_rank_zero():
            file.write(features.to(device="cpu", dtype=dtype).numpy().tobytes())
    if not targets:
        raise ValueError(_NO_PAIR.format(0))
    file.flush()
    return torch.cat(targets)
