"""`fit`: a trained network becomes Bayesian, its weights stay as they are; `fit_features` does without the network.

Training before it, and the options of a run, are in `lam.methods.laplace_posthoc`.

Source: Warburg et al. (2023), section 3.
"""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.encoders.base import at_least_float32
from lam.encoders.batches import Batch, as_batches, split_batch
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.layers import LayersEncoder, curvature_of_layers
from lam.encoders.seen import REMEMBERED, item_hashes, spread
from lam.hessians.accumulate import (
    StructureOptions,
    curvature_of_batches,
    curvature_of_dataset,
    curvature_over_all_pairs,
    targets_of,
    total_of,
)
from lam.hessians.batch import check_feature_values, check_kinds, check_sphere
from lam.hessians.losses import CURVATURES, ContrastiveCurvature, Curvature
from lam.hessians.structures import MAX_MEMORY, LayersCurvature
from lam.inputs import AnyPreprocessing
from lam.methods.added_head import dimension_of, train_layer
from lam.models.head import ADDED, default_head, evaluating, features_and_output, find_head, probe_output
from lam.models.layers import Layers, elements_of_pass, find_layers, own_weights
from lam.models.layers import n_items as count_items
from lam.pairs.mining import ALL_PAIRS
from lam.pairs.pairs import as_targets, check_labels
from lam.pairs.relation import SCOPES, Relation, Scope
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS
from lam.posteriors.base import check_settings
from lam.posteriors.layers import Predictive
from lam.utils import distributed
from lam.utils.checks import check_choice

_LOG = logging.getLogger(__name__)

_IMAGENET_CLASSES = (1000, 21841, 21843)
"""Numbers of classes of ImageNet's usual parts."""

