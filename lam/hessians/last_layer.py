"""Generalised Gauss-Newton matrix (GGN) of a loss with respect to the weights of a linear last layer f = Wφ + b.

φ are the layer's inputs (features). H_a is the curvature of the loss with respect to the output of item a, with the
other outputs fixed. An item forms pairs with its partners. To avoid a matrix of all pairs of a data set, the code first
sums over the partners of each item, in blocks or by class, and then over items.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from tqdm import tqdm

from lam.hessians.losses import Curvature
from lam.hessians.losses.contrastive import BLOCK_ELEMENTS, cross_sum_of_class, cross_sum_over_pairs
from lam.hessians.relations import LabelRelation, NeighbourRelation, Related, cost_of
from lam.hessians.structures.base import Structure, weighted_by_term, with_ones
from lam.hessians.structures.last_layer import Diagonal
from lam.pairs.candidates import Candidates
from lam.pairs.pairs import Neighbours, Pairs
from lam.utils.autocast import without_autocast
from lam.utils.checks import check_at_least, check_tensor

ROWS = 4096  # number of items in a block of features
BLOCK_SIZE = {"cpu": 1 << 10, "cuda": 1 << 14}
"""Rows and columns of a block of similarities, by the kind of device; a block of float32 takes 1 GiB on a GPU."""

_ALL_ZERO = "features are all zero: the network ignores its inputs"

Sums = TypeVar("Sums", bound=Structure)

_ADVICE = "scale the network's output up, or give features and weight in float64"


@without_autocast()
def ggn_of_batch(
    empty: Sums,
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
) -> Sums:
    """Sum the GGN of a loss over the pairs of a batch, in the structure of `empty`.

    Args:
        empty: structure with all sums zero and the curvature of the loss.
        features: (N, P) inputs of the layer.
        weight: (D, P) the layer's weight.
        bias: (D,) the layer's bias, or None.
        pairs: pairs of the N items, or their candidates, if the curvature takes candidates.

    Returns:
        The structure with the sums of this batch, in the type of the features, but at least float32.

    Raises:
        ValueError: for shapes that disagree, features that are all zero or not finite, an output of length zero, or
            candidates for a curvature that takes only pairs.
    """
    curvature = empty.curvature
    inputs, n, r = _checked(features, weight, bias, pairs, curvature)
    part = empty.of_items(inputs, curvature.of_batch(n, r, pairs))
    if curvature.has_cross_terms:
        part = replace(part, sums=part.sums + curvature.cross(with_ones(inputs, bias is not None), n, r, pairs))
    part = replace(part, counts=curvature.counts(pairs))
    return part.of_type(torch.promote_types(features.dtype, torch.float32))


def diagonal_ggn(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
) -> Diagonal:
    """Diagonal of a loss's GGN, Σ_a H_a,ii φ_aj² for weight W_ij, plus the curvature's cross terms, if any.

    H_a holds the second derivatives of the loss with respect to the output of item a, whose features are φ_a.

    Args, Raises: as `ggn_of_batch`.

    Example:
        >>> from lam.hessians import ContrastiveCurvature
        >>> features, pairs = torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> diagonal_ggn(features, torch.eye(3), None, pairs, ContrastiveCurvature(1.0)).counts
        (2, 4)
    """
    shape = len(curvature.terms), len(weight), weight.shape[1] + (bias is not None)
    zeros = weight.new_zeros(()).expand(shape)  # only the shape is read, so nothing is allocated
    empty = Diagonal(zeros, (0,) * shape[0], curvature, has_bias=bias is not None)
    return ggn_of_batch(empty, features, weight, bias, pairs)


@without_autocast()
def output_curvature(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    pairs: Pairs | Candidates,
    curvature: Curvature,
    *,
    summed: bool = False,
) -> Float[Tensor, "*N D D"]:
    """The curvature H_a of every item, scaled so that the GGN of the weights is Σ_a H_a ⊗ φ_a φ_aᵀ.

    The result takes 4 N D² bytes in float32. With `summed`, it is Σ_a H_a (D, D), computed in less memory.

    Args, Raises: as `ggn_of_batch`, and
        ValueError: for a curvature with cross terms, or pairs without a positive pair.

    Example:
        >>> from lam.hessians import ContrastiveCurvature
        >>> features, pairs = torch.eye(3), Pairs.by_label(torch.tensor([0, 0, 1]))
        >>> output_curvature(features, torch.eye(3), None, pairs, ContrastiveCurvature(2.0, fix="projected")).shape
        torch.Size([3, 3, 3])
    """
    if curvature.has_cross_terms:
        raise ValueError(f"the cross terms of {curvature} belong to two items each: use fix='fixed'")
    _, n, r = _checked(features, weight, bias, pairs, curvature)
    items = curvature.of_batch(n, r, pairs)
    matrices = items.total() if summed else items.matrices().movedim(1, 0)
    return weighted_by_term(matrices, curvature, curvature.counts(pairs))


def _checked(
    features: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs | Candidates, curvature: Curvature
) -> tuple[Tensor, Tensor, Tensor]:
    """Features, and directions and lengths of outputs, after a check of all inputs."""
    check_layer(features, weight, bias)
    if len(features) and not features.any():
        raise ValueError(_ALL_ZERO)
    pairs.check_size(len(features))
    if isinstance(pairs, Candidates) and not curvature.takes_candidates:
        raise ValueError(f"{type(curvature).__name__} compares items with one another: give Pairs, not Candidates")
    return outputs(features, weight, bias, curvature.working_dtype(features))


@without_autocast()
def ggn_of_dataset(
    empty: Sums,
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    related: Int[Tensor, " N"] | Neighbours,
    *,
    block_size: int | None = None,
    progress: bool = True,
) -> Sums:
    """GGN over every pair of a data set, equal to `ggn_of_batch` for one batch of all items.

    Similarities are computed in the type of the features, but at least in float32.

    Args:
        empty: the structure with all sums zero. Its curvature must be `in_blocks`, such as a contrastive or softmax
            curvature whose `fix` is not `full`.
        features: (N, P) inputs of the layer, on any device; they move to the weight's device in blocks.
        weight: (D, P) the layer's weight.
        bias: (D,) the layer's bias, or None.
        related: (N,) labels, or `Neighbours` with the near pairs.
        block_size: rows and columns of a block of similarities; `BLOCK_SIZE` by default.
        progress: show a progress bar, the number of pairs and the memory on standard error.

    Returns:
        The structure with the sums of the data set, in float64.

    Raises:
        ValueError: as `ggn_of_batch`; also for a curvature that is not `in_blocks`, a wrong number of labels, or no
            positive pair.
    """
    curvature = empty.curvature
    curvature.check_scope("dataset")
    check_at_least("block_size", block_size, 1)
    n, r = _all_outputs(features, weight, bias, curvature)
    relation = NeighbourRelation(related) if isinstance(related, Neighbours) else LabelRelation(related)
    if relation.size != len(n):
        raise ValueError(f"there are {len(n)} items, but labels or neighbours for {relation.size}")
    if relation.n_positives == 0:
        raise ValueError(f"there is no positive pair among {len(n)} items: the loss has no curvature")
    block_size = block_size or BLOCK_SIZE.get(n.device.type, BLOCK_SIZE["cpu"])
    items = curvature.over_dataset(n, r, relation, block_size=block_size, progress=progress)
    total = empty
    for start, batch in tqdm(_stream(features, n.device), desc=items.cost, disable=not (progress and items.cost)):
        own = batch.to(curvature.working_dtype(batch))
        total = total + empty.of_items(own, items[start : start + len(batch)])
    if curvature.has_cross_terms:
        total = replace(total, sums=total.sums + _cross_terms(relation, features, weight, bias, progress=progress))
    return replace(total, counts=curvature.counts(relation))


def _all_outputs(features: Tensor, weight: Tensor, bias: Tensor | None, curvature: Curvature) -> tuple[Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor]] = []
    any_nonzero = False
    for start, batch in _stream(features, weight.device):
        check_layer(batch, weight, bias) if start == 0 else check_feature_values(batch, start)
        parts.append(outputs(batch, weight, bias, curvature.working_dtype(batch), offset=start)[1:])
        any_nonzero = any_nonzero or bool(batch.any())
    if len(features) < 2:
        raise ValueError(f"at least 2 items are needed to form a pair, got {len(features)}")
    if not any_nonzero:
        raise ValueError(_ALL_ZERO)
    return torch.cat([n for n, _ in parts]), torch.cat([r for _, r in parts])


def _cross_terms(
    relation: Related, features: Tensor, weight: Tensor, bias: Tensor | None, *, progress: bool
) -> Float[Tensor, "D F"]:
    """Sum of the cross terms over all positive pairs, by class or by blocks of listed pairs."""
    total = weight.new_zeros(len(weight), weight.shape[1] + (bias is not None), dtype=torch.float64)
    D, F = total.shape
    blocks = relation.positive_blocks(max(1, BLOCK_ELEMENTS // features.shape[1]))
    cost = cost_of(relation.n_positives // 2, 8 * F * (2 * max(map(len, blocks)) + 4 * D))
    for block in tqdm(blocks, desc=cost, disable=not progress):
        rows, pairs = (block, None) if block.ndim == 1 else block.unique(return_inverse=True)
        part = features[rows.to(features.device)].to(weight.device)
        part, n, r = outputs(part, weight, bias, torch.float64)
        inputs = with_ones(part, bias is not None)
        if pairs is None and len(rows) > D:  # moments of a large class take fewer operations than its pairs
            total += cross_sum_of_class(inputs, n, r)
        else:
            first, second = torch.triu_indices(len(rows), len(rows), 1).to(n.device) if pairs is None else pairs.T
            total += cross_sum_over_pairs(inputs, n, r, first, second, n.new_ones(len(first)))
    return total


def _stream(features: Tensor, device: torch.device) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, len(features), ROWS):
        yield start, features[start : start + ROWS].to(device)


def outputs(
    features: Float[Tensor, "N P"],
    weight: Float[Tensor, "D P"],
    bias: Float[Tensor, " D"] | None,
    dtype: torch.dtype,
    *,
    offset: int = 0,
) -> tuple[Float[Tensor, "N P"], Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Features in type `dtype`, and the layer's outputs as directions and lengths; see `directions` for errors."""
    storage = torch.promote_types(features.dtype, torch.float32)
    features, weight = features.to(dtype), weight.to(dtype)
    start = torch.zeros((), dtype=dtype, device=weight.device) if bias is None else bias.to(dtype)[:, None]
    f = torch.addmm(start, weight, features.T).T.contiguous()  # faster than `F.linear` for a narrow layer
    try:
        return features, *directions(f, storage, offset=offset)
    except ValueError:
        for name, parameter in (("weight", weight), ("bias", bias)):  # checked only now, when an output is invalid
            if parameter is not None and not parameter.isfinite().all():
                raise ValueError(f"{name} must be finite") from None
        raise


