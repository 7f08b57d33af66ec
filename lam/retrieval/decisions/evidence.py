"""`Evidence`: scores of calibration queries, with and without their matches, and of strangers, parted into folds."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lam.retrieval.decisions.probability import FOLDS, Scores, random_order


@dataclass(frozen=True, eq=False)
class Evidence:
    """What is learnt from: Q queries as they are, M of them without their matches, and O strangers.

    Attributes:
        queries: (Q,) scores of the queries in the gallery as it is.
        has_match: (Q,) whether the gallery holds a match.
        right: (Q,) whether the first hit is one.
        no_match: (M,) scores of queries whose matches were taken out of the gallery.
        strangers: (O,) scores of queries whose class neither the gallery nor the reference holds.
        simulated: (M,) scores of calibration queries as if their classes were unseen, beside strangers that were given;
            empty where these are the strangers.
        query_fold: (Q,) the part of the data that each belongs to, from 0.
        no_match_fold: (M,) likewise; a query is in one part, with its matches and without.
        stranger_fold: (O,) likewise; a class of strangers is in one part.
    """

    queries: Mapping[str, Float[Tensor, " Q"]]
    has_match: Bool[Tensor, " Q"]
    right: Bool[Tensor, " Q"]
    no_match: Mapping[str, Float[Tensor, " M"]]
    strangers: Mapping[str, Float[Tensor, " O"]]
    query_fold: Int[Tensor, " Q"]
    no_match_fold: Int[Tensor, " M"]
    stranger_fold: Int[Tensor, " O"]
    simulated: Mapping[str, Float[Tensor, " M"]] = field(default_factory=dict)
    simulated_fold: Int[Tensor, "..."] = field(default_factory=lambda: torch.zeros(0).long())

    @property
    def all_strangers(self) -> list[Mapping[str, Float[Tensor, "..."]]]:
        """Strangers of each kind that there is."""
        kinds = (self.strangers, self.stranger_fold), (self.simulated, self.simulated_fold)
        return [scores for scores, numbers in kinds if len(numbers)]

    @property
    def known(self) -> Scores:
        """Scores of the queries that have a match."""
        return {name: values[self.has_match] for name, values in self.queries.items()}

    @property
    def right_if_known(self) -> Bool[Tensor, " N"]:
        """Of these, whether the first hit is right."""
        return self.right[self.has_match]

    def only(self, names: Collection[str]) -> "Evidence":
        """Some of the scores."""
        kinds = {
            kind: {name: values for name, values in getattr(self, kind).items() if name in names}
            for kind in ("queries", "no_match", "strangers", "simulated")
        }
        return replace(self, **kinds)

    def without(self, fold: int) -> "Evidence":
        """All but one fold; all, where no query with a match would be left."""
        kept, no_match, strangers, simulated = (
            numbers != fold
            for numbers in (self.query_fold, self.no_match_fold, self.stranger_fold, self.simulated_fold)
        )
        if not (self.has_match & kept).any():
            return self
        return Evidence(
            queries=_rows(self.queries, kept),
            has_match=self.has_match[kept],
            right=self.right[kept],
            no_match=_rows(self.no_match, no_match),
            strangers=_rows(self.strangers, strangers),
            query_fold=self.query_fold[kept],
            no_match_fold=self.no_match_fold[no_match],
            stranger_fold=self.stranger_fold[strangers],
            simulated=_rows(self.simulated, simulated),
            simulated_fold=self.simulated_fold[simulated],
        )

    def out_of_fold(
        self, fit: Callable[["Evidence"], Callable[[Scores], Tensor]]
    ) -> tuple[Float[Tensor, "Q F"], Float[Tensor, "M F"], Float[Tensor, "O F"], Tensor]:
        """What the other folds teach of each query, each query without its match, and each stranger, given or made.

        Args:
            fit: learns statistics, (F, N) of the scores of N queries.
        """
        kinds = [
            (self.queries, self.query_fold),
            (self.no_match, self.no_match_fold),
            (self.strangers, self.stranger_fold),
            (self.simulated, self.simulated_fold),
        ]
        parts: list[list[Tensor]] = [[] for _ in kinds]
        width = 0
        for fold in range(FOLDS):
            held = [numbers == fold for _, numbers in kinds]
            if not any(map(torch.any, held)):
                continue
            learnt = fit(self.without(fold))
            for part, (scores, _), rows in zip(parts, kinds, held, strict=True):
                if rows.any():
                    part.append(learnt(_rows(scores, rows)).T)
                    width = part[-1].shape[1]
        columns = [torch.cat(part) if part else torch.zeros(0, width, dtype=torch.float64) for part in parts]
        orders = [numbers.argsort(stable=True).argsort() for _, numbers in kinds]
        asked, no_match, strangers, simulated = (column[order] for column, order in zip(columns, orders, strict=True))
        return asked, no_match, strangers, simulated


def folds_of(units: Int[Tensor, " N"]) -> Int[Tensor, " N"]:
    """The fold of each of N items: items of one unit, such as a class, are in one fold; units in a random order."""
    names, position = units.unique(return_inverse=True)
    return (random_order(len(names)).argsort() % FOLDS)[position]


def _rows(scores: Scores, rows: Tensor) -> dict[str, Tensor]:
    return {name: values[rows] for name, values in scores.items()}
