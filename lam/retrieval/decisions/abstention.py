"""The answer to each query: match, unknown or abstain."""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.utils.checks import check_choice, check_length, check_no_nan

Decision = Literal["match", "unknown", "abstain"]
DECISIONS: tuple[Decision, ...] = get_args(Decision)
MATCH, UNKNOWN, ABSTAIN = range(3)
Same = TypeVar("Same", bound="Decisions")


@dataclass(frozen=True)
class Decisions:
    """The answers to Q queries.

    Attributes:
        codes: (Q,) positions of the answers in `DECISIONS`.
        probability: (Q,) P(the first hit is right), or P(the pair matches); 0 without a hit.
        score: (Q,) cosine of the first hit; −∞ without a hit.
        ood_score: (Q,) OOD score of the flag; higher means more OOD.
        p_value: (Q,) conformal p-value of the OOD score; small means an unusually high score.
        flagged_by: name of each query's flag: the calibration's flag, or a substitute if evidence is missing.
        stale: whether the gallery has grown or shrunk by over 20 % since calibration.
    """

    codes: Int64[Tensor, " Q"]
    probability: Float[Tensor, " Q"]
    score: Float[Tensor, " Q"]
    ood_score: Float[Tensor, " Q"]
    p_value: Float[Tensor, " Q"]
    flagged_by: tuple[str, ...]
    stale: bool

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self: Same, index: slice) -> Same:
        """The answers to some queries."""
        return replace(self, **{name: value[index] for name, value in vars(self).items() if name != "stale"})

    def where(self: Same, which: Bool[Tensor, " Q"], others: "Decisions") -> Same:
        """These answers where `which` is true, and `others` elsewhere."""
        chosen: dict[str, Any] = {}
        for name, own in vars(self).items():
            other = getattr(others, name)
            if isinstance(own, Tensor):
                chosen[name] = torch.where(which.to(own.device), own, other)
            elif isinstance(own, tuple):
                triples = zip(which.tolist(), own, other, strict=True)
                chosen[name] = tuple(one if is_own else another for is_own, one, another in triples)
        return replace(self, **chosen)

    @property
    def decision(self) -> tuple[Decision, ...]:
        """The name of each query's answer, from `DECISIONS`."""
        return tuple(DECISIONS[code] for code in self.codes.tolist())

    def share(self, decision: Decision) -> float:
        """Share of the queries with this answer; NaN for no query."""
        check_choice("decision", decision, DECISIONS)
        return float((self.codes == DECISIONS.index(decision)).double().mean())


@dataclass(frozen=True)
class SearchDecisions(Decisions):
    """The answers to Q searches; their `probability` is P(known) · P(right | known).

    Attributes:
        p_known: (Q,) probability that the gallery holds a match; depends on the expected share of strangers.
        right_if_known: (Q,) probability that the first hit is right if the gallery holds a match.
        statistic: (Q,) the accept statistic: the probability, or minus the score `accept`; −∞ without a hit.
        false_accept: (Q,) conformal p-value of the statistic among `Acceptance.false_accepts`; 1 without a hit.
        accept: name of each query's statistic: `probability`, or a score.
        accept_above: (Q,) accept threshold: a statistic above it means `match`, unless the query is flagged.
        flag_above: (Q,) flag threshold: a query with an `ood_score` above it is flagged.
    """

    p_known: Float[Tensor, " Q"]
    right_if_known: Float[Tensor, " Q"]
    statistic: Float[Tensor, " Q"]
    false_accept: Float[Tensor, " Q"]
    accept: tuple[str, ...]
    accept_above: Float[Tensor, " Q"]
    flag_above: Float[Tensor, " Q"]


def decision_codes(
    flagged: Bool[Tensor, " Q"], statistic: Float[Tensor, " Q"], *, accept_above: float
) -> Int64[Tensor, " Q"]:
    """(Q,) positions in `DECISIONS`: abstain if flagged, match if strictly above the threshold, else unknown.

    Example:
        >>> flagged, statistic = torch.tensor([False, False, True]), torch.tensor([0.9, 0.2, 0.9])
        >>> [DECISIONS[code] for code in decision_codes(flagged, statistic, accept_above=0.5).tolist()]
        ['match', 'unknown', 'abstain']
    """
    check_length("flagged", flagged, "the statistics", len(statistic))
    check_no_nan("statistic", statistic)
    codes = torch.where(statistic > accept_above, MATCH, UNKNOWN)
    return codes.masked_fill(flagged, ABSTAIN)
