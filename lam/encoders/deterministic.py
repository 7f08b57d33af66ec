"""The network as it is, without any uncertainty."""

from typing import Any

from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, base_arguments, own_direction
from lam.encoders.files import SavedEncoder
from lam.models.head import features_and_output
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings


class DeterministicEncoder(Encoder):
    """Embed without uncertainty: κ is the upper end of its range for every input, a bound, and the variance 0.

    Args:
        network: maps (N, ...) inputs to (N, D) by a linear layer at its end, normalised or not.
        head: path of that layer.
        common: `relation`, `preprocessing` and `ood_score` of `Encoder`.
    """

    kind = "deterministic"
    has_kappa = False

    def __init__(self, network: nn.Module, head: str, **common: Any) -> None:
        super().__init__(network, head, **common)

    @property
    def dimension(self) -> int:
        """The number of embedding dimensions D."""
        layer: Any = self._module.get_submodule(self.head)
        return layer.out_features

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function of a batch of inputs; nothing is drawn."""

        def predict(inputs: Any) -> Prediction:
            features, output = features_and_output(self._module, self.head, inputs)
            return Prediction(features, without_uncertainty(own_direction(output)))

        return predict

    @classmethod
    def restored(cls, saved: SavedEncoder) -> "DeterministicEncoder":
        """The encoder that `save` wrote."""
        if saved.network is None:
            raise ValueError(f"an encoder of kind {saved.kind} needs its network")
        return cls(saved.network, saved.head, **base_arguments(saved))

    @property
    def _module(self) -> nn.Module:
        network: Any = self.network
        return network


def without_uncertainty(mean: Tensor) -> Embeddings:
    """Embeddings of unit vectors (N, D) whose uncertainty is unknown: R = 1, variance 0, κ at its upper end."""
    one = mean.new_ones(len(mean))
    return Embeddings(mean, one * KAPPA_RANGE[1], one, 0 * one)
