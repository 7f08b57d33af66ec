from dataclasses import replace
from itertools import product
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from lam.hessians.losses.contrastive import FIXES, SPLITS, _cross_sum_by_output, cross_sum_over_pairs
from lam.pairs.pairs import Pairs
from tests.helpers import contrastive_ggn, contrastive_ggn_dataset
from tests.hessians import twin

VARIANTS = [(split, fix) for split, fix in product(SPLITS, FIXES) if fix != "projected"]
"""Variants of the curvature that are sums over pairs."""


def make(N: int = 7, D: int = 3, P: int = 4, *, bias: bool = True, seed: int = 0, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, 3, (N,), generator=generator)
    labels[:2] = 0
    return draw(N, P), draw(D, P), draw(D) if bias else None, labels


def expected(features: Tensor, weight: Tensor, bias: Tensor | None, pairs: Pairs, options: dict[str, Any]) -> Tensor:
    """h from the slow twin, pair by pair."""
    f = features @ weight.T + (0 if bias is None else bias)
    n = f / f.norm(dim=1, keepdim=True)
    inside = torch.cdist(n, n) < options["margin"]
    targets = pairs.positive.double() / pairs.n_positives
    if options["fix"] != "positive":
        targets = targets - options["negative_weight"] * (pairs.negative * inside).double() / pairs.n_negatives
    return twin.ggn(features, weight, bias, targets, options["split"], options["fix"] != "fixed")


@pytest.mark.parametrize(("split", "fix"), VARIANTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("margin", "negative_weight"), [(2.0, 1.0), (0.9, 0.3), (0.5, 0.0)])
def test_equals_autograd_over_all_pairs(split, fix, bias, margin, negative_weight):
    features, weight, b, labels = make(bias=bias)
    pairs = Pairs.by_label(labels)
    options = {"split": split, "fix": fix, "margin": margin, "negative_weight": negative_weight}
    got = contrastive_ggn(features, weight, b, pairs, **options)
    torch.testing.assert_close(got.h, expected(features, weight, b, pairs, options), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("split", "fix"), VARIANTS)
@pytest.mark.parametrize("triplets", [True, False])
def test_mined_tuples_count_as_often_as_they_repeat(split, fix, triplets):
    features, weight, bias, _ = make(N=6)
    anchors, positives = torch.tensor([0, 0, 2, 0]), torch.tensor([1, 1, 3, 4])
    others, negatives = torch.tensor([5, 1, 5, 5]), torch.tensor([2, 3, 4, 2])
    tuples = (anchors, positives, negatives + 0) if triplets else (anchors, positives, others, negatives)
    if triplets:
        tuples = (anchors, positives, torch.tensor([5, 3, 5, 2]))
    pairs = Pairs.from_tuples(tuples, 6, n_positives=8, n_negatives=22)
    options = {"split": split, "fix": fix, "margin": 1.2, "negative_weight": 0.7}
    directed = torch.zeros(6, 6, dtype=torch.float64)
    for a, b in zip(tuples[0].tolist(), tuples[1].tolist(), strict=True):
        directed[a, b] += 1 / 8
    f = features @ weight.T + bias
    n = f / f.norm(dim=1, keepdim=True)
    first = tuples[0] if triplets else tuples[2]
    for a, b in zip(first.tolist(), tuples[-1].tolist(), strict=True):
        if fix != "positive" and (n[a] - n[b]).norm() < 1.2:
            directed[a, b] -= 0.7 / 22
    want = twin.ggn(features, weight, bias, directed, split, fix != "fixed")
    got = contrastive_ggn(features, weight, bias, pairs, **options)
    torch.testing.assert_close(got.h, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("split", "fix"), VARIANTS)
