"""Methods that train a head on the features of a frozen network, or with the network."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.deterministic import GaussianEncoder, HeadEncoder
from lam.losses import Loss, SupCon
from lam.losses.base import weighted_mean
from lam.losses.distributions import mutual_likelihood, soft_contrastive
from lam.methods.base import Learned, Method, Trained, head_of
from lam.models.head import features_and_output, head_input_and_output
from lam.models.kappa_head import KappaHead, UncertaintyHead
from lam.models.weights import sha256_of_weights, unwrapped
from lam.training import History, Minibatch, Step, Training, train
from lam.utils.checks import check_at_least, check_positive

HeadLoss = Callable[[Tensor, Tensor, Minibatch], Tensor]
"""Maps the head's outputs for N items, the items' unit embeddings (N, D) and the batch to a scalar loss."""


@dataclass(frozen=True)
class HeadMethod(Method):
    """Train a network, then freeze it and train a second head.

    Attributes:
        epochs: epochs of the second head, at least 1.
        learning_rate: learning rate of the second head, positive.
    """

    epochs: int = 10
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        check_at_least("epochs", self.epochs, 1)
        check_positive("learning_rate", self.learning_rate)

    def train_head(
        self, head: nn.Module, network: nn.Module, path: str, loss: HeadLoss, dataset: Any, training: Training
    ) -> History:
        """Train a head on the inputs (N, P) of the layer `path`, with checkpoints in the sub-folder `head`.

        The head has its own epochs and learning rate, and learns from all pairs of a batch; other settings are as for
        the network. The last epoch is kept: validation measures retrieval, which the head does not change.
        """
        own = replace(
            training,
            epochs=self.epochs,
            learning_rate=self.learning_rate,
            miner="all",
            max_pairs=None,
            validate=None,
            folder=training.part("head"),
        )
        with training.stage("head"):
            return train(head, dataset, own, step=HeadStep(network, path, loss, self._kept_settings), method=self.name)

    @property
    def _kept_settings(self) -> dict[str, Any]:
        """The options that a resumed training must share: all except the number of the head's epochs."""
        return {name: value for name, value in self.settings().items() if name != "epochs"}


class HeadStep(Step):
    """A training step by a head's loss; the network stays in evaluation mode, without gradients.

    A resumed run must have the same `options`, path and network weights; a hash compares the weights.
    """

    def __init__(self, network: nn.Module, path: str, loss: HeadLoss, options: dict[str, Any]) -> None:
        self.network, self.path, self.loss = network, path, loss
        self.settings = {**options, "head": path, "frozen": sha256_of_weights(network)[:12]}

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The head's loss; the argument `loss` is not used."""
        features, output = features_and_output(self.network, self.path, batch.inputs)
        return self.loss(network(features.float()), F.normalize(batch.gather(output).float()), batch)


@dataclass(frozen=True)
class Pfe(HeadMethod):
    """Train a network, then freeze it and train an uncertainty head.

    The mean of an embedding is the network's unit vector. The head learns from all positive pairs of a batch.

    Source: Shi and Jain (2019), "Probabilistic face embeddings"; Warburg et al. (2023), appendix G.4.

    Attributes:
        learning_rate: learning rate of the head, high because the head starts at variance e⁻⁷ for all inputs.
        shared: whether the head's last batch norm shares one scale and shift between all dimensions.
    """

    learning_rate: float = 1e-2
    shared: bool = True

    name = "pfe"
    encoder = GaussianEncoder

    def learn_rest(
        self, network: nn.Module, head: str, dataset: Any, training: Training, histories: dict[str, History]
    ) -> dict[str, Any]:
        layer: Any = network.get_submodule(head)
        uncertainty = UncertaintyHead(layer.in_features, layer.out_features, shared=self.shared, seed=training.seed)

        def loss(log_variance: Tensor, mean: Tensor, batch: Minibatch) -> Tensor:
            return mutual_likelihood(mean, log_variance, batch.pairs)

        histories["head"] = self.train_head(uncertainty, network, head, loss, dataset, training)
        return {"uncertainty": uncertainty, "unit_mean": True}


@dataclass(frozen=True)
class LossPrediction(HeadMethod):
    """Train a network, then freeze it and train a head that predicts each item's loss.

    The predicted loss is the supervised contrastive loss of an item as an anchor, whichever loss trained the network.
    The head learns from items with a match in the batch. κ is 1 / prediction; only the order of κ has a meaning. If a
    Laplace run starts from a run of this method, this κ becomes κ_a, the κ of ambiguity. Unlike in Yoo and Kweon, the
    network is trained first, so the head does not change retrieval.

    Source: Yoo and Kweon (2019), "Learning loss for active learning"; Kirchhof et al. (2023), "URL: a representation
    learning benchmark for transferable uncertainty estimates", where this head is the strongest.

    Attributes:
        temperature: temperature of the predicted loss, positive.
        hidden: units of the head's hidden layer, at least 1.
    """

    temperature: float = 0.1
    hidden: int = 128

    name = "loss_prediction"
    encoder = HeadEncoder

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("temperature", self.temperature)
        check_at_least("hidden", self.hidden, 1)

    def learn_rest(
        self, network: nn.Module, head: str, dataset: Any, training: Training, histories: dict[str, History]
    ) -> dict[str, Any]:
        layer: Any = network.get_submodule(head)
        kappa_head = KappaHead(layer.in_features, self.hidden, start=1.0, form="inverse", seed=training.seed)
        predicted = SupCon(2.0, self.temperature)

        def loss(kappa: Tensor, embeddings: Tensor, batch: Minibatch) -> Tensor:
            losses, counts = predicted.of_anchors(embeddings, batch.pairs)
            return weighted_mean((1 / kappa - losses).square(), counts)

        histories["head"] = self.train_head(kappa_head, network, head, loss, dataset, training)
        return {"kappa_head": kappa_head}


@dataclass(frozen=True)
class Hib(Method):
    """Hedged instance embeddings: train a network and its uncertainty head together, by a loss on sampled embeddings.

    Two samples at distance d match with p(match) = sigmoid(b − a d). The loss is a sum: the mean of −log p(match) over
    positive pairs, the mean of −log(1 − p(match)) over negative pairs, and β times the mean KL divergence of the items'
    N(μ, diag(σ²)) from N(0, I). As in Oh et al., μ is the head's output before normalisation. Retrieval and validation
    compare the directions of μ.

    The number of samples and β are as in Oh et al., who state no initial a and b. Training learns b and log a, from a
    p(match) of ½ at distance 1.

    Source: Oh et al. (2019), "Modeling uncertainty with hedged instance embedding"; Warburg et al. (2023), app. G.4.

    Attributes:
        n_samples: samples of each item in a step, at least 1; a pair compares all samples of its two items.
        kl_weight: weight β ≥ 0 of the divergence.
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

        A trained network is trained further. Only the margin of `training.loss` is used, by miners.
        `training.validate` gets the network without its uncertainty head.
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