def directions(
    f: Float[Tensor, "N D"], storage: torch.dtype, *, offset: int = 0
) -> tuple[Float[Tensor, "N D"], Float[Tensor, "N 1"]]:
    """Outputs f as unit vectors and lengths; `offset` is the index of the first item, for errors.

    An output that is zero or not finite raises a `ValueError`, and so does an output that is too short: the type
    `storage` must hold inverse fourth powers of the lengths.
    """
    limits = torch.finfo(storage)
    least = limits.max**-0.25
    r = torch.linalg.vector_norm(f, dim=1, keepdim=True, dtype=torch.float64)  # float32 squares overflow before f does
    if not r.equal(r.clamp(least, torch.finfo(r.dtype).max)):  # also for NaN
        problems = (
            (r == 0, "is zero and has no direction"),
            (r < least, f"has a length of {{:.2g}}, too short for {limits.dtype}, at least {least:.2g}: {_ADVICE}"),
            (~r.isfinite(), f"is too large for {f.dtype}"),
        )
        invalid, problem = next((invalid, problem) for invalid, problem in problems if invalid.any())
        item = int(invalid.nonzero()[0, 0])
        raise ValueError(f"the output of item {item + offset} {problem.format(r[item].item())}")
    r = r.to(f.dtype)
    return f / r, r


