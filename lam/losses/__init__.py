"""Training losses, by name; one file a loss.

`build` makes those of embeddings; `DistributionLoss`es take a concentration with each, and methods make them.

The choice decides a table's figures, so every table names it. The curvature of a posterior is chosen apart from it:
that of `log_posterior` unless a method's option `curvature` names another of `lam.hessians.CURVATURES`.
"""

from typing import Literal, get_args

from lam.losses.alignment import ConcentrationAlignment, Explicit
from lam.losses.aninfonce import AnInfoNCE
from lam.losses.base import Loss, MarginLoss, TrainableLoss, as_settings, margin_of, settings_of
from lam.losses.contrastive import Contrastive
from lam.losses.distributions import DistributionLoss
from lam.losses.elk import ELK
from lam.losses.hib import HIB
from lam.losses.infonce import InfoNCE, two_views
from lam.losses.log_posterior import LogPosterior
from lam.losses.mc_infonce import MCInfoNCE
from lam.losses.pml import PytorchMetricLearning
from lam.losses.siamese import BYOL, SimSiam
from lam.losses.squared import Squared
from lam.losses.supcon import SupCon
from lam.losses.swav import SwAV
from lam.losses.varcon import VarCon
from lam.utils.checks import check_positive

LossName = Literal["contrastive", "log_posterior", "squared", "pml", "supcon", "infonce", "varcon", "aninfonce"]

TEMPERATURE = 0.1
_WITHOUT_TEMPERATURE: dict[str, type[MarginLoss]] = {
    "contrastive": Contrastive,
    "log_posterior": LogPosterior,
    "squared": Squared,
    "pml": PytorchMetricLearning,
}


def build(
    name: str = "contrastive", *, margin: float, temperature: float = TEMPERATURE, dimension: int | None = None
) -> Loss:
    """A training loss by its name.

    Args:
        name: "contrastive" (mean d², active mean (margin − d)²), "log_posterior" (mean ½d², mean over all negatives
            ½(margin² − d²)), "squared" (mean d², active mean margin² − d²), "pml" (pytorch-metric-learning's
            `ContrastiveLoss`), "supcon" (softmax of cosines over a temperature), "infonce" (the same, each positive
            pair against negatives alone), "varcon" (items against centroids of classes) or "aninfonce" (infonce with a
            weight for each dimension, which is learned).
        margin: in (0, 2]: negative pairs at this distance or beyond exert no force; of the losses with a temperature
            that of miners and of the contrastive curvature alone.
        temperature: of "supcon", "infonce", "varcon" and "aninfonce", positive.
        dimension: D of the embeddings, which "aninfonce" needs.

    Returns:
        A loss, called with unit embeddings and `Pairs`.

    Raises:
        ValueError: for an unknown name, a margin outside (0, 2], a temperature that is not positive, or "aninfonce"
            without a dimension.

    Example:
        >>> build("contrastive", margin=0.7)
        Contrastive(margin=0.7)
    """
    if name not in get_args(LossName):
        raise ValueError(f"loss must be one of {', '.join(get_args(LossName))}, got {name!r}")
    if name in _WITHOUT_TEMPERATURE:
        return _WITHOUT_TEMPERATURE[name](margin=margin)
    check_positive("temperature", temperature)
    if name == "aninfonce":
        if dimension is None:
            raise ValueError("aninfonce has a weight for each dimension: say dimension=D, that of the embeddings")
        return AnInfoNCE(dimension, 1 / (2 * temperature), margin=margin)
    return {"supcon": SupCon, "infonce": InfoNCE, "varcon": VarCon}[name](margin=margin, temperature=temperature)


__all__ = [
    "BYOL",
    "ELK",
    "HIB",
    "AnInfoNCE",
    "ConcentrationAlignment",
    "Contrastive",
    "DistributionLoss",
    "Explicit",
    "InfoNCE",
    "LogPosterior",
    "Loss",
    "LossName",
    "MCInfoNCE",
    "MarginLoss",
    "PytorchMetricLearning",
    "SimSiam",
    "Squared",
    "SupCon",
    "SwAV",
    "TrainableLoss",
    "VarCon",
    "as_settings",
    "build",
    "margin_of",
    "settings_of",
    "two_views",
]
