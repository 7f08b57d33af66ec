"""Every structure of every loss's curvature, at every split, against Σ_a H_a ⊗ φ_a φ_aᵀ by autograd."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam.hessians import (
    ContrastiveCurvature,
    Diagonal,
    Ekfac,
    Full,
    InfoNCECurvature,
    Kron,
    LowRank,
    SupConCurvature,
    ggn_of_batch,
)
from lam.hessians.losses.contrastive import SPLITS
from lam.hessians.losses.softmax import SOFTMAX_SPLITS
from lam.pairs import Pairs
from tests.hessians.test_last_layer import make
from tests.hessians.test_matrices import twin_of_pair
from tests.hessians.test_softmax import TAU, curvature_in, loss_of, with_bias, z_of
from tests.hessians.test_structures import empty_of
from tests.hessians.test_varcon_aninfonce import CURVATURES, parts_of

N = 9
EVERY: list[Any] = [
    *(ContrastiveCurvature(0.9, split, negative_weight=0.4) for split in SPLITS),
    *(record(TAU, split=split) for record in (InfoNCECurvature, SupConCurvature) for split in SOFTMAX_SPLITS),
    *CURVATURES,
]


def output_curvatures(curvature: Any, f: Tensor, labels: Tensor) -> Tensor:
    """(N, D, D) H_a by automatic differentiation, with h's average."""
    pairs = Pairs.by_label(labels)
    if isinstance(curvature, ContrastiveCurvature):
        n = F.normalize(f)
        kinds = pairs.positive, pairs.negative & (torch.cdist(n, n) < curvature.margin)
        H = torch.zeros(N, f.shape[1], f.shape[1], dtype=torch.float64)
        for kind, weight, count in zip(kinds, curvature.terms.values(), curvature.counts(pairs), strict=True):
            assert kind.any()
            for a, b in kind.nonzero().tolist():
                H[a] += 2 * weight / count * twin_of_pair(curvature.split, f[a], f[b])
        return H
    if isinstance(curvature, InfoNCECurvature | SupConCurvature):

        def logits(own: Tensor, a: int) -> Tensor:
            return z_of(own, f)

        def loss(z: Tensor, a: int) -> Tensor:
            return loss_of(type(curvature), z, pairs.positive[a].double(), pairs.negative[a].double())
    else:
        logits, loss = parts_of(curvature, f, labels)
    parts = [curvature_in(f[a], partial(logits, a=a), partial(loss, a=a), curvature.split) for a in range(N)]
    return torch.stack(parts) / curvature.counts(pairs)[0]


@pytest.mark.parametrize("curvature", EVERY, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_that_part_of_the_whole(curvature: Any, bias: bool) -> None:
    features, weight, b, labels = make(N, bias=bias)
    phi, theta = with_bias(features, weight, b)
    H = output_curvatures(curvature, phi @ theta.T, labels)
    values, vectors = torch.linalg.eigh(H)
    positive = vectors @ torch.diag_embed(values.clamp(min=0)) @ vectors.mT
    for fix, own in (("fixed", H), ("projected", positive)):
        whole = torch.einsum("aij,ak,al->ikjl", own, phi, phi).flatten(2).flatten(0, 1)
        close: Any = {"rtol": 1e-9, "atol": 1e-9 * float(whole.abs().max())}

        def of(structure: Any, fix: Any = fix) -> Any:
            empty = empty_of(structure, weight, replace(curvature, fix=fix), has_bias=bias)
            return ggn_of_batch(empty, features, weight, b, Pairs.by_label(labels))

        full = of(Full)
        torch.testing.assert_close(full.h, whole, **close)
        values = torch.linalg.eigvalsh(whole)
        negative = (values < -1e-6 * values.abs().max()).double().mean()
        assert full.clipped == pytest.approx(float(negative))
        torch.testing.assert_close(of(Diagonal).h.flatten(), whole.diagonal(), **close)
        ekfac, kron, low_rank = of(Ekfac), of(Kron), of(LowRank)
        rotation = torch.kron(*ekfac.eigenbasis)
        torch.testing.assert_close(ekfac.h.flatten(), (rotation.T @ whole @ rotation).diagonal(), **close)
        moment, U = phi.T @ phi, torch.kron(*kron.eigenbasis)
        in_basis = U @ kron.spectrum.flatten().diag() @ U.T
        torch.testing.assert_close(in_basis, torch.kron(kron.h, kron.inputs / N), rtol=1e-9, atol=1e-9)
        for factor in (kron, low_rank):
            torch.testing.assert_close(factor.h, own.sum(0), **close)
            assert factor.n_items == N
        torch.testing.assert_close(kron.inputs, moment, **close)
        torch.testing.assert_close(low_rank.sketch, moment @ low_rank.probes.double(), **close)
        torch.testing.assert_close(low_rank.squares, moment.diagonal(), **close)
