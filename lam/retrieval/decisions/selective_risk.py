"""Selective risk control: a threshold that bounds the share of wrong answers among the answers.

In contrast, `lam.retrieval.decisions.conformal` bounds rates among all queries of one kind.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lam.retrieval.decisions.conformal import LEVEL
from lam.utils.checks import check_length, check_no_nan, check_share

_STEP = 1.1  # each threshold answers a tenth more queries than the threshold before
_SPARE = 2  # wrong answers that the first threshold allows, if there are enough calibration queries


def control_selective_risk(
    scores: Float[Tensor, " N"], wrong: Bool[Tensor, "..."], *, target: float, confidence: float = LEVEL
) -> float:
    """The lowest tested threshold above which, at this confidence, at most a share `target` of the answers is wrong.

    Let R(t) = P(wrong | score > t). Threshold t_j is the (m_j + 1)-th highest score, for numbers m_1 < m_2 < … that do
    not depend on the scores. The n_j queries above t_j have W_j wrong answers. Given t_j, these queries are independent
    draws from the answers above t_j. So P(Bin(n_j, target) ≤ W_j) is a p-value of the hypothesis R(t_j) > target. The
    thresholds are tested from the highest down, until a p-value exceeds 1 − `confidence`. The result is the last
    threshold that passed. This fixed-sequence testing needs no correction for many thresholds.

    m_1 is the least number of answers that passes the test with two wrong answers. If N is less than twice this number,
    m_1 is computed for one wrong answer or, if N is again too small, for no wrong answer. Each next m is a tenth
    larger; the last m is N. With ties, a threshold may have fewer than `answers_needed` answers; the test skips it.

    The promise is P(R(threshold) > target) ≤ 1 − `confidence` over calibration sets, for any N and any distribution of
    scores. It has two assumptions. First, calibration queries and new queries are independent draws from one source,
    with the same share of strangers. Second, answers with a higher score are not wrong more often than answers with a
    lower score. This is needed because the thresholds depend on the calibration data. (Without ties it suffices that R
    exceeds the target below one threshold and nowhere above it.) In simulations of 1,080 kinds of scores that violate
    the second assumption, at most 4.4 % of 20,000 sets broke the promise, where 5 % is allowed.

    Source: Angelopoulos, Bates, Candès, Jordan and Lei (2021), Learn then Test, sections 2.3 and 3; the exact binomial
        bound as in Geifman and El-Yaniv (2017), SGR.

    Args:
        scores: (N,) accept scores of calibration queries; −∞ for a query that is never answered.
        wrong: (N,) whether the answer would be wrong, as for any stranger.
        target: the allowed share of wrong answers, in (0, 1).
        confidence: in (0, 1).

    Returns:
        The threshold: −∞ if every finite score may be answered, ∞ if too many answers with a high score are wrong.

    Raises:
        ValueError: for NaN, another length, a share outside (0, 1), or fewer queries than `answers_needed`.

    Example:
        >>> scores = torch.arange(100.0)
        >>> control_selective_risk(scores, scores < 20, target=0.1)
        17.0
        >>> control_selective_risk(scores, scores > 80, target=0.1)
        inf
    """
    check_length("wrong", wrong, "the scores", len(scores))
    check_no_nan("scores", scores)
    least = answers_needed(target, confidence=confidence)
    if len(scores) < least:
        raise ValueError(
            f"at most {target:g} wrong with confidence {confidence:g} needs at least {least} calibration queries, all "
            f"answered without an error, got {len(scores)}: give more queries, a larger target or a lower confidence"
        )
    from scipy.special import bdtr

    falling, order = scores.detach().cpu().double().sort(descending=True)
    below = torch.cat([falling, falling.new_tensor([-math.inf])])
    thresholds = below[torch.tensor(_ranks(len(falling), target, confidence))]
    answered = torch.searchsorted(-falling, -thresholds)
    n_wrong = torch.cat([torch.zeros(1), wrong.cpu()[order].cumsum(0)])[answered]
    p_values = torch.from_numpy(bdtr(n_wrong.double().numpy(), answered.numpy(), target))
    can_hold = answered >= least
    holds = ((p_values <= 1 - confidence) | ~can_hold).long().cumprod(0).bool() & can_hold
    return float(thresholds[holds][-1]) if holds.any() else math.inf


def answers_needed(target: float, *, n_wrong: int = 0, confidence: float = LEVEL) -> int:
    """The least number of answers, `n_wrong` of them wrong, that can promise at most a share `target` of wrong answers.

    This is the least n with P(Bin(n, target) ≤ n_wrong) ≤ 1 − confidence.

    Example:
        >>> answers_needed(0.05), answers_needed(0.05, n_wrong=1), answers_needed(0.01)
        (59, 93, 299)
    """
    check_share("target", target)
    check_share("confidence", confidence)
    from scipy.special import bdtr

    n = max(math.ceil(round(math.log(1 - confidence) / math.log(1 - target), 9)), n_wrong + 1)
    while bdtr(n_wrong, n, target) > 1 - confidence:
        n += 1
    return n


def _ranks(count: int, target: float, confidence: float) -> list[int]:
    """The numbers m_j of `control_selective_risk`."""
    starts = [answers_needed(target, n_wrong=spare, confidence=confidence) for spare in range(_SPARE + 1)]
    ranks = [max([starts[0], *(start for start in starts if 2 * start <= count)])]
    while ranks[-1] < count:
        ranks.append(min(max(round(ranks[-1] * _STEP), ranks[-1] + 1), count))
    return ranks
