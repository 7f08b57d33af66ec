"""Post-hoc Laplace: a trained network becomes Bayesian and keeps its weights.

Source: Warburg et al. (2023), section 3.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader

from lam.datasets.augmented import TwoViews, Views, check_images, without_augmentation
from lam.encoders import BayesianEncoder, Encoder
from lam.encoders.batches import Batch, HeldOut, as_batches, split_batch
from lam.hessians import ContrastiveCurvature, Curvature
from lam.hessians.losses import CURVATURES, from_settings
from lam.hessians.losses.contrastive import Fix, Split
from lam.losses import Loss
from lam.losses.base import as_settings, margin_of, settings_of
from lam.methods.base import Learned, Method, Trained, inputs_of, probe_of
from lam.methods.fit import empty_layers_curvature, fit
from lam.methods.laplace import Laplace
from lam.models.head import default_head, find_head, probe_output
from lam.models.layers import find_layers
from lam.models.weights import unwrapped
from lam.pairs.mining import MinerName
from lam.pairs.relation import Relation, Scope
from lam.training import History, Training
from lam.tuning.alterations import is_images
from lam.utils.checks import check_at_least, check_choice, check_positive
from lam.utils.random import seeded
from lam.vmf.embeddings import Mean

_CONTRASTIVE_SETTINGS = ("margin", "split", "fix", "negative_weight")

OWN = "own"  # name for the curvature of the network's training loss
Options = TypeVar("Options", bound="LaplaceMethod")
Tune = Literal["calibration", "marginal_likelihood", "none"]


@dataclass(frozen=True, kw_only=True)
class LaplaceMethod(Method):
    """Options of both Laplace methods: the direction of embeddings, the curvature, and the tuning of the posterior.

    Attributes:
        tune: choice after training: `calibration` chooses the likelihood scale s on held-out data,
            `marginal_likelihood` chooses the prior precision α, `none` chooses nothing.
        tune_step: with `marginal_likelihood`, size of a single step of log α; by default, α has the greatest evidence.
        mean: the direction of an embedding: `network` or, as in Warburg et al., `sampled`; see `BayesianEncoder`.
        curvature: a name in `lam.hessians.CURVATURES`, a mapping of name and settings, such as {name: supcon, split:
            outputs}, or an object of `lam.hessians`. Missing settings, such as a temperature, come from the training
            loss. `own` is the curvature of the network's training loss. The options below set a contrastive curvature.
        margin: margin of the contrastive curvature; negative pairs beyond it have no curvature. The default is the
            margin of the training loss, which mined triplets always use.
        split, fix, negative_weight: settings of the contrastive curvature; see `ContrastiveCurvature`.
    """

    tune: Tune = "calibration"
    tune_step: float | None = None
    mean: Mean = "network"
    curvature: Curvature | str | dict[str, Any] = "contrastive"
    margin: float | None = None
    split: Split = "arccos"
    fix: Fix = "fixed"
    negative_weight: float = 1.0

    encoder = BayesianEncoder

    def __post_init__(self) -> None:
        check_choice("tune", self.tune, get_args(Tune))
        check_choice("mean", self.mean, get_args(Mean))
        check_positive("tune_step", self.tune_step)
        if self.tune_step is not None and self.tune != "marginal_likelihood":
            raise ValueError(f"tune_step needs tune='marginal_likelihood', got tune={self.tune!r}: leave tune_step out")

    @property
    def loss_curvature(self) -> Curvature:
        """The curvature that the options name; some of its settings may be missing."""
        if self.curvature == OWN:  # a stand-in until `resolved` knows the loss
            return ContrastiveCurvature(self.margin)
        settings = {"name": self.curvature} if isinstance(self.curvature, str) else self.curvature
        if settings == {"name": "contrastive"}:
            return ContrastiveCurvature(self.margin, self.split, self.fix, self.negative_weight)
        if foreign := self._contrastive_settings:
            name = "..." if isinstance(settings, Curvature) else settings.get("name")
            raise ValueError(
                f"{next(iter(foreign))} is a setting of the contrastive curvature, got curvature={self.curvature!r}: "
                f"give settings as curvature={{name: {name}, ...}}"
            )
        if isinstance(settings, Curvature):
            return settings
        try:
            return from_settings(settings)
        except (TypeError, ValueError) as error:
            where = "" if str(error).startswith("curvature") else f"curvature={self.curvature!r}: "
            raise ValueError(f"{where}{error}") from None

    def resolved(self: Options, training: Training) -> Options:
        """The options, with the training loss's curvature for `own`; `ValueError` for a loss without a curvature."""
        if self.curvature != OWN:
            return self
        if training.trained_by is None:
            return replace(self, curvature={"name": training.loss.curvature})
        if not training.trained_by:
            raise ValueError(
                "the loss that trained the network has no curvature of its own: give method.curvature one of "
                f"{', '.join(CURVATURES)}"
            )
        own = {name: value for name, value in training.trained_by.items() if name != "views"}
        if own["name"] != "contrastive":
            return replace(self, curvature=own)
        defaults: Any = {name: getattr(LaplaceMethod, name) for name in _CONTRASTIVE_SETTINGS}
        return replace(self, curvature=own | self._contrastive_settings, **defaults)

    @property
    def _contrastive_settings(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in _CONTRASTIVE_SETTINGS}
        return {name: value for name, value in own.items() if value != getattr(LaplaceMethod, name)}

    def curvature_of(self, loss: Loss, learned: Learned | None = None) -> Curvature:
        """The curvature, completed by a loss and its learned parameters; `ValueError` if a setting is still missing."""
        curvature = self.loss_curvature.with_defaults({**settings_of(loss), **as_settings(learned or {})})
        if missing := curvature.unset:
            raise ValueError(
                f"{type(curvature).__name__} needs a {missing[0]}, which the loss {type(loss).__name__} does not have: "
                f"set method.curvature={{name: ..., {missing[0]}: ...}}, or train by another loss"
            )
        return curvature

    @property
    def tunes(self) -> bool:
        return self.tune != "none"

    def tune_on(
        self,
        encoder: Encoder,
        held_out: HeldOut | Iterable[Batch],
        *,
        progress: bool = False,
    ) -> None:
        """Choose s or α of the posterior by the options, and recommend an OOD score for images.

        See `BayesianEncoder.tune` and `BayesianEncoder.recommend`.
        """
        bayesian, held_out = cast(BayesianEncoder, encoder), HeldOut.of(held_out)
        if self.tune == "calibration":
            bayesian.tune(held_out, by="calibration", progress=progress)
        elif self.tune == "marginal_likelihood":
            bayesian.tune([], by="marginal_likelihood", step=self.tune_step)
        if is_images(split_batch(next(iter(as_batches(held_out.batches)), None))[0]):
            bayesian.recommend(held_out.batches, progress=progress)


