"""Post-hoc Laplace: a trained network becomes Bayesian, its weights stay as they are.

Source: Warburg et al. (2023), section 3.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader

from lam.datasets.augmented import without_augmentation
from lam.encoders.bayesian import BayesianEncoder
from lam.hessians import ContrastiveCurvature, Fix, Split
from lam.losses import Loss, margin_of
from lam.methods.base import Stage, Trained, silent, train_network
from lam.methods.fit import fit, refuse_dimension_of_other_head
from lam.pairs.mining import MinerName
from lam.pairs.relation import Relation, Scope
from lam.utils.checks import refuse_below, refuse_non_positive, refuse_other_than
from lam.vmf.embeddings import Mean

Tune = Literal["calibration", "marginal_likelihood", "none"]


@dataclass(frozen=True)
class LaplaceOptions:
    """How the posterior is fitted and tuned; see `fit` and `BayesianEncoder.tune`.

    Attributes:
        head: path of the last linear layer, found by default; or `train` or `identity`, for a layer that is added.
        dimension: D of the layer that `train` adds.
        split: `euclidean` or `arccos`.
        fix: `fixed`, `positive` or `full`.
        negative_weight: w in [0, 1].
        pairs: `batch` or `dataset`.
        miner: which pairs of a batch count for the curvature: `all`, `violating`, `easy`, `semihard` or `hard`.
        max_pairs: at most so many triplets of the kind, or, of all pairs, so many of each type.
        margin: of the curvature, within which negative pairs have one; by default that of the loss, which stays that of
            the miner's triplets.
        average: whether the curvature is averaged over the pairs of each type, or their plain sum.
        batch_size: items a batch, among which pairs are formed.
        prior_precision: α > 0.
        likelihood_scale: s > 0; by default the number of items squared, or 1 of a plain sum.
        tune: by what s or α of the run's posterior is chosen, on the validation split; of `laplace_online` too.
        tune_step: of `marginal_likelihood`: log α moves by this once, in place of to the maximum.
        mean: which direction is retrieved: `network` or, as in the paper, `sampled`; see `BayesianEncoder`;
            of `laplace_online` too.

    Raises:
        ValueError: for an option outside its range.
    """

    head: str | None = None
    dimension: int | None = None
    split: Split = "arccos"
    fix: Fix = "fixed"
    negative_weight: float = 1.0
    pairs: Scope = "batch"
    miner: MinerName = "all"
    max_pairs: int | None = None
    margin: float | None = None
    average: bool = True
    batch_size: int = 256
    prior_precision: float = 1.0
    likelihood_scale: float | None = None
    tune: Tune = "calibration"
    tune_step: float | None = None
    mean: Mean = "network"

    def __post_init__(self) -> None:
        Relation(self.pairs, miner=self.miner, max_pairs=self.max_pairs)
        self.curvature.check_scope(self.pairs)
        refuse_dimension_of_other_head(self.dimension, self.head)
        refuse_other_than("tune", self.tune, get_args(Tune))
        refuse_other_than("mean", self.mean, get_args(Mean))
        refuse_below("batch_size", self.batch_size, 2)
        for name in ("prior_precision", "likelihood_scale", "tune_step"):
            refuse_non_positive(name, getattr(self, name))
        if self.tune_step is not None and self.tune != "marginal_likelihood":
            raise ValueError(
                f"tune_step is of tune='marginal_likelihood', got {self.tune_step} with tune={self.tune!r}"
            )

    @property
    def curvature(self) -> ContrastiveCurvature:
        """The curvature, without a margin where that is the loss's."""
        return ContrastiveCurvature(self.margin, self.split, self.fix, self.negative_weight, self.average)


def train(
    network: nn.Module,
    dataset: Any,
    *,
    loss: Loss,
    epochs: int,
    options: LaplaceOptions | None = None,
    pretrained: bool = False,
    relation: Relation | None = None,
    seed: int = 0,
    stage: Stage = silent,
    **training: Any,
) -> Trained:
    """Train a network, then put a posterior over its last layer; nothing is tuned here.

    Args:
        network: maps (N, ...) inputs to unit rows (N, D) by a linear layer and normalisation.
        dataset: of (input, label); see `lam.training.train`.
        loss: of `lam.losses`; its margin is that of the curvature, unless the options have one.
        epochs: passes over the data.
        options: how the posterior is fitted.
        pretrained: the network is trained already.
        relation: what makes two items a pair; by default their labels.
        seed: of the order of the data and of everything drawn.
        stage: see `lam.methods.base.Stage`.
        training: further options of `lam.training.train`.

    Returns:
        The encoder, and the history unless the network was trained already.

    Raises:
        ValueError: as `lam.training.train` and `fit`.
    """
    options = options or LaplaceOptions()
    relation = relation or Relation()
    if relation.positive_within is not None and options.pairs == "batch":
        raise ValueError(
            'pairs must be "dataset" for places (laplace.pairs=dataset in a run): shuffled batches of places hold '
            "hardly a positive pair"
        )
    training |= {"loss": loss, "epochs": epochs, "seed": seed, "method": "laplace_posthoc"}
    histories = train_network(network, dataset, pretrained=pretrained, relation=relation, stage=stage, **training)
    with stage("fit"):
        encoder = fit_with(
            options,
            network,
            without_augmentation(dataset),
            margin=margin_of(loss),
            relation=relation,
            seed=seed,
            num_workers=training.get("num_workers", 0),
            progress=training.get("progress", True),
        )
    return Trained(encoder, histories)


def fit_with(
    options: LaplaceOptions,
    network: nn.Module,
    dataset: Any,
    *,
    margin: float | None,
    relation: Relation,
    seed: int,
    num_workers: int,
    progress: bool,
) -> BayesianEncoder:
    """Fit as the options of a run say, on the shuffled batches of a data set; see `fit`."""
    generator = torch.Generator().manual_seed(seed)
    return fit(
        network,
        DataLoader(dataset, batch_size=options.batch_size, shuffle=True, num_workers=num_workers, generator=generator),
        margin=margin,
        curvature=options.curvature,
        pairs=replace(
            relation, scope=options.pairs, miner=options.miner, max_pairs=options.max_pairs, triplet_margin=None
        ),
        head=options.head,
        dimension=options.dimension,
        prior_precision=options.prior_precision,
        likelihood_scale=options.likelihood_scale,
        seed=seed,
        progress=progress,
    )
