"""Methods that learn without labels, from two random views of each image."""

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lam.datasets.augmented import TwoViews, Views
from lam.losses import BYOL, ConcentrationAlignment, Loss, SimSiam, SwAV
from lam.losses.views import Explicit, Regulariser, Siamese
from lam.methods.base import Learned
from lam.methods.concentration import ConcentrationMethod, DistributionNetwork, KappaBy
from lam.models.kappa_head import Form
from lam.pairs.relation import Relation
from lam.training import Training


@dataclass(frozen=True)
class ViewsMethod(ConcentrationMethod):
    """Train μ and κ together on two random views of each image, without labels.

    The loss has three parts: a loss on directions, the alignment of the two views scaled by their κ, and a regulariser
    of κ. κ is the softplus of the κ head's output; kappa="none" keeps only the loss on directions. The network's head
    is the projection; `cifar_resnet18` with the option `projection` gives it two layers, as the papers do. A run keeps
    the epoch of the best retrieval on the validation split, or the last epoch if no two images match there.

    Source: "Probabilistic contrastive learning with explicit concentration on the hypersphere", equations 5, 6, 10, 11.

    Attributes:
        weight: weight λ_a of the alignment.
        regulariser: "square" (λκ²) or "likelihood" (κ − (D − 1)/2 log κ).
        decay: λ of "square".
        crop_scale: least share of an image's area that a view shows.
        flip: probability that a view is mirrored; leave 0 if left and right differ in meaning.
        jitter: largest change of a view's contrast and brightness.
        noise: largest standard deviation of a view's Gaussian noise, in standard deviations of the image.
    """

    kappa: KappaBy = "shared"
    start: float = 5.0
    weight: float = 0.05
    regulariser: Regulariser = "square"
    decay: float = 0.005
    crop_scale: float = 0.3
    flip: float = 0.0
    jitter: float = 0.4
    noise: float = 0.0

    reads_labels = False
    form: ClassVar[Form] = "softplus"

    def __post_init__(self) -> None:
        super().__post_init__()
        Explicit(self.weight, self.regulariser, self.decay)
        self.view()

    def view(self) -> Views:
        """The settings of a view."""
        return Views(crop_scale=self.crop_scale, flip=self.flip, jitter=self.jitter, noise=self.noise)

    def explicit(self) -> Explicit | None:
        """The alignment and its regulariser; None without κ."""
        return None if self.kappa == "none" else Explicit(self.weight, self.regulariser, self.decay)

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """The curvature, with the settings of the views; see `Method.trained_by`."""
        return {**super().trained_by(loss, dimension, learned), "views": asdict(self.view())}

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject data without images; see `Method.check`."""
        super().check(network, *self.training_data(dataset, training))

    def check_start(self, *, pretrained: bool) -> None:
        """Reject phases for a trained network without the predictor that its loss needs."""
        if pretrained and self.kappa == "phases" and isinstance(self.loss(2, 0), Siamese):
            raise ValueError(
                f"{self.name} cannot add κ to a trained network in phases, because encoders have no predictor: take "
                "kappa=shared (method.kappa=shared in a run)"
            )

    def training_data(self, dataset: Any, training: Training) -> tuple[Any, Training]:
        """Two views of each image; all other images of a batch are negatives."""
        training = replace(training, relation=Relation(), per_class=None, miner="all", max_pairs=None)
        return TwoViews(dataset, self.view()), training


@dataclass(frozen=True)
class Simclr(ViewsMethod):
    """Train by NT-Xent; negatives are the views of all other images in a batch.

    Source: Chen et al. (2020), "A simple framework for contrastive learning of visual representations".

    Attributes:
        temperature: τ of NT-Xent.
    """

    temperature: float = 0.5

    name = "simclr"

    def loss(self, dimension: int, seed: int) -> ConcentrationAlignment:
        return ConcentrationAlignment(self.explicit(), self.temperature)


@dataclass(frozen=True)
class Simsiam(ViewsMethod):
    """Train by the cosine between the prediction from one view and the other view, without negatives.

    Source: Chen and He (2021), "Exploring simple Siamese representation learning".

    Attributes:
        predictor: units of the predictor's hidden layer; the encoder has no predictor.
    """

    predictor: int = 128

    name = "simsiam"
    normalises = True

    def loss(self, dimension: int, seed: int) -> SimSiam:
        return SimSiam(dimension, self.predictor, self.explicit(), seed=seed)


@dataclass(frozen=True)
class Byol(ViewsMethod):
    """Train by the distance between the prediction from one view and the target from the other view.

    A copy of the network computes the targets. Before each training pass, the copy's weights ξ follow the network's
    weights θ: ξ ← m ξ + (1 − m) θ. In the paper, m grows to 1. Checkpoints hold the copy; encoders do not.

    Source: Grill et al. (2020), "Bootstrap your own latent: a new approach to self-supervised learning".

    Attributes:
        predictor: units of the predictor's hidden layer; the encoder has no predictor.
        momentum: momentum m of the target in [0, 1).
    """

    predictor: int = 128
    momentum: float = 0.99

    name = "byol"
    normalises = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")

    def loss(self, dimension: int, seed: int) -> BYOL:
        return BYOL(dimension, self.predictor, self.explicit(), seed=seed)

    def model(self) -> Callable[..., "MomentumNetwork"]:
        return partial(MomentumNetwork, momentum=self.momentum)


class MomentumNetwork(DistributionNetwork):
    """A `DistributionNetwork` and a slower copy without gradients, updated before each training pass."""

    def __init__(self, network: nn.Module, head: str, *arguments: Any, momentum: float, **options: Any) -> None:
        super().__init__(network, head, *arguments, **options)
        self.momentum = momentum
        own = copy.deepcopy(network), copy.deepcopy(self.norm)
        self.target = DistributionNetwork(own[0], head, None, self.loss, start=1.0, norm=own[1])
        del self.target.loss
        self.target.requires_grad_(False)

    def forward(self, inputs: Any) -> tuple[Tensor, ...]:
        """μ (N, D), κ (N,) and targets (N, D)."""
        if self.training:
            for part in ("network", "norm"):
                follow(getattr(self.target, part), getattr(self, part), self.momentum)
        with torch.no_grad():
            targets, _ = self.target(inputs)
        return *super().forward(inputs), targets


@torch.no_grad()
def follow(target: nn.Module, network: nn.Module, momentum: float) -> None:
    """ξ ← m ξ + (1 − m) θ for all weights, in place; equal weights stay exactly equal."""
    for slow, fast in zip(target.parameters(), network.parameters(), strict=True):
        slow.lerp_(fast, 1 - momentum)


@dataclass(frozen=True)
class Swav(ViewsMethod):
    """Train by predicting, from one view, the other view's assignment to J learned prototypes; without multi-crop.

    Source: Caron et al. (2020), "Unsupervised learning of visual features by contrasting cluster assignments".

    Attributes:
        n_prototypes: number J of prototypes; the encoder does not keep the prototypes.
        temperature: τ of the predictions.
        smoothness: ε of the assignments.
        n_iterations: iterations of Sinkhorn and Knopp's algorithm.
    """

    n_prototypes: int = 256
    temperature: float = 0.1
    smoothness: float = 0.05
    n_iterations: int = 3

    name = "swav"
    normalises = True

    def loss(self, dimension: int, seed: int) -> SwAV:
        numbers = (self.n_prototypes, self.temperature, self.smoothness, self.n_iterations)
        return SwAV(dimension, *numbers, self.explicit(), seed=seed)
