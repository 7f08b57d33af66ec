"""A linear layer added to a network without a head, trained on the network's outputs."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import skip_init
from torch.utils.data import TensorDataset

from lam import losses
from lam.models import EmbeddingNetwork
from lam.pairs.relation import Relation
from lam.training import Training, train
from lam.utils.autocast import without_autocast
from lam.utils.checks import positive_integer

DIMENSION = 64
BATCH_SIZE, LEARNING_RATE = 256, 1e-2
MOST_EPOCHS, MOST_STEPS = 50, 1000
HELD_OUT, MOST_HELD_OUT = 0.1, 1000
"""Share and largest number of the held-out items, which choose the epoch."""


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
    1,000 steps, at most 50 epochs. 10 % of the items, at most 1,000, are held out and choose the epoch by their loss.
    If these or the other items lack positive or negative pairs, all items train the layer until the last epoch.

    Args:
        features, targets: (N, P) outputs of a network, and (N,) labels or (N, X) positions.
        relation: which items are pairs.
        margin: margin of the loss.
        dimension: D, from 2 to P; by default 64, or P if that is less.
        seed: seed of the split and of the order of items.

    Returns:
        A layer from P to D with a bias, in the type and on the device of the features.
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
    """A float32 layer from features (N, P) to their first D principal components, scaled to more equal variances.

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
