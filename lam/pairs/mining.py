"""`Mining`, the choice of pairs in a batch: all pairs, pairs in triplets of one kind, or pairs of a library's miner.

The weight of a pair is the number of chosen triplets that contain it, as in pytorch-metric-learning. n⁺ is the number
of positive pairs before the choice, times the mean weight of the chosen positive pairs, rounded. A curvature and the
loss `log_posterior` divide their sum over the chosen positive pairs by n⁺. The quotient is the weighted mean over the
chosen pairs, times their share of the positive pairs. n⁻ counts negative pairs in the same way. If `max_pairs` has an
effect, n⁺ and n⁻ are multiplied by the share of triplets or pairs that is drawn.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from lam.pairs.pairs import Pairs, check_label_vector
from lam.utils.checks import check_at_least

MinerName = Literal["all", "violating", "easy", "semihard", "hard"]
Miner = Callable[[Tensor, Tensor], Any]
"""A miner of pytorch-metric-learning: (embeddings, labels) to a tuple of 3 or 4 tensors of indices."""


@dataclass(frozen=True)
class Mining:
    """The choice of pairs in a batch.

    A triplet contains the pairs (anchor a, positive p) and (anchor a, negative n). With Euclidean distances d of unit
    embeddings, a triplet is

        easy       if          d_an > d_ap + margin
        violating  if          d_an ≤ d_ap + margin
        semihard   if   d_ap < d_an ≤ d_ap + margin
        hard       if          d_an ≤ d_ap

    `all` chooses every pair.

    Source: Schroff et al. (2015). Kinds and counts are as in `TripletMarginMiner` of pytorch-metric-learning. lam calls
    its kind "all" `violating`, and uses the loss's margin instead of 0.2. Warburg et al. (2023) also mine in this way,
    with at most `max_pairs` triplets for the curvature.

    Attributes:
        miner: `all`, `violating`, `easy`, `semihard` or `hard`, for labels and places; or a miner of
            pytorch-metric-learning, for labels.
        max_pairs: greatest number of triplets, drawn at random; None for no limit. For `all` and miners of
            pytorch-metric-learning, the limit is on unordered positive pairs, and the same on negative pairs.

    Raises:
        ValueError: for an unknown name, or a limit that is not an integer of at least 1.

    Example:
        >>> embeddings = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [0.0, 1.0]])
        >>> pairs, labels = Pairs.by_label(torch.tensor([0, 0, 1, 1])), torch.tensor([0, 0, 1, 1])
        >>> hard = Mining("hard").choose(embeddings, pairs, labels, margin=0.5, generator=torch.Generator())
        >>> hard.negative.nonzero().tolist()
        [[1, 2], [2, 1]]
    """

    miner: MinerName | Miner = "all"
    max_pairs: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.miner) and self.miner not in get_args(MinerName):
            names = ", ".join(get_args(MinerName))
            raise ValueError(f"miner must be one of {names}, or a miner of pytorch-metric-learning, got {self.miner!r}")
        check_at_least("max_pairs", self.max_pairs, 1)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as JSON."""
        return {"miner": _in_json(self.miner), "max_pairs": self.max_pairs}

    def choose(
        self,
        embeddings: Float[Tensor, "N D"],
        pairs: Pairs,
        targets: Tensor | None,
        *,
        margin: float | None,
        generator: torch.Generator,
    ) -> Pairs:
        """The chosen pairs of a batch, possibly empty. `all` without a limit returns `pairs`.

        Args:
            embeddings: (N, D) unit rows.
            pairs: pairs to choose from.
            targets: (N,) labels of the items; only a miner of pytorch-metric-learning reads them.
            margin: positive margin of the triplets; needed only if the miner chooses triplets.
            generator: generator on the CPU for `max_pairs`.

        Raises:
            ValueError: for pairs of another number of items, a margin that is not positive, or a miner of
                pytorch-metric-learning without labels.
        """
        pairs.check_size(len(embeddings))
        if margin is not None and not margin > 0:
            raise ValueError(f"margin must be positive, got {margin}")
        embeddings = embeddings.detach().to(torch.promote_types(embeddings.dtype, torch.float32))
        if callable(self.miner):
            pairs = _choose_by_miner(self.miner, embeddings, pairs, targets)
        elif self.miner != "all":
            if margin is None:
                raise ValueError(f"{self.miner} triplets need a margin, got None from the loss: give one")
            return _choose_triplets(self.miner, embeddings, pairs, margin, self.max_pairs, generator)
        return pairs if self.max_pairs is None else _draw_pairs(pairs, self.max_pairs, generator)


ALL_PAIRS = Mining()


def _choose_by_miner(miner: Miner, embeddings: Tensor, pairs: Pairs, targets: Tensor | None) -> Pairs:
    if targets is None or targets.ndim != 1:
        raise ValueError(
            "a miner of pytorch-metric-learning needs labels, got no labels: "
            f"choose by name, {', '.join(get_args(MinerName))}"
        )
    check_label_vector(targets)
    counts = {"n_positives": pairs.n_positives, "n_negatives": pairs.n_negatives}
    tuples = miner(embeddings, targets)
    return _count_by_weight(Pairs.from_tuples(tuples, pairs.size, **counts, labels=pairs.labels))


