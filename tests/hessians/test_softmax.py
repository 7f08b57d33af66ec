"""Curvatures of losses with a softmax over candidates, against automatic differentiation in float64."""

from functools import partial
from itertools import product
from typing import Any

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import hessian, jacrev
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lam.hessians import (
    ContrastiveCurvature,
    InfoNCECurvature,
    SupConCurvature,
    VarConCurvature,
    diagonal_ggn,
    output_curvature,
)
from lam.hessians.losses.softmax import SOFTMAX_FIXES, SOFTMAX_SPLITS
from lam.pairs import Candidates, Pairs
from tests.hessians.test_last_layer import make

RECORDS = [InfoNCECurvature, SupConCurvature]
VARIANTS = list(product(RECORDS, SOFTMAX_SPLITS, SOFTMAX_FIXES))
TAU = 0.3


def losses_of(record: type, z: Tensor, positive: Tensor, negative: Tensor) -> tuple[list[Tensor], list[float]]:
    """Cross-entropies of one anchor with logits (M,), and how often each counts."""
    log_w = (positive + negative).log()
    if record is SupConCurvature:
        shares = positive / positive.sum().clamp(min=1e-300)
        log_p = (z + log_w).log_softmax(0) - log_w
        return [-(shares * torch.where(positive > 0, log_p, 0)).sum()], [1.0]
    losses, times = [], []
    if not negative.any():
        return losses, times  # their ratio is 1, whatever the logits
    for p in positive.nonzero()[:, 0].tolist():
        against = (z + negative.log()).logsumexp(0)
        losses.append(torch.logaddexp(z[p], against) - z[p])
        times.append(float(positive[p]))
    return losses, times


