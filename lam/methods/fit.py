"""`fit` makes a trained network Bayesian and keeps its weights; `fit_features` needs no network.

Source: Warburg et al. (2023), section 3.
"""

import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from tqdm import tqdm

from lam.encoders.base import at_least_float32
from lam.encoders.batches import REMEMBERED, Batch, as_batches, as_tensors, item_hashes, split_batch, spread
from lam.encoders.bayesian import BayesianEncoder
from lam.encoders.layers import LayersEncoder
from lam.hessians.accumulate import LastLayerAccumulator
from lam.hessians.last_layer import check_feature_values, check_kinds, check_sphere
from lam.hessians.structures.layers import LayersCurvature
from lam.inputs import AnyPreprocessing
from lam.methods.laplace import Laplace, train_layer
from lam.models.head import ADDED, default_head, features_and_output, find_head, probe_output
from lam.models.head import n_items as count_items
from lam.models.layers import elements_of_pass, find_layers, own_weights
from lam.models.modes import evaluating
from lam.models.weights import unwrapped
from lam.pairs.pairs import as_targets, check_labels, targets_of
from lam.pairs.relation import Relation
from lam.posteriors import LAYERS_POSTERIORS, POSTERIORS, Posterior
from lam.posteriors.layers import LayersAccumulator
from lam.posteriors.settings import check_seed
from lam.training.batches import labels_of_items
from lam.utils import distributed
from lam.utils.checks import check_tensor
from lam.utils.random import seeded

_LOG = logging.getLogger(__name__)

_IMAGENET_CLASSES = (1000, 21841, 21843)  # numbers of classes in ImageNet's usual subsets
_MANY_CLASSES = 100
"""With fewer classes, the numbers of embedding dimensions and of classes may be equal by chance."""

_MENDED = ("diag", "kron")  # structures whose posterior `tune` may replace