_MANY_CLASSES = 100
"""Fewer classes may well be as many as an embedding has dimensions."""


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    network: nn.Module,
    loader: Iterable[Batch],
    *,
    margin: float | None = None,
    curvature: Curvature | None = None,
    pairs: Scope | Relation = "batch",
    head: str | Literal["identity", "train"] | None = None,
    dimension: int | None = None,
    layers: Layers = "last",
    structure: str = "diag",
    predictive: Predictive | None = None,
    max_memory: int = MAX_MEMORY,
    rank: int | None = None,
    prior_precision: float = 1.0,
    likelihood_scale: float | None = None,
    preprocessing: AnyPreprocessing | None = None,
    seed: int = 0,
    progress: bool = True,
) -> BayesianEncoder:
    """Put a Laplace posterior over the last layer of a trained retrieval network.

    In several processes, started by torchrun, each calls it with the same network and loader, takes its share of the
    batches (`lam.utils.distributed.shard`), and gets the same posterior: that of one process, up to the order of
    sums. With `pairs="dataset"` features alone are shared out, and the first process forms the curvature from them.

    Args:
        network: any module that maps a batch to embeddings (N, D), normalised or not, by a linear layer at its end;
            with `head` "train" or "identity" without one.
        loader: batches (inputs, labels), or (inputs, positions) for places; inputs are a tensor, or a dictionary, which
            the network is given by name.
        margin: of the contrastive loss, in (0, 2]: of its curvature, unless that is given with another, of the miner's
            triplets, and of what trains a layer that is added.
        curvature: of the loss; `ContrastiveCurvature(margin)` by default.
        pairs: `batch`: all pairs within each batch, so that fits can be added and batches forgotten; or `dataset`:
            every pair of the data set, however it is cut. Or a `lam.pairs.Relation`, for places or mined pairs.
        head: path of the linear layer, found by a probe batch by default (a TorchScript network, whose layers cannot be
            reached, takes "identity"). Or a layer is added after the network, which
            stays as it is: "train", one trained on the network's output (`lam.methods.added_head`), which is kept in
            memory meanwhile; or "identity", which keeps the network's embeddings. κ of the latter says little about the
            distance from the data, so its OOD score is k-NN.
        dimension: D of the layer that `head="train"` adds; by default 64, or the output's width if less.
        layers: which the posterior is over: `last`; or `all` that have weights, or a list of their paths, with pairs
            within batches.
        structure: of the posterior's covariance, one of `lam.posteriors.POSTERIORS`: `diag`, `kron`, `ekfac`, `full` or
            `low_rank`; over several layers `diag` or `kron`. All but `diag` of the last layer hold each item with the
            others still: `fix="fixed"`. `ekfac` goes through the features twice, from a temporary file.
        predictive: of several layers: `linearised` in their weights, the default, or `sampled`, whole networks.
        max_memory: bytes that the sums of the structure may take; over several layers with what a batch and an item
            take, but not what networks that are sampled later take, S times the weights of the layers.
        rank: of `low_rank`: the most directions of the features that it tells apart; 256 by default.
        prior_precision: α.
        likelihood_scale: s; by default the number of items squared, or 1 of a plain sum. `BayesianEncoder.tune` chooses
            it.
        preprocessing: how an image file becomes an input; that of the loader's data set by default.
        seed: of the posterior's noise.
        progress: show progress bars on standard error.

    Returns:
        The encoder. The network itself is not changed.

    Raises:
        ValueError: for settings outside their range, a network whose output is no (N, D), given by no linear layer or
            another for an item in another batch, layers that a posterior cannot be over, features or a curvature that
            are not finite, features that are all zero, and data without positive or negative pairs.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batches = [(torch.randn(16, 4), torch.arange(16) % 4) for _ in range(3)]
        >>> encoder = fit(network, batches, margin=0.7, progress=False)
        >>> encoder.head, encoder.embed(batches).kappa.shape
        ('2', torch.Size([48]))
    """
    check_settings(prior_precision, likelihood_scale, seed)
    if not isinstance(pairs, Relation):
        check_choice("pairs", pairs, SCOPES)
        pairs = Relation(pairs)
    curvature, margin = _with_margin(curvature, margin)
    curvature.check_scope(pairs.scope)
    lacks_margin = pairs.mining != ALL_PAIRS and pairs.triplet_margin is None
    relation = replace(pairs, triplet_margin=margin) if lacks_margin else pairs
    head = default_head(network, head)
    refuse_dimension_of_other_head(dimension, head)
    options = structure_options(structure, max_memory, rank)
    check_layers(layers, predictive, structure, head, relation.scope, curvature)
    dataset = getattr(loader, "dataset", None)
    labels = getattr(dataset, "labels", getattr(dataset, "targets", None))
    if labels is not None and relation.positive_within is None:
        check_labels(as_targets(labels))
    distributed.join()
    progress = progress and distributed.is_rank_zero()
    loader = as_batches(loader, labelled=True)
    first, batches = distributed.shard(loader)
    if first is None:
        raise ValueError("the loader gave no batch")
    batches = tqdm(batches, total=_number_of(loader), desc="fitting", unit="batch", disable=not progress)
    path = ADDED if head in ("identity", "train") else find_head(network, split_batch(first)[0], head)
    if path == ADDED:
        output = at_least_float32(probe_output(network, split_batch(first)[0]))
        _hint_at_logits("", output.shape[1], labels)
        options.check(added_layer(head, output.shape[1], dimension, margin), curvature)  # before it is trained
        features = _features(network, ADDED, output.dtype, batches)
        if head == "identity":
            weight, bias = torch.eye(output.shape[1], dtype=output.dtype, device=output.device), None
        else:
            training = {"margin": margin, "dimension": dimension, "seed": seed, "progress": progress}
            layer, features = _trained_layer(features, output.device, relation, **training)
            weight, bias = detached_copies(layer.weight, layer.bias)
    else:
        layer: Any = network.get_submodule(path)
        _hint_at_logits(path, layer.out_features, labels)
        with evaluating(layer):  # in which reading a spectral norm's weight changes nothing
            weight, bias = detached_copies(layer.weight, layer.bias)
        features = _features(network, path, weight.dtype, batches)
    settings: Any = prior_precision, likelihood_scale, seed
    common: Any = {
        "relation": relation,
        "preprocessing": preprocessing or getattr(dataset, "preprocessing", None),
        "ood_score": "knn" if head == "identity" or _is_identity(weight, bias) else "kappa",
        "trained_on": item_hashes(split_batch(first)[0])[:REMEMBERED],
    }
    if layers != "last":
        paths = find_layers(network, split_batch(first)[0], layers)
        where: Any = {"network": network, "head": path, "layers": paths}
        probe = split_batch(first)[0]
        empty, cost = empty_of_layers(structure, curvature, probe, max_memory, n_items=count_items(probe), **where)
        _LOG.info("curvature of %s", cost)
        if progress:
            tqdm.write(f"curvature of {cost}", file=sys.stderr)
        share = curvature_of_layers(map(split_batch, batches), relation=relation, empty=empty, seed=seed, **where)
        where["predictive"] = predictive or "linearised"
        posterior = LAYERS_POSTERIORS[structure](weight, bias, *total_of(*share), *settings, **where)
        return LayersEncoder(network, path, posterior, **common)
    arguments = features, weight, bias, relation, options.empty(weight, curvature, has_bias=bias is not None), options
    if relation.in_batches:
        sums, n_items = curvature_of_batches(*arguments, seed=seed)
    else:
        sums, n_items = curvature_of_dataset(*arguments, progress=progress)
    return BayesianEncoder(network, path, POSTERIORS[structure](weight, bias, sums, n_items, *settings), **common)


