"""lam makes a retrieval network Bayesian.

`fit` puts a Laplace posterior over the last layer of a trained network. Every embedding becomes a von Mises-Fisher
distribution with a concentration κ. `evaluate` measures whether κ can be trusted. A table in docs/explanation/making.md
explains the letters in shapes, such as N items and D embedding dimensions.
"""

from lam.encoders.base import Encoder
from lam.encoders.batches import HeldOut
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.load import load
from lam.evaluation import Evaluation, evaluate
from lam.methods.fit import fit, fit_features
from lam.methods.laplace import Laplace
from lam.pairs.pairs import Pairs
from lam.utils import torchvision as torchvision_import
from lam.utils.files import CorruptFileError
from lam.vmf.embeddings import Embeddings

__version__ = "0.1.0"

torchvision_import.install()

__all__ = [
    "BayesianEncoder",
    "CorruptFileError",
    "Embeddings",
    "Encoder",
    "Evaluation",
    "HeldOut",
    "Laplace",
    "Pairs",
    "evaluate",
    "fit",
    "fit_features",
    "load",
]
