"""Training losses, by name; one file a loss.

The choice decides a table's figures, so every table names it. The curvature of a posterior is always that of
`log_posterior`, whatever was trained with.
"""

from typing import Literal, get_args

from lam.losses.base import Loss, MarginLoss, margin_of
from lam.losses.contrastive import Contrastive
from lam.losses.infonce import InfoNCE, two_views
from lam.losses.log_posterior import LogPosterior
from lam.losses.pml import PytorchMetricLearning
from lam.losses.squared import Squared
from lam.losses.supcon import SupCon

LossName = Literal["contrastive", "log_posterior", "squared", "pml", "supcon", "infonce"]

TEMPERATURE = 0.1
_LOSSES: dict[str, type[MarginLoss]] = {
    "contrastive": Contrastive,
    "log_posterior": LogPosterior,
    "squared": Squared,
    "pml": PytorchMetricLearning,
    "supcon": SupCon,
    "infonce": InfoNCE,
}


def build(name: str = "contrastive", *, margin: float, temperature: float = TEMPERATURE) -> Loss:
    """A training loss by its name.

    Args:
        name: "contrastive" (mean d², active mean (margin − d)²), "log_posterior" (mean ½d², mean over all negatives
            ½(margin² − d²)), "squared" (mean d², active mean margin² − d²), "pml" (pytorch-metric-learning's
            `ContrastiveLoss`), "supcon" (softmax of cosines over a temperature) or "infonce" (the same, each positive
            pair against negatives alone).
        margin: in (0, 2]: negative pairs at this distance or beyond exert no force; of "supcon" and "infonce", that of
            the posterior's curvature alone.
        temperature: of "supcon" and "infonce", positive.

    Returns:
        A loss, called with unit embeddings and `Pairs`.

    Raises:
        ValueError: for an unknown name, a margin outside (0, 2] or a temperature that is not positive.

    Example:
        >>> build("contrastive", margin=0.7)
        Contrastive(margin=0.7)
    """
    if name not in _LOSSES:
        raise ValueError(f"loss must be one of {', '.join(get_args(LossName))}, got {name!r}")
    options = {"temperature": temperature} if name in ("supcon", "infonce") else {}
    return _LOSSES[name](margin=margin, **options)


__all__ = [
    "Contrastive",
    "InfoNCE",
    "LogPosterior",
    "Loss",
    "LossName",
    "MarginLoss",
    "PytorchMetricLearning",
    "Squared",
    "SupCon",
    "build",
    "margin_of",
    "two_views",
]
