"""HIB, hedged instance embeddings: a loss of sampled embeddings trains a network and its uncertainty together.

Source: Oh et al. (2019), "Modeling uncertainty with hedged instance embedding"; Warburg et al. (2023), appendix G.4.
"""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.gaussian import GaussianEncoder
from lam.losses import Loss
from lam.losses.heads import soft_contrastive
from lam.methods.base import Learned, Method, Trained, head_of
from lam.models.head import head_input_and_output
from lam.models.uncertainty_head import UncertaintyHead
from lam.models.weights import unwrapped
from lam.training import Minibatch, Step, Training
from lam.utils.checks import check_at_least, check_positive


@dataclass(frozen=True)
class Hib(Method):
    """Train a network and its uncertainty head together.

    Two samples at distance d match with p(match) = sigmoid(b − a d). The loss is a sum: the mean of −log p(match) over
    positive pairs, the mean of −log(1 − p(match)) over negative pairs, and β times the mean KL divergence of the items'
    N(μ, diag(σ²)) from N(0, I). As in the source, μ is the head's output before normalisation: for unit vectors, the
    divergence would not depend on μ. Retrieval and validation compare the directions of μ.

    The number of samples and β come from the source, which states no initial a and b. With a = b = 5, p(match) is ½ at
    distance 1. With a = 1 and b = 0, the loss fell far slower. Training learns b and log a.

    Attributes:
        n_samples: samples of each item in a step, at least 1; a pair compares all samples of its two items.
        kl_weight: β ≥ 0.
        scale: initial a > 0 of p(match).
        offset: initial b of p(match), finite.
        shared: whether the uncertainty head's last batch norm shares one scale and shift between all dimensions.
    """

    n_samples: int = 8
    kl_weight: float = 1e-4
    scale: float = 5.0
    offset: float = 5.0
    shared: bool = True

    name = "hib"
    encoder = GaussianEncoder

    def __post_init__(self) -> None:
        check_at_least("n_samples", self.n_samples, 1)
        check_at_least("kl_weight", self.kl_weight, 0.0)
        check_positive("scale", self.scale)
        if not math.isfinite(self.offset):
            raise ValueError(f"offset must be finite, got {self.offset}")

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """Empty, as the loss has no curvature; see `Method.trained_by`."""
        return {}

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and its uncertainty head; see `Method.train`.

        A trained network is trained further. `training.loss` only gives miners their margin, and `training.validate`
        gets the network itself.
        """
        network = unwrapped(network)
        path = head_of(network, dataset)
        layer: Any = network.get_submodule(path)
        uncertainty = UncertaintyHead(layer.in_features, layer.out_features, shared=self.shared, seed=training.seed)
        validate: Any = training.validate
        validate_network = None if validate is None else lambda model: validate(model.network)
        plan = replace(training, pretrained=False, validate=validate_network)
        histories = self.train_network(HibNetwork(network, path, uncertainty, self), dataset, plan, HibStep(self))
        head_of(network, dataset, path)  # a batch norm after the head is the identity only before the training
        own = {"uncertainty": uncertainty, "unit_mean": False}
        return Trained(self.encoder_of(network, path, dataset, training, **own), histories)


class HibNetwork(nn.Module):
    """A network, the uncertainty head on its features, and the scale and offset in p(match), trained together."""

    def __init__(self, network: nn.Module, head: str, uncertainty: UncertaintyHead, options: Hib) -> None:
        super().__init__()
        self.network, self.head, self.uncertainty = network, head, uncertainty
        self.log_scale = nn.Parameter(torch.tensor(math.log(options.scale)))
        self.offset = nn.Parameter(torch.tensor(float(options.offset)))

    def forward(self, inputs: Any) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N D"]]:
        """μ, the output of the head before normalisation, and log σ²."""
        features, _ = head_input_and_output(self.network, self.head, inputs)
        return self.network.get_submodule(self.head)(features).float(), self.uncertainty(features.float())


class HibStep(Step):
    """A training step by the soft contrastive loss of samples plus the divergence from the unit Gaussian."""

    def __init__(self, options: Hib) -> None:
        self.options, self.settings = options, asdict(options)

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The loss of samples; the argument `loss` only gives miners their margin."""
        model: Any = network
        mean, log_variance = model(batch.inputs)
        noise = torch.randn((self.options.n_samples, *mean.shape), generator=batch.generator).to(mean)
        samples = mean + (log_variance / 2).exp() * noise
        pairs = batch.choose_pairs(F.normalize(mean), loss)
        match = soft_contrastive(samples, pairs, scale=model.log_scale.exp(), offset=model.offset)
        return match + self.options.kl_weight * divergence_from_unit_gaussian(mean, log_variance).mean()


def divergence_from_unit_gaussian(
    mean: Float[Tensor, "N D"], log_variance: Float[Tensor, "N D"]
) -> Float[Tensor, " N"]:
    """KL(N(μ, diag(σ²)) ‖ N(0, I)) = ½ Σ_d (μ² + σ² − 1 − log σ²) of each item."""
    return (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