@dataclass(frozen=True, kw_only=True)
class LaplacePosthoc(LaplaceMethod, Laplace):
    """Train a network, then put a posterior over its last layer; further options are as for `lam.methods.Laplace`.

    Attributes:
        miner: pairs of a batch for the curvature: a name as in `lam.pairs.Mining`.
        max_pairs: largest number of mined triplets; for `all`, of positive and of negative pairs each.
        views: settings of two random views of each image; by default, plain images. With views, only the two views of
            an image match, so the curvature needs no labels. `curvature=own` takes the training's views.
        average: whether the curvature averages positive pairs, and negative pairs; otherwise it sums them.
        batch_size: items in a batch, at least 2; `pairs=batch` forms pairs within these batches.
    """

    pairs: Scope = "batch"
    miner: MinerName = "all"
    max_pairs: int | None = None
    views: Views | None = None
    average: bool = True
    batch_size: int = 256

    name = "laplace_posthoc"

    def __post_init__(self) -> None:
        LaplaceMethod.__post_init__(self)
        Relation(self.pairs, miner=self.miner, max_pairs=self.max_pairs)
        Laplace.__post_init__(self)
        check_at_least("batch_size", self.batch_size, 2)

    def train(self, network: nn.Module, dataset: Any, training: Training) -> Trained:
        """Train a network and fit the posterior without tuning; see `Method.train` and `lam.fit`.

        Missing settings of the curvature, such as a margin, come from the loss. Stages are `train` and `fit`.
        """
        network = unwrapped(network)
        self.check(network, dataset, training)
        options = self.resolved(training)
        histories = self.train_network(network, dataset, training)
        return Trained(fit_posterior(options, network, dataset, training, histories), histories)

    def check(self, network: nn.Module, dataset: Any, training: Training) -> None:
        """Also reject options that do not fit the network, the loss or the labels; see `Method.check`."""
        super().check(network, dataset, training)
        if not training.by_label and self.pairs == "batch":
            raise ValueError(
                'pairs must be "dataset" for places (method.pairs=dataset in a run): shuffled batches of places hold '
                "hardly any positive pairs"
            )
        resolved, probe = self.resolved(training), probe_of(dataset)
        if resolved.views is not None:
            check_images(dataset, "leave views out")
        options = replace(resolved.laplace(training), head=default_head(network, self.head))
        options.check_complete()
        if options.head in ("identity", "train"):
            options.check_layer(options.added_layer(options.head, probe_output(network, probe).shape[1]))
            return
        head = find_head(network, probe, options.head)
        if self.layers == "last":
            options.check_layer(cast(nn.Linear, network.get_submodule(head)))
            return
        n_items = min(self.batch_size, len(dataset)) * (1 if resolved.views is None else 2)
        layers = find_layers(network, head, probe, self.layers)
        empty_layers_curvature(options, probe, n_items=n_items, network=network, head=head, layers=layers)

    def resolved(self, training: Training) -> "LaplacePosthoc":
        """The options; `curvature=own` becomes the training's curvature and views. See `LaplaceMethod.resolved`."""
        views = (training.trained_by or {}).get("views") if self.curvature == OWN else None
        return replace(super().resolved(training), views=self.views if views is None else Views(**views))

    def relation_of(self, training: Training) -> Relation:
        """The training's relation, with the scope and the mining of the options."""
        chosen = {"scope": self.pairs, "miner": self.miner, "max_pairs": self.max_pairs, "triplet_margin": None}
        return replace(training.relation, **chosen)

    def laplace(self, training: Training, learned: Learned | None = None) -> Laplace:
        """The settings for `lam.fit`; missing settings come from the training's loss."""
        relation = self.relation_of(training)
        if self.views is not None:  # views match by the number of their image, not by labels or places
            relation = Relation(relation.scope, miner=self.miner, max_pairs=self.max_pairs)
        own = {field.name: getattr(self, field.name) for field in fields(Laplace)}
        curvature, margin = self.curvature_of(training.loss, learned), margin_of(training.loss)
        return Laplace(**{**own, "curvature": curvature, "margin": margin, "pairs": relation})

    @property
    def loss_curvature(self) -> Curvature:
        curvature: Any = super().loss_curvature
        return curvature if self.average else replace(curvature, average=False)


