"""Post-hoc Laplace: a trained network becomes Bayesian, its weights stay as they are.

Source: Warburg et al. (2023), section 3.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.curvature import (
    SCOPES,
    Batch,
    Relation,
    Scope,
    all_pairs,
    as_batches,
    check_labels,
    check_pairs,
    curvature_in_batches,
    curvature_of_dataset,
    split_batch,
)
from lam.encoder import BayesianEncoder
from lam.head import features_and_output, find_head
from lam.hessians.contrastive import Fix, Split
from lam.hessians.last_layer import check_finite, check_settings
from lam.posterior import LastLayerPosterior
from lam.preprocessing import Preprocessing


def fit(
    network: nn.Module,
    loader: Iterable[Batch],
    *,
    margin: float,
    head: str | None = None,
    split: Split = "arccos",
    fix: Fix = "fixed",
    negative_weight: float = 1.0,
    pairs: Scope = "batch",
    positive_within: float | None = None,
    negative_beyond: float | None = None,
    prior_precision: float = 1.0,
    likelihood_scale: float | None = None,
    preprocessing: Preprocessing | None = None,
    seed: int = 0,
    progress: bool = True,
) -> BayesianEncoder:
    """Put a Laplace posterior over the last layer of a trained retrieval network.

    Args:
        network: any module that maps a batch to embeddings (N, D), normalised or not, by a linear layer at its end.
        loader: batches (inputs, labels), or (inputs, positions) for places.
        margin: of the contrastive loss, in (0, 2].
        head: path of the linear layer; found by a probe batch by default.
        split: whether the normalisation is linearised (`euclidean`) or not (`arccos`).
        fix: `fixed`, `positive` or `full`: which terms of the curvature are kept.
        negative_weight: w in [0, 1], the weight of negative pairs.
        pairs: `batch`: all pairs within each batch, so that fits can be added and batches forgotten; or `dataset`:
            every pair of the data set, however it is cut.
        positive_within: for places, in metres.
        negative_beyond: for places, in metres.
        prior_precision: α.
        likelihood_scale: s; by default the number of items squared. `BayesianEncoder.tune` chooses it.
        preprocessing: how an image file becomes an input; that of the loader's data set by default.
        seed: of the posterior's noise.
        progress: show progress bars on standard error.

    Returns:
        The encoder. The network itself is not changed.

    Raises:
        ValueError: for settings outside their range, a network whose output no linear layer gives, features that are
            not finite or all zero, and data without positive or negative pairs.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batches = [(torch.randn(16, 4), torch.arange(16) % 4) for _ in range(3)]
        >>> encoder = fit(network, batches, margin=0.7, progress=False)
        >>> encoder.head, encoder.embed(batches).kappa.shape
        ('2', torch.Size([48]))
    """
    if pairs not in SCOPES:
        raise ValueError(f"pairs must be one of {', '.join(SCOPES)}, got {pairs!r}")
    relation = Relation(pairs, positive_within, negative_beyond)
    check_settings(margin=margin, split=split, fix=fix, negative_weight=negative_weight)
    if fix == "full" and pairs == "dataset":
        raise ValueError('fix must be fixed or positive with pairs="dataset", got full: use pairs="batch"')
    dataset = getattr(loader, "dataset", None)
    labels = getattr(dataset, "labels", getattr(dataset, "targets", None))
    if labels is not None and positive_within is None:
        check_labels(torch.as_tensor(labels))
    loader = as_batches(loader)
    batches = iter(loader)
    first = next(batches, None)
    if first is None:
        raise ValueError("the loader gave no batch")
    path = find_head(network, split_batch(first)[0], head)
    layer: Any = network.get_submodule(path)
    weight, bias = _copied(layer.weight, layer.bias)
    total = len(loader) if hasattr(loader, "__len__") else None  # pyright: ignore[reportArgumentType]
    shown = tqdm(chain([first], batches), total=total, desc="fitting", unit="batch", disable=not progress)
    features = _features(network, path, weight.dtype, shown)
    options: dict[str, Any] = {"margin": margin, "split": split, "fix": fix, "negative_weight": negative_weight}
    if relation.in_batches:
        curvature, n_items = curvature_in_batches(features, weight, bias, relation, **options)
        check_pairs(curvature, n_items)
    else:
        curvature, n_items = curvature_of_dataset(features, weight, bias, relation, progress=progress, **options)
    posterior = LastLayerPosterior(weight, bias, curvature, n_items, prior_precision, likelihood_scale, seed)
    if preprocessing is None:
        preprocessing = getattr(dataset, "preprocessing", None)
    return BayesianEncoder(network, path, posterior, relation=relation, preprocessing=preprocessing)


def fit_features(
    features: Float[Tensor, "N P"],
    labels: Tensor | Sequence[int],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None = None,
    *,
    margin: float,
    split: Split = "arccos",
    fix: Fix = "fixed",
    negative_weight: float = 1.0,
    positive_within: float | None = None,
    negative_beyond: float | None = None,
    prior_precision: float = 1.0,
    likelihood_scale: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> BayesianEncoder:
    """Fit the posterior with no network at hand: from stored features and the layer above them, over every pair.

    Args:
        features: (N, P) what enters the layer.
        labels: (N,) integer labels, or (N, X) positions with `positive_within`.
        weight: (D, P) of the layer.
        bias: (D,) of the layer, or None.
        margin, split, fix, negative_weight, positive_within, negative_beyond, prior_precision, likelihood_scale, seed:
            as in `fit`. `full` holds an (N, N) matrix of pairs.
        progress: show a progress bar on standard error.

    Returns:
        An encoder whose inputs are features.

    Raises:
        ValueError: as `fit`.

    Example:
        >>> features, labels = torch.randn(32, 8), torch.arange(32) % 4
        >>> encoder = fit_features(features, labels, torch.randn(3, 8), margin=0.7)
        >>> encoder.embed(features[:1]).mean.shape
        torch.Size([1, 3])
    """
    relation = Relation("dataset", positive_within, negative_beyond)
    check_settings(margin=margin, split=split, fix=fix, negative_weight=negative_weight)
    labels = torch.as_tensor(labels)
    if len(labels) != len(features):
        raise ValueError(f"there are {len(features)} items and {len(labels)} labels")
    if positive_within is None:
        check_labels(labels)
    weight, bias = _copied(weight, bias)
    options: dict[str, Any] = {"margin": margin, "split": split, "fix": fix, "negative_weight": negative_weight}
    curvature = all_pairs(features, labels, weight, bias, relation, progress=progress, **options)
    posterior = LastLayerPosterior(weight, bias, curvature, len(features), prior_precision, likelihood_scale, seed)
    return BayesianEncoder(None, "", posterior, relation=relation)


def _features(
    network: nn.Module, head: str, dtype: torch.dtype, batches: Iterable[Batch]
) -> Iterator[tuple[Tensor, Any]]:
    seen = 0
    for batch in batches:
        inputs, targets = split_batch(batch)
        features = features_and_output(network, head, inputs)[0].to(dtype)
        check_finite(features, seen)
        seen += len(features)
        yield features, targets


def _copied(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Copies that later training does not change, float32 or wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    copied = weight.detach().to(dtype, copy=True)
    return copied, None if bias is None else bias.detach().to(dtype, copy=True)
