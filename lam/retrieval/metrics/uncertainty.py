"""Whether an uncertainty can be trusted: sparsification and calibration of retrieval.

Here live metrics of one data set with its uncertainties. Telling two data sets apart is `lam.retrieval.metrics.ood`.
"""

import math
from dataclasses import dataclass
from typing import Literal, SupportsIndex, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from lam.utils.checks import check_choice, check_length, check_no_nan, positive_integer

Closed = Literal["right", "left"]
_STEPS = 99  # f = 0, 0.01 … 0.98
_DRAWS = 1000


def sparsification(
    correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Accuracy of the queries that stay when the share f of most uncertain ones is dropped.

    With C(m) the number of correct among the m most certain queries, accuracy(f) = C((1 − f)Q) / ((1 − f)Q). C is
    linear between queries, so that a fraction of a query counts as that fraction, and within a group of equal
    uncertainty, so that each member counts with the group's mean: ties by expectation. The gallery stays as it is. A
    good uncertainty gives a rising curve, a useless one a level curve.

    Args:
        correct: (Q,) whether the first hit is relevant; queries without a relevant item left out by the caller.
        uncertainty: (Q,) higher is more uncertain, e.g. −κ; infinities are allowed.

    Returns:
        (F,) the shares f = 0, 0.01 … 0.98 and (F,) the accuracies, both float64; accuracies are NaN for no query.

    Raises:
        ValueError: for NaN (with its index) or another length.

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


def count_by_certainty(what: Bool[Tensor, " Q"], uncertainty: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """How many of the 0, 1 … Q most certain queries are what is counted: (Q + 1,) counts, float64, on the CPU.

    Each member of a tie counts with the mean of the tie, its expectation over the orders of the tie.

    Raises:
        ValueError: for NaN (with its index) or another length.
    """
    kept, counts = count_at_thresholds(what, uncertainty)
    return torch.from_numpy(np.interp(np.arange(len(what) + 1), kept, counts))


def count_at_thresholds(
    what: Bool[Tensor, " Q"], uncertainty: Float[Tensor, "..."]
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """How many queries each threshold keeps, and how many of these are what is counted, rising from none kept.

    A threshold keeps or drops a tie as a whole: for T distinct uncertainties (T + 1,) and (T + 1,) float64, on the CPU.

    Raises:
        ValueError: for NaN (with its index) or another length.
    """
    check_length("uncertainty", uncertainty, "the queries", len(what))
    check_no_nan("uncertainty", uncertainty)
    order = uncertainty.argsort()
    _, sizes = uncertainty[order].unique_consecutive(return_counts=True)
    kept = torch.cat([sizes.new_zeros(1), sizes]).cumsum(0)
    counts = torch.cat([what.new_zeros(1), what[order]]).cumsum(0)[kept]
    return kept.double().cpu(), counts.double().cpu()


def ausc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the sparsification curve: the mean of its accuracies; higher is better.

    Args:
        correct: (Q,) whether the first hit is relevant.
        uncertainty: (Q,) higher is more uncertain.

    Returns:
        A mean in [0, 1], the accuracy itself for a constant uncertainty; NaN for no query.

    Raises:
        ValueError: as `sparsification`.

    Example:
        >>> ausc(torch.tensor([True, True, False, False]), torch.zeros(4))
        0.5
    """
    return float(sparsification(correct, uncertainty)[1].mean())


@dataclass(frozen=True)
class ReliabilityBins:
    """What a reliability diagram shows: B equal bins of confidence.

    Attributes:
        confidence: (B,) mean confidence of the queries in each bin; NaN where there is none.
        accuracy: (B,) share of them whose prediction is right; NaN where there is none.
        count: (B,) how many there are.
    """

    confidence: Float[Tensor, " B"]
    accuracy: Float[Tensor, " B"]
    count: Int64[Tensor, " B"]

    @classmethod
    def of(
        cls, in_bin: Int64[Tensor, " Q"], confidence: Float[Tensor, " Q"], correct: Bool[Tensor, " Q"], *, bins: int
    ) -> "ReliabilityBins":
        """Sort Q queries into B bins, which are counted from 0."""
        count = torch.bincount(in_bin, minlength=bins)
        zeros = torch.zeros(bins, dtype=torch.float64, device=count.device)
        total, right = (zeros.index_add(0, in_bin, values.double()) for values in (confidence, correct))
        return cls(total / count, right / count, count)

    @property
    def expected_error(self) -> float:
        """ECE = Σ_b (n_b / N) |accuracy_b − confidence_b|; lower is better, NaN where all bins are empty.

        N counts the queries that are in a bin. Source: Guo, Pleiss, Sun and Weinberger (2017), eq. 3.
        """
        gap = (self.accuracy - self.confidence).abs()
        return float((self.count * gap).nansum() / self.count.sum())

    @property
    def error_by_chance(self) -> float:
        """What the ECE of a perfect predictor stays below in 95 of 100 draws; NaN where all bins are empty.

        As many queries in each bin are right with the bin's mean confidence, drawn 1,000 times from a fixed seed: an
        ECE above it is no accident of few queries. (Where confidences differ within a bin the true limit is a little
        lower.)

        Example:
            >>> half = torch.zeros(100, dtype=torch.int64), torch.full((100,), 0.5), torch.ones(100, dtype=torch.bool)
            >>> ReliabilityBins.of(*half, bins=1).error_by_chance  # 1.96 · 0.5/√100, in hundredths
            0.1
        """
        of, n = self.count > 0, int(self.count.sum())
        if n == 0:
            return math.nan
        count, confidence = self.count[of].cpu().numpy(), self.confidence[of].cpu().clamp(0, 1).numpy()
        right = np.random.default_rng(0).binomial(count, confidence, (_DRAWS, len(count)))
        return float(np.quantile(np.abs(right - count * confidence).sum(1) / n, 0.95))


@dataclass(frozen=True)
class Votes:
    """How far S sampled networks agree with the prediction of each of Q queries, and whether it is right.

    The confidence of a query is the share v/S of networks that agree.

    Attributes:
        agree: (Q,) how many networks agree, v, from 0 to S.
        correct: (Q,) whether the prediction is right.
        n_samples: S, at least 1.

    Raises:
        ValueError: for shapes that disagree, or no sampled network.
    """

    agree: Int[Tensor, " Q"]
    correct: Bool[Tensor, " Q"]
    n_samples: int

    def __post_init__(self) -> None:
        check_length("correct", self.correct, "votes", len(self.agree))
        if self.n_samples < 1:
            raise ValueError(f"votes must be of at least one sampled network, got {self.n_samples}")

    @property
    def log_score(self) -> Float[Tensor, " Q"]:
        """(Q,) minus the logarithm of the probability that the votes give to what is the case; lower is better.

        The probability that the prediction is right is (v + ½)/(S + 1), so that a finite number of votes never claims
        certainty: Krichevsky and Trofimov (1981). A proper score, as Good (1952) has it: in expectation no other
        probability does better than the true one. float64.
        """
        right = (self.agree.double() + 0.5) / (self.n_samples + 1)
        return -torch.where(self.correct, right, 1 - right).log()

    def binned(self, bins: SupportsIndex = 10, *, closed: Closed = "right") -> ReliabilityBins:
        """Sort the queries into B equal bins of confidence, in integers, so that no rounding moves one.

        Source: Guo, Pleiss, Sun and Weinberger (2017), with bins closed on the right. Warburg et al. (2023), eq. 121,
        do not name the ends of their bins; their code has `closed="left"`.

        Args:
            bins: how many bins B, at least 1.
            closed: the end that belongs to a bin. "right", v/S in bin ⌈B·v/S⌉: 0.1 is in the first of ten bins and 1 in
                the last, no vote at all in the first. "left", v/S in bin ⌊B·v/S⌋ + 1: queries of confidence 1 are in
                none and count nowhere, as in the authors' code.

        Returns:
            Confidence, accuracy and count of each bin.

        Raises:
            ValueError: for no bin, or another end.

        Example:
            >>> votes = Votes(torch.tensor([4, 3]), torch.tensor([True, True]), n_samples=4)
            >>> votes.binned().expected_error, votes.binned(closed="left").expected_error
            (0.125, 0.25)
        """
        bins = positive_integer("bins", bins)
        check_choice("closed", closed, get_args(Closed))
        scaled = self.agree * bins
        in_bin = (scaled - 1).clamp(min=0) // self.n_samples if closed == "right" else scaled // self.n_samples
        inside = in_bin < bins
        confidence = self.agree[inside].double() / self.n_samples
        return ReliabilityBins.of(in_bin[inside], confidence, self.correct[inside], bins=bins)


def majority_votes(
    predictions: Int[Tensor, "S Q"], labels: Int[Tensor, " Q"], ranked_labels: Int[Tensor, "Q K"]
) -> Votes:
    """Votes of S sampled networks on the label of each query's nearest neighbour; most votes are the prediction.

    Args:
        predictions: (S, Q) the label of each query's nearest neighbour under each sampled network.
        labels: (Q,) the true labels.
        ranked_labels: (Q, K) the labels of the hits ranked by the direction that is retrieved: among labels with equal
            votes the one that comes first here wins, and the lowest where none of them is here.

    Returns:
        The votes for each prediction, and whether it is the true label.

    Raises:
        ValueError: for no sample or shapes that disagree.
    """
    if len(predictions) == 0:
        raise ValueError("predictions must hold at least one sampled network, got none")
    check_length("labels", labels, "the queries in predictions", predictions.shape[1])
    if len(ranked_labels) != len(labels):
        raise ValueError(f"ranked_labels must have a row for each of {len(labels)} queries, got {len(ranked_labels)}")
    mode, agree = _mode(predictions, ranked_labels)
    return Votes(agree, mode == labels, len(predictions))


def _mode(predictions: Tensor, ranked_labels: Tensor) -> tuple[Tensor, Tensor]:
    """The label with most votes and its votes. Counts row against rows: C classes cost nothing."""
    votes = torch.stack([(predictions == row).sum(0) for row in predictions])
    never = ranked_labels.shape[1]
    places = torch.full_like(votes, never)
    for k in reversed(range(never)):
        places = places.masked_fill(predictions == ranked_labels[:, k], k)
    standing = votes * (never + 1) - places  # by votes, and among equal votes by place
    wins = standing == standing.amax(0)
    return predictions.masked_fill(~wins, torch.iinfo(predictions.dtype).max).amin(0), votes.amax(0)