def fit_posterior(
    options: LaplacePosthoc, network: nn.Module, dataset: Any, training: Training, histories: Mapping[str, History]
) -> BayesianEncoder:
    """Fit on shuffled batches of plain images or of views, with the loss's learned parameters; see `lam.fit`."""
    plain = without_augmentation(dataset)
    items: Any = plain if options.views is None else TwoViews(plain, options.views)
    settings: Any = {"batch_size": options.batch_size, "shuffle": True, "num_workers": training.num_workers}
    loader = DataLoader(items, **settings, generator=torch.Generator().manual_seed(training.seed))
    laplace = options.laplace(training, learned_parameters(histories))
    common: Any = {"preprocessing": getattr(plain, "preprocessing", None), "progress": training.progress}
    with training.stage("fit"), seeded(training.seed):
        encoder = fit(network, loader, laplace, seed=training.seed, **common)
    encoder.mean = options.mean
    if options.views is not None:  # queries are plain images, which match by the training's relation
        triplet_margin = encoder.relation.triplet_margin
        encoder.relation = replace(options.relation_of(training), triplet_margin=triplet_margin)
        encoder.trained_on = inputs_of(plain, training)["trained_on"]
    return encoder


def learned_parameters(histories: Mapping[str, History]) -> Learned:
    """Learned parameters of the loss; empty for a network that was already trained."""
    return histories["network"].learned if "network" in histories else {}
