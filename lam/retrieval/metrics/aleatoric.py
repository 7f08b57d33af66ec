"""Metrics of κ on ambiguous inputs: corrupted images, crops, and items that people label differently."""

from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lam.utils.checks import check_distributions, check_finite


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

    result: Any = spearmanr(one.cpu(), other.cpu())
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
