"""Metrics of an uncertainty that decides which queries stay unanswered: selective retrieval and abstention.

Each metric depends only on the order of the uncertainties; a tie counts as the mean over all its orders.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.retrieval.metrics.ood import auroc
from lam.retrieval.metrics.uncertainty import count_at_thresholds, count_by_certainty
from lam.utils.checks import booleans, check_finite, check_length, check_no_nan

_ABSTENTION_RATES = np.linspace(0, 1, 11)[:-1]


def r_auroc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the ROC curve of finding wrong first hits by their uncertainty; higher is better.

    0.5 for a useless uncertainty, NaN if all first hits are right or all are wrong.
    """
    correct = booleans("correct", correct)
    check_length("uncertainty", uncertainty, "the queries", len(correct))
    check_finite("uncertainty", uncertainty)
    return auroc(uncertainty[correct], uncertainty[~correct])


def mann_whitney_p(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Two-sided p-value of the R-AUROC against 0.5, by the normal approximation of the Mann-Whitney test.

    NaN if all first hits are right or all are wrong.

    Source: Mann and Whitney (1947).
    """
    correct = booleans("correct", correct)
    check_length("uncertainty", uncertainty, "the queries", len(correct))
    check_finite("uncertainty", uncertainty)
    if _is_one_sided(correct):
        return float("nan")
    if (uncertainty == uncertainty[0]).all():
        return 1.0
    from scipy.stats import mannwhitneyu

    values = uncertainty.double().cpu()
    return float(mannwhitneyu(values[correct.cpu()], values[~correct.cpu()], method="asymptotic").pvalue)


def augrc(correct: Bool[Tensor, " Q"], uncertainty: Float[Tensor, " Q"]) -> float:
    """Area under the generalized risk-coverage curve; lower is better.

    Let E(m) be the number of wrong answers among the m most certain of Q queries. The generalized risk at coverage m/Q
    is E(m)/Q: the share of all queries that get a wrong answer. The curve begins at (0, 0) and has a point for each
    distinct uncertainty; the area is a sum of trapezoids. With accuracy a, it is a(1 − a)(1 − R-AUROC) + (1 − a)²/2.
    A constant uncertainty gives half the error rate; without queries, the area is NaN.

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
    """Area under the curve of accuracy against abstention rate, scaled: 0 is useless, 1 is the best order.

    Rates are 0, 0.1 … 0.9. Negative for an order worse than chance; NaN if all first hits are right or all are wrong.

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
