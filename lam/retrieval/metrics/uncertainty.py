"""Quality of an uncertainty on one data set.

Sparsification, areas of selective retrieval and abstention, reliability of confidences, and κ on ambiguous inputs.
Metrics that compare two data sets are in `lam.retrieval.metrics.ood`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from lam.retrieval.metrics.ood import auroc
from lam.utils.checks import booleans, check_distributions, check_finite, check_length, check_no_nan

_STEPS = 99  # f = 0, 0.01 … 0.98
_DRAWS = 1000
_ABSTENTION_RATES = np.linspace(0, 1, 11)[:-1]


def sparsification(
    correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]
) -> tuple[Float[Tensor, " F"], Float[Tensor, " F"]]:
    """Accuracy of the queries without the most uncertain share f, for each f.

    accuracy(f) = C((1 − f)Q) / ((1 − f)Q), where C(m) is the number of right first hits among the m most certain of Q
    queries. C is interpolated between integers m, and averaged over all orders of tied queries. A good uncertainty
    gives a rising curve, a useless uncertainty a level curve.

    Args:
        correct: (Q,) whether the first hit is relevant; leave out queries without a relevant item.
        uncertainty: (Q,) higher is more uncertain, such as −κ; infinities are allowed.

    Returns:
        (F,) the shares f = 0, 0.01 … 0.98 and (F,) the accuracies, both float64; accuracies are NaN without queries.

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
    """(Q + 1,) numbers of selected queries among the 0, 1 … Q most certain queries, float64, on the CPU.

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
    selected = checked_answers(selected, "uncertainty", uncertainty)
    order = uncertainty.argsort()
    _, sizes = uncertainty[order].unique_consecutive(return_counts=True)
    kept = torch.cat([sizes.new_zeros(1), sizes]).cumsum(0)
    counts = torch.cat([selected.new_zeros(1), selected[order]]).cumsum(0)[kept]
    return kept.double().cpu(), counts.double().cpu()


def checked_answers(
    correct: Tensor, name: str, values: Tensor, *, check: Callable[[str, Tensor], None] = check_no_nan
) -> Bool[Tensor, " Q"]:
    """`correct` as booleans, after a check of the `values`, one for each query."""
    correct = booleans("correct", correct)
    check_length(name, values, "the queries", len(correct))
    check(name, values)
    return correct


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


def r_auroc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the ROC curve of finding wrong first hits by their uncertainty; higher is better.

    0.5 for a useless uncertainty, NaN if all first hits are right or all are wrong.
    """
    correct = checked_answers(correct, "uncertainty", uncertainty, check=check_finite)
    return auroc(uncertainty[correct], uncertainty[~correct])


