"""The length of the unnormalised embedding as κ: free of cost, and in any honest table."""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from lam.curvature import Relation
from lam.losses import Loss
from lam.methods import deterministic
from lam.methods.base import Stage, Trained, silent
from lam.methods.seeded import ConcentrationEncoder


@dataclass(frozen=True)
class NormOptions:
    """There are none."""


class NormEncoder(ConcentrationEncoder):
    """Embed with κ = ‖f‖, f = Wφ + b being the head's output before normalisation.

    A von Mises-Fisher density C_D(κ) exp(κ μ·x) has κμ as its natural parameter, and f is read as that. No loss of
    normalised embeddings asks ‖f‖ to mean anything; its scale is arbitrary, so only the order of κ says something.

    Source: Scott, Gallagher and Mozer (2021), "von Mises-Fisher loss", who train with that reading; here nothing does.

    Args:
        network, head, seed, common: of `SeededEncoder`.
    """

    kind = "norm"

    def concentration(self, features: Float[Tensor, "N P"]) -> Float[Tensor, " N"]:
        """Give ‖f‖, float64."""
        return self.unnormalised(features).double().norm(dim=1)


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: NormOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, and nothing more.

    Args:
        network, dataset, loss, epochs, pretrained, relation, stage, training: of `lam.methods.deterministic.train`.
        options: none.
        seed: of the order of the data, and of the samples drawn from the distributions.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.methods.deterministic.train`.
    """
    training |= {"loss": loss, "epochs": epochs, "pretrained": pretrained, "relation": relation, "seed": seed}
    encoder, histories = deterministic.train(network, dataset, stage=stage, method=NormEncoder.kind, **training)
    return Trained(NormEncoder.upon(encoder, seed=seed), histories)
