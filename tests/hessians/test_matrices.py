"""The whole curvature in the outputs of an item, H_a, of every loss that has one."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import hessian, jacrev

from lam.hessians import FIXES, SPLITS, ContrastiveCurvature, Curvature, InfoNCECurvature, SupConCurvature
from lam.pairs import Pairs
from tests.hessians.softmax import SoftmaxCurvature
from tests.hessians.twin import pair_loss, pair_loss_arccos

VARIANTS: Any = product(SPLITS, FIXES)
MATRICES: list[Any] = [ContrastiveCurvature(0.9, split, fix) for split, fix in VARIANTS if fix != "full"]
"""Curvatures of single pairs that have matrices."""

OF_ALL: list[Any] = [*MATRICES, InfoNCECurvature(0.3), InfoNCECurvature(0.3, split="outputs"), SupConCurvature(0.1)]
"""Every curvature that has matrices."""


def make(N: int = 8, D: int = 4) -> tuple[Tensor, Tensor, Pairs]:
    f = torch.randn(N, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    r = f.norm(dim=1, keepdim=True)
    return f / r, r, Pairs.by_label(torch.arange(N) % 3)


def twin_of_pair(split: str, first: Tensor, second: Tensor) -> Tensor:
    """H11 of one pair: JᵀHJ in the first output, the second held still."""
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
    torch.testing.assert_close(curvature.total(n, r, pairs), matrices.sum(0), **close)
    torch.testing.assert_close(Curvature.total(curvature, n, r, pairs), matrices.sum(0), **close)
    basis = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    expected = torch.einsum("di,atde,ei->ati", basis, matrices, basis)
    torch.testing.assert_close(curvature.in_basis(n, r, pairs, basis), expected, **close)
    torch.testing.assert_close(Curvature.in_basis(curvature, n, r, pairs, basis), expected, **close)


def test_a_loss_with_a_diagonal_alone_says_so():
    n, r, pairs = make()
    curvature = SoftmaxCurvature()
    basis = torch.eye(4, dtype=torch.float64)
    computed: list[Any] = [curvature.matrices, curvature.total, partial(curvature.in_basis, basis=basis)]
    for compute in computed:
        with pytest.raises(ValueError, match="SoftmaxCurvature gives a diagonal alone, and no matrices: use structure"):
            compute(n, r, pairs)
