"""Gaussian posteriors over weights, by the structure of the covariance."""

from lam.posteriors.base import Posterior
from lam.posteriors.last_layer import DiagonalPosterior, EkfacPosterior, FullPosterior, KronPosterior, LowRankPosterior
from lam.posteriors.layers import LayersKronPosterior, LayersPosterior

POSTERIORS: dict[str, type[Posterior]] = {
    posterior.structure.name: posterior
    for posterior in (DiagonalPosterior, KronPosterior, EkfacPosterior, FullPosterior, LowRankPosterior)
}
"""Posteriors over the last layer, by the name of their structure."""

LAYERS_POSTERIORS: dict[str, type[LayersPosterior]] = {"diag": LayersPosterior, "kron": LayersKronPosterior}
"""Posteriors over several layers, by the name of their structure."""

__all__ = [
    "LAYERS_POSTERIORS",
    "POSTERIORS",
    "DiagonalPosterior",
    "EkfacPosterior",
    "FullPosterior",
    "KronPosterior",
    "LayersKronPosterior",
    "LayersPosterior",
    "LowRankPosterior",
    "Posterior",
]
