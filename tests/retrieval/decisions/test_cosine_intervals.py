"""Intervals of cosines: a slow twin, coverage over many calibrations, and a width that falls with κ."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from lam.retrieval import Choices, Targets, calibrate_vectors
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.files import load_calibration, save_calibration
from lam.retrieval.decisions.verification import LEVEL, CosineIntervals
from lam.vmf.embeddings import Embeddings

D, CLASSES = 8, 40


def embedded(mean: Tensor, kappa: Tensor) -> Embeddings:
    return Embeddings(mean, kappa, torch.ones_like(kappa), torch.zeros_like(kappa))


def drawn(n: int, generator: torch.Generator) -> tuple[Embeddings, Tensor, Tensor]:
    """Queries of random classes, their labels, and class centres as the gallery; noise has the variance 1/κ."""
    centres = normalize(torch.randn(CLASSES, D, generator=generator, dtype=torch.float64))
    labels = torch.randint(CLASSES, (n,), generator=generator)
    kappa = 10 ** (1 + 2 * torch.rand(n, generator=generator, dtype=torch.float64))
    noise = torch.randn(n, D, generator=generator, dtype=torch.float64) / kappa[:, None].sqrt()
    return embedded(normalize(centres[labels] + noise), kappa), labels, centres


def hits_of(queries: Embeddings, gallery: Tensor) -> tuple[Tensor, Tensor]:
    return (queries.mean @ gallery.T).topk(10)


def held(intervals: CosineIntervals, queries: Embeddings, labels: Tensor, gallery: Tensor) -> Tensor:
    """Whether the interval at each hit of a query holds the cosine of the next query of its class."""
    order = labels.argsort(stable=True)
    first, second = order[:-1], order[1:]
    first, second = first[labels[first] == labels[second]], second[labels[first] == labels[second]]
    cosines, hits = hits_of(queries, gallery)
    another = (queries.mean[second][:, None] * gallery[hits[first]]).sum(2)
    low, high = intervals(cosines[first], queries.kappa[first]).unbind(2)
    return (low <= another) & (another <= high)


def test_the_intervals_are_those_of_a_slow_twin() -> None:
    queries, labels, gallery = drawn(200, torch.Generator().manual_seed(0))
    cosines, hits = hits_of(queries, gallery)
    intervals = CosineIntervals.fit(queries, labels, gallery, hits)
    assert intervals is not None
    rows: dict[int, list[int]] = {}
    for row in torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist():
        rows.setdefault(int(labels[row]), []).append(row)
    pairs = [(of[i], of[i + 1]) for of in rows.values() for i in range(0, len(of) - 1, 2)]
    scores, units = [], []
    for unit, pair in enumerate(pairs):
        for asking, other in (pair, pair[::-1]):
            for place in range(10):
                change = float(queries.mean[other] @ gallery[hits[asking, place]]) - float(cosines[asking, place])
                scores.append(change * float(queries.kappa[asking]) ** 0.25)
                units.append(unit)
    values = torch.tensor(scores, dtype=torch.float64)
    above = ConformalScores.of(values, torch.tensor(units)).threshold(0.05)
    below = -ConformalScores.of(-values, torch.tensor(units)).threshold(0.05)
    assert intervals.pairs == len(pairs)
    assert (intervals.below, intervals.above) == pytest.approx((below, above), abs=1e-12)
    ends = intervals(cosines, queries.kappa)
    width = float(queries.kappa[3]) ** -0.25
    expected = [float(cosines[3, 4]) + offset * width for offset in (below, above)]
    assert ends[3, 4].tolist() == pytest.approx(np.clip(expected, -1, 1).tolist(), abs=1e-12)


def test_the_promised_share_of_intervals_holds_the_cosine() -> None:
    shares = []
    for seed in range(150):
        queries, labels, gallery = drawn(2200, torch.Generator().manual_seed(seed))
        few, rest = embedded(queries.mean[:200], queries.kappa[:200]), slice(200, None)
        intervals = CosineIntervals.fit(few, labels[:200], gallery, hits_of(few, gallery)[1])
        assert intervals is not None
        tested = embedded(queries.mean[rest], queries.kappa[rest])
        shares.append(float(held(intervals, tested, labels[rest], gallery).double().mean()))
    mean, error = float(np.mean(shares)), float(np.std(shares)) / math.sqrt(len(shares))
    assert LEVEL - 3 * error <= mean <= LEVEL + 0.05, (mean, error)


def test_a_calibration_keeps_its_intervals(tmp_path: Path) -> None:
    queries, labels, gallery = drawn(200, torch.Generator().manual_seed(0))
    names, stored = [str(label) for label in labels.tolist()], [str(label) for label in range(CLASSES)]
    made = calibrate_vectors(queries, names, gallery, stored, Choices(Targets(far=0.1, ood=0.1)))
    assert made.intervals == CosineIntervals.fit(queries, labels, gallery, hits_of(queries, gallery)[1])
    save_calibration(tmp_path, made)
    assert load_calibration(tmp_path, key="vectors").intervals == made.intervals


def test_queries_without_a_match_do_not_change_the_intervals() -> None:
    queries, labels, gallery = drawn(400, torch.Generator().manual_seed(0))
    names, stored = [str(label) for label in labels.tolist()], [str(label) for label in range(CLASSES // 2)]
    made = calibrate_vectors(queries, names, gallery[: CLASSES // 2], stored, Choices(Targets(far=0.1, ood=0.1)))
    known, rest = queries[labels < CLASSES // 2], gallery[: CLASSES // 2]
    assert made.intervals == CosineIntervals.fit(known, labels[labels < CLASSES // 2], rest, hits_of(known, rest)[1])


def test_too_few_pairs_give_no_intervals() -> None:
    queries, _, gallery = drawn(200, torch.Generator().manual_seed(0))
    hits = hits_of(queries, gallery)[1]
    assert CosineIntervals.fit(queries, torch.arange(200), gallery, hits) is None
    pairs = torch.arange(200).clamp(min=38 - 1)  # one class of 163 rows: 81 pairs
    assert CosineIntervals.fit(queries, pairs, gallery, hits) is not None
    eighteen, nineteen = (torch.arange(n * 2) // 2 for n in (18, 19))
    few, enough = (embedded(queries.mean[: len(one)], queries.kappa[: len(one)]) for one in (eighteen, nineteen))
    assert CosineIntervals.fit(few, eighteen, gallery, hits[:36]) is None
    assert CosineIntervals.fit(enough, nineteen, gallery, hits[:38]) is not None


@pytest.mark.parametrize("kappa", [0.0, 1e-30, 10.0, 1e30])
def test_the_ends_are_cosines_and_widths_fall_with_kappa(kappa: float) -> None:
    intervals = CosineIntervals(-0.5, 0.4, 20)
    cosines = torch.tensor([[0.9, 0.1]])
    here = intervals(cosines, torch.tensor([kappa]))
    assert here.dtype == torch.float64
    assert ((here >= -1) & (here <= 1)).all()
    sharper = intervals(cosines, torch.tensor([kappa * 100 + 1]))
    assert ((here[..., 1] - here[..., 0]) >= (sharper[..., 1] - sharper[..., 0])).all()
