"""`GaussianEncoder`: Gaussian embeddings, as PFE and HIB learn them."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.base import Prediction, Predictor, directions_of
from lam.encoders.deterministic import TwoHeadedEncoder
from lam.hessians.outputs import check_feature_values
from lam.models.head import features_and_output
from lam.models.uncertainty_head import UncertaintyHead
from lam.posteriors.base import CHUNK_ELEMENTS
from lam.utils.autocast import without_autocast
from lam.vmf.embeddings import Embeddings
from lam.vmf.resultant import projected_resultant

_MOST = 80.0
"""Greatest log variance, so that float32 holds the sum of the variances."""


class GaussianEncoder(TwoHeadedEncoder):
    """Embed by N(μ, diag(σ²)), with μ from the network's head and σ² from an uncertainty head on the same features.

    Retrieval compares the directions of μ. Samples μ + σ ε are projected to the sphere, and κ follows from their
    unbiased mean resultant length (Sra 2012). All inputs share the noise ε, so κ is the same in any batch. `variance`
    is Σ_d σ_d². Joint samples draw other noise for each item, from the seed and the item's position in the pass.

    Args:
        uncertainty: maps the inputs of the network's head to log variances (N, D).
        unit_mean: whether μ is the head's output after normalisation, instead of the output itself.
    """

    kind = "gaussian"
    own_head = "uncertainty", UncertaintyHead
    keeps = ("seed", "unit_mean")

    def __init__(
        self, network: nn.Module, head: str, uncertainty: UncertaintyHead, *, unit_mean: bool, **common: Any
    ) -> None:
        super().__init__(network, head, **common)
        self.uncertainty = uncertainty.eval()
        self.unit_mean = unit_mean

    @torch.no_grad()
    @without_autocast()
    def distribution(self, features: Float[Tensor, "N P"]) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """μ and log σ² of items, from the inputs of the head; log σ² is at most 80."""
        mean, log_variance = self.unnormalised(features), self.uncertainty(features.float()).clamp(max=_MOST)
        return F.normalize(mean) if self.unit_mean else mean, log_variance

    def predictor(self, *, n_samples: int, joint: bool = False) -> Predictor:
        """A function that predicts batches; items share the noise for κ, but not the noise for joint samples."""
        shape = (n_samples, self.dimension)
        shared = _noise(shape, torch.Generator().manual_seed(self.seed))
        rows = max(1, CHUNK_ELEMENTS // shared.numel())

        def predict(inputs: Any, offset: int) -> Prediction:
            features, output = features_and_output(self.network, self.head, inputs)
            check_feature_values(features, offset)
            embeddings: list[Embeddings] = []
            samples: list[Tensor] = []
            for chunk, direction in zip(features.split(rows), directions_of(output).split(rows), strict=True):
                mean, log_variance = self.distribution(chunk)
                variances = log_variance.double().exp()
                length = projected_resultant(mean, variances, shared.to(mean.device))
                of_chunk = variances.sum(1).to(direction)
                embeddings.append(Embeddings.from_resultant(length, of_chunk, mean=direction, n_samples=n_samples))
                if joint:
                    positions = range(offset, offset + len(chunk))
                    noise = self.draw_each(positions, lambda _, generator: _noise(shape, generator))
                    deviation = (log_variance.double() / 2).exp() * noise.to(mean.device)
                    samples.append(F.normalize(mean.double() + deviation, dim=-1).to(mean.dtype))
                offset += len(chunk)
            return Prediction(features, Embeddings.concatenate(embeddings), torch.cat(samples, 1) if joint else None)

        return predict


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)
