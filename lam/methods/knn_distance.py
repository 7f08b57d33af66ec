"""The distance to the k-th nearest training item, among features of the network, as uncertainty."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.bessel import check_all, kappa_from_resultant
from lam.curvature import Relation
from lam.embeddings import KAPPA_RANGE
from lam.encoder_base import widened
from lam.head import features_and_output
from lam.losses import Loss
from lam.methods import deterministic
from lam.methods.base import Stage, Trained, silent
from lam.methods.seeded import ConcentrationEncoder, reference_inputs
from lam.retrieval.ood import NEIGHBOUR, check_neighbours, unit_knn_distance
from lam.training.settings import refuse_below


@dataclass(frozen=True)
class NeighbourOptions:
    """What an item is compared with.

    Attributes:
        k: which of its nearest neighbours, counted from 1.
        reference: how many training items are kept, drawn at random; all of them where there are no more.

    Raises:
        ValueError: for a k below 1, or fewer than k reference items.
    """

    k: int = NEIGHBOUR
    reference: int = 5000

    def __post_init__(self) -> None:
        refuse_below("k", self.k, 1)
        if self.reference < self.k:
            raise ValueError(f"reference must be at least k = {self.k} items, got {self.reference}")


class NeighbourEncoder(ConcentrationEncoder):
    """Embed with the κ that solves A_D(κ) = max(0, c), c being the cosine to the k-th nearest reference feature.

    That is the von Mises-Fisher distribution on the sphere of the embeddings whose draws lie, on average, at that
    cosine from its mean. The order of κ is that of c; how the scale is chosen no source says. An item of the reference
    is its own first neighbour.

    Source: Sun, Ming, Zhu and Li (2022), for the distance.

    Args:
        network, head, common: of `SeededEncoder`.
        reference: (M, P) features of training items as unit vectors, M ≥ k; zeros stay zeros.
        k: which neighbour, counted from 1.
        seed: of the samples drawn from the distributions.

    Raises:
        ValueError: where k is below 1, or the reference holds fewer than k items or others than unit vectors.
    """

    kind = "knn_distance"

    def __init__(
        self,
        network: nn.Module,
        head: str,
        *,
        reference: Float[Tensor, "M P"],
        k: int = NEIGHBOUR,
        seed: int = 0,
        **common: Any,
    ) -> None:
        check_neighbours(k, reference)
        length = reference.norm(dim=1)
        check_all(
            ((length - 1).abs() < 1e-4) | (length == 0), "reference must be of unit vectors, their length", length
        )
        super().__init__(network, head, seed=seed, **common)
        self.k = k
        self.reference = reference

    def to(self, device: torch.device | str) -> "NeighbourEncoder":
        """Move network and reference to a device, in place."""
        super().to(device)
        self.reference = self.reference.to(device)
        return self

    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """Solve for κ in float64, from 1 − c, which keeps its digits near 1."""
        distance = unit_knn_distance(_unit(features).to(self.reference), self.reference, k=self.k)
        cosine = (1 - distance).clamp(min=0)
        return kappa_from_resultant(
            cosine, self.dimension, one_minus_resultant=distance.clamp(max=1), max_kappa=KAPPA_RANGE[1]
        )

    def settings(self) -> dict[str, Any]:
        """The seed and k."""
        return {**super().settings(), "k": self.k}

    def tensors(self) -> dict[str, Tensor]:
        """The reference."""
        return {"reference": self.reference}


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: NeighbourOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, then keep the features of some training items.

    Args:
        network, dataset, loss, epochs, pretrained, relation, stage, training: of `lam.methods.deterministic.train`.
        options: what an item is compared with.
        seed: of the order of the data, of the reference, and of the samples drawn from the distributions.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.methods.deterministic.train`; or for a data set of fewer than k items.
    """
    options = options or NeighbourOptions()
    training |= {"loss": loss, "epochs": epochs, "pretrained": pretrained, "relation": relation, "seed": seed}
    encoder, histories = deterministic.train(network, dataset, stage=stage, method=NeighbourEncoder.kind, **training)
    with stage("reference"):
        inputs = reference_inputs(dataset, options.reference, seed=seed)
        reference = torch.cat([_unit(features_and_output(network, encoder.head, batch)[0]) for batch in inputs])
    return Trained(NeighbourEncoder.upon(encoder, reference=reference, k=options.k, seed=seed), histories)


def _unit(features: Tensor) -> Tensor:
    return F.normalize(widened(features))
