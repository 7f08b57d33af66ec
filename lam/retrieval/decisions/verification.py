"""Whether two images match: a threshold at a promised false-match rate, and a probability.

The first hit of a search has the best of many cosines, but a pair has only one cosine. So a gallery's accept threshold
would be far too strict for pairs.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.probability import Correctness, random_order
from lam.retrieval.metrics.searches import Matches
from lam.utils.blocks import row_blocks
from lam.utils.checks import check_length

_BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class DrawnPairs:
    """R pairs of a query and a gallery item, as positions; `same` says whether the two match."""

    queries: Int64[Tensor, " R"]
    items: Int64[Tensor, " R"]
    same: Bool[Tensor, " R"]


def draw_pairs(matches: Matches, n_queries: int, n_items: int, *, generator: torch.Generator) -> DrawnPairs:
    """For each query, a random pair with a matching item and one with a non-matching item, if they exist.

    More pairs of a query would not be independent.
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
    return DrawnPairs(*(torch.cat(column) for column in zip(*pairs, strict=True)))


@dataclass(frozen=True, eq=False)
class Verifier:
    """A match threshold and probability for pairs of images, learnt from held-out pairs.

    Attributes:
        impostors: cosines of pairs that do not match.
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
        """Learn from the cosines of R pairs, the κ of both images (`kappa`, `other`), and whether the images match."""
        check_length("same", same, "the pairs", len(cosine))
        n_same, n_other = int(same.sum()), int((~same).sum())
        if min(n_same, n_other) == 0:
            raise ValueError(f"verification needs pairs that match and pairs that do not, got {n_same} and {n_other}")
        order = random_order(len(same)).to(same.device)  # else only the first classes would be used
        each = min(n_same, n_other)
        balanced = torch.cat([order[kind[order]][:each] for kind in (same, ~same)]).sort().values
        evidence = _evidence(cosine[balanced], kappa[balanced], other[balanced])
        return cls(ConformalScores.of(cosine[~same]), Correctness.fit(evidence, same[balanced]))

    def probability(
        self, cosine: Float[Tensor, " R"], kappa: Float[Tensor, " R"], other: Float[Tensor, " R"]
    ) -> Float[Tensor, " R"]:
        """(R,) P(a pair matches), if half of all pairs match; arguments as in `of`."""
        return self.sameness(_evidence(cosine, kappa, other))


def _evidence(cosine: Tensor, kappa: Tensor, other: Tensor) -> dict[str, Tensor]:
    """Minus the cosine, minus the smaller κ and minus the greater κ; higher means more doubt."""
    return {"cosine": -cosine, "kappa": -torch.minimum(kappa, other), "other_kappa": -torch.maximum(kappa, other)}
