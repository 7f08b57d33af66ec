"""P(first hit is right): a regression on the result of a search, kept as plain numbers."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.retrieval.metrics.uncertainty import CalibrationBins
from lam.utils.checks import check_finite, check_length, check_no_nan, positive_integer

EVIDENCE = ("cosine", "query_kappa", "hit_kappa", "margin")
_LEAST = 1e-8  # below the resolution of a float32 cosine
_COUNT = len(EVIDENCE)
FOLDS = 5
"""Parts of a cross-validation."""


@dataclass(frozen=True)
class Correctness:
    """P(first hit is right) = g(Σ_j weight_j (x_j − center_j)/scale_j), learnt by logistic and isotonic regression.

    x is (log(1 − cosine), log κ of the query, log κ of the hit, log margin), the margin being the cosine of the first
    hit less that of the second: near 1, where retrieval happens, it is orders of magnitude of the distance that tell,
    and κ spans many. Logistic regression weighs the four; g rises, piecewise linearly between knots, and is learnt from
    the sums of searches that the weights were not learnt from, so that log odds need not be linear in them.

    Attributes:
        weights: one for each x.
        center: means of x on the calibration data.
        scale: their standard deviations.
        knots: sums at which g is known, rising.
        levels: g there, rising, strictly between 0 and 1.
        n: how many searches it was learnt from.
    """

    weights: tuple[float, ...]
    center: tuple[float, ...]
    scale: tuple[float, ...]
    knots: tuple[float, ...]
    levels: tuple[float, ...]
    n: int

    def __post_init__(self) -> None:
        for name in ("weights", "center", "scale", "knots", "levels"):
            values = getattr(self, name)
            count = len(values) if name in ("knots", "levels") else _COUNT
            if len(values) != count or not values or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} must be finite numbers, {count} of them, got {values}")
        if len(self.knots) != len(self.levels):
            raise ValueError(f"knots and levels must be as many, got {len(self.knots)} and {len(self.levels)}")

    @classmethod
    def fit(cls, evidence: Float[Tensor, "N E"], correct: Bool[Tensor, " N"]) -> "Correctness":
        """Learn with scikit-learn, which gives the weights its default penalty.

        Queries without a match in the gallery do not belong here: no first hit of theirs can be right. Where all hits
        are right, or none is, there is nothing to learn from, and the answer is Laplace's (n_right + 1)/(N + 2); and no
        probability is nearer to 0 or 1 than 1/(N + 2).

        Source: Platt (1999), Zadrozny and Elkan (2002).

        Args:
            evidence: (N, 4) as `evidence_of` gives it.
            correct: (N,) whether the first hit was right.

        Raises:
            ValueError: for no search, another length, or evidence that is not finite.
        """
        check_length("correct", correct, "the rows of evidence", len(evidence))
        check_finite("evidence", evidence)
        if len(evidence) == 0:
            raise ValueError("the probability of a right answer needs searches that have a match, got none")
        from sklearn.isotonic import IsotonicRegression

        x, right = evidence.detach().cpu().double(), correct.cpu()
        center, spread = x.mean(0), x.std(0, correction=0)
        scale = torch.where(spread > 0, spread, 1.0)
        x = (x - center) / scale
        weights, n = _weights(x, right), len(right)
        sums = torch.empty(n, dtype=torch.float64)
        for fold, rest in folds(n):
            sums[fold] = x[fold] @ _weights(x[rest], right[rest])
        rising: Any = IsotonicRegression().fit(sums.numpy(), right.double().numpy())
        least = 1 / (n + 2)
        levels = torch.from_numpy(rising.y_thresholds_).double().clamp(least, 1 - least)
        return cls(
            weights=tuple(weights.tolist()),
            center=tuple(center.tolist()),
            scale=tuple(scale.tolist()),
            knots=tuple(rising.X_thresholds_.tolist()),
            levels=tuple(levels.tolist()),
            n=n,
        )

    def __call__(self, evidence: Float[Tensor, "N E"]) -> Float[Tensor, " N"]:
        """P(first hit is right) for each row of `evidence_of`.

        Raises:
            ValueError: for evidence of another width or not finite.
        """
        if evidence.shape[1:] != (_COUNT,):
            raise ValueError(f"evidence must have {_COUNT} columns, {EVIDENCE}, got shape {tuple(evidence.shape)}")
        check_finite("evidence", evidence)
        x = evidence.double()
        weights, center, scale = (x.new_tensor(values) for values in (self.weights, self.center, self.scale))
        return _interpolated(((x - center) / scale) @ weights, x.new_tensor(self.knots), x.new_tensor(self.levels))

    def to_json(self) -> dict[str, Any]:
        """The numbers, by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, numbers: dict[str, Any]) -> "Correctness":
        """The regression of numbers by name."""
        n = numbers["n"]
        return cls(**{name: tuple(values) for name, values in numbers.items() if name != "n"}, n=n)


def folds(n: int) -> Iterator[tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]]:
    """For each fifth of N items by turns: which are in it, and which in the rest; a lone item is in both."""
    turn = torch.arange(n) % FOLDS
    for fold in range(min(FOLDS, n)):
        is_in_fold = turn == fold
        yield is_in_fold, ~is_in_fold if n > 1 else is_in_fold


def evidence_of(
    cosine: Float[Tensor, " N"],
    query_kappa: Float[Tensor, " N"],
    hit_kappa: Float[Tensor, " N"],
    second: Float[Tensor, " N"],
) -> Float[Tensor, "N E"]:
    """The four numbers that P(first hit is right) is computed from; see `Correctness`.

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
        check_length(name, values, "the cosines", len(cosine))
        check_no_nan(name, values)
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
    check_length("correct", correct, "the probabilities", len(probability))
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


def _weights(x: Tensor, correct: Tensor) -> Tensor:
    """Of a logistic regression; zero where all are right or all are wrong."""
    if correct.all() or not correct.any():
        return torch.zeros(_COUNT, dtype=torch.float64)
    from sklearn.linear_model import LogisticRegression

    model: Any = LogisticRegression(max_iter=1000).fit(x.numpy(), correct.numpy())
    return torch.from_numpy(model.coef_[0])


def _interpolated(sums: Tensor, knots: Tensor, levels: Tensor) -> Tensor:
    """Levels at sums: linear between knots, constant beyond them."""
    right = torch.searchsorted(knots, sums.contiguous()).clamp(max=len(knots) - 1)
    left = (right - 1).clamp(min=0)
    width = (knots[right] - knots[left]).clamp(min=torch.finfo(knots.dtype).tiny)
    share = ((sums - knots[left]) / width).clamp(0, 1)
    return levels[left] + share * (levels[right] - levels[left])
