"""p-values of "the item's class is new" and "the item's class is in the gallery", learned without held-out classes.

An item that is the only one of its class stands in for a stranger, because it was a stranger when it arrived.

The one assumption is that the gallery and the new item are exchangeable: the gallery is a random sample of incoming
items. A hand-picked gallery violates the assumption: with four photographs of each of thirty people, no class has only
one item, whatever the share of strangers. Training on the gallery's items also violates the assumption, because
training moves these items nearer to each other than to new items.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor


@dataclass(frozen=True, eq=False)
class UnseenClasses:
    """p-values of "a new item's class is new" and of "its class is in the gallery", learned from N gallery items.

    Exactly one of the two hypotheses is true. If the p-value of one is at most a level α, the answer is the other one.
    At most a share α of all items gets a false answer, in the mean over galleries and new items, for any N and any
    sizes of classes. With M classes of one item, the p-value of "new" is at least 1/(M + 1).

    Source: Xie, Zhou, Liang, Favaro and Sesia (2025), arXiv 2510.13037; Good (1953). The p-value of "in the gallery",
        for all classes at once, follows from the same exchangeability: among the N + 1 items, all items that are alone
        in their class are equally likely to have arrived last; so are all other items.

    Attributes:
        labels: (N,) the class of each gallery item.
        left_out: (N,) nearness of each item to the nearest other gallery item, such as the cosine of the two.

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

    @cached_property
    def is_single(self) -> Bool[Tensor, " N"]:
        """(N,) whether an item is the only one of its class."""
        _, position, counts = self.labels.unique(return_inverse=True, return_counts=True)
        return counts[position] == 1

    @property
    def share_of_new(self) -> float:
        """(M + 1)/(N + 1) for M classes of one item: an upper bound, in the mean, on the share of items of new classes.

        This is Good and Turing's estimate M/N, with the next item counted.
        """
        return (int(self.is_single.sum()) + 1) / (len(self.labels) + 1)

    def p_new(self, scores: Float[Tensor, " Q"], nearest: Int[Tensor, "..."]) -> Float[Tensor, " Q"]:
        """(Q,) p-values in (0, 1] of "this item is of a new class": small means that its class is in the gallery.

        p = (1 + A)/(M + 1). M gallery items are alone in their class. A of these are at least as near to another
        item, new or in the gallery (`left_out`), as the new item is to the gallery. For exchangeable items,
        P(p ≤ α | its class is new) ≤ α.

        Args:
            scores: (Q,) nearness of each new item to the nearest gallery item, measured as `left_out`.
            nearest: (Q,) position of the nearest gallery item, from 0.
        """
        nearest, values = nearest.cpu().long(), scores.detach().cpu().double()
        single, left_out = self._rising[0], self.left_out.detach().cpu().double()[nearest]
        as_near = len(single) - torch.searchsorted(single, values)
        as_near = as_near + (self.is_single.cpu()[nearest] & (left_out < values))
        return ((1 + as_near).double() / (1 + len(single))).to(scores.device)

    def p_in_gallery(self, scores: Float[Tensor, " Q"]) -> Float[Tensor, " Q"]:
        """(Q,) p-values in (0, 1] of "this item is of a class in the gallery": small means that its class is new.

        p = (1 + A + s)/(R + 1 + s), where R items are in classes of two or more, and A of these are at least as far
        from all other items as the new item is from the gallery. A new item may be the second of its class; the first
        is then alone in its class. So s = 1 if any item alone in its class is as far, else 0. For exchangeable items,
        P(p ≤ α | its class is in the gallery) ≤ α.
        """
        (single, several), values = self._rising, scores.detach().cpu().double()
        as_far = torch.searchsorted(several, values, right=True)
        second = (torch.searchsorted(single, values, right=True) > 0).long()
        return ((1 + as_far + second).double() / (1 + len(several) + second)).to(scores.device)

    @cached_property
    def _rising(self) -> tuple[Tensor, Tensor]:
        """Sorted `left_out` of the items that are alone in their class, and of the other items."""
        kinds = (self.left_out[which].detach().cpu().double() for which in (self.is_single, ~self.is_single))
        single, several = (values.sort().values for values in kinds)
        return single, several