def loss_of(record: type, z: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    losses, times = losses_of(record, z, positive, negative)
    return sum((t * loss for t, loss in zip(times, losses, strict=True)), torch.zeros(()).double())


def z_of(f: Tensor, candidates: Tensor) -> Tensor:
    """Cosines over the temperature of one output with all candidates."""
    return candidates @ f / (candidates.norm(dim=1) * f.norm()) / TAU


def curvature_in(parameters: Tensor, z: Any, loss: Any, split: str) -> Tensor:
    """The Hessian with respect to the parameters; or Jᵀ H J with the Hessian H with respect to the logits."""
    if split == "outputs":
        return hessian(lambda parameters: loss(z(parameters)))(parameters)
    J, H = jacrev(z)(parameters), hessian(loss)(z(parameters))
    flat = J.flatten(1)
    return (flat.T @ H @ flat).reshape(2 * parameters.shape)


def twin(features: Tensor, theta: Tensor, pairs: Any, record: type, split: str, fix: str) -> Tensor:
    """h, summed over the anchors' losses; with `fix="full"`, all outputs depend on the weights, else the anchor's."""
    total, still = torch.zeros_like(theta), features @ theta.T
    for a in range(len(features)):

        def z(theta: Tensor, a: int = a) -> Tensor:
            f = features @ theta.T
            candidates = pairs.directions if isinstance(pairs, Candidates) else f if fix == "full" else still
            return z_of(f[a], candidates)

        def loss(z: Tensor, a: int = a) -> Tensor:
            return loss_of(record, z, pairs.positive[a].double(), pairs.negative[a].double())

        if not (pairs.positive[a].any() and pairs.negative[a].any()):
            continue
        if fix == "projected":
            candidates = pairs.directions if isinstance(pairs, Candidates) else still
            values, vectors = torch.linalg.eigh(
                curvature_in(still[a], partial(z_of, candidates=candidates), loss, split)
            )
            positive = vectors @ torch.diag(values.clamp(min=0)) @ vectors.T
            total += torch.outer(positive.diagonal(), features[a].square())
        else:
            total += torch.einsum("ijij->ij", curvature_in(theta, z, loss, split))
    return total


def with_bias(features: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if bias is None:
        return features, weight
    return torch.cat([features, torch.ones(len(features), 1).to(features)], 1), torch.cat([weight, bias[:, None]], 1)


def bank(labels: Tensor, M: int = 9, D: int = 3) -> Candidates:
    generator = torch.Generator().manual_seed(7)
    directions = F.normalize(torch.randn(M, D, generator=generator, dtype=torch.float64))
    return Candidates.by_label(labels, directions, torch.arange(M) % 3)


@pytest.mark.parametrize(("record", "split", "fix"), VARIANTS)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_autograd_over_all_candidates_of_a_batch(record, split, fix, bias):
    features, weight, b, labels = make(bias=bias)
    labels[-1] = 9  # an item without a positive pair
    pairs = Pairs.by_label(labels)
    diagonal = diagonal_ggn(features, weight, b, pairs, record(TAU, split=split, fix=fix))
    expected = twin(*with_bias(features, weight, b), pairs, record, split, fix)
    torch.testing.assert_close(diagonal.sums[0], expected, rtol=1e-9, atol=1e-11)
    n = pairs.n_positives if record is InfoNCECurvature else int(pairs.positive.any(1).sum())
    assert diagonal.counts == (n,)
    torch.testing.assert_close(diagonal.h, expected / n, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("record", "split"), list(product(RECORDS, SOFTMAX_SPLITS)))
def test_equals_autograd_with_a_memory_bank_and_with_a_second_view(record, split):
    features, weight, bias, labels = make()
    view = F.normalize(torch.randn(7, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    for candidates in (bank(labels), Candidates.paired(view)):
        diagonal = diagonal_ggn(features, weight, bias, candidates, record(TAU, split=split))
        expected = twin(*with_bias(features, weight, bias), candidates, record, split, "fixed")
        torch.testing.assert_close(diagonal.sums[0], expected, rtol=1e-9, atol=1e-11)
    assert diagonal.counts == (7,)


@pytest.mark.parametrize(("record", "split"), list(product(RECORDS, SOFTMAX_SPLITS)))
@pytest.mark.parametrize("held_still", [False, True])
def test_the_matrices_are_second_derivatives_in_the_output_of_each_item(record, split, held_still):
    features, weight, bias, labels = make()
    pairs: Any = bank(labels) if held_still else Pairs.by_label(labels)
    f = F.linear(features, weight, bias)
    r, candidates = f.norm(dim=1, keepdim=True), pairs.directions if held_still else f
    matrices = record(TAU, split=split).matrices(f / r, r, pairs)
    for a in range(7):

        def loss(z: Tensor, a: int = a) -> Tensor:
            return loss_of(record, z, pairs.positive[a].double(), pairs.negative[a].double())

        expected = curvature_in(f[a], partial(z_of, candidates=candidates), loss, split)
        torch.testing.assert_close(matrices[a, 0], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("record", "split", "fix"), VARIANTS)
def test_pairs_that_a_miner_chose_count_as_often_as_in_the_loss(record, split, fix):
    features, weight, bias, _ = make(N=6)
    tuples = (torch.tensor([0, 0, 2, 0]), torch.tensor([1, 1, 3, 4]), torch.tensor([5, 3, 5, 2]))
    pairs = Pairs.from_tuples(tuples, 6, n_positives=8, n_negatives=22)
    diagonal = diagonal_ggn(features, weight, bias, pairs, record(TAU, split=split, fix=fix))
    expected = twin(*with_bias(features, weight, bias), pairs, record, split, fix)
    torch.testing.assert_close(diagonal.sums[0], expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("record", "fix"), list(product(RECORDS, SOFTMAX_FIXES)))
def test_split_at_the_logits_nothing_is_ever_clipped(record, fix):
    features, weight, bias, labels = make(N=40)
    diagonal = diagonal_ggn(features, weight, bias, Pairs.by_label(labels), record(0.05, fix=fix))
    assert diagonal.clipped == 0
    outputs = diagonal_ggn(features, weight, bias, Pairs.by_label(labels), record(0.05, split="outputs", fix=fix))
    assert (outputs.clipped > 0) == (fix != "projected")


@pytest.mark.parametrize(("record", "split", "fix"), VARIANTS)
@pytest.mark.parametrize("temperature", [0.01, 0.1, 10.0])
def test_float32_follows(record, split, fix, temperature):
    features, weight, bias, labels = make(40, 8, 12)
    pairs, curvature = Pairs.by_label(labels), record(temperature, split=split, fix=fix)
    wide = diagonal_ggn(features, weight, bias, pairs, curvature)
    narrow = diagonal_ggn(features.float(), weight.float(), None if bias is None else bias.float(), pairs, curvature)
    assert narrow.sums.dtype == torch.float32
    scale = wide.sums.abs().max()
    torch.testing.assert_close(narrow.sums.double() / scale, wide.sums / scale, rtol=1e-4, atol=1e-4)


def test_items_without_a_candidate_or_a_positive_pair_have_no_curvature():
    features, weight, bias, _ = make(N=4)
    nothing = torch.zeros(4, 4)
    for pairs in (Pairs.by_label(torch.arange(4)), Pairs(nothing, nothing, 0, 0)):
        diagonal = diagonal_ggn(features, weight, bias, pairs, SupConCurvature(0.1))
        assert not diagonal.sums.any()
        with pytest.raises(ValueError, match="no matched item"):
            _ = diagonal.h


@pytest.mark.parametrize(
    "curvature",
    [
        SupConCurvature(0.1),
        SupConCurvature(0.1, fix="full"),
        SupConCurvature(0.1, split="outputs", fix="projected"),
        InfoNCECurvature(0.1, split="outputs"),
        VarConCurvature(0.1, 0.01),
    ],
    ids=str,
)
def test_a_batch_without_items_and_a_bank_without_candidates_have_no_curvature(curvature: Any):
    features, weight, bias, labels = make(N=4)
    batches: list[Any] = [(features[:0], Pairs.by_label(labels[:0]))]
    if curvature.takes_candidates and not curvature.has_cross_terms:
        batches.append((features, Candidates(features[:0, :3], torch.zeros(4, 0), torch.zeros(4, 0))))
    for inputs, pairs in batches:
        diagonal = diagonal_ggn(inputs, weight, bias, pairs, curvature)
        assert diagonal.counts == (0,)
        assert torch.equal(diagonal.sums, torch.zeros_like(diagonal.sums))


class Largest(TorchDispatchMode):
    """Number of elements of the largest tensor that is computed in this mode."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        formed = func(*args, **(kwargs or {}))
        sizes = [part.numel() for part in tree_leaves(formed) if isinstance(part, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return formed


@pytest.mark.parametrize(("record", "split", "fix"), list(product(RECORDS, SOFTMAX_SPLITS, ("fixed", "full"))))
def test_the_diagonal_never_holds_a_vector_for_every_pair(record: Any, split: Any, fix: Any):
    N, D = 60, 12
    features, weight, bias, labels = make(N=N, D=D)
    with Largest() as largest:
        diagonal_ggn(features, weight, bias, Pairs.by_label(labels), record(0.1, split=split, fix=fix))
    assert N * N <= largest.elements < N * N * D


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("curvature", [ContrastiveCurvature(0.9), SupConCurvature(0.1), InfoNCECurvature(0.1)], ids=str)
def test_what_is_an_average_over_positive_pairs_is_refused_without_one(summed: bool, curvature: Any):
    features, weight, bias, _ = make(N=4)
    with pytest.raises(ValueError, match="no (positive pair|matched item)"):
        output_curvature(features, weight, bias, Pairs.by_label(torch.arange(4)), curvature, summed=summed)
    pairs = Pairs.by_label(torch.arange(4) % 2)
    assert output_curvature(features, weight, bias, pairs, curvature, summed=summed).any()


@pytest.mark.parametrize("labels", [torch.zeros(4, dtype=torch.long), torch.arange(4)])
def test_a_batch_without_curvature_changes_no_sum_that_it_is_added_to(labels: Tensor):
    features, weight, bias, _ = make(N=4)
    blank, good = (
        diagonal_ggn(features, weight, bias, Pairs.by_label(of), InfoNCECurvature(0.1))
        for of in (labels, torch.arange(4) % 2)
    )
    assert torch.equal((blank + good).sums, good.sums)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "temperature.*0.0"),
        ({"temperature": -1.0}, "got -1.0"),
        ({"temperature": float("nan")}, "got nan"),
        ({"split": "arccos"}, "split.*logits, outputs.*'arccos'"),
        ({"fix": "positive"}, "fix.*full.*'positive'"),
    ],
)
def test_settings_outside_their_range_are_refused(record, settings, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=message):
        record(**{"temperature": 0.1, **settings})


def test_bad_input_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    features, weight, bias, labels = make()
    for message, pairs, curvature in (
        ("temperature.*given", Pairs.by_label(labels), SupConCurvature(None)),
        ("candidates.*7.*candidates.*6", bank(labels[:6]), SupConCurvature(0.1)),
        ("candidates.*3 dimensions.*5", bank(labels, D=5), SupConCurvature(0.1)),
        ("fix.*fixed candidates.*'full'", bank(labels), SupConCurvature(1, fix="full")),
        ("ContrastiveCurvature compares items", bank(labels), ContrastiveCurvature(0.7)),
    ):
        with pytest.raises(ValueError, match=message):
            diagonal_ggn(features, weight, bias, pairs, curvature)
    with pytest.raises(ValueError, match="fix.*fixed.*'full'"):
        SupConCurvature(0.1, fix="full").matrices(F.normalize(features), torch.ones(7, 1), Pairs.by_label(labels))
