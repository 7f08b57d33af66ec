"""Methods that learn each item's concentration κ by a loss on von Mises-Fisher distributions."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lam.encoders.deterministic import DeterministicEncoder, HeadEncoder, NormEncoder
from lam.losses import ELK, HIB, DistributionLoss, Loss, MCInfoNCE
from lam.losses.base import as_settings
from lam.methods.base import Learned, Trained, head_of
from lam.methods.head import HeadMethod
from lam.models.head import head_input_and_output
from lam.models.kappa_head import Form, KappaHead
from lam.models.weights import unwrapped
from lam.training import Minibatch, Step, Training
from lam.utils.checks import check_at_least
from lam.utils.random import on_device

KappaBy = Literal["phases", "shared", "norm", "none"]


@dataclass(frozen=True)
class ConcentrationMethod(HeadMethod):
    """Train the mean direction μ and the concentration κ of each item by a loss on distributions.

    Only the margin of `training.loss` is used, by miners.

    Attributes:
        kappa: how κ is learned. "phases" trains the network with one κ for all items, then freezes the network and
            trains a κ head on the features. "shared" trains network and head together. "norm" has no head: κ is the
            length of the embedding before normalisation. "none" has one κ for all items, and no uncertainty.
        hidden: units of the κ head's hidden layer, at least 1.
        start: initial κ; also the κ of all items while κ is not learned.
    """

    kappa: KappaBy = "phases"
    hidden: int = 128
    start: float = 20.0

    encoder = HeadEncoder
    form: ClassVar[Form] = "exp"
    """Function from the κ head's output to κ."""
    normalises: ClassVar[bool] = False
    """Whether batch norm follows the network's last layer in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least("hidden", self.hidden, 1)
        KappaHead(1, 1, start=self.start, form=self.form)
        self.loss(2, 0)

    def training_data(self, dataset: Any, training: Training) -> tuple[Any, Training]:
        """Data and settings of the network's training; by default unchanged."""
        return dataset, training

    @abstractmethod
    def loss(self, dimension: int, seed: int) -> DistributionLoss:
        """A new loss for embeddings of D dimensions; the seed initialises its learned parameters."""

    def model(self) -> Callable[..., "DistributionNetwork"]:
        """Function that builds the trained module; it takes the arguments of `DistributionNetwork`."""
        return DistributionNetwork

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """The curvature of the learned loss at κ = `start`; see `Method.trained_by`."""
        method = replace(self, **as_settings(learned or {}))
        return method.loss(dimension, 0).curvature(dimension, self.start)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train μ and κ; see `Method.train`. Stages are `train` and, in phases, `head`.

        An already trained network stays as it is if `kappa` is "phases"; otherwise it is trained further.
        """
        network = unwrapped(network)
        path = head_of(network, dataset)
        layer: Any = network.get_submodule(path)
        kappa_head = None
        if self.kappa not in ("norm", "none"):
            kappa_head = KappaHead(layer.in_features, self.hidden, start=self.start, form=self.form, seed=training.seed)
        in_phases = self.kappa == "phases"
        data, plan = self.training_data(dataset, training)
        start = self.start if in_phases or self.kappa == "none" else None
        loss = self.loss(layer.out_features, plan.seed)
        norm = nn.BatchNorm1d(layer.out_features, dtype=torch.float32) if self.normalises else None
        if norm is not None and layer._parameters.get("weight") is None:
            raise ValueError(
                f"{self.name} merges a batch norm into {path!r}, whose weight is computed from others: remove the "
                "weight norm or spectral norm of this layer"
            )
        model = self.model()(network, path, kappa_head, loss, start=start, norm=norm)
        validate: Any = plan.validate
        first = replace(
            plan,
            pretrained=plan.pretrained and in_phases,
            validate=None if validate is None else lambda trained: validate(Means(trained)),
        )
        histories = self.train_network(model, data, first, DistributionStep(self._kept_settings))
        if "network" in histories:
            model.fold()
            histories["network"] = replace(histories["network"], learned=loss.learned())
        head_of(network, dataset, path)  # a batch norm after the head is the identity only before the training
        own: dict[str, Any] = {"kind": DeterministicEncoder if self.kappa == "none" else NormEncoder}
        if kappa_head is not None:
            own = {"kappa_head": kappa_head}
        if in_phases and kappa_head is not None:
            network.eval()
            loss.requires_grad_(False)

            def loss_of_head(kappa: Tensor, mean: Tensor, batch: Minibatch) -> Tensor:
                return loss(mean, kappa, batch.pairs, generator=on_device(batch.generator, mean.device))

            histories["head"] = self.train_head(kappa_head, network, path, loss_of_head, data, plan)
        return Trained(self.encoder_of(network, path, dataset, training, **own), histories)


class DistributionNetwork(nn.Module):
    """The modules that are trained together: a network, the κ head on its features, and the loss.

    Args:
        network: a network that ends in a linear layer; a normalisation may follow.
        head: path of this layer.
        kappa_head: maps the inputs of that layer to κ (N,); if None, κ is the length of the layer's output.
        loss: a loss on distributions.
        start: fixed κ of all items; None to learn κ.
        norm: batch norm of the layer's output, which `fold` merges into the layer; None for no batch norm.
    """

    def __init__(
        self,
        network: nn.Module,
        head: str,
        kappa_head: KappaHead | None,
        loss: DistributionLoss,
        *,
        start: float | None = None,
        norm: nn.BatchNorm1d | None = None,
    ) -> None:
        super().__init__()
        self.network, self.head, self.loss, self.start, self.norm = network, head, loss, start, norm
        self.kappa_head = kappa_head if start is None else None

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        """μ (N, D) and κ (N,)."""
        features, _ = head_input_and_output(self.network, self.head, inputs)
        output = self.network.get_submodule(self.head)(features).float()
        output = output if self.norm is None else self.norm(output)
        mean = F.normalize(output)
        if self.start is not None:
            return mean, mean.new_full((len(mean),), self.start)
        return mean, output.norm(dim=1) if self.kappa_head is None else self.kappa_head(features.float())

    @torch.no_grad()
    def fold(self) -> None:
        """Merge the batch norm, with its running statistics, into the layer before it."""
        if self.norm is None:
            return
        layer: Any = self.network.get_submodule(self.head)
        running: Any = (self.norm.running_mean, self.norm.running_var)
        scale = self.norm.weight / (running[1] + self.norm.eps).sqrt()
        bias = (0 if layer.bias is None else layer.bias) - running[0]
        layer.weight.mul_(scale[:, None])
        layer.bias = nn.Parameter((bias * scale + self.norm.bias).to(layer.weight))
        self.norm = None


class Means(nn.Module):
    """The mean directions of a `DistributionNetwork`, for validation between epochs."""

    def __init__(self, model: DistributionNetwork) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any) -> Float[Tensor, "N D"]:
        return self.model(inputs)[0]


class DistributionStep(Step):
    """A training step for a `DistributionNetwork`, with the `DistributionLoss` that the network holds."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        """The network's `DistributionLoss`; the argument `loss` only gives miners their margin."""
        model: Any = network
        mean, kappa, *targets = model(batch.inputs)
        options: dict[str, Any] = {"generator": on_device(batch.generator, mean.device)}
        if targets:
            options["targets"] = targets[0]
        return model.loss(mean, kappa, batch.choose_pairs(mean, loss), **options)


