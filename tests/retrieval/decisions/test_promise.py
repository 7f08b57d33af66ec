"""Promises: queries unlike the calibration queries put them in doubt, errors in feedback break them."""

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.conformal import clopper_pearson
from lam.retrieval.decisions.promise import Promise, cells_of
from lam.retrieval.metrics.open_set import search_open_set
from lam.vmf.embeddings import Embeddings
from tests.retrieval.decisions.calibrated import calibrated

_CENTERS = torch.nn.functional.normalize(torch.randn(20, 8, generator=torch.Generator().manual_seed(1)), dim=1)


def items(n: int, seed: int, *, noise: float = 0.1) -> tuple[Embeddings, torch.Tensor]:
    """Items of 20 classes; the noisier, the lower their κ and the cosine of their first hit."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(20, (n,), generator=generator)
    spread = noise * (0.5 + torch.rand(n, generator=generator))
    points = _CENTERS[labels] + spread[:, None] * torch.randn(n, 8, generator=generator)
    kappa = 1 / spread.double().square()
    return Embeddings(torch.nn.functional.normalize(points, dim=1), kappa, torch.ones(n), torch.ones(n)), labels


GALLERY, LABELS = items(200, 2)


@cache
def calibration_of(**options: Any) -> Calibration:
    queries, labels = items(300, 3)
    searches = search_open_set(queries.mean, GALLERY.mean, lambda rows: labels[rows][:, None] == LABELS)
    return calibrated(searches, queries, targets=Targets(far=0.1, ood=0.1, **options))


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibration_of()


def observe(promise: Promise, n: int, seed: int, *, noise: float = 0.1) -> None:
    queries, _ = items(n, seed, noise=noise)
    cosines = (queries.mean @ GALLERY.mean.T).max(1).values
    for kappa, cosine in zip(queries.kappa.tolist(), cosines.tolist(), strict=True):
        promise.observe(kappa, cosine)


def evidence_of(promise: Promise) -> dict[str, float]:
    return {reading.name: reading.evidence for reading in promise.readings}


def test_queries_like_those_of_the_calibration_raise_no_doubt(calibration: Calibration) -> None:
    promise = Promise(calibration, seed=0)
    assert [reading.peak for reading in promise.readings] == [1.0] * 4
    observe(promise, 1000, 4)
    assert promise.state == "holds"
    assert [(reading.name, reading.n) for reading in promise.readings][:2] == [("kappa", 1000), ("cosine", 1000)]


@pytest.mark.parametrize("before", [0, 1000])
def test_other_queries_raise_doubt_and_it_stays(calibration: Calibration, before: int) -> None:
    promise = Promise(calibration, seed=0)
    observe(promise, before, 4)
    observe(promise, 100, 5, noise=0.3)
    assert promise.state == "in doubt"
    assert all(evidence_of(promise)[name] > 60 for name in ("kappa", "cosine"))
    observe(promise, 1000, 6)
    assert promise.state == "in doubt"


def test_each_score_is_enough(calibration: Calibration) -> None:
    for name in ("kappa", "cosine"):
        promise = Promise(calibration, seed=0)
        queries, _ = items(100, 7)
        cosines = (queries.mean @ GALLERY.mean.T).max(1).values
        for kappa, cosine in zip(queries.kappa.tolist(), cosines.tolist(), strict=True):
            promise.observe(*((1.0, cosine) if name == "kappa" else (kappa, -1.0)))
        assert [other for other, wealth in evidence_of(promise).items() if wealth > 60] == [name]
        assert promise.state == "in doubt"


def test_false_accepts_in_feedback_break_the_promise(calibration: Calibration) -> None:
    promise = Promise(calibration)
    for _ in range(300):
        assert promise.judge(matched=False, stranger=True, right=None) == ["far"]
    assert promise.state == "holds"
    for _ in range(100):
        assert promise.judge(matched=True, stranger=True, right=None) == ["far"]
    assert promise.state == "broken"
    far = promise.readings[2]
    assert (far.name, far.n, far.errors) == ("far", 400, 100)


def test_a_rate_at_its_limit_does_not_break_the_promise(calibration: Calibration) -> None:
    """The rate of one calibration set may exceed `far` by chance, so the limit lies above it."""
    promise, above = Promise(calibration), calibration.accept_above
    limit = promise.readings[2].limit or 0.0
    assert limit == calibration.false_accepts.interval(above, level=0.99)[1] > 0.1
    generator = np.random.default_rng(3)
    for _ in range(5000):
        promise.judge(matched=bool(generator.random() < limit), stranger=True, right=None)
    assert promise.state == "holds"


@pytest.mark.parametrize(("wrong", "state"), [(None, "in doubt"), (0.2, "broken")])
def test_wrong_matches(wrong: float | None, state: str) -> None:
    calibration = calibration_of(wrong=wrong)
    promise, acceptance = Promise(calibration), calibration.acceptances[0]
    answered = acceptance.statistics > calibration.accept_above
    n_wrong = int((answered & ~acceptance.is_right).sum())
    level = 1 - (0.05 / 3 if wrong is None else 0.005)
    assert promise.readings[3].limit == max(wrong or 0, clopper_pearson(n_wrong, int(answered.sum()), level=level)[1])
    for number in range(400):
        assert promise.judge(matched=True, stranger=False, right=number % 3 > 0) == ["wrong"]
    assert promise.state == state


def test_feedback_that_tells_nothing_is_not_counted(calibration: Calibration) -> None:
    promise = Promise(calibration)
    assert promise.judge(matched=False, stranger=False, right=None) == []
    assert promise.judge(matched=True, stranger=None, right=None) == []
    assert promise.judge(matched=True, stranger=True, right=False) == ["far", "wrong"]


def test_it_goes_on_from_its_arrays(calibration: Calibration) -> None:
    promise, other = Promise(calibration, seed=1), Promise(calibration, seed=2)
    observe(promise, 50, 5, noise=0.12)
    promise.judge(matched=True, stranger=True, right=False)
    other.restore({name: values.copy() for name, values in promise.arrays().items()})
    assert other.readings == promise.readings
    observe(promise, 50, 6)
    observe(other, 50, 6)
    for one, another in zip(promise.readings, other.readings, strict=True):
        assert (one.n, one.errors) == (another.n, another.errors)
        assert another.evidence == pytest.approx(one.evidence, rel=0.5)  # other draws break the ties


def test_the_key_is_of_what_is_promised(calibration: Calibration) -> None:
    same = replace(calibration, facts={"note": "another"})
    others = [replace(calibration, targets=Targets(far=0.2, ood=0.1)), calibration_of(wrong=0.3)]
    assert Promise(same).key == Promise(calibration).key
    assert len({Promise(other).key for other in (calibration, *others)}) == 3


def test_cells_rise_with_doubt() -> None:
    kappa = cells_of("kappa", np.logspace(9, -7, 1000))
    cosine = cells_of("cosine", 1 - np.logspace(-7, 0.3, 1000))
    for cells in (kappa, cosine):
        assert cells[0] == 0
        assert cells[-1] > 4000
        assert (np.diff(cells) >= 0).all()
    assert cells_of("cosine", np.array([1.0, -1.0])).tolist() == [0, 4095]
