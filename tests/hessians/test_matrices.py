"""H_a, the whole curvature with respect to the output of an item, for every loss that has one."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacrev

from lam.hessians import (
    AnInfoNCECurvature,
    ContrastiveCurvature,
    Curvature,
    Full,
    InfoNCECurvature,
    SupConCurvature,
    VarConCurvature,
    diagonal_ggn,
    ggn_of_batch,
    output_curvature,
)
from lam.hessians.losses.base import BatchItems
from lam.hessians.losses.contrastive import FIXES, SPLITS, positive_arccos, positive_part
from lam.hessians.losses.softmax import SOFTMAX_SPLITS
from lam.pairs import Pairs
from tests.hessians.softmax import SoftmaxCurvature
from tests.hessians.test_last_layer import make as make_layer
from tests.hessians.twin import pair_loss, pair_loss_arccos

VARIANTS: Any = product(SPLITS, FIXES)
MATRICES: list[Any] = [ContrastiveCurvature(0.9, split, fix) for split, fix in VARIANTS if fix in ("fixed", "positive")]
"""Curvatures of single pairs that have matrices."""

PROJECTED: list[Any] = [
    ContrastiveCurvature(0.9, "arccos", "projected", negative_weight=0.6),
    ContrastiveCurvature(1.9, "euclidean", "projected"),
    ContrastiveCurvature(0.9, "arccos", "projected", average=False),
    SupConCurvature(0.1, split="outputs", fix="projected"),
    InfoNCECurvature(0.3, split="outputs", fix="projected"),
]
"""Curvatures with `fix="projected"`: the positive part of each item's matrix."""

OF_ALL: list[Any] = [
    *MATRICES,
    InfoNCECurvature(0.3),
    InfoNCECurvature(0.3, split="outputs"),
    SupConCurvature(0.1),
    *(VarConCurvature(0.4, 0.1, split=split) for split in SOFTMAX_SPLITS),
    *(AnInfoNCECurvature((0.7, 2.0, 4.0, 1.0), split=split) for split in SOFTMAX_SPLITS),
    *PROJECTED,
]
"""Every curvature that has matrices."""


def make(N: int = 8, D: int = 4) -> tuple[Tensor, Tensor, Pairs]:
    f = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    r = f.norm(dim=1, keepdim=True)
    return f / r, r, Pairs.by_label(torch.arange(N) % 3)


def twin_of_pair(split: str, first: Tensor, second: Tensor) -> Tensor:
    """H11 of one pair: JᵀHJ with respect to the first output; the second is fixed."""
    f = torch.stack([first, second])
    if split == "arccos":
        return hessian(pair_loss_arccos)(f)[0, :, 0]
    unit: Callable[[Tensor], Tensor] = lambda f: f / f.norm()  # noqa: E731
    J, H = jacrev(unit)(first), hessian(pair_loss)(f / f.norm(dim=1, keepdim=True))[0, :, 0]
    return J.T @ H @ J