@torch.inference_mode(False)
@torch.enable_grad()
def fit(
    network: nn.Module,
    loader: Iterable[Batch],
    options: Laplace | None = None,
    *,
    margin: float | None = None,
    preprocessing: AnyPreprocessing | None = None,
    seed: int = 0,
    progress: bool = True,
) -> BayesianEncoder:
    """Put a Laplace posterior over the last layer of a trained retrieval network.

    Under torchrun, every process calls `fit` with the same network and loader and reads its share of the batches
    (`lam.utils.distributed.shard`). Every process gets the posterior that a single process would get, up to rounding.
    With `pairs="dataset"` only the features are computed in parallel; the first process forms the curvature.

    Args:
        network: maps a batch to embeddings (N, D), normalised or not. It ends in a linear layer, unless `head` is
            "train" or "identity". Parallel modules and averaged models of torch, and modules of Fabric, are unwrapped.
        loader: batches (inputs, labels), or (inputs, positions) for places; inputs are a tensor, or a dictionary of
            keyword arguments.
        options: settings of the posterior; by default `Laplace(margin=margin)`.
        margin: margin of the contrastive loss, in (0, 2]: `fit(network, loader, margin=0.7)` is short for
            `fit(network, loader, Laplace(margin=0.7))`.
        preprocessing: preprocessing of an image file or a text; by default the data set's.
        seed: seed of the posterior's noise.
        progress: show progress bars on standard error.

    Returns:
        The encoder. The network itself is not changed.

    Raises:
        ValueError: for settings outside their range; a network whose output is not (N, D), does not come from a linear
            layer, is random, or depends on other items of the batch; unusable layers; features or a curvature that are
            not finite; features that are all zero; data without positive or negative pairs.

    Example:
        >>> network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batches = [(torch.randn(16, 4), torch.arange(16) % 4) for _ in range(3)]
        >>> encoder = fit(network, batches, margin=0.7, progress=False)
        >>> encoder.head, encoder.embed(batches).kappa.shape
        ('2', torch.Size([48]))
    """
    check_seed(seed)
    if not isinstance(network, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"network must be a torch.nn.Module, got {type(network).__name__}: call lam.fit(network, loader, ...)"
        )
    network = unwrapped(network, compiled=False)  # a wrapper may cast outputs, so that they match no layer's output
    options = _settings_of(options, margin)
    options = replace(options, head=default_head(network, options.head))
    head = options.head
    dataset = getattr(loader, "dataset", None)
    labels = _labels_of(dataset)
    if labels is not None and options.relation.positive_within is None:
        check_labels(labels)
    distributed.join()
    progress = progress and distributed.is_rank_zero()
    loader = as_batches(loader, labelled=True)
    first, batches = distributed.shard(loader)
    if first is None:
        raise ValueError("the loader gave no batch")
    probe, targets = split_batch(first)
    batches = tqdm(batches, total=_n_batches(loader), desc="fitting", unit="batch", disable=not progress)
    if head in ("identity", "train"):
        path = ADDED
        output = at_least_float32(probe_output(network, probe))
        _hint_at_logits("", output.shape[1], labels)
        options.check_layer(options.added_layer(head, output.shape[1]))  # fails before the training
        features = _features(network, ADDED, output.dtype, batches)
        if head == "identity":
            weight, bias = torch.eye(output.shape[1], dtype=output.dtype, device=output.device), None
        else:
            layer, features = _train_layer(features, output.device, options, seed=seed, progress=progress)
            weight, bias = detached_copies(layer.weight, layer.bias)
    else:
        path = find_head(network, probe, head)
        layer: Any = network.get_submodule(path)
        _hint_at_logits(path, layer.out_features, labels)
        with evaluating(layer):  # reading a spectral norm's weight in training mode changes it
            weight, bias = detached_copies(layer.weight, layer.bias)
        features = _features(network, path, weight.dtype, batches)
    options = options.with_structure(*weight.shape)
    summing = _Fit(options, options.relation, network, path, weight, bias, loader, seed, progress)
    is_last = options.layers == "last"
    posterior = summing.over_features(features) if is_last else summing.over_layers(probe, batches)
    encoder = (BayesianEncoder if is_last else LayersEncoder)(
        network,
        path,
        posterior,
        relation=options.relation,
        preprocessing=preprocessing or getattr(dataset, "preprocessing", None),
        ood_score="knn" if _is_identity(weight, bias) else "kappa",
        trained_on=item_hashes(probe, targets)[:REMEMBERED],
    )
    encoder.fitted = summing
    return encoder