@pytest.mark.parametrize("shape", [(12, 2, 30), (12, 40, 5)])
def test_both_ways_through_the_cross_terms_agree_and_float32_follows(split, fix, shape):
    N, D, P = shape
    features, weight, bias, labels = make(N, D, P)
    pairs = Pairs.by_label(labels)
    options = {"split": split, "fix": fix, "margin": 1.3}
    wide = contrastive_ggn(features, weight, bias, pairs, **options)
    narrow = contrastive_ggn(features.float(), weight.float(), bias.float(), pairs, **options)
    assert narrow.sums.dtype == torch.float32
    scale = wide.sums[0].abs().max()
    torch.testing.assert_close(narrow.sums[0].double() / scale, wide.sums[0] / scale, rtol=1e-5, atol=1e-6)
    f = features @ weight.T + bias
    r = f.norm(dim=1, keepdim=True)
    n = f / r
    T = pairs.positive.double()
    listed = cross_sum_over_pairs(
        features, n, r, *T.triu(1).nonzero(as_tuple=True), torch.ones(int(T.sum()) // 2).double()
    )
    torch.testing.assert_close(_cross_sum_by_output(features, n, r, T), listed, rtol=1e-10, atol=1e-10)
    inside = torch.cdist(n, n) < 1.3
    if D == 2 and fix != "positive":
        want = twin.ggn(features, weight, bias, (pairs.negative * inside).double(), split, fix == "full")
        torch.testing.assert_close(wide.sums[1], want, rtol=1e-10, atol=1e-10)


def test_euclidean_positive_is_never_negative_and_clipping_is_reported():
    features, weight, bias, labels = make(N=30)
    pairs = Pairs.by_label(labels)
    positive = contrastive_ggn(features, weight, bias, pairs, margin=2.0, split="euclidean", fix="positive")
    assert positive.clipped == 0
    assert positive.h.min() >= -1e-12
    full = contrastive_ggn(features, weight, bias, pairs, margin=2.0, split="arccos", fix="full")
    assert full.clipped == (full.h < 0).double().mean().item() > 0


def test_a_plain_sum_adds_up_only_with_its_like():
    parts = []
    for seed in range(3):
        features, _, _, labels = make(N=9, seed=seed)
        _, weight, bias, _ = make(seed=99)
        parts.append(contrastive_ggn(features, weight, bias, Pairs.by_label(labels), margin=1.0, negative_weight=0.5))
    sums = [replace(part, curvature=replace(part.curvature, average=False)) for part in parts]
    torch.testing.assert_close(sums[0].h, parts[0].sums[0] - 0.5 * parts[0].sums[1])
    with pytest.raises(ValueError, match="same.*settings.*average=False.*average=True"):
        sums[0] + parts[1]


def test_a_batch_without_positive_pairs_adds_its_counts_only():
    features, weight, bias, _ = make(N=4)
    lonely = contrastive_ggn(features, weight, bias, Pairs.by_label(torch.arange(4)), margin=1.0)
    assert lonely.counts == (0, 12)
    with pytest.raises(ValueError, match="among 12.*pairs"):
        _ = lonely.h


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin": 0.0}, r"margin.*\(0, 2\].*0.0"),
        ({"margin": 2.5}, "got 2.5"),
        ({"margin": float("nan")}, "got nan"),
        ({"split": "cosine"}, "split.*euclidean, arccos.*'cosine'"),
        ({"fix": "none"}, "fix.*positive, fixed, full, projected.*'none'"),
        ({"negative_weight": 1.5}, "negative_weight must"),
        ({"features": torch.zeros(7, 4)}, "features.*zero"),
        ({"features": torch.ones(7, 5)}, "features must be"),
        ({"features": torch.ones(6, 4)}, "pairs.*6.*pairs.*7"),
        ({"weight": torch.full((3, 4), float("inf"))}, "weight.*finite"),
        ({"weight": torch.ones(1, 4), "bias": None}, "at least 2 outputs"),
        ({"bias": torch.ones(2)}, "bias.*shape"),
    ],
)
def test_bad_input_is_refused(change, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    features, weight, bias, labels = make(dtype=torch.float32)
    arguments: dict[str, Any] = {"features": features, "weight": weight, "bias": bias, "margin": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        contrastive_ggn(pairs=Pairs.by_label(labels), **arguments)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_features_that_are_not_finite_are_named(value):
    features, weight, bias, labels = make()
    features[4, 2] = value
    with pytest.raises(ValueError, match=f"features.*{value}.*item 4, feature 2"):
        contrastive_ggn(features, weight, bias, Pairs.by_label(labels), margin=1.0)


def test_an_output_without_direction_is_named():
    features, weight, _, labels = make()
    features[3] = 0
    with pytest.raises(ValueError, match="output of item 3.*zero"):
        contrastive_ggn(features, weight, None, Pairs.by_label(labels), margin=1.0)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("fix", ["fixed", "positive"])
@pytest.mark.parametrize(
    ("features_by", "weight_by"), [(1e-20, 1.0), (1.0, 1e-20), (1e-10, 1e-10), (1e-20, 1e-20), (1e-30, 1.0)]
)
def test_outputs_too_short_for_float32_are_named_and_float64_takes_them(features_by, weight_by, fix, whole):
    features, weight, _, labels = make(N=20)

    def h(features: Tensor, weight: Tensor) -> Tensor:
        options: dict[str, Any] = {"margin": 1.0, "fix": fix}
        if whole:
            return contrastive_ggn_dataset(features, weight, None, related=labels, progress=False, **options).h
        return contrastive_ggn(features, weight, None, Pairs.by_label(labels), **options).h

    short, thin = features_by * features, weight_by * weight
    with pytest.raises(ValueError, match="output of item 0.*float32.*2.3e-"):
        h(short.float(), thin.float())
    torch.testing.assert_close(h(short, thin) * weight_by**2, h(features, weight), rtol=1e-10, atol=0)
    near = 1e-9 * features.float() / features.float().norm(dim=1).min()
    torch.testing.assert_close(
        h(near, weight.float()), h(features, weight).to(h(near, weight.float())), rtol=1e-3, atol=1e-5
    )
