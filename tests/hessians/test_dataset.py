from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor

from lam.hessians import Diagonal, Ekfac, Full, InfoNCECurvature, Kron, SupConCurvature, ggn_of_batch, ggn_of_dataset
from lam.hessians.losses.contrastive import SPLITS, addends_of, bytes_of_blocks
from lam.hessians.relations import cost_of
from lam.pairs import Neighbours, Pairs
from tests.helpers import contrastive_ggn, contrastive_ggn_dataset, diagonal_ggn_dataset
from tests.hessians.test_last_layer import make

QUIET = {"progress": False}


def assert_same(got: Any, want: Any, rtol: float = 1e-10) -> None:
    assert got.counts == want.counts
    scale = want.sums[0].abs().max().double()
    torch.testing.assert_close(got.sums.double() / scale, want.sums.double() / scale, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fix", ["fixed", "positive", "projected"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("D", [2, 30])
def test_equals_one_batch_by_label_for_any_block_size(split, fix, bias, D):
    features, weight, b, labels = make(N=53, D=D, bias=bias)
    options = {"margin": 1.1, "split": split, "fix": fix, "negative_weight": 0.4}
    want = contrastive_ggn(features, weight, b, Pairs.by_label(labels), **options)
    for block_size in (1, 7, 53, 1000):
        got = contrastive_ggn_dataset(features, weight, b, related=labels, block_size=block_size, **options, **QUIET)
        assert got.sums.dtype == torch.float64
        assert_same(got, want)


@pytest.mark.long
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fix", ["fixed", "positive", "projected"])
def test_equals_one_batch_by_position_for_any_block_size(split, fix):
    features, weight, bias, _ = make(N=60)
    positions = torch.rand(60, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 100
    options = {"margin": 1.3, "split": split, "fix": fix}
    want = contrastive_ggn(features, weight, bias, Pairs.by_distance(positions, 12.0, 25.0), **options)
    neighbours = Neighbours.by_distance(positions, 12.0, 25.0)
    for block_size in (1, 7, 60, 1000):
        got = contrastive_ggn_dataset(
            features, weight, bias, related=neighbours, block_size=block_size, **options, **QUIET
        )
        assert_same(got, want)


SOFTMAXES: list[Any] = [
    SupConCurvature(0.1),
    SupConCurvature(0.3, split="outputs"),
    InfoNCECurvature(0.02),
    InfoNCECurvature(0.3, split="outputs"),
    InfoNCECurvature(0.3, split="outputs", fix="projected"),
]


@pytest.mark.long
@pytest.mark.parametrize("curvature", SOFTMAXES, ids=str)
@pytest.mark.parametrize("by_label", [True, False])
def test_a_softmax_over_a_data_set_equals_that_of_one_batch_for_any_block_size(curvature, by_label):
    features, weight, bias, labels = make(N=12)
    if by_label:
        labels[-1] = 9  # an item without a positive pair
        related: Any = labels
        pairs = Pairs.by_label(labels)
    else:
        positions = torch.rand(12, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 60
        related = Neighbours.by_distance(positions, 12.0, 25.0)
        pairs = Pairs.by_distance(positions, 12.0, 25.0)
    for structure in (Diagonal, Kron, Full):
        empty = structure.zeros(weight, curvature, has_bias=True)
        want = ggn_of_batch(empty, features, weight, bias, pairs)
        for block_size in (1, 5, 12, 1000):
            got = ggn_of_dataset(empty, features, weight, bias, related=related, block_size=block_size, **QUIET)
            assert_same(got, want)
    basis = Ekfac.in_basis_of(ggn_of_batch(Kron.zeros(weight, curvature, has_bias=True), features, weight, bias, pairs))
    got = ggn_of_dataset(basis, features, weight, bias, related=related, block_size=5, **QUIET)
    assert_same(got, ggn_of_batch(basis, features, weight, bias, pairs))


def test_a_softmax_over_a_data_set_in_float32_says_what_it_takes(capsys):
    features, weight, bias, labels = make(N=300, D=8, P=20)
    curvature = SupConCurvature(0.1)
    wide = diagonal_ggn_dataset(features, weight, bias, curvature, related=labels, **QUIET)
    assert capsys.readouterr().err == ""
    layer = features.float(), weight.float(), bias.float()
    narrow = diagonal_ggn_dataset(*layer, curvature, related=labels, block_size=64)
    assert_same(narrow, wide, rtol=1e-5)
    assert "89,700 pairs, 0 MiB" in capsys.readouterr().err
    with pytest.raises(ValueError, match='pairs.*"dataset"'):
        diagonal_ggn_dataset(*layer, SupConCurvature(0.1, fix="full"), related=labels)
    with pytest.raises(ValueError, match="among 300 items"):
        diagonal_ggn_dataset(*layer, curvature, related=torch.arange(300))


@pytest.mark.parametrize("split", SPLITS)
def test_tight_classes_keep_their_digits_in_float32(split):
    _, weight, bias, labels = make(N=60, P=6, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(3, 6, generator=generator)[labels] + 1e-3 * torch.randn(60, 6, generator=generator)
    options = {"margin": 1.0, "fix": "positive", "split": split}
    wide_layer = features.double(), weight.double(), bias.double()
    wide = contrastive_ggn_dataset(*wide_layer, related=labels, **options, **QUIET)
    narrow = contrastive_ggn_dataset(features, weight, bias, related=labels, **options, **QUIET)
    assert_same(narrow, wide, rtol=1e-5)
    assert_same(contrastive_ggn(features, weight, bias, Pairs.by_label(labels), **options), wide, rtol=1e-5)


def test_every_entry_in_float32_is_within_1e5_of_float64():
    features, weight, bias, labels = make(N=300, D=8, P=20)
    wide = contrastive_ggn_dataset(features, weight, bias, related=labels, margin=1.0, **QUIET)
    narrow = contrastive_ggn_dataset(
        features.float(), weight.float(), bias.float(), related=labels, margin=1.0, block_size=64, **QUIET
    )
    torch.testing.assert_close(narrow.sums[0], wide.sums[0], rtol=1e-5, atol=1e-5 * wide.sums[0].abs().max().item())


@pytest.mark.parametrize("fix", ["fixed", "positive"])
def test_progress_shows_how_many_pairs_and_bytes_before_it_starts(fix, capsys):
    features, weight, bias, labels = make(N=30)
    contrastive_ggn_dataset(features, weight, bias, related=labels, margin=1.0, fix=fix)
    positive = int((labels.bincount() * (labels.bincount() - 1)).sum()) // 2
    pairs = 435 if fix == "fixed" else positive
    assert f"{pairs} pairs, 0 MiB" in capsys.readouterr().err


def test_bytes_are_those_of_blocks_and_sums():
    n = torch.nn.functional.normalize(torch.randn(3000, 64))
    blocks, sums = 4 * 2 * 256**2, (4 + 8) * 3000 * 65
    assert bytes_of_blocks(n, 256) == blocks + sums < 20 * n.numel() * n.element_size()
    assert bytes_of_blocks(n[:10], 256) == 4 * 2 * 10**2 + (4 + 8) * 10 * 65
    assert cost_of(10 * 9 // 2, 3 * 2**20) == "45 pairs, 3 MiB"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fix": "full"}, 'pairs.*"dataset"'),
        ({"related": torch.zeros(6, dtype=torch.long)}, "7 items.*neighbours for 6"),
        ({"related": torch.arange(7)}, "among 7 items"),
        ({"block_size": 0}, "block_size.*1"),
        ({"features": torch.ones(1, 4)}, "at least 2 items"),
        ({"features": torch.cat([torch.ones(3, 4), torch.full((4, 4), float("nan"))])}, "nan.*item 3, feature 0"),
        ({"features": torch.cat([torch.ones(3, 4), torch.zeros(4, 4)]), "bias": None}, "output of item 3"),
    ],
)
def test_bad_input_is_refused(change, message, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    features, weight, bias, labels = make(dtype=torch.float32)
    arguments = {"features": features, "weight": weight, "bias": bias, "related": labels, "margin": 1.0, **QUIET}
    with pytest.raises(ValueError, match=message):
        contrastive_ggn_dataset(**{**arguments, **change})


@pytest.mark.parametrize(
    ("positive", "message"),
    [
        ([[0, 5]], r"indices in \[0, 5\), got 0 to 5"),
        ([[1, 1]], "its own neighbour"),
        ([[0, 1], [1, 0]], "unordered pair once"),
    ],
)
def test_neighbours_are_checked(positive: list[list[int]], message: str):
    none = torch.zeros(0, 2, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        Neighbours(torch.tensor(positive), none, 5)


def test_positions_are_checked():
    positions: Tensor = torch.tensor([[0.0, 0.0], [1.0, float("nan")]])
    with pytest.raises(ValueError, match="positions.*index 1"):
        Neighbours.by_distance(positions, 1.0)
    with pytest.raises(ValueError, match="0 < positive_within <= negative_beyond, got 2.0 and 1.0"):
        Neighbours.by_distance(torch.zeros(2, 2), 2.0, 1.0)


def test_addends_in_bfloat16_lose_nothing():
    vectors = torch.randn(50, 13) * 10.0 ** torch.randint(-6, 6, (50, 1))
    addends = addends_of(vectors)
    assert addends.dtype == torch.bfloat16
    assert addends.shape == (50, 3 * 16)
    assert torch.equal(addends.float().unflatten(1, (3, 16)).sum(1)[:, :13], vectors)
