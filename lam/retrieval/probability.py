"""How probable it is that the first hit is right: logistic regression on what a search returns, as plain numbers."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.retrieval.checks import positive_integer, refuse_nan, refuse_non_finite, refuse_other_length
from lam.retrieval.uncertainty import CalibrationBins

EVIDENCE = ("cosine", "query_kappa", "hit_kappa", "margin")
_LEAST = 1e-8  # below the resolution of a float32 cosine
_COUNT = len(EVIDENCE)


@dataclass(frozen=True)
class Correctness:
    """P(first hit is right) = σ(intercept + Σ_j weight_j (x_j − center_j)/scale_j).

    x is (log(1 − cosine), log κ of the query, log κ of the hit, log margin), the margin being the cosine of the first
    hit less that of the second: near 1, where retrieval happens, it is orders of magnitude of the distance that tell,
    and κ spans many.

    Attributes:
        intercept: of the log odds.
        weights: one for each x.
        center: means of x on the calibration data.
        scale: their standard deviations.
        n: how many searches it was learnt from.
    """

    intercept: float
    weights: tuple[float, ...]
    center: tuple[float, ...]
    scale: tuple[float, ...]
    n: int

    def __post_init__(self) -> None:
        for name in ("weights", "center", "scale"):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != _COUNT or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be {_COUNT} finite numbers, one for each of {EVIDENCE}, got {values}")
            object.__setattr__(self, name, values)

    @classmethod
    def fit(cls, evidence: Float[Tensor, "N E"], correct: Bool[Tensor, " N"]) -> "Correctness":
        """Learn by logistic regression with scikit-learn's default penalty.

        Queries without a match in the gallery do not belong here: no first hit of theirs can be right. Where all hits
        are right, or none is, there is nothing to learn from, and the answer is Laplace's (n_right + 1)/(N + 2).

        Args:
            evidence: (N, 4) as `evidence_of` gives it.
            correct: (N,) whether the first hit was right.

        Raises:
            ValueError: for no search, another length, or evidence that is not finite.
        """
        refuse_other_length("correct", correct, "the rows of evidence", len(evidence))
        refuse_non_finite("evidence", evidence)
        if len(evidence) == 0:
            raise ValueError("the probability of a right answer needs searches that have a match, got none")
        x = evidence.detach().cpu().double()
        right, n = int(correct.sum()), len(correct)
        center = x.mean(0)
        spread = x.std(0, correction=0)
        scale = torch.where(spread > 0, spread, 1.0)
        if right in (0, n):
            odds = math.log((right + 1) / (n - right + 1))
            return cls(odds, (0.0,) * _COUNT, tuple(center.tolist()), tuple(scale.tolist()), n)
        from sklearn.linear_model import LogisticRegression

        model: Any = LogisticRegression(max_iter=1000).fit(((x - center) / scale).numpy(), correct.cpu().numpy())
        weights = tuple(model.coef_[0].tolist())
        return cls(float(model.intercept_[0]), weights, tuple(center.tolist()), tuple(scale.tolist()), n)

    def __call__(self, evidence: Float[Tensor, "N E"]) -> Float[Tensor, " N"]:
        """Give the probability for each row of `evidence_of`.

        Raises:
            ValueError: for evidence of another width or not finite.
        """
        if evidence.shape[1:] != (_COUNT,):
            raise ValueError(f"evidence must have {_COUNT} columns, {EVIDENCE}, got shape {tuple(evidence.shape)}")
        refuse_non_finite("evidence", evidence)
        x = evidence.double()
        weights, center, scale = (x.new_tensor(values) for values in (self.weights, self.center, self.scale))
        return torch.sigmoid(self.intercept + ((x - center) / scale) @ weights)

    def to_json(self) -> dict[str, Any]:
        """The numbers, by name."""
        return asdict(self)


def evidence_of(
    cosine: Float[Tensor, " N"],
    query_kappa: Float[Tensor, " N"],
    hit_kappa: Float[Tensor, " N"],
    second: Float[Tensor, " N"],
) -> Float[Tensor, "N E"]:
    """Give the four numbers from which the probability of a right answer is told; see `Correctness`.

    Args:
        cosine: (N,) of the first hit, in [−1, 1].
        query_kappa: (N,) concentrations of the queries.
        hit_kappa: (N,) of their first hits.
        second: (N,) cosine of the second hit; −1 where there is none.

    Returns:
        (N, 4), float64.

    Raises:
        ValueError: for another length or NaN.
    """
    columns = {"cosine": cosine, "query_kappa": query_kappa, "hit_kappa": hit_kappa, "second": second}
    for name, values in columns.items():
        refuse_other_length(name, values, "the cosines", len(cosine))
        refuse_nan(name, values)
    distance, kappa, other, margin = (
        values.double().clamp(min=_LEAST).log()
        for values in (1 - cosine.double(), query_kappa, hit_kappa, cosine.double() - second.double())
    )
    return torch.stack([distance, kappa, other, margin], 1)


def probability_bins(
    probability: Float[Tensor, " N"], correct: Bool[Tensor, " N"], *, bins: int = 10
) -> CalibrationBins:
    """Sort answers by their probability into equal bins, closed on the right: a reliability diagram and its ECE.

    Args:
        probability: (N,) in [0, 1].
        correct: (N,) whether each answer is right.
        bins: how many bins B, at least 1.

    Returns:
        Mean probability, accuracy and count of each bin; its `expected_error` is the ECE, lower is better, NaN for no
        answer.

    Raises:
        ValueError: for no bin, another length, or a probability outside [0, 1], NaN included.

    Example:
        >>> probability_bins(torch.tensor([0.75, 0.75]), torch.tensor([True, False])).expected_error
        0.25
    """
    bins = positive_integer("bins", bins)
    refuse_other_length("correct", correct, "the probabilities", len(probability))
    outside = (~((probability >= 0) & (probability <= 1))).nonzero()
    if len(outside):
        index = int(outside[0])
        raise ValueError(f"probability must lie in [0, 1], got {float(probability[index])} at index {index}")
    in_bin = ((probability.double() * bins).ceil().long() - 1).clamp(min=0)
    count = torch.bincount(in_bin, minlength=bins)
    zeros = torch.zeros(bins, dtype=torch.float64, device=count.device)
    total = zeros.index_add(0, in_bin, probability.double())
    right = zeros.index_add(0, in_bin, correct.double())
    return CalibrationBins(total / count, right / count, count)
