"""Gaussians over weights: features in, embeddings out. One file a structure."""

from lam.posteriors.base import Posterior
from lam.posteriors.diagonal import DiagonalPosterior
from lam.posteriors.full import FullPosterior
from lam.posteriors.kron import EkfacPosterior, KronPosterior
from lam.posteriors.low_rank import LowRankPosterior

POSTERIORS: dict[str, type[Posterior]] = {
    "diag": DiagonalPosterior,
    "kron": KronPosterior,
    "ekfac": EkfacPosterior,
    "full": FullPosterior,
    "low_rank": LowRankPosterior,
}
"""Every posterior by the structure of its covariance, as files and `structure=` name it."""

__all__ = [
    "POSTERIORS",
    "DiagonalPosterior",
    "EkfacPosterior",
    "FullPosterior",
    "KronPosterior",
    "LowRankPosterior",
    "Posterior",
]