@pytest.mark.parametrize("curvature", MATRICES, ids=str)
def test_the_matrices_are_second_derivatives_with_the_others_held_still(curvature: Any):
    n, r, pairs = make()
    near = torch.cdist(n, n) < curvature.margin
    kinds = [pairs.positive, pairs.negative & near][: len(curvature.terms)]
    assert all(kind.any() for kind in kinds)
    expected = torch.zeros(len(n), len(kinds), 4, 4, dtype=torch.float64)
    for term, kind in enumerate(kinds):
        for a, b in kind.nonzero().tolist():
            expected[a, term] += 2 * twin_of_pair(curvature.split, n[a] * r[a], n[b] * r[b])
    torch.testing.assert_close(curvature.matrices(n, r, pairs), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("curvature", OF_ALL, ids=str)
def test_diagonal_total_and_diagonal_in_a_basis_are_those_of_the_matrices(curvature: Curvature):
    n, r, pairs = make()
    matrices = curvature.matrices(n, r, pairs)
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(matrices, matrices.mT, **close)
    torch.testing.assert_close(curvature.diagonal(n, r, pairs), matrices.diagonal(dim1=2, dim2=3), **close)
    ways = curvature.of_batch(n, r, pairs), BatchItems(curvature, n, r, pairs)
    for items in ways:
        torch.testing.assert_close(items.total(), matrices.sum(0), **close)
    basis = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    expected = torch.einsum("di,atde,ei->ati", basis, matrices, basis)
    for items in ways:
        torch.testing.assert_close(items.in_basis(basis), expected, **close)


@pytest.mark.parametrize("curvature", PROJECTED, ids=str)
def test_the_positive_part_of_each_item_keeps_more_than_relu_of_the_diagonal(curvature: Any):
    n, r, pairs = make()
    fixed = replace(curvature, fix="fixed")
    weights, counts = fixed.terms.values(), fixed.counts(pairs) if curvature.average else (1, 1)
    ratios = [w * counts[0] / count for w, count in zip(weights, counts, strict=False)]
    scales = torch.tensor(ratios, dtype=torch.float64)
    matrices = torch.einsum("t,atde->ade", scales, fixed.matrices(n, r, pairs))
    values, vectors = torch.linalg.eigh(matrices)
    expected = vectors @ torch.diag_embed(values.clamp(min=0)) @ vectors.mT
    assert (values < -1e-6).any()
    torch.testing.assert_close(curvature.matrices(n, r, pairs)[:, 0], expected, rtol=1e-10, atol=1e-12)
    kept, clipped = curvature.diagonal(n, r, pairs)[:, 0], matrices.diagonal(dim1=1, dim2=2).relu()
    assert (kept >= clipped - 1e-12).all()
    assert kept.sum() > 1.01 * clipped.sum() or curvature.split == "euclidean"  # whose eigenvalues are of one sign


@pytest.mark.parametrize("curvature", OF_ALL, ids=str)
def test_output_curvatures_make_the_whole_ggn(curvature: Any):
    features, weight, bias, labels = make_layer(N=9, D=4)
    pairs = Pairs.by_label(labels)
    if curvature.has_cross_terms:
        with pytest.raises(ValueError, match="cross terms .* use fix='fixed'"):
            output_curvature(features, weight, bias, pairs, curvature)
        return
    matrices = output_curvature(features, weight, bias, pairs, curvature)
    assert matrices.shape == (9, 4, 4)
    total = output_curvature(features, weight, bias, pairs, curvature, summed=True)
    torch.testing.assert_close(total, matrices.sum(0), rtol=1e-10, atol=1e-12)
    phi = torch.cat([features, torch.ones(9, 1).double()], 1)
    h = torch.einsum("aii,aj->ij", matrices, phi.square())
    torch.testing.assert_close(diagonal_ggn(features, weight, bias, pairs, curvature).h, h, rtol=1e-10, atol=1e-12)
    full = ggn_of_batch(Full.zeros(weight, curvature, has_bias=True), features, weight, bias, pairs).h
    expected = torch.einsum("ade,ai,aj->diej", matrices, phi, phi)
    torch.testing.assert_close(full.reshape(expected.shape), expected, rtol=1e-10, atol=1e-12)


def test_items_without_partners_and_partners_in_line_have_a_positive_part():
    n = torch.eye(3, dtype=torch.float64)
    for m in (torch.zeros(3, 3).double(), n, -n):
        products = positive_arccos(n, m)
        identity = torch.eye(3, dtype=torch.float64)
        c = (n * m).sum(1)[:, None, None]
        expected = positive_part(c * (identity - n[:, :, None] * n[:, None]))
        torch.testing.assert_close(products.matrices(), expected)
        assert products.diagonal().isfinite().all()


def test_a_loss_with_a_diagonal_alone_says_so():
    n, r, pairs = make()
    curvature = SoftmaxCurvature()
    items, basis = curvature.of_batch(n, r, pairs), torch.eye(4, dtype=torch.float64)
    computed: list[Any] = [items.matrices, items.total, partial(items.in_basis, basis)]
    for compute in computed:
        with pytest.raises(ValueError, match="SoftmaxCurvature.*diagonal.*matrices"):
            compute()