def _choose_triplets(
    kind: str, embeddings: Tensor, pairs: Pairs, margin: float, max_triplets: int | None, generator: torch.Generator
) -> Pairs:
    """The pairs in triplets of a kind, weighted by their number of triplets; at most `max_triplets` are drawn.

    Counting takes O(N² log N) and forms no triplets. For an anchor and a positive, the negatives of a kind have
    consecutive ranks of distance, `first` to `last` − 1. So cumulative sums count the triplets of each negative.
    """
    distance = torch.cdist(embeddings, embeddings, compute_mode="donot_use_mm_for_euclid_dist")
    finite = distance.isfinite()  # other pairs are in no triplet; the loss reports them
    positive, negative = (pairs.positive > 0) & finite, (pairs.negative > 0) & finite
    ranked, order = distance.masked_fill(~negative, torch.inf).sort(1)
    nearer = torch.searchsorted(ranked, distance, right=True)
    inside = torch.searchsorted(ranked, distance + margin, right=True)
    n_negatives = negative.sum(1, keepdim=True).expand_as(nearer)
    first, last = {
        "hard": (torch.zeros_like(nearer), nearer),
        "semihard": (nearer, inside),
        "violating": (torch.zeros_like(nearer), inside),
        "easy": (inside, n_negatives),
    }[kind]
    weight = positive.to(distance)
    steps = distance.new_zeros(pairs.size, pairs.size + 1)
    steps.scatter_add_(1, first, weight).scatter_add_(1, last, -weight)
    with_negative = torch.zeros_like(distance).scatter_(1, order, steps.cumsum(1)[:, :-1])
    counts = (last - first) * positive
    positive, negative = ((directed + directed.T) / 2 for directed in (counts * weight, with_negative))
    chosen, total = _count_by_weight(replace(pairs, positive=positive, negative=negative)), int(counts.sum())
    if max_triplets is None or total <= max_triplets:
        return chosen
    ends = counts.flatten().cumsum(0)
    places = _draw_distinct(total, max_triplets, generator).to(ends.device)
    of_pair = torch.searchsorted(ends, places, right=True)
    anchor, other = of_pair // pairs.size, of_pair % pairs.size
    rank = first[anchor, other] + places - (ends[of_pair] - counts[anchor, other])
    triplets = anchor, other, order[anchor, rank]
    return replace(
        Pairs.from_tuples(triplets, pairs.size, n_positives=2 * total, n_negatives=2 * total, labels=pairs.labels),
        n_positives=max(1, round(chosen.n_positives * max_triplets / total)),
        n_negatives=max(1, round(chosen.n_negatives * max_triplets / total)),
    )


def _draw_distinct(total: int, count: int, generator: torch.Generator) -> Tensor:
    """`count` distinct random integers below `total`; a permutation of all integers might not fit in memory."""
    drawn = torch.randint(total, (count,), generator=generator).unique()
    while len(drawn) < count:
        drawn = torch.cat([drawn, torch.randint(total, (count,), generator=generator)]).unique()
    return drawn[torch.randperm(len(drawn), generator=generator)[:count]]


def _count_by_weight(pairs: Pairs) -> Pairs:
    """The same pairs, with n⁺ and n⁻ multiplied by the mean weights of positive and negative pairs."""
    return replace(
        pairs,
        n_positives=_times_mean_weight(pairs.n_positives, pairs.positive),
        n_negatives=_times_mean_weight(pairs.n_negatives, pairs.negative),
    )


def _times_mean_weight(n: int, weights: Tensor) -> int:
    n_chosen = int(weights.count_nonzero())
    return max(1, round(n * float(weights.double().sum()) / n_chosen)) if n_chosen else n


def _draw_pairs(pairs: Pairs, max_pairs: int, generator: torch.Generator) -> Pairs:
    positive, n_positives = _draw_kind(pairs.positive, pairs.n_positives, max_pairs, generator)
    negative, n_negatives = _draw_kind(pairs.negative, pairs.n_negatives, max_pairs, generator)
    return Pairs(positive, negative, n_positives, n_negatives, pairs.labels)


def _draw_kind(weights: Tensor, n: int, max_pairs: int, generator: torch.Generator) -> tuple[Tensor, int]:
    candidates = weights.triu(1).nonzero()
    if len(candidates) <= max_pairs:
        return weights, n
    drawn = candidates[torch.randperm(len(candidates), generator=generator)[:max_pairs].to(candidates.device)]
    mask = torch.zeros_like(weights, dtype=torch.bool)
    mask[drawn[:, 0], drawn[:, 1]] = True
    return weights * (mask | mask.T), max(1, round(n * max_pairs / len(candidates)))


def _in_json(miner: object) -> Any:
    """A miner as JSON: its name, or its class and the attributes that share a name with a constructor argument."""
    if isinstance(miner, str):
        return miner
    if inspect.isroutine(miner):
        return miner.__qualname__
    parameters = {name for kind in type(miner).__mro__[:-1] for name in inspect.signature(kind.__init__).parameters}
    attributes = {name: getattr(miner, name) for name in sorted(parameters) if hasattr(miner, name)}
    options = {
        name: _in_json(value) if isinstance(value, nn.Module) else repr(value)
        for name, value in attributes.items()
        if isinstance(value, nn.Module | int | float | str | tuple | list | None)
    }
    return {"class": type(miner).__qualname__, **options}