def check_layer(features: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Reject features that do not fit the layer, and a layer with fewer than two outputs."""
    check_features(features, weight)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    check_sphere(weight.shape[0])


def check_sphere(D: int) -> None:
    """Reject a layer of fewer than two outputs."""
    if D < 2:
        raise ValueError(f"the layer must have at least 2 outputs to lie on a sphere, got {D}")


def check_features(features: Tensor, weight: Tensor) -> None:
    """Reject features and weights with wrong shapes, types or values."""
    if features.ndim != 2 or weight.ndim != 2 or features.shape[1] != weight.shape[1]:
        raise ValueError(
            f"features must be (N, P) and weight (D, P), got {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    check_kinds(features, weight)
    check_feature_values(features)


def check_kinds(features: Tensor, weight: Tensor) -> None:
    """Reject integer features and weights, and tensors without values."""
    for name, tensor in (("features", features), ("weight", weight)):
        check_tensor(name, tensor)
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be of a floating type, got {tensor.dtype}: convert them, .to(torch.float32)")
        if tensor.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the meta device, which has only a shape")


def check_feature_values(features: Tensor, offset: int = 0, *, name: str = "features") -> None:
    """Reject features (N, P) that are not finite, or too large for a sum of their squares.

    Error messages count items from `offset`, and call the features `name`.
    """
    if not features.numel():
        return
    limit = torch.finfo(torch.promote_types(features.dtype, torch.float32)).max ** 0.25
    # The norm is one fast pass. If a value is NaN, so is the norm, and the first comparison is false.
    if float(torch.linalg.vector_norm(features)) <= limit or (features.abs() <= limit).all():
        return
    item, place = (~(features.abs() <= limit)).nonzero()[0].tolist()
    got = f"got {features[item, place].item():.3g} at item {item + offset}, {name[:-1]} {place}"
    if features.isfinite().all():
        raise ValueError(f"{name} must be at most {limit:.2g} in size, so that sums of squares stay finite, {got}")
    raise ValueError(f"{name} must be finite, {got}")