def fit_features(
    features: Float[Tensor, "N P"],
    labels: Tensor | Sequence[int],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None = None,
    *,
    margin: float | None = None,
    curvature: Curvature | None = None,
    pairs: Relation | None = None,
    structure: str = "diag",
    max_memory: int = MAX_MEMORY,
    rank: int | None = None,
    prior_precision: float = 1.0,
    likelihood_scale: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> BayesianEncoder:
    """Fit the posterior with no network at hand: from stored features and the layer above them, over every pair.

    Args:
        features: (N, P) what enters the layer.
        labels: (N,) integer labels, or (N, X) positions.
        weight: (D, P) of the layer.
        bias: (D,) of the layer, or None.
        margin, curvature, structure, max_memory, rank, prior_precision, likelihood_scale, seed: as in `fit`. A
            curvature that joins items, and one from outside lam, may hold an (N, N) matrix of pairs.
        pairs: what makes a pair of places.
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
    check_settings(prior_precision, likelihood_scale, seed)
    relation = replace(pairs or Relation(), scope="dataset")
    curvature, _ = _with_margin(curvature, margin)
    check_kinds(features, weight)
    labels = targets_of(features, labels)
    if relation.positive_within is None:
        check_labels(labels)
    weight, bias = detached_copies(weight, bias)
    options = structure_options(structure, max_memory, rank)
    empty = options.empty(weight, curvature, has_bias=bias is not None)
    sums = curvature_over_all_pairs(features, labels, weight, bias, relation, empty, options, progress=progress)
    posterior = POSTERIORS[structure](weight, bias, sums, len(features), prior_precision, likelihood_scale, seed)
    trained_on = item_hashes(features[spread(len(features))])
    return BayesianEncoder(None, "", posterior, relation=relation, trained_on=trained_on)


def structure_options(structure: str, max_memory: int, rank: int | None) -> StructureOptions:
    """The options of a structure by its name.

    Raises:
        ValueError: for a name that no posterior has, or an option outside its range.
    """
    check_choice("structure", structure, POSTERIORS)
    return StructureOptions(POSTERIORS[structure].structure, max_memory, rank)


def check_layers(
    layers: Layers, predictive: str | None, structure: str, head: str | None, scope: Scope, curvature: Curvature
) -> None:
    """Refuse options that go with the last layer alone, and those of several layers with the last.

    Raises:
        ValueError: naming the option.
    """
    is_paths = isinstance(layers, list | tuple) and all(isinstance(path, str) for path in layers)
    if not (is_paths or isinstance(layers, str)):
        raise ValueError(f'layers must be "last", "all" or a list of paths, got {layers!r}')
    if layers == "last":
        if predictive is not None:
            raise ValueError(
                f'predictive is of several layers, got {predictive!r} with layers="last", whose outputs are linear in '
                'its weights: give layers="all" or a list of paths'
            )
        return
    if structure not in LAYERS_POSTERIORS:
        known = ", ".join(LAYERS_POSTERIORS)
        raise ValueError(f"structure must be one of {known}, got {structure!r} with layers={layers!r}")
    check_choice("predictive", predictive or "linearised", get_args(Predictive))
    if head in ("identity", "train"):
        raise ValueError(
            f"layers={layers!r} are of a network that ends in its own linear layer, got head={head!r}, which adds one "
            'that is in the posterior alone: use layers="last"'
        )
    if scope != "batch":
        raise ValueError(
            f'layers={layers!r} have a posterior formed in batches alone, got pairs={scope!r}: use pairs="batch"'
        )
    LAYERS_POSTERIORS[structure].structure.check_cross_terms(curvature)


def added_layer(head: str | None, width: int, dimension: int | None, margin: float | None) -> nn.Linear:
    """The shape of the layer that is added after outputs of a width, without values.

    Raises:
        ValueError: for a dimension outside its range, or no margin of the loss that trains the layer.
    """
    if head == "identity":  # without a bias, which would add the same variance to all items
        return nn.Linear(width, width, bias=False, device="meta")
    if margin is None:
        raise ValueError('head="train" trains a layer by the contrastive loss: give its margin')
    return nn.Linear(width, dimension_of(width, dimension), device="meta")


def empty_of_layers(
    structure: str,
    curvature: Curvature,
    probe: Any,
    max_memory: int,
    *,
    n_items: int,
    network: nn.Module,
    head: str,
    layers: Sequence[str],
) -> tuple[LayersCurvature, str]:
    """The curvature of no batch, and what that of batches of N items takes, in words.

    Raises:
        ValueError: where that is more than `max_memory`.
    """
    layer: Any = network.get_submodule(head)
    check_sphere(layer.out_features)
    modules = {path: network.get_submodule(path) for path in layers}
    own = {path: (module, own_weights(module)) for path, module in modules.items()}
    empty: LayersCurvature = LAYERS_POSTERIORS[structure].structure.zeros(own, curvature, max_memory=max_memory)
    kept = sum(tensor.nbytes for tensor in empty.tensors().values())
    size = next(layer.parameters()).element_size()  # to read a parametrised weight in training would change its buffers
    an_item = size * elements_of_pass(network, head, layers, probe, jacobians=empty.forms_jacobians)
    matrices = max(size, 4) * n_items * len(curvature.terms) * layer.out_features**2
    n_weights = sum(rows * columns for rows, columns in empty.shapes)
    cost = (
        f"{n_weights:,} weights in {len(layers)} layers: {layer.out_features} passes backwards, {kept:,} bytes, "
        f"{matrices:,} bytes a batch and {an_item:,} bytes an item"
    )
    sampled = sum(weight.nbytes for _, weights in own.values() for weight in weights.values())
    if kept + matrices + an_item > max_memory:
        raise ValueError(
            f"the curvature of {cost}, is more than max_memory, {max_memory:,}: allow more, take smaller "
            "batches, or name fewer layers"
        )
    return empty, f"{cost}; later {sampled:,} bytes for each network that is sampled"


def _with_margin(curvature: Any, margin: float | None) -> tuple[Curvature, float | None]:
    """The curvature, which takes the margin where it is to have one, and the margin, taken from it where none is given.

    Raises:
        ValueError: where neither is given, or what is no curvature.
    """
    if curvature is None:
        if margin is None:
            raise ValueError("give the margin of the contrastive loss, or the curvature of another")
        curvature = ContrastiveCurvature(margin)
    if not isinstance(curvature, Curvature):
        known = ", ".join(f'CURVATURES["{name}"]' for name in CURVATURES)
        raise ValueError(f"curvature must be an object of lam.hessians, made by one of {known}, got {curvature!r}")
    curvature = curvature.filled({"margin": margin})
    curvature.check_filled()
    return curvature, getattr(curvature, "margin", None) if margin is None else margin


def _number_of(loader: Any) -> int | None:
    """How many batches this process gets, where a loader can say so."""
    try:
        return ceil(len(loader) / distributed.world_size())
    except TypeError:
        return None


def _is_identity(weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a layer changes nothing: a network's own embeddings are kept by it."""
    square = weight.shape[0] == weight.shape[1] and (bias is None or not bias.any())
    return square and torch.equal(weight, torch.eye(len(weight), dtype=weight.dtype, device=weight.device))


def _hint_at_logits(path: str, dimension: int, labels: Any) -> None:
    """Warn where the outputs of a head are as many as there are classes: they may be logits, no embedding."""
    targets = as_targets([] if labels is None else labels)
    n_classes = len(targets.unique()) if targets.ndim == 1 else 0
    whose = (
        "ImageNet"
        if dimension in _IMAGENET_CLASSES
        else "the data"
        if dimension == n_classes >= _MANY_CLASSES
        else None
    )
    if whose is not None:
        warnings.warn(
            f"the last layer, {path or 'the network itself'}, has {dimension} outputs, as many as {whose} has classes: "
            "if they are class logits, which make poor embeddings, put torch.nn.Identity() in its place and fit with "
            'head="train" or head="identity"',
            stacklevel=3,
        )


def refuse_dimension_of_other_head(dimension: int | None, head: str | None) -> None:
    """Refuse a dimension where no layer is added that could have it."""
    if dimension is not None and head != "train":
        raise ValueError(f'dimension is that of the layer that head="train" adds, got {dimension} with head={head!r}')


def _features(
    network: nn.Module, head: str, dtype: torch.dtype, batches: Iterable[Batch]
) -> Iterator[tuple[Tensor, Any]]:
    n_items = 0
    for batch in batches:
        inputs, targets = split_batch(batch)
        features = features_and_output(network, head, inputs)[0].to(dtype)
        check_feature_values(features, n_items)
        n_items += len(features)
        yield features, targets


def _trained_layer(
    features: Iterable[tuple[Tensor, Any]], device: torch.device, relation: Relation, **training: Any
) -> tuple[nn.Linear, Iterable[tuple[Tensor, Any]]]:
    """A layer trained on features, batches of them with their targets, and these again."""
    inputs = [(part.to(device), targets) for part, targets in distributed.batches_of_all(features)]
    targets = torch.cat([targets_of(part, targets) for part, targets in inputs])
    if relation.positive_within is None:
        check_labels(targets)
    layer = train_layer(torch.cat([part for part, _ in inputs]), targets, relation, **training)
    return layer, distributed.shard(inputs)[1]


def detached_copies(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Copies that later training does not change, float32 or wider."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype, copy=True), None if bias is None else bias.detach().to(dtype, copy=True)
