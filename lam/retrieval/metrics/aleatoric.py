"""Whether κ says how ambiguous an input is: against severities, crops, people's labels, and right and wrong answers."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from lam.utils.checks import check_finite


def rank_correlation(one: Shaped[Tensor, " N"], other: Shaped[Tensor, " N"]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None where one of the two is constant.

    Of κ with the severity of a corruption, or with the entropy of people's labels, it is at best −1.

    Raises:
        ValueError: for fewer than two values, or numbers that are not finite.

    Example:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([9.0, 4.0, 1.0]))
        -1.0
    """
    if len(one) < 2 or one.shape != other.shape:
        raise ValueError(f"one and other must be at least two values each, as many, got {len(one)} and {len(other)}")
    check_finite("one", one)
    check_finite("other", other)
    if (one == one[0]).all() or (other == other[0]).all():
        return None
    ranks = torch.stack([_mean_ranks(values) for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1].clamp(-1, 1))


def less_sure_of_crops(kappa: Float[Tensor, " N"], kappa_of_crop: Float[Tensor, " N"]) -> float:
    """Share of images whose crop has a smaller κ than the whole; half where κ knows nothing of it, ties as half.

    Source: Kirchhof et al. (2023), "URL: a representation learning benchmark for transferable uncertainty estimates".

    Raises:
        ValueError: where there is no image, as many crops as there are images are not given, or a κ is not finite.

    Example:
        >>> less_sure_of_crops(torch.tensor([5.0, 5.0]), torch.tensor([2.0, 5.0]))
        0.75
    """
    if len(kappa) == 0 or kappa.shape != kappa_of_crop.shape:
        raise ValueError(f"each image needs its crop, at least one, got {len(kappa)} and {len(kappa_of_crop)}")
    check_finite("kappa", kappa)
    check_finite("kappa_of_crop", kappa_of_crop)
    return float(((kappa_of_crop < kappa).double() + (kappa_of_crop == kappa).double() / 2).mean())


def label_entropy(probabilities: Float[Tensor, "N C"]) -> Float[Tensor, " N"]:
    """Entropy, in nats, of the labels that people gave each item: −Σ_c p_c log p_c.

    Raises:
        ValueError: for rows that are no probabilities.

    Example:
        >>> label_entropy(torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
        tensor([0.0000, 0.6931])
    """
    sums = probabilities.sum(1)
    wrong = ((probabilities < 0).any(1) | ((sums - 1).abs() > 1e-3)).nonzero()
    if len(wrong):
        row = int(wrong[0, 0])
        raise ValueError(
            f"probabilities must be at least 0 and add up to 1, got {float(sums[row])} in all at row {row}"
        )
    return torch.special.entr(probabilities).sum(1)


@dataclass(frozen=True)
class Failures:
    """How κ of right answers differs from κ of wrong ones.

    Attributes:
        auroc: probability that a right answer has the larger κ, ties as half; None where all are right, or none.
        u: the Mann-Whitney statistic, how many pairs of a right and a wrong answer that is.
        p_value: of U under no difference, two-sided, by its normal approximation with ties; None as above.
    """

    auroc: float | None
    u: float
    p_value: float | None


def failures(kappa: Float[Tensor, " N"], right: Bool[Tensor, " N"], *, name: str = "kappa") -> Failures:
    """Compare κ of right and of wrong answers.

    Source: Mann and Whitney (1947).

    Args:
        kappa: (N,) larger where an answer is surer.
        right: (N,) whether each answer is.
        name: what errors call κ.

    Raises:
        ValueError: where κ and answers are not as many, or κ is not finite.

    Example:
        >>> failures(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([False, False, True, True])).auroc
        1.0
    """
    if kappa.shape != right.shape:
        raise ValueError(f"each answer needs its kappa, got {len(right)} and {len(kappa)}")
    check_finite(name, kappa)
    n_right, n_wrong = int(right.sum()), int((~right).sum())
    if not n_right or not n_wrong:
        return Failures(None, 0.0, None)
    from scipy.stats import mannwhitneyu

    u, p_value = mannwhitneyu(kappa[right].double().cpu(), kappa[~right].double().cpu(), method="asymptotic")
    p_value = 1.0 if (kappa == kappa[0]).all() else float(p_value)
    return Failures(float(u) / (n_right * n_wrong), float(u), p_value)


def _mean_ranks(values: Tensor) -> Tensor:
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2).double()[places]
