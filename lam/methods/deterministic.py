"""Methods that only train a network: the baseline without uncertainty, and methods that differ in encoder or loss."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lam.datasets.augmented import AugmentationOptions, Augmented, ViewsOfKinds, check_images
from lam.encoders.base import directions_of
from lam.encoders.concentration import NeighbourEncoder, NormEncoder
from lam.encoders.deterministic import DeterministicEncoder
from lam.encoders.ensemble import DropoutEncoder, check_network
from lam.losses import AnInfoNCE, Loss, VarCon
from lam.losses.base import margin_of
from lam.methods.base import Learned, Method, Trained, head_of, reference_inputs
from lam.models.head import features_and_output, head_input_and_output
from lam.models.weights import unwrapped
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.training import History, Minibatch, Step, Training
from lam.utils.checks import check_at_least, check_positive


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network by `training.loss`, without uncertainty."""

    name = "deterministic"
    encoder: ClassVar[type[DeterministicEncoder]] = DeterministicEncoder
    learns_from_matches = False

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        layer: Any = network.get_submodule(head)
        own = replace(training, loss=self.training_loss(training.loss, layer.out_features))
        histories = self.train_network(network, dataset, own)
        return Trained(self.encoder_of(network, head, dataset, training), histories)


@dataclass(frozen=True)
class Norm(Deterministic):
    """Train a network by `training.loss`; κ is the length of the embedding before normalisation.

    The seed also drives samples from the distributions.
    """

    name = "norm"
    encoder = NormEncoder


@dataclass(frozen=True)
class McDropout(Deterministic):
    """Train a network with its own dropout layers, which stay active when it embeds.

    The seed also drives the masks. A trained network may have been trained with or without dropout.

    Source: Gal and Ghahramani (2016); Warburg et al. (2023), appendix G.4, with a rate of 0.05.
    """

    name = "mc_dropout"
    encoder = DropoutEncoder

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject a network without dropout; see `Method.check`."""
        check_network(network)
        super().check(network, dataset, training)


@dataclass(frozen=True)
class Varcon(Deterministic):
    """Train a network by VarCon instead of `training.loss`. The encoder has no uncertainty; a posterior can add it.

    Source: Wang et al. (2025), "Variational supervised contrastive learning".

    Attributes:
        temperature: τ₁ > 0 of `lam.losses.VarCon`.
        epsilon: initial ε of `lam.losses.VarCon`, within ±τ₁; by default τ₁ / 5.
        learn_epsilon: whether ε is learned.
    """

    temperature: float = 0.1
    epsilon: float | None = None
    learn_epsilon: bool = True

    name = "varcon"

    def __post_init__(self) -> None:
        self._loss()

    def training_loss(self, loss: Loss, dimension: int) -> VarCon:
        """VarCon, with the margin of `loss`, which miners use."""
        return self._loss(margin_of(loss))

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject places; see `Method.check`."""
        super().check(network, dataset, replace(training, loss=self._loss()))

    def _loss(self, margin: float | None = None) -> VarCon:
        return VarCon(self.temperature, self.epsilon, learn=self.learn_epsilon, margin=margin)


@dataclass(frozen=True)
class KnnDistance(Method):
    """Train a network, then keep the features of some training items; an item far from them is uncertain.

    Attributes:
        k: rank of the neighbour that gives the distance, from 1.
        reference: number of random training items to keep, at least k; all if there are fewer.
    """

    k: int = NEIGHBOUR
    reference: int = 5000

    name = "knn_distance"
    encoder = NeighbourEncoder
    learns_from_matches = False

    def __post_init__(self) -> None:
        check_at_least("k", self.k, 1)
        if self.reference < self.k:
            raise ValueError(f"reference must be at least k = {self.k} items, got {self.reference}")

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject data of fewer than k items; see `Method.check`."""
        super().check(network, dataset, training)
        if len(dataset) < self.k:
            raise ValueError(f"dataset must hold at least k = {self.k} items, got {len(dataset)}: lower k")

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and keep reference features; see `Method.train`. Stages are `train` and `reference`."""
        network = unwrapped(network)
        self.check(network, dataset, training)
        head = head_of(network, dataset)
        histories = self.train_network(network, dataset, training)
        with training.stage("reference"):
            inputs = reference_inputs(dataset, self.reference, seed=training.seed)
            reference = torch.cat([directions_of(features_and_output(network, head, batch)[0]) for batch in inputs])
        return Trained(self.encoder_of(network, head, dataset, training, reference=reference, k=self.k), histories)


_LEAST_CROP = 0.3  # default crop_scale of the last member


