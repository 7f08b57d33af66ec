"""lam makes a retrieval network Bayesian.

`fit` puts a Laplace posterior over the last layer of a trained network; every embedding becomes a von Mises-Fisher
distribution with a concentration κ; `evaluate` says whether it can be trusted.
"""

from lam import torchvision_import
from lam.embeddings import Embeddings
from lam.encoder import BayesianEncoder
from lam.encoder_base import Encoder
from lam.evaluation import Evaluation, evaluate
from lam.files import CorruptFileError
from lam.fitting import fit, fit_features
from lam.loading import load
from lam.pairs import Pairs

__version__ = "0.1.0"

torchvision_import.install()

__all__ = [
    "BayesianEncoder",
    "CorruptFileError",
    "Embeddings",
    "Encoder",
    "Evaluation",
    "Pairs",
    "evaluate",
    "fit",
    "fit_features",
    "load",
]
