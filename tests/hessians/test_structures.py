"""Laws that every structure of a curvature keeps, for every curvature."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lam import hessians
from lam.hessians import (
    AnInfoNCECurvature,
    ContrastiveCurvature,
    Curvature,
    Diagonal,
    Ekfac,
    Full,
    InfoNCECurvature,
    Kron,
    LowRank,
    Structure,
    SupConCurvature,
    VarConCurvature,
    ggn_of_batch,
    ggn_of_dataset,
    register,
)
from lam.hessians.losses import CURVATURES
from lam.hessians.losses.contrastive import FIXES
from lam.pairs import Pairs
from tests.hessians.softmax import SoftmaxCurvature
from tests.hessians.test_last_layer import make

EVERY_FIX: Any = FIXES
CURVATURES_OF_ALL: list[Any] = [
    *(ContrastiveCurvature(0.9, fix=fix, negative_weight=0.4) for fix in EVERY_FIX),
    ContrastiveCurvature(0.9, average=False),
    InfoNCECurvature(0.3, fix="full"),
    SupConCurvature(0.1),
    SupConCurvature(0.1, split="outputs", average=False),
    VarConCurvature(0.1, 0.02),
    AnInfoNCECurvature((1.0, 2.0, 4.0)),
    SoftmaxCurvature(0.3),
]
WITH_MATRICES: list[Any] = [
    ContrastiveCurvature(0.9, negative_weight=0.4),
    ContrastiveCurvature(0.9, "euclidean", average=False),
    SupConCurvature(0.1),
    InfoNCECurvature(0.3, split="outputs"),
    VarConCurvature(0.1, 0.02),
    AnInfoNCECurvature((1.0, 2.0, 4.0)),
]
STRUCTURES: dict[type[Structure], list[Any]] = {
    Diagonal: CURVATURES_OF_ALL,
    **dict.fromkeys((Kron, Ekfac, Full, LowRank), WITH_MATRICES),
}
"""Every structure, with the curvatures that it can hold."""


def empty_of(structure: Any, weight: Tensor, curvature: Curvature, *, has_bias: bool = True) -> Any:
    """A structure with sums of zero; an Ekfac has the basis of a batch, a LowRank has rank 3."""
    if structure is LowRank:
        return LowRank.zeros(weight, curvature, has_bias=has_bias, rank=3)
    if structure is not Ekfac:
        return structure.zeros(weight, curvature, has_bias=has_bias)
    features, _, bias, labels = make(N=12, D=len(weight), P=weight.shape[1], bias=has_bias, seed=5)
    kron = Kron.zeros(weight, curvature, has_bias=has_bias)
    return Ekfac.in_basis_of(kron + ggn_of_batch(kron, features, weight, bias, Pairs.by_label(labels)))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register("softmax", SoftmaxCurvature)
    yield
    del CURVATURES["softmax"]


@pytest.fixture(
    params=[(structure, curvature) for structure, curvatures in STRUCTURES.items() for curvature in curvatures], ids=str
)
def parts(request: pytest.FixtureRequest) -> list[Any]:
    """Structures of three batches."""
    structure, curvature = request.param
    _, weight, bias, _ = make()
    batches = [make(N=9, seed=seed) for seed in range(3)]
    empty = empty_of(structure, weight, curvature)
    parts = [ggn_of_batch(empty, batch[0], weight, bias, Pairs.by_label(batch[3])) for batch in batches]
    assert all(type(part) is structure for part in parts)
    return parts


def same_sums(one: Structure, other: Structure, rtol: float = 1e-12) -> None:
    assert one.counts == other.counts
    for name in one.sum_fields:
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_adds_up_in_any_order_and_forgets(parts: list[Any], dtype: torch.dtype) -> None:
    a, b, c = (part.of_type(dtype) for part in parts)
    one, other = (a + b) + c, c + (b + a)
    same_sums(one, other)
    assert one.counts == tuple(map(sum, zip(a.counts, b.counts, c.counts, strict=True)))
    same_sums(one - b, a + c, rtol=1e-10)
    with pytest.raises(ValueError, match="subtract .* from .*never added"):
        _ = a - one


def test_the_empty_structure_is_the_zero_of_addition(parts: list[Any]) -> None:
    empty = parts[0].empty()
    same_sums(empty + parts[0], parts[0], rtol=0)
    with pytest.raises(ValueError, match="is no (positive pair|matched item|item)"):
        _ = empty.h


def test_h_is_the_weighted_sum_of_its_terms(parts: list[Any]) -> None:
    part = parts[0]
    assert len(part.sums) == len(part.counts) == len(part.curvature.terms)
    counts = part.counts if part.curvature.average else [1] * len(part.counts)
    expected = sum(w * S / n for S, n, w in zip(part.sums, counts, part.curvature.terms.values(), strict=True))
    torch.testing.assert_close(part.h, expected, rtol=1e-12, atol=1e-15)
    assert 0 <= part.clipped <= 1


def test_it_is_restored_from_its_tensors_and_settings(parts: list[Any]) -> None:
    for part in (parts[0], replace(parts[0], sums=parts[0].h[None], counts=None)):
        again = type(part).restored(part.tensors(), json.loads(json.dumps(part.settings())))
        same_sums(again, part, rtol=0)
        assert torch.equal(again.h, part.h)
        assert again.to("cpu").settings() == part.settings()
        assert again.curvature == part.curvature


def test_of_one_process_the_sum_over_processes_is_its_own(parts: list[Any]) -> None:
    same_sums(parts[0].all_reduce(), parts[0], rtol=0)


def test_a_running_mean_neither_adds_up_nor_forgets(parts: list[Any]) -> None:
    h = parts[0].h
    mean = replace(parts[0], sums=h[None], counts=None)
    assert (parts[0].adds_up, mean.adds_up) == (True, False)
    assert torch.equal(mean.h, h)
    for combine in (lambda: mean + mean, lambda: parts[0] + mean, lambda: mean - parts[0], lambda: mean.all_reduce()):
        with pytest.raises(ValueError, match="running mean.*sum"):
            combine()


def test_other_settings_do_not_add_up(parts: list[Any]) -> None:
    other = replace(parts[0], curvature=ContrastiveCurvature(0.1))
    with pytest.raises(ValueError, match="same layer.*settings"):
        _ = parts[0] + other


@pytest.mark.parametrize("name", ["Kron", "Ekfac", "Full", "LowRank"])
@pytest.mark.parametrize("fix", ["positive", "full"])
def test_cross_terms_are_refused_where_there_is_no_place_for_them(name: str, fix: Any) -> None:
    _, weight, _, _ = make()
    with pytest.raises(ValueError, match='cross terms.*fix="fixed".*structure="diag"'):
        empty_of(getattr(hessians, name), weight, ContrastiveCurvature(1.0, fix=fix))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_too_much_memory_is_refused_with_its_bytes(structure: Any) -> None:
    _, weight, _, _ = make()
    curvature = WITH_MATRICES[0]
    n_bytes = structure.n_bytes(2, 3, 5, *([3] if structure is LowRank else []))
    empty = empty_of(structure, weight, curvature)
    kept = sum(tensor.nbytes for tensor in empty.tensors().values())
    assert n_bytes <= kept <= n_bytes + 100
    options = {"has_bias": True} | ({"rank": 3} if structure is LowRank else {})
    with pytest.raises(ValueError, match=f'structure="{structure.name}".*layer.*3 x 5 weights.*{n_bytes:,} '):
        structure.zeros(weight, curvature, max_memory=n_bytes - 1, **options)
    structure.zeros(weight, curvature, max_memory=n_bytes, **options)


def test_a_layer_of_100_000_inputs_has_room_for_a_low_rank_alone() -> None:
    features, weight, _, labels = make(N=60, P=100_000, bias=False, dtype=torch.float32)
    with pytest.raises(ValueError, match=r'3 x 100000 weights takes 80,000,000,144 bytes.*use structure="low_rank"'):
        Kron.zeros(weight, WITH_MATRICES[0], has_bias=False)
    empty = LowRank.zeros(weight, WITH_MATRICES[0], has_bias=False, rank=8)
    ggn = ggn_of_batch(empty, features, weight, None, Pairs.by_label(labels))
    assert 0.5 < ggn.diagnostics()["share_left"] < 1  # random features have no low rank
    assert sum(tensor.nbytes for tensor in ggn.tensors().values()) < 20e6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_of_a_data_set_it_is_that_of_one_batch(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    features, weight, bias, labels = make(N=40, P=4)
    empty = empty_of(structure, weight, ContrastiveCurvature(1.1, negative_weight=0.4))
    batch = ggn_of_batch(empty, features, weight, bias, Pairs.by_label(labels))
    for rows in (4096, 7):
        monkeypatch.setattr("lam.hessians.last_layer.ROWS", rows)
        whole = ggn_of_dataset(empty, features, weight, bias, related=labels, block_size=9, progress=False)
        same_sums(whole, batch, rtol=1e-10)


def test_what_has_another_basis_does_not_add_up() -> None:
    _, weight, _, _ = make(N=12)
    one, other = (empty_of(Ekfac, weight, curvature) for curvature in WITH_MATRICES[:2])
    other = replace(other, curvature=one.curvature)
    with pytest.raises(ValueError, match="Ekfacs.*output_basis"):
        _ = one + other


def test_a_low_rank_that_is_whole_is_the_second_moment_and_one_that_is_not_says_what_it_leaves() -> None:
    generator = torch.Generator().manual_seed(0)
    P, N = 60, 300
    features = torch.randn(N, P, generator=generator).double() * 0.8 ** torch.arange(P)
    weight, labels = torch.randn(3, P, generator=generator).double(), torch.arange(N) % 5
    moment, left = features.T @ features / N, []
    for rank in (60, 20, 5):
        empty = LowRank.zeros(weight, WITH_MATRICES[0], has_bias=False, rank=rank)
        ggn = ggn_of_batch(empty, features, weight, None, Pairs.by_label(labels))
        known = ggn.factor @ ggn.factor.T
        assert torch.linalg.eigvalsh(moment - known)[0] > -1e-6 * moment.trace()
        torch.testing.assert_close(known.diagonal() + ggn.rest, moment.diagonal(), rtol=1e-6, atol=1e-9)
        assert ggn.diagnostics()["share_left"] == pytest.approx(float(1 - known.trace() / moment.trace()), abs=1e-6)
        left.append(ggn.diagnostics()["share_left"])
        if rank == 60:
            torch.testing.assert_close(known, moment, rtol=0, atol=1e-5 * float(moment.trace()))
    assert left[0] < 1e-5 < left[1] < left[2]
    spectrum = torch.linalg.eigvalsh(moment)
    for rank, share in ((20, left[1]), (5, left[2])):  # no worse than the best of half its rank
        assert share < 1 - float(spectrum[-(rank // 2) :].sum() / moment.trace())
    with pytest.raises(ValueError, match="rank.*1, got 0"):
        LowRank.zeros(weight, WITH_MATRICES[0], has_bias=False, rank=0)


def test_low_ranks_add_up_although_another_processor_rounded_their_probes_differently() -> None:
    features, weight, bias, labels = make()
    pairs, empty = Pairs.by_label(labels), LowRank.zeros(weight, WITH_MATRICES[0], has_bias=True, rank=3)
    rounded = replace(empty, probes=empty.probes + 3e-7)
    one, other = (ggn_of_batch(each, features, weight, bias, pairs) for each in (empty, rounded))
    torch.testing.assert_close((one + other).factor, (one + one).factor, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="LowRanks.*same probes"):
        _ = one + replace(one, probes=one.probes + 1e-3)
