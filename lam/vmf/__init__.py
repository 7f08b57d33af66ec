"""The von Mises-Fisher distribution, ratios of Bessel functions, and `Embeddings`, a batch of distributions."""

from lam.vmf.bessel import bessel_ratio, bessel_ratio_complement, kappa_from_resultant, log_normalizer
from lam.vmf.distribution import VonMisesFisher, fuse
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings, MeanResultant, mean_resultant_length

__all__ = [
    "KAPPA_RANGE",
    "Embeddings",
    "MeanResultant",
    "VonMisesFisher",
    "bessel_ratio",
    "bessel_ratio_complement",
    "fuse",
    "kappa_from_resultant",
    "log_normalizer",
    "mean_resultant_length",
]
