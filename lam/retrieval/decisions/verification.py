"""Whether two images show the same: a threshold at a promised false-match rate, and a probability.

A pair is no search: its score is not the best of many, so that the accept threshold of a gallery would be far too
strict, and it has no second hit to be compared with.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.probability import Correctness, random_order
from lam.retrieval.metrics.searches import Matches
from lam.utils.checks import check_length

_BLOCK_ELEMENTS = 2**22


@dataclass(frozen=True)
class DrawnPairs:
    """R pairs of a query and an item of the gallery.

    Attributes:
        queries: (R,) rows of queries.
        items: (R,) rows of the gallery.
        same: (R,) whether they match.
    """

    queries: Int64[Tensor, " R"]
    items: Int64[Tensor, " R"]
    same: Bool[Tensor, " R"]


def draw_pairs(matches: Matches, n_queries: int, n_items: int, *, generator: torch.Generator) -> DrawnPairs:
    """Pairs of each query with an item that matches and with one that does not, where there are such, drawn at random.

    One pair of each kind a query, because pairs that share an image tell less than they are.

    Args:
        matches: which items of the gallery match the queries at given rows.
        n_queries: how many queries.
        n_items: how many items.
        generator: of the draw, on the CPU.
    """
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in torch.arange(n_queries).split(max(1, _BLOCK_ELEMENTS // max(1, n_items))):
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
        sameness: P(the two match) where half of all pairs do, from their cosine and their κ.
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
        """Learn from R pairs; of the kind that there is more of, as many as of the other make the probability.

        Args:
            cosine: (R,) of each pair.
            kappa: (R,) concentration of the one.
            other: (R,) concentration of the other.
            same: (R,) whether they match.

        Raises:
            ValueError: where there is no pair of either kind, or as `Correctness.fit`.
        """
        check_length("same", same, "the pairs", len(cosine))
        count = min(int(same.sum()), int((~same).sum()))
        if count == 0:
            raise ValueError(
                f"verification needs pairs that match and pairs that do not, got {int(same.sum())} and "
                f"{int((~same).sum())}"
            )
        order = random_order(len(same)).to(same.device)  # or those of the first classes alone would count
        balanced = torch.cat([order[kind[order]][:count] for kind in (same, ~same)]).sort().values
        evidence = _evidence(cosine[balanced], kappa[balanced], other[balanced])
        sameness = Correctness.fit(evidence, same[balanced])
        return cls(ConformalScores.of(cosine[~same]), sameness)

    def probability(
        self, cosine: Float[Tensor, " R"], kappa: Float[Tensor, " R"], other: Float[Tensor, " R"]
    ) -> Float[Tensor, " R"]:
        """P(the two match), where half of all pairs do; arguments as those of `of`."""
        return self.sameness(_evidence(cosine, kappa, other))


def _evidence(cosine: Tensor, kappa: Tensor, other: Tensor) -> dict[str, Tensor]:
    """The cosine, and κ of the less and of the more certain of the two, each the lower the less doubt there is."""
    return {"cosine": -cosine, "kappa": -torch.minimum(kappa, other), "other_kappa": -torch.maximum(kappa, other)}
