"""Training losses by name.

`build` creates losses on embeddings. A `DistributionLoss`, which a method creates, also takes concentrations. A
method's option `curvature` chooses the posterior's curvature, independently of the loss.
"""

from lam.losses.base import Loss, MarginLoss, TemperatureLoss, TrainableLoss
from lam.losses.distributions import ELK, HIB, DistributionLoss, MCInfoNCE
from lam.losses.margin import Contrastive, LogPosterior, PytorchMetricLearning, Squared
from lam.losses.softmax import AnInfoNCE, InfoNCE, SupCon, VarCon
from lam.losses.views import BYOL, ConcentrationAlignment, Explicit, Siamese, SimSiam, SwAV
from lam.utils import registry

__all__ = [
    "BYOL",
    "ELK",
    "HIB",
    "LOSSES",
    "AnInfoNCE",
    "ConcentrationAlignment",
    "Contrastive",
    "DistributionLoss",
    "Explicit",
    "InfoNCE",
    "LogPosterior",
    "Loss",
    "MCInfoNCE",
    "MarginLoss",
    "PytorchMetricLearning",
    "Siamese",
    "SimSiam",
    "Squared",
    "SupCon",
    "SwAV",
    "TemperatureLoss",
    "TrainableLoss",
    "VarCon",
    "build",
    "find",
    "register",
]

TEMPERATURE = 0.1
LOSSES: dict[str, type[Loss]] = {
    "contrastive": Contrastive,
    "log_posterior": LogPosterior,
    "squared": Squared,
    "pml": PytorchMetricLearning,
    "supcon": SupCon,
    "infonce": InfoNCE,
    "varcon": VarCon,
    "aninfonce": AnInfoNCE,
}
"""Losses by their names in configurations; see `register`."""


def find(name: str) -> type[Loss]:
    """The class of a registered loss; another name raises a `ValueError`."""
    return registry.find(LOSSES, "loss", name, "lam.losses.register")


def build(
    name: str = "contrastive", *, margin: float, temperature: float = TEMPERATURE, dimension: int | None = None
) -> Loss:
    """A training loss by its name.

    Args:
        name: a key of `LOSSES`; each class states its formula. "contrastive", "log_posterior", "squared" and "pml" (of
            pytorch-metric-learning) use the distances of pairs and a margin. The others use a softmax of
            cosine/temperature: "supcon" over all items, "infonce" over a positive pair and its negatives, "varcon" over
            centroids of classes. "aninfonce" is infonce with a learned weight for each dimension.
        margin: in (0, 2]; negative pairs at this distance or beyond have no gradient. For losses with a temperature,
            only miners and the contrastive curvature use the margin.
        temperature: temperature of "supcon", "infonce", "varcon" and "aninfonce", positive.
        dimension: D of the embeddings; "aninfonce" needs it.

    Returns:
        A loss, called with unit embeddings and `Pairs`.

    Raises:
        ValueError: for an unknown name, a setting outside its range, or "aninfonce" without a dimension.

    Example:
        >>> build("contrastive", margin=0.7)
        Contrastive(margin=0.7)
    """
    return find(name).configured(margin=margin, temperature=temperature, dimension=dimension)


def register(name: str, loss: type[Loss]) -> None:
    """Register a loss for configurations; `Loss.configured` creates it from the settings of a configuration.

    Raises:
        ValueError: if another class has the name, or for a class that is not derived from `Loss`.
    """
    registry.check_class("loss", loss, Loss)
    registry.enter(LOSSES, "loss", name, loss)