@dataclass(frozen=True)
class Aninfonce(Deterministic):
    """Train a network by AnInfoNCE instead of `training.loss`; `History.learned` holds the concentrations Λ − Λ⁻.

    With M > 1 members, the loss is a sum of M losses. Each member has its own vector Λ and its own kind of crops; later
    members crop more. A batch holds every image in every kind of crop; the items of a pair share a kind. The loss has
    no curvature for several members, without normalisation, or if an entry of Λ is at most `negatives`.

    Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", equation 3, corollaries B.1
    (hard negatives) and B.2 (ensembles).

    Attributes:
        concentration: initial Λ > 0 of all dimensions; 5 corresponds to InfoNCE at temperature 0.1.
        n_members: M ≥ 1; several members need images.
        crop_scales: least share of an image's area in a crop, for each member; by default evenly from 1 to 0.3.
        negatives: Λ⁻ ≥ 0 of all dimensions, below `concentration`: the concentration of negatives around their anchor,
            if `training.miner` prefers near negatives. The loss weights dimensions by Λ − Λ⁻.
        normalise: whether the loss compares unit embeddings; otherwise it compares the head's outputs. Retrieval
            always compares directions.
    """

    concentration: float = 5.0
    n_members: int = 1
    crop_scales: tuple[float, ...] | None = None
    negatives: float = 0.0
    normalise: bool = True

    name = "aninfonce"

    def __post_init__(self) -> None:
        check_positive("concentration", self.concentration)
        check_at_least("n_members", self.n_members, 1)
        check_at_least("negatives", self.negatives, 0.0)
        if self.negatives >= self.concentration:
            raise ValueError(f"negatives must be below concentration, {self.concentration:g}, got {self.negatives:g}")
        if self.crop_scales is not None and len(self.crop_scales) != self.n_members:
            raise ValueError(
                f"crop_scales must hold {self.n_members} scales, one for each member, got {len(self.crop_scales)}"
            )
        self.kinds()

    def kinds(self, base: AugmentationOptions | None = None) -> list[AugmentationOptions]:
        """The augmentation of each member: its crops, with the other options of `base`."""
        scales = self.crop_scales or torch.linspace(1, _LEAST_CROP, self.n_members).tolist()
        return [replace(base or AugmentationOptions(), crop_scale=None if scale == 1 else scale) for scale in scales]

    def training_loss(self, loss: Loss, dimension: int) -> AnInfoNCE:
        """AnInfoNCE, with the margin of `loss`, which miners use."""
        negatives = torch.full((dimension,), float(self.negatives))
        options: dict[str, Any] = {"n_members": self.n_members, "negatives": negatives, "margin": margin_of(loss)}
        return AnInfoNCE(dimension, self.concentration, **options)

    def trained_by(self, loss: Loss, dimension: int, learned: Learned | None = None) -> dict[str, Any]:
        """Empty if the loss has no curvature, as the class describes; see `Method.trained_by`."""
        if self.n_members > 1 or not self.normalise or min((learned or {}).get("concentration", [1.0])) <= 0:
            return {}
        return super().trained_by(loss, dimension, learned)

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject several members for items that are not images; see `Method.check`."""
        super().check(network, dataset, training)
        if self.n_members > 1:
            check_images(dataset, "take a single member, n_members=1")

    def train_network(
        self, network: nn.Module, dataset: Any, training: Training, step: Step | None = None
    ) -> dict[str, History]:
        if step is None and (self.n_members > 1 or not self.normalise):
            step = AnInfoNCEStep(self.settings(), head_of(network, dataset))
        if self.n_members > 1:
            base = dataset.options if isinstance(dataset, Augmented) else None
            dataset = ViewsOfKinds(dataset, self.kinds(base))
        return super().train_network(network, dataset, training, step)


class AnInfoNCEStep(Step):
    """A training step by the sum of the members' losses, each over the member's own crops of the images."""

    def __init__(self, options: dict[str, Any], head: str) -> None:
        self.settings, self.head = options, head

    def value(self, network: nn.Module, loss: Loss, batch: Minibatch) -> Tensor:
        if not isinstance(loss, AnInfoNCE):
            raise TypeError(f"the loss must be AnInfoNCE, got {type(loss).__name__}")
        features, embeddings = head_input_and_output(network, self.head, batch.inputs)
        compared = embeddings
        if not self.settings["normalise"]:
            compared = unwrapped(network).get_submodule(self.head)(batch.gather(features))
        terms = []
        for number, rows in enumerate(rows_of_members(batch, self.settings["n_members"])):
            own, targets = embeddings[rows], None if batch.targets is None else batch.targets[rows]
            part = replace(batch, pairs=pairs_among(batch.pairs, rows), targets=targets)
            terms.append(loss.of_member(compared[rows], part.choose_pairs(own, loss), number))
        return torch.stack(terms).sum()


def rows_of_members(batch: Minibatch, n_members: int) -> list[Tensor]:
    """Positions of each member's crops in a batch; each process contributes the crops of all members, in order."""
    rows = torch.arange(batch.pairs.size, device=batch.pairs.positive.device).split(batch.sizes or batch.pairs.size)
    parts = [part.chunk(n_members) for part in rows if len(part)]
    return [torch.cat(of_member) for of_member in zip(*parts, strict=True)]


def pairs_among(pairs: Pairs, rows: Tensor) -> Pairs:
    """The pairs with both items among the rows."""
    positive, negative = pairs.positive[rows][:, rows], pairs.negative[rows][:, rows]
    labels = None if pairs.labels is None else pairs.labels[rows]
    return Pairs(positive, negative, int(positive.sum()), int(negative.sum()), labels)
