"""Gaussians over weights: features in, embeddings out. One file a structure."""

from lam.posteriors.base import Posterior
from lam.posteriors.diagonal import LastLayerPosterior

POSTERIORS: dict[str, type[Posterior]] = {"diagonal": LastLayerPosterior}
"""Every posterior by the structure of its covariance, as files name it."""

__all__ = ["POSTERIORS", "LastLayerPosterior", "Posterior"]