def fit_features(
    features: Any,
    labels: Any,
    weight: Any,
    bias: Any = None,
    options: Laplace | None = None,
    *,
    margin: float | None = None,
    seed: int = 0,
    progress: bool = False,
) -> BayesianEncoder:
    """Fit the posterior of a linear layer to all pairs of items, from stored features.

    The time grows with N²: one core takes 4 s for 6,000 items of 768 dimensions.

    Args:
        features: (N, P) inputs of the layer, a tensor, an array or a table.
        labels: (N,) integer labels, or (N, X) positions.
        weight: (D, P) weight of the layer.
        bias: (D,) bias of the layer, or None.
        options, margin, seed: as in `fit`. Pairs come from the whole data set; `head`, `dimension`, `layers` and
            `predictive` have no effect. A curvature with cross terms, or your own, may need memory for (N, N) pairs.
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
    check_seed(seed)
    options = _settings_of(options, margin)
    relation = replace(options.relation, scope="dataset")
    features, weight, bias = map(as_tensors, (features, weight, bias))
    check_kinds(features, weight)
    if bias is not None:
        check_tensor("bias", bias)
    if weight.ndim != 2:
        raise ValueError(f"weight must have shape (D, P), got {tuple(weight.shape)}")
    features = features.detach()  # else the posterior keeps the graph that computed them
    labels = targets_of(features, labels)
    weight, bias = detached_copies(weight, bias)
    options = options.with_structure(*weight.shape)
    summing = _Fit(options, relation, None, "", weight, bias, [(features, labels)], seed, progress)
    trained_on = item_hashes(features[spread(len(features))])
    encoder = BayesianEncoder(None, "", summing.posterior(), relation=relation, trained_on=trained_on)
    encoder.fitted = summing
    return encoder


@dataclass(frozen=True)
class _Fit:
    """The settings and the batches of a fit, to repeat it with other curvatures.

    The batches hold inputs of `network`; without a network, one batch holds all features, inputs of a layer with
    `weight` and `bias`.
    """

    options: Laplace
    relation: Relation
    network: nn.Module | None
    head: str
    weight: Float[Tensor, "D P"]
    bias: Float[Tensor, " D"] | None
    loader: Iterable[Batch]
    seed: int
    progress: bool

    def to(self, device: torch.device | str) -> "_Fit":
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    @torch.inference_mode(False)
    @torch.enable_grad()
    def without_clipping(self, old: Posterior) -> list[Posterior]:
        """`old` with non-negative curvatures of the same loss, for the structures `diag` and `kron`."""
        posteriors = list[Posterior]()
        for curvature in self.options.loss_curvature.non_negative() if self.options.structure in _MENDED else ():
            # an unusable or zero curvature, or batches that cannot be read again
            with suppress(ValueError, OSError), distributed.alone(), seeded(self.seed):
                new = replace(self, options=replace(self.options, curvature=curvature)).posterior()
                posteriors += [replace(old, curvature=new.curvature)] if new.n_items == old.n_items else []
        return posteriors

    def posterior(self) -> Posterior:
        if self.network is None:
            return self.over_features(self.loader)
        first, batches = distributed.shard(self.loader)
        if first is None:
            raise ValueError("the loader gave no batch")
        if self.options.layers != "last":
            return self.over_layers(split_batch(first)[0], batches)
        return self.over_features(_features(self.network, self.head, self.weight.dtype, batches))

    def over_features(self, batches: Iterable[tuple[Tensor, Any]]) -> Posterior:
        """The posterior over the last layer, from batches of features and targets."""
        summing = LastLayerAccumulator(
            empty=self.options.empty(self.weight, has_bias=self.bias is not None),
            relation=self.relation,
            seed=self.seed,
            weight=self.weight,
            bias=self.bias,
            progress=self.progress,
        )
        if self.network is None:
            ((features, labels),) = batches
            curvature = summing.over_pairs(features, labels), len(features)
        else:
            curvature = summing.fit(batches)
        settings = self.options.posterior_options(self.seed)
        return POSTERIORS[str(self.options.structure)](self.weight, self.bias, *curvature, **settings)

    def over_layers(self, probe: Any, batches: Iterable[Batch]) -> Posterior:
        """The posterior over several layers, from batches; `probe` holds the inputs of the first batch."""
        network, options = cast(nn.Module, self.network), self.options
        where: Any = {"network": network, "head": self.head}
        where["layers"] = find_layers(network, self.head, probe, options.layers)
        empty, cost = empty_layers_curvature(options, probe, n_items=count_items(probe), **where)
        _LOG.info("curvature of %s", cost)
        if self.progress:
            tqdm.write(f"curvature of {cost}", file=sys.stderr)
        summing = LayersAccumulator(empty=empty, relation=self.relation, seed=self.seed, **where)
        curvature, settings = summing.fit(map(split_batch, batches)), options.posterior_options(self.seed)
        where["predictive"] = options.predictive or "linearised"
        return LAYERS_POSTERIORS[str(options.structure)](self.weight, self.bias, *curvature, **settings, **where)


def empty_layers_curvature(
    options: Laplace, probe: Any, *, n_items: int, network: nn.Module, head: str, layers: Sequence[str]
) -> tuple[LayersCurvature, str]:
    """A curvature of zeros, and the cost of its sums as text; a cost above `max_memory` raises a `ValueError`."""
    curvature, max_memory = options.loss_curvature, options.max_memory
    layer: Any = network.get_submodule(head)
    check_sphere(layer.out_features)
    own = {path: (module := network.get_submodule(path), own_weights(module)) for path in layers}
    empty: LayersCurvature = LAYERS_POSTERIORS[options.structure or "diag"].structure.zeros(
        own, curvature, max_memory=max_memory
    )
    kept = sum(tensor.nbytes for tensor in empty.tensors().values())
    size = next(layer.parameters()).element_size()  # reading a weight in training mode may change buffers
    an_item = size * elements_of_pass(network, head, layers, probe, jacobians=empty.forms_jacobians)
    matrices = max(size, 4) * n_items * len(curvature.terms) * layer.out_features**2
    n_weights = sum(rows * columns for rows, columns in empty.shapes)
    cost = (
        f"{n_weights:,} weights in {len(layers)} layers: {layer.out_features} backward passes, {kept:,} bytes, "
        f"{matrices:,} bytes a batch and {an_item:,} bytes an item"
    )
    sampled = sum(weight.nbytes for _, weights in own.values() for weight in weights.values())
    if kept + matrices + an_item > max_memory:
        raise ValueError(
            f"the curvature of {cost}, exceeds max_memory, {max_memory:,}: raise it, take smaller batches, or name "
            "fewer layers"
        )
    return empty, f"{cost}; later {sampled:,} bytes for each network that is sampled"


def _settings_of(options: Laplace | None, margin: float | None) -> Laplace:
    if not isinstance(options, Laplace | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"options must be a lam.Laplace, got {options!r:.80}: give lam.Laplace(margin=0.7), or margin=0.7 by name; "
            "labels belong to the batches, such as [(inputs, labels)]"
        )
    if options is not None and margin is not None:
        raise ValueError(f"margin must be given within options: Laplace(margin={margin!r}, ...)")
    options = Laplace(margin=margin) if options is None else options
    options.check_complete()
    return options


def _n_batches(loader: Any) -> int | None:
    try:
        return ceil(len(loader) / distributed.world_size())
    except TypeError:
        return None


def _is_identity(weight: Tensor, bias: Tensor | None) -> bool:
    square = weight.shape[0] == weight.shape[1] and (bias is None or not bias.any())
    return square and torch.equal(weight, torch.eye(len(weight), dtype=weight.dtype, device=weight.device))


def _labels_of(dataset: Any) -> Tensor | None:
    """The integer labels of all items of a data set; None if `labels` or `targets` hold anything else."""
    try:
        labels = as_targets(labels_of_items(dataset))
        is_vector = labels.shape == (len(dataset),) and not labels.is_floating_point()
    except (TypeError, ValueError):  # class names, a table or a path, or a data set without a length
        return None
    return labels if is_vector and not (labels < 0).any() else None


def _hint_at_logits(path: str, dimension: int, labels: Tensor | None) -> None:
    """Warn if a head has as many outputs as there are classes: the outputs may be logits."""
    n_classes = 0 if labels is None else len(labels.unique())
    if dimension in _IMAGENET_CLASSES or dimension == n_classes >= _MANY_CLASSES:
        data = "ImageNet" if dimension in _IMAGENET_CLASSES else "the data"
        warnings.warn(
            f"the last layer, {path or 'the network itself'}, has {dimension} outputs, as many as {data} has classes: "
            "if they are class logits, which make poor embeddings, put torch.nn.Identity() in its place and fit with "
            'head="train" or head="identity"',
            stacklevel=5,  # skips two decorators
        )


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


def _train_layer(
    features: Iterable[tuple[Tensor, Any]], device: torch.device, options: Laplace, *, seed: int, progress: bool
) -> tuple[nn.Linear, Iterable[tuple[Tensor, Any]]]:
    """A layer trained on features of all processes, and this process's batches of features and targets."""
    inputs = [(part.to(device), targets) for part, targets in distributed.batches_of_all(features)]
    targets = torch.cat([targets_of(part, targets) for part, targets in inputs])
    if options.relation.positive_within is None:
        check_labels(targets)
    training: Any = {"margin": options.loss_margin, "dimension": options.dimension, "seed": seed, "progress": progress}
    layer = train_layer(torch.cat([part for part, _ in inputs]), targets, options.relation, **training)
    return layer, distributed.shard(inputs)[1]


def detached_copies(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Copies in float32 or wider, which later training of the layer does not change."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.detach().to(dtype, copy=True), None if bias is None else bias.detach().to(dtype, copy=True)
