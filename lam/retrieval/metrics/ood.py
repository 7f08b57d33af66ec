"""How well a score separates out-of-distribution (OOD) items from in-distribution (ID) items.

OOD is the positive class, and a higher score means more OOD: pass −κ, not κ.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lam.utils.checks import check_finite, check_length


def auroc(in_distribution: Float[Tensor, " N"], out_of_distribution: Float[Tensor, " O"]) -> float:
    """Area under the ROC curve: P(an OOD item scores above an in-distribution item); higher is better.

    A tie counts half.

    Args:
        in_distribution: (N,) scores of in-distribution items.
        out_of_distribution: (O,) scores of OOD items.

    Returns:
        An area in [0, 1], 0.5 for a useless score; NaN if either set is empty.

    Raises:
        ValueError: for a score that is not finite; the message names its index.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
        0.75
    """
    from sklearn.metrics import roc_auc_score

    return _area(roc_auc_score, in_distribution, out_of_distribution)


def auprc(in_distribution: Float[Tensor, " N"], out_of_distribution: Float[Tensor, " O"]) -> float:
    """Average precision of finding OOD items; higher is better.

    AP = Σ_t (recall_t − recall_(t−1)) precision_t over falling thresholds t. Arguments and errors as in `auroc`.

    Returns:
        The average precision in [0, 1], the `prevalence` for a useless score; NaN if either set is empty.

    Example:
        >>> auprc(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
        0.8333333333333333
    """
    from sklearn.metrics import average_precision_score

    return _area(average_precision_score, in_distribution, out_of_distribution)


def prevalence(in_distribution: Float[Tensor, " N"], out_of_distribution: Float[Tensor, " O"]) -> float:
    """Share of OOD items among all items, the AUPRC of a useless score; NaN without items."""
    total = len(in_distribution) + len(out_of_distribution)
    return len(out_of_distribution) / total if total else float("nan")


def roc_curve(
    in_distribution: Float[Tensor, " N"], out_of_distribution: Float[Tensor, " O"]
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(T,) false positive rates, rising, and (T,) true positive rates, float64, without collinear points."""
    from sklearn.metrics import roc_curve as curve

    return _curve(curve, in_distribution, out_of_distribution)


def precision_recall_curve(
    in_distribution: Float[Tensor, " N"], out_of_distribution: Float[Tensor, " O"]
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """(T,) recalls of OOD items, rising from 0 to 1, and (T,) precisions, for all thresholds, float64."""
    from sklearn.metrics import precision_recall_curve as curve

    precision, recall = _curve(curve, in_distribution, out_of_distribution)
    return recall.flip(0), precision.flip(0)


def _area(metric: Callable[..., Any], in_distribution: Tensor, out_of_distribution: Tensor) -> float:
    target, scores = _target_and_scores(in_distribution, out_of_distribution)
    return float(metric(target, scores)) if 0 < target.sum() < len(target) else float("nan")


def _curve(metric: Callable[..., Any], in_distribution: Tensor, out_of_distribution: Tensor) -> tuple[Tensor, Tensor]:
    target, scores = _target_and_scores(in_distribution, out_of_distribution)
    if not 0 < target.sum() < len(target):
        n, n_ood = len(in_distribution), len(out_of_distribution)
        raise ValueError(f"a curve needs items of both classes, got {n} in distribution and {n_ood} out of it")
    first, second, _ = metric(target, scores)
    return torch.from_numpy(first), torch.from_numpy(second)


def _target_and_scores(in_distribution: Tensor, out_of_distribution: Tensor) -> tuple[Any, Any]:
    for name, scores in (("in_distribution", in_distribution), ("out_of_distribution", out_of_distribution)):
        check_finite(name, scores)
        check_length(name, scores, "the items", scores.numel())
    target = torch.cat([torch.zeros(len(in_distribution)), torch.ones(len(out_of_distribution))])
    return target.numpy(), torch.cat([in_distribution, out_of_distribution]).detach().double().cpu().numpy()
