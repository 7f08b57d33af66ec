"""`Laplace`: the settings of a Laplace posterior for `lam.fit` and `lam.fit_features`. Also trains an added layer."""

import math
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.data import TensorDataset

from lam import losses
from lam.hessians.losses import CURVATURES, ContrastiveCurvature, Curvature, from_settings
from lam.hessians.structures.base import MAX_MEMORY, Structure
from lam.models import EmbeddingNetwork
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.relation import SCOPES, Relation, Scope
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS
from lam.posteriors.layers import Predictive
from lam.posteriors.settings import PRIOR_RATIO, check_settings
from lam.training import Training, train
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_choice, positive_integer

DIMENSION = 64
BATCH_SIZE, LEARNING_RATE = 256, 1e-2
MOST_EPOCHS, MOST_STEPS = 50, 1000
HELD_OUT, MOST_HELD_OUT = 0.1, 1000
"""Share and largest number of held-out items; the epoch of their lowest loss is kept."""

KRON_WIDTH = 4096
"""Largest number of inputs or outputs for `kron` by default. Wider factors take minutes to decompose."""


@without_autocast()
def train_layer(
    features: Float[Tensor, "N P"],
    targets: Tensor,
    relation: Relation,
    *,
    margin: float,
    dimension: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> nn.Linear:
    """Train a linear layer on features by the contrastive loss, starting from `whitening_layer`.

    Warburg et al. (2023) add no layer. The settings were chosen on sentence embeddings: Adam at 1e-2, batches of 256,
    1,000 steps, at most 50 epochs. 10 % of the items, at most 1,000, are held out to choose the epoch by loss.
    If these or the other items lack positive or negative pairs, the layer learns from all items until the last epoch.

    `targets` are (N,) labels or (N, X) positions; the seed drives the split and the order of items. The layer has a
    bias, D outputs (see `dimension_of`), and the type and device of the features.
    """
    layer = whitening_layer(features, dimension)
    items, held_out = _split(targets, relation, seed)
    device = features.device

    def validate(network: nn.Module) -> float:
        embeddings = network(features[held_out].float())
        return -float(loss(embeddings, relation.pairs(targets[held_out])))

    loss = losses.build(margin=margin)
    n_batches = math.ceil(len(items) / BATCH_SIZE)
    training = Training(
        loss=loss,
        epochs=min(MOST_EPOCHS, math.ceil(MOST_STEPS / n_batches)),
        relation=relation,
        validate=validate if len(held_out) else None,
        batch_size=BATCH_SIZE,
        learning_rate=LEARNING_RATE,
        seed=seed,
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=[device.index] if device.type == "cuda" else 1,
        progress=progress,
    )
    data = TensorDataset(features[items].float().cpu(), targets[items].cpu())
    train(EmbeddingNetwork(nn.Identity(), layer), data, training)
    return layer.to(features)


def whitening_layer(features: Float[Tensor, "N P"], dimension: int | None = None) -> nn.Linear:
    """A float32 layer from features (N, P) to their first D principal components, scaled to nearly equal variances.

    W = diag(λ + λ̄)^(−1/2) Uᵀ and b = −W m. m is the mean of the features, U and λ are the eigenvectors and eigenvalues
    of their covariance, and λ̄ is the mean of λ. λ̄ keeps the layer from magnifying noise where variance is small.
    """
    width = features.shape[1]
    D = dimension_of(width, dimension)
    centred = features.double() - features.double().mean(0)
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(features))
    values = values.clamp(min=0)
    if values.sum() == 0:
        raise ValueError(f"all {len(features)} features are equal: give other data, or a network that tells them apart")
    weight = (vectors / (values + values.mean()).sqrt()).T.flip(0)[:D]
    layer: Any = skip_init(nn.Linear, width, D, device=features.device, dtype=torch.float32)  # draws nothing
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(-weight @ features.double().mean(0))
    return layer


def dimension_of(width: int, dimension: int | None) -> int:
    """D of an added layer, from 2 to `width`; by default 64, or `width` if that is less."""
    D = min(DIMENSION, width) if dimension is None else positive_integer("dimension", dimension)
    if not 2 <= D <= width:
        raise ValueError(f"dimension must be from 2 to {width}, the width of the network's output, got {dimension}")
    return D


