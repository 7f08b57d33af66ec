"""Methods that only train a network: the baseline without uncertainty, and methods that differ in encoder or loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from lam import models
from lam.datasets.augmented import AugmentationOptions, Augmented, ViewsOfKinds, check_images
from lam.encoders.base import directions_of
from lam.encoders.deterministic import DeterministicEncoder, NeighbourEncoder, NormEncoder
from lam.encoders.ensemble import Combine, DropoutEncoder, EnsembleEncoder, align, check_network, features_and_units
from lam.losses import AnInfoNCE, Loss, VarCon
from lam.losses.base import margin_of
from lam.methods.base import Learned, Method, Trained, head_of, reference_inputs
from lam.models.head import features_and_output, head_input_and_output
from lam.models.weights import check_is_file, load_weights, unwrapped
from lam.pairs.pairs import Pairs
from lam.retrieval.metrics.reference import NEIGHBOUR
from lam.training import History, Minibatch, Step, Training, device_of
from lam.training.steps import normalized
from lam.utils.checks import check_at_least, check_choice

_LEAST_CROP = 0.3  # default crop_scale of the last member


@dataclass(frozen=True)
class Deterministic(Method):
    """Train a network by `training.loss`, without uncertainty."""

    name = "deterministic"
    encoder: ClassVar[type[DeterministicEncoder]] = DeterministicEncoder
    learns_from_matches = False


@dataclass(frozen=True)
class Norm(Deterministic):
    """Train a network by `training.loss`; κ is the length of the embedding before normalisation.

    `training.seed` also determines the samples of the embeddings' distributions.
    """

    name = "norm"
    encoder = NormEncoder


@dataclass(frozen=True)
class McDropout(Deterministic):
    """Train a network with its own dropout layers, which stay active when it embeds.

    `training.seed` also determines the masks. A trained network may have been trained with or without dropout.

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
        """Also reject positions instead of class labels; see `Method.check`."""
        super().check(network, dataset, replace(training, loss=self._loss()))

    def _loss(self, margin: float | None = None) -> VarCon:
        return VarCon(self.temperature, self.epsilon, learn=self.learn_epsilon, margin=margin)


@dataclass(frozen=True)
class KnnDistance(Method):
    """Train a network, then keep the features of some training items; inputs far from these features are uncertain.

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

    def learn_rest(
        self, network: nn.Module, head: str, dataset: Any, training: Training, histories: dict[str, History]
    ) -> dict[str, Any]:
        with training.stage("reference"):
            inputs = reference_inputs(dataset, self.reference, seed=training.seed)
            reference = torch.cat([directions_of(features_and_output(network, head, batch)[0]) for batch in inputs])
        return {"reference": reference, "k": self.k}


@dataclass(frozen=True)
class Aninfonce(Deterministic):
    """Train a network by AnInfoNCE instead of `training.loss`; `History.learned` holds Λ = Λ⁺ − Λ⁻.

    With M > 1 members, the loss is a sum of M losses. Each member has its own vector Λ and its own kind of crops. A
    batch holds every image in every kind of crop; both items of a pair have the same kind. The curvature needs a single
    member, unit embeddings, and Λ > 0 in all dimensions.

    Source: Rusak et al. (2024), "InfoNCE: identifying the gap between theory and practice", equation 3, corollaries B.1
    (hard negatives) and B.2 (ensembles).

    Attributes:
        concentration: initial Λ⁺ > 0 of all dimensions; 5 corresponds to InfoNCE at temperature 0.1.
        n_members: number M ≥ 1 of members; several members need images.
        crop_scales: least share of an image's area in a crop, for each member; by default in equal steps from 1 to 0.3.
        negatives: Λ⁻ ≥ 0 of all dimensions, below `concentration`: the concentration of negatives around their anchor,
            if `training.miner` prefers near negatives.
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
        check_at_least("negatives", self.negatives, 0.0)
        AnInfoNCE(1, self.concentration, n_members=self.n_members, negatives=torch.tensor([float(self.negatives)]))
        if self.crop_scales is not None and len(self.crop_scales) != self.n_members:
            raise ValueError(
                f"crop_scales must hold {self.n_members} scales, one for each member, got {len(self.crop_scales)}"
            )
        kinds = self.kinds()
        if self.n_members == 1 and kinds[0].crop_scale is not None:
            raise ValueError(
                f"crop_scales need several members, got {self.crop_scales} for one: augment the data instead"
            )

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
        """As `Method.trained_by`; empty unless the curvature's conditions, which the class states, hold."""
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
        features, output = head_input_and_output(network, self.head, batch.inputs)
        compared = embeddings = normalized(output)
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


