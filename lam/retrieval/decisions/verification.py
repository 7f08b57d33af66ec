"""Decisions whether two images match, and intervals for the cosine between a hit and an image of the query's class.

The first hit of a search has the best of many cosines, but a pair has only one cosine. So a gallery's accept threshold
would be far too strict for pairs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores, needed
from lam.retrieval.decisions.probability import Correctness, random_order
from lam.retrieval.metrics.open_set import Matches
from lam.utils.blocks import row_blocks
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings

_BLOCK_ELEMENTS = 2**22
LEVEL = 0.9  # promised share of intervals that hold the cosine
_HITS = 10  # number of first hits used for each query; answers seldom show more
_PAIRS = 2000  # greatest number of pairs


def draw_pairs(
    matches: Matches, n_queries: int, n_items: int, *, generator: torch.Generator
) -> tuple[Int64[Tensor, " R"], Int64[Tensor, " R"], Bool[Tensor, " R"]]:
    """For each query, a random pair with a matching item and one with a non-matching item, if they exist.

    More pairs of a query would not be independent. Returns the positions of query and item, and whether they match.
    """
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in row_blocks(n_queries, n_items, elements=_BLOCK_ELEMENTS):
        rows = torch.arange(block.start, block.stop)
        matching = matches(rows).cpu()
        for same in (True, False):
            choices = matching == same
            has_choice = choices.any(1)
            order = torch.rand(choices.shape, generator=generator).masked_fill(~choices, -1.0)
            items = order.argmax(1)[has_choice]
            pairs.append((rows[has_choice], items, torch.full((len(items),), same)))
    queries, items, same = (torch.cat(column) for column in zip(*pairs, strict=True))
    return queries, items, same


@dataclass(frozen=True, eq=False)
class Verifier:
    """A match threshold and probability for pairs of images, learned from held-out pairs.

    Attributes:
        impostors: cosines of pairs that do not match: of known items, or of strangers with gallery items.
        sameness: P(a pair matches) from cosine and κ, if half of all pairs match.
    """

    impostors: ConformalScores
    sameness: Correctness

    @classmethod
    def of(
        cls,
        cosine: Float[Tensor, " R"],
        kappa: Float[Tensor, " R"],
        other: Float[Tensor, " R"],
        same: Bool[Tensor, " R"],
    ) -> "Verifier":
        """Learn from R pairs of both kinds: cosines, κ of both images (`kappa`, `other`), and whether they match."""
        order = random_order(len(same)).to(same.device)  # else only the first classes would be used
        each = min(int(same.sum()), int((~same).sum()))
        balanced = torch.cat([order[kind[order]][:each] for kind in (same, ~same)]).sort().values
        evidence = _evidence(cosine[balanced], kappa[balanced], other[balanced])
        return cls(ConformalScores.of(cosine[~same]), Correctness.fit(evidence, same[balanced]))

    def probability(
        self, cosine: Float[Tensor, " R"], kappa: Float[Tensor, " R"], other: Float[Tensor, " R"]
    ) -> Float[Tensor, " R"]:
        """(R,) P(a pair matches), if half of all pairs match. Arguments as in `of`; the result is on their device."""
        return self.sameness(_evidence(cosine, kappa, other)).to(cosine.device)


def _evidence(cosine: Tensor, kappa: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Minus the cosine, minus the smaller κ and minus the greater κ; higher means more doubt."""
    cosine, kappa, other = (values.detach().cpu() for values in (cosine, kappa, other))
    return {"cosine": -cosine, "kappa": -torch.minimum(kappa, other), "other_kappa": -torch.maximum(kappa, other)}


@dataclass(frozen=True)
class CosineIntervals:
    """Intervals [c + below κ^(-1/4), c + above κ^(-1/4)], for the cosine c of a hit and the κ of its query.

    The cosine between the hit and another image of the query's class lies in the interval with probability `LEVEL`,
    averaged over queries of known classes and their first ten hits. A small κ widens the interval: with one width for
    all queries, the cosines of uncertain queries would too often lie outside.

    Attributes:
        below: offset of the lower end for κ = 1.
        above: offset of the upper end for κ = 1.
        pairs: number of calibration pairs.
    """

    below: float
    above: float
    pairs: int

    @classmethod
    def fit(
        cls, queries: Embeddings, labels: Int64[Tensor, " Q"], gallery: Float[Tensor, "G D"], hits: Int64[Tensor, "Q K"]
    ) -> "CosineIntervals | None":
        """Intervals by split conformal prediction, from queries with a match; None for too few pairs.

        The exchangeable units are disjoint pairs of queries of one class. A hit of one query has the cosine c with this
        query, and c' with the other query of the pair. Conformal quantiles of (c' − c) · κ^(1/4) are `below` and
        `above`; see `ConformalScores.threshold`.
        """
        first, second = (rows[:_PAIRS] for rows in pairs_of(labels.cpu()))
        rate = (1 - LEVEL) / 2
        if len(first) < needed(rate):
            return None
        asking, other = torch.cat([first, second]), torch.cat([second, first])
        mean, found = queries.mean.detach().cpu(), gallery.detach().cpu()[hits.cpu()[asking, :_HITS]].double()
        own, another = (torch.einsum("qkd,qd->qk", found, mean[rows].double()) for rows in (asking, other))
        differences = (another - own) / _width(queries.kappa.cpu()[asking])[:, None]
        unit = torch.arange(len(first)).repeat(2)[:, None].expand(differences.shape).flatten()
        below, above = (ConformalScores.of(sign * differences.flatten(), unit).threshold(rate) for sign in (-1, 1))
        return cls(-below, above, len(first))

    def __call__(self, cosines: Float[Tensor, "Q K"], kappa: Float[Tensor, " Q"]) -> Float[Tensor, "Q K 2"]:
        """(Q, K, 2) lower and upper ends, float64, for cosines of hits and κ of the queries."""
        width = _width(kappa)[:, None]
        ends = [cosines.double() + offset * width for offset in (self.below, self.above)]
        return torch.stack(ends, 2).clamp(-1, 1)


def _width(kappa: Tensor) -> Tensor:
    return kappa.detach().double().clamp(*KAPPA_RANGE).pow(-0.25)


def pairs_of(labels: Int64[Tensor, " Q"]) -> tuple[Int64[Tensor, " P"], Int64[Tensor, " P"]]:
    """Rows of disjoint pairs with equal labels, drawn at random, because adjacent images may be more alike."""
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = shuffled[labels[shuffled].argsort(stable=True)]
    rising = labels[order]
    place = torch.arange(len(labels)) - torch.searchsorted(rising, rising)  # index among the rows of a label
    first = ((place[:-1] % 2 == 0) & (rising[:-1] == rising[1:])).nonzero().flatten()
    first = first[torch.randperm(len(first), generator=torch.Generator().manual_seed(1))]
    return order[first], order[first + 1]
