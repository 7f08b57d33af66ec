"""The network as it is, without any uncertainty."""

from typing import Any

from torch import Tensor, nn

from lam.encoders.base import Encoder, Prediction, Predictor, directions_of
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
    network: nn.Module

    @property
    def dimension(self) -> int:
        """The number of embedding dimensions D."""
        layer: Any = self.network.get_submodule(self.head)
        return layer.out_features

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function of a batch of inputs; nothing is drawn."""

        def predict(inputs: Any) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            return Prediction(features, without_uncertainty(directions_of(output)))

        return predict


def without_uncertainty(mean: Tensor) -> Embeddings:
    """Embeddings of unit vectors (N, D) whose uncertainty is unknown: R = 1, variance 0, κ at its upper end."""
    one = mean.new_ones(len(mean))
    return Embeddings(mean, one * KAPPA_RANGE[1], one, 0 * one)
