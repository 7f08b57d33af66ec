"""Curvatures of VarCon and AnInfoNCE against automatic differentiation in float64, of losses that are lam's own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lam import losses
from lam.hessians import (
    AnInfoNCECurvature,
    Full,
    InfoNCECurvature,
    Kron,
    VarConCurvature,
    diagonal_ggn,
    ggn_of_batch,
    ggn_of_dataset,
)
from lam.hessians.losses.softmax import SOFTMAX_SPLITS
from lam.methods.laplace_posthoc import LaplacePosthoc
from lam.pairs import Candidates, Neighbours, Pairs
from tests.helpers import diagonal_ggn_dataset
from tests.hessians.test_last_layer import make
from tests.hessians.test_softmax import curvature_in, loss_of
from tests.methods.test_curvatures import train

TAU, EPSILON, LAMBDA = 0.4, 0.1, (0.7, 2.0, 4.0)
CURVATURES: list[Any] = [
    *(AnInfoNCECurvature(LAMBDA, split=split) for split in SOFTMAX_SPLITS),
    *(VarConCurvature(TAU, EPSILON, split=split) for split in SOFTMAX_SPLITS),
]
Parts = tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor, int], Tensor]]


def parts_of(curvature: Any, f: Tensor, labels: Tensor) -> Parts:
    """The logits of an item as a function of its output, and its loss as a function of the logits."""
    n, pairs = F.normalize(f), Pairs.by_label(labels)
    if isinstance(curvature, AnInfoNCECurvature):
        weights = torch.tensor(LAMBDA, dtype=torch.float64)
        return (
            lambda own, a: -(weights * (F.normalize(own, dim=0) - n).square()).sum(1),
            lambda z, a: loss_of(InfoNCECurvature, z, pairs.positive[a].double(), pairs.negative[a].double()),
        )
    classes, own_class = labels.unique(return_inverse=True)
    centroids = torch.stack([F.normalize(n[labels == c].mean(0), dim=0) for c in classes])

    def logits(own: Tensor, a: int) -> Tensor:
        return centroids @ F.normalize(own, dim=0) / TAU

    def loss(z: Tensor, a: int) -> Tensor:
        log_p, r = z.log_softmax(0), own_class[a]
        tau = TAU - EPSILON + 2 * EPSILON * logits(f[a], a).softmax(0)[r]  # held still
        q = torch.where(torch.arange(len(classes)) == r, 1 / tau, 0.0).softmax(0)
        return (q * (q.log() - log_p)).sum() - log_p[r]

    return logits, loss


def loss_itself(curvature: Any) -> Any:
    """lam's own loss."""
    if isinstance(curvature, VarConCurvature):
        return losses.VarCon(TAU, EPSILON)
    loss = losses.AnInfoNCE(3).double()
    loss.log_concentration.data[:] = torch.tensor(LAMBDA).double().log()
    return loss


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_equals_autograd_of_the_loss_that_trains(curvature: Any):
    features, weight, bias, labels = make(N=8)
    labels[-1] = 9  # an item without a positive pair, in a class of its own
    f, pairs = F.linear(features, weight, bias), Pairs.by_label(labels)
    r = f.norm(dim=1, keepdim=True)
    logits, loss = parts_of(curvature, f, labels)
    value = sum((loss(logits(f[a], a), a) for a in range(8)), torch.zeros(()))
    (count,) = curvature.counts(pairs)
    torch.testing.assert_close(loss_itself(curvature)(f / r, pairs).detach(), value / count, rtol=1e-6, atol=0)
    parts = ((f[a], partial(logits, a=a), partial(loss, a=a)) for a in range(8))
    expected = torch.stack([curvature_in(*part, curvature.split) for part in parts])
    torch.testing.assert_close(curvature.matrices(f / r, r, pairs)[:, 0], expected, rtol=1e-9, atol=1e-11)
    phi = torch.cat([features, torch.ones(8, 1).double()], 1)
    h = torch.einsum("aii,aj->ij", expected, phi.square()) / count
    torch.testing.assert_close(diagonal_ggn(features, weight, bias, pairs, curvature).h, h, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("curvature", CURVATURES, ids=str)
def test_over_a_data_set_it_is_that_of_one_batch(curvature: Any):
    features, weight, bias, labels = make(N=16)
    pairs = Pairs.by_label(labels)
    for structure, size in product((Kron, Full), (1, 7, 100)):
        empty = structure.zeros(weight, curvature, has_bias=True)
        whole = ggn_of_dataset(empty, features, weight, bias, related=labels, block_size=size, progress=False)
        batch = ggn_of_batch(empty, features, weight, bias, pairs)
        torch.testing.assert_close(whole.h, batch.h, rtol=1e-10, atol=1e-12)


def test_post_hoc_they_take_over_what_the_loss_has_learned():
    trained = train(LaplacePosthoc(curvature="varcon"), loss=losses.VarCon(0.2, margin=0.7))
    (epsilon,) = trained.histories["network"].learned["epsilon"]
    assert trained.encoder.posterior.curvature.curvature == VarConCurvature(0.2, epsilon)
    trained = train(LaplacePosthoc(curvature="aninfonce"), loss=losses.AnInfoNCE(3, margin=0.7))
    learned = tuple(trained.histories["network"].learned["concentration"])
    assert trained.encoder.posterior.curvature.curvature == AnInfoNCECurvature(learned)
    assert learned != (5.0, 5.0, 5.0)
    harder = losses.AnInfoNCE(3, negatives=torch.full((3,), 2.0), margin=0.7)
    trained = train(LaplacePosthoc(curvature="aninfonce"), loss=harder)
    compared_by = trained.encoder.posterior.curvature.curvature.concentration
    assert max(compared_by) < 4.0  # near 5 - 2: the positives alone give 5


@pytest.mark.parametrize("split", SOFTMAX_SPLITS)
def test_of_mined_pairs_it_is_that_of_the_items_in_them(split: Any):
    features, weight, bias, labels = make()
    curvature, pairs = VarConCurvature(TAU, EPSILON, split=split), Pairs.by_label(labels)
    kept = torch.tensor([True, True, True, False, True, True, False])[: len(labels)]
    both = kept[:, None] & kept
    mined = replace(pairs, positive=pairs.positive & both, negative=pairs.negative & both)
    n, r = F.normalize(features @ weight.T + bias), (features @ weight.T + bias).norm(dim=1, keepdim=True)
    actual = curvature.diagonal(n, r, mined)
    expected = curvature.diagonal(n, r, pairs)
    torch.testing.assert_close(actual, expected * kept[:, None, None])
    assert curvature.counts(mined) == (int(kept.sum()),)
    assert curvature.counts(pairs) == (len(labels),)


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    features, weight, bias, labels = make()
    pairs = Pairs.by_label(labels)
    near = Pairs.by_distance(torch.rand(7, 2).double(), 0.5)
    for message, call in (
        ("concentration.*0.0", lambda: AnInfoNCECurvature((1.0, 0.0))),
        ("fix.*fixed, projected.*'full'", lambda: AnInfoNCECurvature((1.0, 1.0), fix="full")),  # pyright: ignore
        ("epsilon.*±temperature, 0.1.*0.2", lambda: VarConCurvature(0.1, 0.2)),
        ("temperature.*-1", lambda: VarConCurvature(-1, 0.2)),
        ("3 numbers.*2", lambda: ggn(pairs, AnInfoNCECurvature((1.0, 1.0)))),
        ("concentration.*None", lambda: ggn(pairs, AnInfoNCECurvature())),
        ("epsilon.*given", lambda: ggn(pairs, VarConCurvature(0.1))),
        ("varcon needs classes", lambda: ggn(near, VarConCurvature(0.1, 0.0))),
        ("VarConCurvature compares items", lambda: ggn(Candidates.paired(torch.eye(7)), VarConCurvature(0.1, 0.0))),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    neighbours = Neighbours.by_distance(torch.rand(7, 2).double(), 0.5)
    options: dict[str, Any] = {"related": neighbours, "progress": False}
    with pytest.raises(ValueError, match="varcon needs classes"):
        diagonal_ggn_dataset(features, weight, bias, VarConCurvature(0.1, 0.0), **options)


def ggn(pairs: Any, curvature: Any) -> Any:
    return diagonal_ggn(*make()[:3], pairs, curvature)