@dataclass(frozen=True)
class Mcinfonce(ConcentrationMethod):
    """Train mean directions and concentrations by MCInfoNCE.

    At the minimum of the loss, κ equals the concentration of the process that generated the data.
    `lam.methods.ConcentrationMethod` explains `kappa`; its default "phases" was best in the paper.

    Source: Kirchhof, Kasneci and Oh (2023), "Probabilistic contrastive learning recovers the correct aleatoric
    uncertainty of ambiguous inputs".

    Attributes:
        kappa_pos: concentration of one latent variable of a positive pair around the other.
        learn_kappa_pos: learn `kappa_pos` with the network; `kappa="phases"` fixes it while the κ head is trained.
        n_samples: samples of each item in a step.
        n_negatives: negatives of each anchor, drawn from the batch; None for all.
    """

    kappa_pos: float = 20.0
    learn_kappa_pos: bool = False
    n_samples: int = 16
    n_negatives: int | None = None

    name = "mcinfonce"

    def loss(self, dimension: int, seed: int) -> MCInfoNCE:
        return MCInfoNCE(self.kappa_pos, self.n_samples, self.n_negatives, learn_kappa_pos=self.learn_kappa_pos)


@dataclass(frozen=True)
class Elk(ConcentrationMethod):
    """Train mean directions and concentrations by `lam.losses.ELK`, InfoNCE with a similarity in closed form.

    Source: as `Mcinfonce`, equation 55.

    Attributes:
        kappa_pos: factor of the similarity; the paper chooses among 16, 32 and 64 on CIFAR-10 (appendix C.2).
    """

    kappa: KappaBy = "shared"
    kappa_pos: float = 1.0

    name = "elk"

    def loss(self, dimension: int, seed: int) -> ELK:
        return ELK(self.kappa_pos)


@dataclass(frozen=True)
class HibVmf(ConcentrationMethod):
    """Train mean directions and concentrations by the probability sigmoid(a cos + b) that two samples match.

    `Hib` is the original, with Gaussians and distances.

    Source: as `Mcinfonce`, equation 54.

    Attributes:
        n_samples: samples of each item in a step.
        scale: factor a > 0 in p(match).
        offset: offset b in p(match).
        n_negatives: negatives of each item, drawn from the batch; None for all.
    """

    kappa: KappaBy = "shared"
    n_samples: int = 16
    scale: float = 1.0
    offset: float = 0.0
    n_negatives: int | None = None

    name = "hib_vmf"

    def loss(self, dimension: int, seed: int) -> HIB:
        return HIB(self.n_samples, self.scale, self.offset, self.n_negatives)
