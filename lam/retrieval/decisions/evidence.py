"""`Evidence`: scores of calibration queries, with and without their matches, and of strangers, split into folds."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.decisions.probability import FOLDS, Scores, random_order, rows_of


@dataclass(frozen=True, eq=False)
class Group:
    """N searches of one kind.

    Attributes:
        scores: (N,) scores by name.
        fold: (N,) fold of each search, from 0.
    """

    scores: Scores = field(default_factory=dict)
    fold: Int[Tensor, " N"] = field(default_factory=lambda: torch.zeros(0).long())

    def __len__(self) -> int:
        return len(self.fold)

    def __getitem__(self, rows: Tensor) -> "Group":
        return Group(rows_of(self.scores, rows), self.fold[rows])


@dataclass(frozen=True, eq=False)
class Evidence:
    """Searches of a calibration: Q queries, M of these queries again without their matches, and O strangers.

    Both searches of a query are in one fold, and all strangers of a class are in one fold.

    Attributes:
        queries: Q queries in the whole gallery.
        has_match: (Q,) whether the gallery holds a match.
        right: (Q,) whether the first hit is a match.
        no_match: M queries in the gallery without their matches.
        strangers: O queries of classes that neither the gallery nor the reference holds.
        simulated: M calibration queries, scored as if their classes were new; empty if `strangers` holds these queries.
    """

    queries: Group
    has_match: Bool[Tensor, " Q"]
    right: Bool[Tensor, " Q"]
    no_match: Group
    strangers: Group
    simulated: Group = field(default_factory=Group)

    @property
    def stranger_kinds(self) -> list[Scores]:
        """Scores of each kind of strangers."""
        return [group.scores for group in (self.strangers, self.simulated) if len(group)]

    @property
    def known(self) -> Scores:
        """Scores of the queries with a match."""
        return rows_of(self.queries.scores, self.has_match)

    def only(self, names: Collection[str]) -> "Evidence":
        """The evidence with only these scores."""
        few = {
            kind: replace(group, scores={name: values for name, values in group.scores.items() if name in names})
            for kind, group in vars(self).items()
            if isinstance(group, Group)
        }
        return replace(self, **few)

    def without(self, fold: int) -> "Evidence":
        """The evidence without a fold; all evidence if no query with a match would remain."""
        kept = self.queries.fold != fold
        if not (self.has_match & kept).any():
            return self
        others = (group[group.fold != fold] for group in (self.no_match, self.strangers, self.simulated))
        return Evidence(self.queries[kept], self.has_match[kept], self.right[kept], *others)

    def out_of_fold(self, fit: Callable[["Evidence"], Callable[[Scores], Tensor]]) -> list[Float[Tensor, "_ F"]]:
        """Compute (N, F) statistics for `queries`, `no_match`, `strangers` and `simulated`.

        `fit` learns from evidence, and returns a function that maps scores of N searches to (F, N) statistics. Each
        search gets its statistics from a function learned on the other folds.
        """
        groups = self.queries, self.no_match, self.strangers, self.simulated
        parts: list[list[Tensor]] = [[] for _ in groups]
        width = 0
        for fold in range(FOLDS):
            in_fold = [group[group.fold == fold] for group in groups]
            if any(map(len, in_fold)):
                statistics = fit(self.without(fold))
                for part, group in zip(parts, in_fold, strict=True):
                    if len(group):
                        part.append(statistics(group.scores).T)
                        width = part[-1].shape[1]
        columns = [torch.cat(part) if part else torch.zeros(0, width, dtype=torch.float64) for part in parts]
        places = [group.fold.argsort(stable=True).argsort() for group in groups]
        return [column[place] for column, place in zip(columns, places, strict=True)]


def folds_of(units: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The random fold of each of N items; items of one unit, such as a class, share a fold."""
    names, position = units.unique(return_inverse=True)
    return (random_order(len(names)).argsort() % FOLDS)[position]
