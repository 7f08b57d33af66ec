"""Methods: a method trains a network and makes an encoder of it.

A method is a dataclass of options, such as `Hib(n_samples=4)`, derived from `lam.methods.base.Method`. Its main
function is `train(network, dataset, training)`. `METHODS` holds the classes by name; `register` adds another.
"""

from lam.methods.base import Method, Trained
from lam.methods.concentration import ConcentrationMethod, Elk, HibVmf, Mcinfonce
from lam.methods.deterministic import Aninfonce, DeepEnsemble, Deterministic, KnnDistance, McDropout, Norm, Varcon
from lam.methods.head import HeadMethod, Hib, LossPrediction, Pfe
from lam.methods.laplace_online import LaplaceOnline, OnlinePosterior
from lam.methods.laplace_posthoc import LaplaceMethod, LaplacePosthoc
from lam.methods.views import Byol, Simclr, Simsiam, Swav, ViewsMethod
from lam.training import Training
from lam.utils import registry

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        *(Deterministic, Norm, KnnDistance, McDropout, DeepEnsemble, Pfe, Hib),
        *(Mcinfonce, Elk, HibVmf, LossPrediction, Varcon, Aninfonce),
        *(Simclr, Simsiam, Byol, Swav),
        *(LaplacePosthoc, LaplaceOnline),
    )
}


def find(name: str) -> type[Method]:
    """The class of a method; `ValueError` for an unknown name.

    Example:
        >>> find("hib")(n_samples=4)
        Hib(n_samples=4, kl_weight=0.0001, scale=5.0, offset=5.0, shared=True)
    """
    return registry.find(METHODS, "method", name, "lam.methods.register")


def register(name: str, method: type[Method]) -> None:
    """Add a method under a free name; `lam.encoders.load.register` adds its encoder."""
    registry.check_class("method", method, Method, record=True)
    registry.enter(METHODS, "method", name, method)
    method.name = name


__all__ = [
    "METHODS",
    "Aninfonce",
    "Byol",
    "ConcentrationMethod",
    "DeepEnsemble",
    "Deterministic",
    "Elk",
    "HeadMethod",
    "Hib",
    "HibVmf",
    "KnnDistance",
    "LaplaceMethod",
    "LaplaceOnline",
    "LaplacePosthoc",
    "LossPrediction",
    "McDropout",
    "Mcinfonce",
    "Method",
    "Norm",
    "OnlinePosterior",
    "Pfe",
    "Simclr",
    "Simsiam",
    "Swav",
    "Trained",
    "Training",
    "Varcon",
    "ViewsMethod",
    "find",
    "register",
]
