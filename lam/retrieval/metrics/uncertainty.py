"""Quality of an uncertainty on one data set: sparsification and reliability of confidences.

Metrics that compare two data sets are in `lam.retrieval.metrics.ood`.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from lam.utils.checks import booleans, check_length, check_no_nan

_STEPS = 99  # f = 0, 0.01 … 0.98
_DRAWS = 1000


def sparsification(
    correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Accuracy of the remaining queries after the share f of the most uncertain queries is dropped.

    accuracy(f) = C((1 − f)Q) / ((1 − f)Q), where C(m) is the number of right first hits among the m most certain of Q
    queries. C is linear between whole m, and a tie counts as the mean over its orders. A good uncertainty gives a
    rising curve, a useless uncertainty a level curve.

    Args:
        correct: (Q,) whether the first hit is relevant; leave out queries without a relevant item.
        uncertainty: (Q,) higher is more uncertain, e.g. −κ; infinities are allowed.

    Returns:
        (F,) the shares f = 0, 0.01 … 0.98 and (F,) the accuracies, both float64; accuracies are NaN for no query.

    Raises:
        ValueError: for a NaN, or for arguments of different lengths.

    Example:
        >>> shares, accuracy = sparsification(torch.tensor([True, False]), torch.tensor([0.1, 0.9]))
        >>> accuracy[[0, 25, 50]].tolist()
        [0.5, 0.6666666666666666, 1.0]
    """
    n_correct = count_by_certainty(correct, uncertainty)
    steps = np.arange(_STEPS)
    shares = torch.from_numpy(steps / 100)
    if len(correct) == 0:
        return shares, torch.full_like(shares, torch.nan)
    kept = (100 - steps) * len(correct) / 100
    return shares, torch.from_numpy(np.interp(kept, np.arange(len(n_correct)), n_correct) / kept)


def ausc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the sparsification curve, as the mean of its accuracies; higher is better.

    Arguments and errors as in `sparsification`.

    Returns:
        A mean in [0, 1], the accuracy for a constant uncertainty; NaN for no query.

    Example:
        >>> ausc(torch.tensor([True, True, False, False]), torch.zeros(4))
        0.5
    """
    return float(sparsification(correct, uncertainty)[1].mean())


def count_by_certainty(selected: Bool[Tensor, " Q"], uncertainty: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """(Q + 1,) numbers of selected queries among the 0, 1 … Q most certain, float64, on the CPU.

    In a tie, each query counts as the mean of the tied queries.
    """
    kept, counts = count_at_thresholds(selected, uncertainty)
    return torch.from_numpy(np.interp(np.arange(len(selected) + 1), kept, counts))


def count_at_thresholds(
    selected: Bool[Tensor, " Q"], uncertainty: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Number of queries that each threshold keeps, and number of selected queries among these; both rise from zero.

    A threshold keeps or drops a tie as a whole: T distinct uncertainties give T + 1 numbers each, float64, on the CPU.
    """
    selected = booleans("correct", selected)
    check_length("uncertainty", uncertainty, "the queries", len(selected))
    check_no_nan("uncertainty", uncertainty)
    order = uncertainty.argsort()
    _, sizes = uncertainty[order].unique_consecutive(return_counts=True)
    kept = torch.cat([sizes.new_zeros(1), sizes]).cumsum(0)
    counts = torch.cat([selected.new_zeros(1), selected[order]]).cumsum(0)[kept]
    return kept.double().cpu(), counts.double().cpu()


@dataclass(frozen=True)
class ReliabilityBins:
    """Data of a reliability diagram, in B bins of equal width in confidence.

    Attributes:
        confidence: (B,) mean confidence of the queries in each bin; NaN for an empty bin.
        accuracy: (B,) share of right predictions in each bin; NaN for an empty bin.
        count: (B,) number of queries in each bin.
    """

    confidence: Float[Tensor, " B"]
    accuracy: Float[Tensor, " B"]
    count: Int64[Tensor, " B"]

    @classmethod
    def of(
        cls, in_bin: Int64[Tensor, " Q"], confidence: Float[Tensor, " Q"], correct: Bool[Tensor, " Q"], *, bins: int
    ) -> "ReliabilityBins":
        """Averages in each of B bins; `in_bin` numbers the bin of each query from 0."""
        count = torch.bincount(in_bin, minlength=bins)
        zeros = torch.zeros(bins, dtype=torch.float64, device=count.device)
        total, right = (zeros.index_add(0, in_bin, values.double()) for values in (confidence, correct))
        return cls(total / count, right / count, count)

    @property
    def expected_error(self) -> float:
        """ECE = Σ_b (n_b / N) |accuracy_b − confidence_b|; lower is better, NaN if all bins are empty.

        Bin b holds n_b of N queries. Source: Guo, Pleiss, Sun and Weinberger (2017), eq. 3.
        """
        gap = (self.accuracy - self.confidence).abs()
        return float((self.count * gap).nansum() / self.count.sum())

    @property
    def error_by_chance(self) -> float:
        """0.95 quantile of the ECE of a perfectly calibrated predictor; NaN if all bins are empty.

        In each of 1,000 draws with a fixed seed, the number of right queries in a bin is binomial, at the bin's mean
        confidence. A greater ECE is hardly due to chance. (If a bin's confidences differ, the quantile is too high.)

        Example:
            >>> half = torch.zeros(100, dtype=torch.int64), torch.full((100,), 0.5), torch.ones(100, dtype=torch.bool)
            >>> ReliabilityBins.of(*half, bins=1).error_by_chance  # 1.96 · 0.5/√100, in hundredths
            0.1
        """
        filled, n = self.count > 0, int(self.count.sum())
        if n == 0:
            return math.nan
        count, confidence = self.count[filled].cpu().numpy(), self.confidence[filled].cpu().clamp(0, 1).numpy()
        right = np.random.default_rng(0).binomial(count, confidence, (_DRAWS, len(count)))
        return float(np.quantile(np.abs(right - count * confidence).sum(1) / n, 0.95))