def mann_whitney_p(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Two-sided p-value of `r_auroc` against 0.5, by the normal approximation of the Mann-Whitney test.

    NaN if all first hits are right or all are wrong.

    Source: Mann and Whitney (1947).
    """
    correct = checked_answers(correct, "uncertainty", uncertainty, check=check_finite)
    if _is_one_sided(correct):
        return float("nan")
    if (uncertainty == uncertainty[0]).all():
        return 1.0
    from scipy.stats import mannwhitneyu

    values = uncertainty.detach().double().cpu()
    return float(mannwhitneyu(values[correct.cpu()], values[~correct.cpu()], method="asymptotic").pvalue)


def augrc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the generalized risk-coverage curve; lower is better.

    Let E(m) be the number of wrong answers among the m most certain of Q queries. The generalized risk at coverage m/Q
    is E(m)/Q: the share of all queries that get a wrong answer. The curve begins at (0, 0) and has a point for each
    distinct uncertainty. Its area is a sum of trapezoids: a(1 − a)(1 − R-AUROC) + (1 − a)²/2 for accuracy a. For a
    constant uncertainty, the area is half the error rate; without queries, it is NaN.

    Source: Traub, Bungert, Lueth, Baumgartner, Maier-Hein, Maier-Hein and Jaeger (2024), equation 6, as their code
        (`RiskCoverageStats.augrc` in fd-shifts) computes it, without its factor of 1000.

    Example:
        >>> augrc(torch.tensor([True, True, False]), torch.tensor([0.1, 0.2, 0.9]))
        0.0555...
    """
    return _generalized_area(~booleans("correct", correct), uncertainty)


def scod_augrc(correct: Bool[Tensor, " N"], inside: Float[Tensor, " N"], outside: Float[Tensor, " O"]) -> float:
    """AUGRC of known and OOD items together, ranked by one score; lower is better.

    A kept item costs ½ if it is OOD, or known with a wrong first hit, and 0 otherwise. The value depends on the share
    of OOD items, the `prevalence`. It is NaN without known items, or without OOD items.

    Source: Narasimhan, Menon, Jitkrittum and Kumar (2024) for the costs; the area as in `augrc`.

    Example:
        >>> scod_augrc(torch.tensor([True, False]), torch.tensor([0.1, 0.4]), torch.tensor([0.9]))
        0.1111...
    """
    correct = booleans("correct", correct)
    check_length("inside", inside, "the known items", len(correct))
    check_no_nan("outside", outside)
    is_loss = torch.cat([~correct, torch.ones_like(outside, dtype=torch.bool)])
    area = _generalized_area(is_loss, torch.cat([inside.double(), outside.double()]))
    return area / 2 if len(inside) and len(outside) else float("nan")


def abstention_nauc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the curve of accuracy against abstention rate: 0 for queries in random order, 1 for the best order.

    Rates are 0, 0.1 … 0.9. Negative for an order worse than random; NaN if all first hits are right or all are wrong.

    Source: Gisserot-Boukhlef, Faysse, Malherbe, Hudelot and Colombo (2024), equation 6, as MTEB computes it.
    """
    correct = booleans("correct", correct)
    orders = [count_by_certainty(correct, by) for by in (uncertainty, (~correct).double())]
    if _is_one_sided(correct):
        return float("nan")
    area, best = (np.trapezoid(_abstention_curve(n_correct), _ABSTENTION_RATES) for n_correct in orders)
    level = float(correct.double().mean()) * (_ABSTENTION_RATES[-1] - _ABSTENTION_RATES[0])
    return float((area - level) / (best - level)) if best != level else float("nan")


def _is_one_sided(correct: Tensor) -> bool:
    """Whether all answers are right or all are wrong; also true for no answer."""
    return bool(correct.all()) or not correct.any()


def _abstention_curve(n_correct: Tensor) -> list[float]:
    count = len(n_correct) - 1
    answered = [max(count - round(rate * count), 1) for rate in _ABSTENTION_RATES]
    return [float(n_correct[kept]) / kept for kept in answered]


def _generalized_area(is_loss: Tensor, uncertainty: Tensor) -> float:
    kept, n_losses = count_at_thresholds(is_loss, uncertainty)
    return float(torch.trapezoid(n_losses, kept)) / len(is_loss) ** 2 if len(is_loss) else float("nan")


def rank_correlation(one: Shaped[Tensor, " N"], other: Shaped[Tensor, " N"]) -> float | None:
    """Spearman's rank correlation, with mean ranks for ties; None if either input is constant.

    The best correlation of κ with the severity of a corruption, or with the entropy of people's labels, is −1.
    """
    if len(one) < 2 or one.shape != other.shape:
        raise ValueError(f"one and other must be equal in number, at least 2, got {len(one)} and {len(other)}")
    check_finite("one", one)
    check_finite("other", other)
    if (one == one[0]).all() or (other == other[0]).all():
        return None
    from scipy.stats import spearmanr

    result: Any = spearmanr(one.detach().double().cpu(), other.detach().double().cpu())
    return float(result.statistic)


def less_sure_of_crops(kappa: Float[Tensor, " N"], kappa_of_crop: Float[Tensor, " N"]) -> float:
    """Share of images whose crop has a smaller κ than the whole image; ties count half. An uninformative κ gives 0.5.

    Source: Kirchhof et al. (2023), "URL: a representation learning benchmark for transferable uncertainty estimates".
    """
    if len(kappa) == 0 or kappa.shape != kappa_of_crop.shape:
        raise ValueError(f"each kappa needs a kappa_of_crop, at least one, got {len(kappa)} and {len(kappa_of_crop)}")
    check_finite("kappa", kappa)
    check_finite("kappa_of_crop", kappa_of_crop)
    return float(((kappa_of_crop < kappa).double() + (kappa_of_crop == kappa).double() / 2).mean())


def label_entropy(probabilities: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Entropy, in nats, of the labels that people gave each item: −Σ_c p_c log p_c, float64.

    Rows with the same probabilities in another order have equal entropies, so that they tie in a rank correlation.
    """
    check_distributions("probabilities", probabilities)
    return torch.special.entr(probabilities.double().sort(1).values).sum(1)