def _split(targets: Tensor, relation: Relation, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of training and held-out items; all items train if a part lacks positive or negative pairs."""
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed)).to(targets.device)
    count = min(math.ceil(HELD_OUT * len(order)), MOST_HELD_OUT)
    held_out, items = order[:count], order[count:]
    for part in (held_out, items[:MOST_HELD_OUT]):
        pairs = relation.pairs(targets[part])
        if pairs.n_positives == 0 or pairs.n_negatives == 0:
            return order, order[:0]
    return items, held_out


@dataclass(frozen=True, kw_only=True)
class Laplace:
    """Settings of a Laplace posterior, checked on creation.

    Attributes:
        margin: margin of the contrastive loss, in (0, 2], for miners, for `head="train"`, and for a curvature whose
            own margin is None.
        curvature: curvature of the loss: an object of `lam.hessians`, its name, or a mapping of name and settings.
        pairs: `batch` takes all pairs within a batch, so that posteriors can be added, and batches subtracted.
            `dataset` takes every pair of the data set. A `lam.pairs.Relation` is for pairs by distance or mined pairs.
        head: path of the last linear layer, found by default. `train` and `identity` add a layer after the network and
            leave the network unchanged. `train` trains this layer on all outputs of the network, held in memory (see
            `lam.methods.laplace.train_layer`). `identity` keeps the network's embeddings; κ then says little about the
            distance from the data, so the OOD score is k-NN. TorchScript networks take `identity` by default.
        dimension: D of the layer of `head="train"`; by default 64, or the width of the output if that is less.
        layers: the layers of the posterior: `last`, `all` layers with weights, or a list of paths. Several layers need
            pairs within batches.
        structure: structure of the covariance, a name in `lam.posteriors.POSTERIORS`: `diag`, `kron`, `ekfac`, `full`
            or `low_rank`; several layers take `diag` or `kron`. Curvatures with cross terms (derivatives with respect
            to two items) need `diag` and `layers="last"`. `ekfac` reads the features twice, from a temporary file. The
            default is `kron`; it is `diag` for several layers, for more than 4,096 inputs or outputs, and for a
            curvature that has cross terms or no `matrices` method.
        predictive: outputs `linearised` in the weights (default), or `sampled` networks, for several layers.
        max_memory: limit in bytes for the sums of the structure; with several layers, for the sums, the second
            derivatives of a batch and the pass of an item together. S sampled networks take S times the layers' memory.
        rank: largest rank of the input factor of `low_rank`; 256 by default.
        prior_precision: precision α > 0; by default `prior_ratio` times the mean of s·h over all weights, with the
            curvature h and the likelihood scale s. With this default, s changes only the posterior's width, not its
            shape.
        prior_ratio: factor > 0 in the default of `prior_precision`.
        likelihood_scale: factor s > 0 of h; by default the squared number of items, or 1 if the curvature is a plain
            sum over pairs. `BayesianEncoder.tune` chooses s.

    Raises:
        ValueError: for a setting outside its range, or settings that exclude each other.
    """

    margin: float | None = None
    curvature: Curvature | str | dict[str, Any] = "contrastive"
    pairs: Relation | Scope = "batch"
    head: str | None = None
    dimension: int | None = None
    layers: str | list[str] = "last"
    structure: str | None = None
    predictive: Predictive | None = None
    max_memory: int = MAX_MEMORY
    rank: int | None = None
    prior_precision: float | None = None
    prior_ratio: float = PRIOR_RATIO
    likelihood_scale: float | None = None

    def __post_init__(self) -> None:
        check_settings(self.prior_precision, self.likelihood_scale, prior_ratio=self.prior_ratio)
        self.loss_curvature.check_scope(self.relation.scope)
        if self.dimension is not None and self.head != "train":
            raise ValueError(
                f'dimension needs head="train", got dimension={self.dimension} with head={self.head!r}: leave it out'
            )
        if self.max_memory is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise ValueError("max_memory must be a number of bytes, got None")
        check_at_least("max_memory", self.max_memory, 1.0)
        if self.rank is not None and self.structure != "low_rank":
            raise ValueError(f'rank is for structure="low_rank" only, got {self.rank} with {self.structure!r}')
        check_at_least("rank", self.rank, 1)
        if self.structure is not None:
            check_choice("structure", self.structure, POSTERIORS)
            POSTERIORS[self.structure].structure.check_cross_terms(self.loss_curvature)
        self._check_layers()

    @property
    def loss_curvature(self) -> Curvature:
        """The curvature as an object; `margin` fills in a missing margin."""
        if isinstance(self.curvature, Curvature):
            return self.curvature.with_defaults({"margin": self.margin})
        if self.curvature == "contrastive":
            return ContrastiveCurvature(self.margin)
        if not isinstance(self.curvature, str | dict):
            raise ValueError(
                f"curvature must be one of {', '.join(CURVATURES)}, a mapping of a name and settings, or an object of "
                f"lam.hessians, got {self.curvature!r}"
            )
        settings = {"name": self.curvature} if isinstance(self.curvature, str) else self.curvature
        return from_settings(settings).with_defaults({"margin": self.margin})

    @property
    def relation(self) -> Relation:
        """The rule for pairs; `loss_margin` is the default margin of mined triplets."""
        if not isinstance(self.pairs, Relation):
            check_choice("pairs", self.pairs, SCOPES)
            return Relation(self.pairs)
        if self.pairs.mining == ALL_PAIRS or self.pairs.triplet_margin is not None:
            return self.pairs
        return replace(self.pairs, triplet_margin=self.loss_margin)

    @property
    def loss_margin(self) -> float | None:
        """`margin`, by default the margin of the curvature."""
        return getattr(self.loss_curvature, "margin", None) if self.margin is None else self.margin

    def with_structure(self, n_outputs: int, n_inputs: int) -> "Laplace":
        """The settings; a missing structure becomes the default for a layer of this shape."""
        if self.structure is not None:
            return self
        curvature = self.loss_curvature
        takes_kron = self.layers == "last" and curvature.has_matrices and not curvature.has_cross_terms
        return replace(self, structure="kron" if takes_kron and max(n_outputs, n_inputs) <= KRON_WIDTH else "diag")

    def empty(self, weight: Float[Tensor, "D P"], *, has_bias: bool) -> Structure:
        """The structure with all sums zero for a layer with this weight; see `lam.hessians.Structure.check`."""
        structure: Any = POSTERIORS[str(self.with_structure(*weight.shape).structure)].structure
        rank = {} if self.rank is None else {"rank": self.rank}
        return structure.zeros(weight, self.loss_curvature, has_bias=has_bias, max_memory=self.max_memory, **rank)

    def check_layer(self, layer: nn.Linear) -> None:
        """Reject a layer whose curvature takes too much memory; see `lam.hessians.Structure.check`."""
        weight = torch.empty(layer.out_features, layer.in_features, device="meta")
        self.empty(weight, has_bias=layer.bias is not None)

    def posterior_options(self, seed: int) -> dict[str, Any]:
        """The settings of a posterior."""
        own = {name: getattr(self, name) for name in ("prior_precision", "prior_ratio", "likelihood_scale")}
        return {**own, "seed": seed}

    def check_complete(self) -> None:
        """Require a complete loss: a margin, or a curvature without missing settings; and a margin for triplets."""
        curvature = self.loss_curvature
        if curvature == ContrastiveCurvature(None):
            raise ValueError("the contrastive curvature needs a margin: give margin, or another curvature")
        curvature.check_complete()
        if self.relation.miner != "all" and self.relation.triplet_margin is None:
            raise ValueError(f"{self.relation.miner} triplets need a margin, got None: give margin, or another miner")

    def added_layer(self, head: str, width: int) -> nn.Linear:
        """The layer that `head` adds after outputs of this width, on the meta device."""
        if head == "identity":  # a bias would add the same variance to all items
            return nn.Linear(width, width, bias=False, device="meta")
        if self.loss_margin is None:
            raise ValueError('head="train" uses the contrastive loss: give its margin')
        return nn.Linear(width, dimension_of(width, self.dimension), device="meta")

    def _check_layers(self) -> None:
        """Reject settings that do not fit the number of layers, one or several."""
        is_paths = isinstance(self.layers, list | tuple) and all(isinstance(path, str) for path in self.layers)
        if not (is_paths or isinstance(self.layers, str)):
            raise ValueError(f'layers must be "last", "all" or a list of paths, got {self.layers!r}')
        if self.layers == "last":
            if self.predictive is not None:
                raise ValueError(
                    f'predictive needs several layers, got {self.predictive!r} with layers="last": leave it out, or '
                    'give layers="all" or a list of paths'
                )
            return
        if (structure := self.structure or "diag") not in LAYERS_POSTERIORS:
            known = ", ".join(LAYERS_POSTERIORS)
            raise ValueError(f"structure must be one of {known}, got {self.structure!r} with layers={self.layers!r}")
        check_choice("predictive", self.predictive or "linearised", get_args(Predictive))
        if self.head in ("identity", "train"):
            raise ValueError(
                f"layers={self.layers!r} need a network that ends in its own linear layer, got head={self.head!r}: use "
                'layers="last"'
            )
        if self.relation.scope != "batch":
            raise ValueError(
                f"layers={self.layers!r} take pairs within batches, got pairs={self.relation.scope!r}: use "
                'pairs="batch"'
            )
        LAYERS_POSTERIORS[structure].structure.check_cross_terms(self.loss_curvature)