@dataclass(frozen=True)
class DeepEnsemble(Method):
    """Train M networks as `Deterministic` does, each from its own seed, and combine them.

    An input is uncertain if the networks disagree.

    Source: Lakshminarayanan, Pritzel and Blundell (2017); Warburg et al. (2023), appendix G.4.

    Attributes:
        n_members: M ≥ 2 networks.
        checkpoints: M files of weights (.safetensors or .pth) to load instead of training; empty to train.
        combine: `concatenate`, or `mean` as in Warburg et al.; see
            `lam.encoders.ensemble.EnsembleEncoder`.
        reference: number of random training items, at least 2. Rotations align the members' embeddings of them for κ.
    """

    n_members: int = 5
    checkpoints: Sequence[str] = ()
    combine: Combine = "concatenate"
    reference: int = 5000

    name = "deep_ensemble"
    encoder = EnsembleEncoder

    def __post_init__(self) -> None:
        for name in ("n_members", "reference"):
            check_at_least(name, getattr(self, name), 2)
        check_choice("combine", self.combine, get_args(Combine))
        if self.checkpoints and len(self.checkpoints) != self.n_members:
            raise ValueError(
                f"checkpoints must be empty, or one file for each of n_members={self.n_members} members, got "
                f"{len(self.checkpoints)}"
            )

    @property
    def n_seeds(self) -> int:
        """One seed for each member."""
        return self.n_members

    def check_start(self, *, pretrained: bool) -> None:
        """Reject a single trained network, and missing checkpoints."""
        if pretrained:
            raise ValueError(
                f"a deep ensemble cannot start from one trained network: give {self.n_members} files as checkpoints "
                "(--method.checkpoints=[...] in a run), or start without a trained network"
            )
        for file in self.checkpoints:
            check_is_file(file)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train the members; see `Method.train`. Stages are `member-1` and so on and, with `concatenate`, `align`.

        The network is the first member. `training.another` makes the other members from the following seeds; by
        default, `network.recipe` makes them, without pretrained weights. Histories and sub-folders of checkpoints are
        named `member-1` and so on.
        """
        self.check_start(pretrained=training.pretrained)
        network = unwrapped(network)
        members = [network, *map(unwrapped, self._others(network, training))]
        if len(set(members)) < len(members):
            raise ValueError(
                "Training(another=...) must return a new network for each seed, got one of them twice, which cannot "
                "be several members: build the network inside the function"
            )
        head = _common_head(members, dataset)
        histories = {}
        for number, member in enumerate(members, start=1):
            if self.checkpoints:
                load_weights(member, self.checkpoints[number - 1])
                member.to(device_of(training.accelerator, training.devices)).eval()
                continue
            part = f"member-{number}"
            own = replace(
                training,
                seed=training.seed + number - 1,
                folder=training.part(part),
                stage=lambda _, part=part: training.stage(part),
            )
            for history in self.train_network(member, dataset, own).values():
                histories[part] = history
        rotations = None
        if self.combine == "concatenate":
            with training.stage("align"):
                inputs = reference_inputs(dataset, self.reference, seed=training.seed)
                rotations = align(torch.cat([features_and_units(members, head, batch)[1] for batch in inputs], 1))
        own = {"combine": self.combine, "rotations": rotations}
        return Trained(self.encoder_of(members, head, dataset, training, **own), histories)

    def _others(self, network: nn.Module, training: Training) -> list[nn.Module]:
        recipe: Any = getattr(network, "recipe", None)
        another = training.another or (lambda seed: models.build(**{**recipe, "seed": seed}))
        if training.another is None and not recipe:
            raise ValueError(
                "lam.models did not build this network and cannot make more like it: give Training(another=...), a "
                "function from a seed to a network with new random weights"
            )
        dtype = next(network.parameters()).dtype
        return [another(training.seed + number).to(dtype) for number in range(1, self.n_members)]


def _common_head(members: Sequence[nn.Module], dataset: Any) -> str:
    head, first = "", ""
    for number, member in enumerate(members, start=1):
        head = head_of(member, dataset)
        layer: Any = member.get_submodule(head)
        shape = f"{head} ({layer.in_features} -> {layer.out_features})"
        first = first or shape
        if shape != first:
            raise ValueError(f"members must have heads of one shape: member 1 has {first}, member {number} has {shape}")
    return head
