"""Whether an item is of a class that the gallery holds, told by the gallery itself: no class has to be set aside.

Items that are the only one of their class stand in for strangers, as each was one when it came. For promises by classes
that were set aside see `lam.retrieval.decisions.conformal`.

The one assumption is that the gallery and the new item are exchangeable: the gallery is a random sample of what comes
in, in an order that tells nothing. A gallery that somebody composed is no such sample. Four photographs of each of
thirty people, for example, have no class of one item, whatever the share of strangers: nothing here holds for them. A
network that was trained on the gallery's items brings them nearer to each other than to new ones, which breaks the
assumption too.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from lam.utils.checks import check_choice, check_length, check_no_nan

Among = Literal["such", "all"]


@dataclass(frozen=True, eq=False)
class UnseenClasses:
    """p-values for a new item's class being new and for its being in the gallery, learnt from N gallery items.

    Exactly one of the two hypotheses is the case. At a level α, p ≤ α for "new" lets one say "of a class in the
    gallery", and p ≤ α for "in the gallery" lets one say "of no class in the gallery". With `among="such"` each is said
    wrongly of at most a share α of the items that it is false of, so that at most a share α of all items gets a false
    statement. With `among="all"` each is said wrongly of at most a share α of all items, a weaker promise that allows
    more to be said of the rarer kind.

    Shares are means over galleries and new items; one gallery may bring more or less. They hold for any N and any sizes
    of classes. The fewer classes of one item there are, the less can be said: p of "new" is never below 1/(M + 1) with
    "such", for M of them, nor below 1/(N + 1) with "all".

    Source: Xie, Zhou, Liang, Favaro and Sesia (2025), arXiv 2510.13037, for p-values of how often a label was seen and
        for `among="all"`; Good (1953). `among="such"` and the p-value of all classes in the gallery at once follow from
        the same exchangeability: given the N + 1 items, whichever came last is equally likely to be any of them, and
        any of those of its kind.

    Attributes:
        labels: (N,) the class of each gallery item.
        left_out: (N,) how near each item is to the nearest other gallery item, such as their cosine; higher is nearer.

    Raises:
        ValueError: for no item, NaN, or another length.

    Example:
        >>> gallery = UnseenClasses(torch.tensor([0, 0, 0, 1, 2, 3]), torch.tensor([0.8, 0.9, 0.9, 0.3, 0.4, 0.2]))
        >>> gallery.share_of_new  # three of six items are the only one of their class
        0.5714...
        >>> scores, nearest = torch.tensor([0.95, 0.1]), torch.tensor([1, 4])
        >>> gallery.p_new(scores, nearest).tolist(), gallery.p_in_gallery(scores).tolist()
        ([0.25, 1.0], [1.0, 0.25])
    """

    labels: Int64[Tensor, " N"]
    left_out: Float[Tensor, "..."]

    def __post_init__(self) -> None:
        if len(self.labels) == 0:
            raise ValueError("the gallery must hold at least one item, got none")
        check_length("left_out", self.left_out, "the gallery items", len(self.labels))
        check_no_nan("left_out", self.left_out)

    @cached_property
    def is_single(self) -> Bool[Tensor, " N"]:
        """(N,) whether an item is the only one of its class."""
        _, position, counts = self.labels.unique(return_inverse=True, return_counts=True)
        return counts[position] == 1

    @property
    def share_of_new(self) -> float:
        """(M + 1)/(N + 1) for M classes of one item: at least the share of new items that are of a new class.

        The chance that the next item is of a new class is at most its mean over galleries. It is the p-value of "new"
        that looks at no score: `good_turing`.
        """
        return good_turing(self.labels)

    def p_new(
        self, scores: Float[Tensor, " Q"], nearest: Int[Tensor, "..."], *, among: Among = "such"
    ) -> Float[Tensor, " Q"]:
        """p-values of "this item is of a new class": small means that its class is in the gallery.

        p = (1 + A)/(M + 1) with A the number of the M single items that are as near to another item as the new one is
        to the gallery, the new one counted as another item: those with a `left_out` of at least the score, and the
        nearest item itself where it is single. With `among="all"` the denominator is N + 1.

        Promised, if gallery and item are exchangeable: P(p ≤ α | its class is new) ≤ α with "such", and P(its class is
        new and p ≤ α) ≤ α with "all", for every α. A score other than nearness to the nearest item keeps this where a
        new item can raise no `left_out` but the nearest item's, such as a score of each item by itself.

        Args:
            scores: (Q,) how near each new item is to the nearest gallery item, as `left_out` measures it.
            nearest: (Q,) the position of that item in the gallery, from 0.
            among: what α is a share of: the items of new classes, or all items.

        Returns:
            (Q,) values in (0, 1], float64, on the device of the scores.

        Raises:
            ValueError: for NaN, another length, a position outside the gallery, or another word.
        """
        check_choice("among", among, get_args(Among))
        check_no_nan("scores", scores)
        check_length("nearest", nearest, "the scores", len(scores))
        outside = (nearest < 0) | (nearest >= len(self.labels))
        if outside.any():
            given = int(nearest[outside][0])
            raise ValueError(f"nearest must be positions from 0 to {len(self.labels) - 1} in the gallery, got {given}")
        nearest, values = nearest.cpu().long(), scores.detach().cpu().double()
        single = self._single
        as_near = len(single) - torch.searchsorted(single, values)
        left_out = self.left_out.detach().cpu().double()[nearest]
        as_near = as_near + (self.is_single.cpu()[nearest] & (left_out < values))
        return ((1 + as_near).double() / (1 + (len(single) if among == "such" else len(self.labels)))).to(scores.device)

    def p_in_gallery(self, scores: Float[Tensor, " Q"], *, among: Among = "such") -> Float[Tensor, " Q"]:
        """p-values of "this item is of a class in the gallery": small means that it is of no class there.

        p = (1 + A + s)/(R + 1 + s) with A the number of the R items of classes of two or more that are as far from any
        other item as the new one is from the gallery. The new item may be the second of a class of one, whose first
        then counts too: s = 1 where a single item is as far, otherwise 0. With `among="all"` the denominator is N + 1.

        Promised, if gallery and item are exchangeable: P(p ≤ α | its class is in the gallery) ≤ α with "such", and
        P(its class is in the gallery and p ≤ α) ≤ α with "all", for every α.

        Args:
            scores: (Q,) how near each new item is to the nearest gallery item, as `left_out` measures it.
            among: what α is a share of: the items of classes in the gallery, or all items.

        Returns:
            (Q,) values in (0, 1], float64, on the device of the scores.

        Raises:
            ValueError: for NaN, or another word.
        """
        check_choice("among", among, get_args(Among))
        check_no_nan("scores", scores)
        values = scores.detach().cpu().double()
        several, single = self._several, self._single
        as_far = torch.searchsorted(several, values, right=True)
        second = (torch.searchsorted(single, values, right=True) > 0).long()
        count = len(several) + second if among == "such" else len(self.labels)
        return ((1 + as_far + second).double() / (1 + count)).to(scores.device)

    @cached_property
    def _single(self) -> Float[Tensor, "..."]:
        return self._rising(self.is_single)

    @cached_property
    def _several(self) -> Float[Tensor, "..."]:
        return self._rising(~self.is_single)

    def _rising(self, which: Tensor) -> Tensor:
        return self.left_out[which].detach().cpu().double().sort().values


def good_turing(labels: Int64[Tensor, " N"], *, seen: int = 0) -> float:
    """p-value of "the next item is of a class seen exactly so often", which looks at no score.

    p = (k + 1)(M + 1)/(N + 1) for M classes of k + 1 items among N. If the items and the next one are exchangeable,
    P(its class was seen k times and p ≤ α) ≤ α, and P(its class was seen k times) is at most the mean of p. It is Good
    and Turing's estimate of that chance, (k + 1)M/N, with the next item counted.

    Source: Xie, Zhou, Liang, Favaro and Sesia (2025), arXiv 2510.13037, the deterministic p-value; Good (1953).

    Args:
        labels: (N,) the class of each item.
        seen: k, how often; 0 for a new class.

    Returns:
        A value in (0, 1].

    Raises:
        ValueError: for a negative number of times.

    Example:
        >>> good_turing(torch.tensor([0, 0, 1, 2, 2, 3, 3])), good_turing(torch.tensor([0, 0, 1, 2, 2, 3, 3]), seen=1)
        (0.25, 1.0)
    """
    if seen < 0:
        raise ValueError(f"seen must be at least 0, got {seen}")
    _, counts = labels.unique(return_counts=True)
    classes = int((counts == seen + 1).sum())
    return min((seen + 1) * (classes + 1) / (len(labels) + 1), 1.0)
