"""Further promises of a calibration: the share of wrong answers, and p-values of new classes."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.retrieval.decisions.abstention import MATCH
from lam.retrieval.decisions.acceptance import Acceptance
from lam.retrieval.decisions.calibrate import OtherQueries
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.conformal import control_selective_risk
from lam.retrieval.decisions.files import load_calibration, save_calibration
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.index.faiss_index import search_flat
from lam.retrieval.index.hits import label_key
from lam.retrieval.metrics.open_set import Searches, search_open_set
from lam.vmf.embeddings import Embeddings
from tests.retrieval.decisions.calibrated import calibrated

CLASSES = 40
_CENTERS = torch.nn.functional.normalize(torch.randn(2 * CLASSES, 6, generator=torch.Generator().manual_seed(9)), dim=1)


def _items(n: int, seed: int, *, first: int = 0, classes: int = CLASSES) -> tuple[Embeddings, torch.Tensor]:
    """Points around centres in R^6; a point farther from its centre has a wrong first hit more often."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(first, first + classes, (n,), generator=generator)
    noise = 0.4 * torch.rand(n, 1, generator=generator)
    points = _CENTERS[labels] + noise * torch.randn(n, 6, generator=generator)
    return Embeddings(torch.nn.functional.normalize(points, dim=1), torch.ones(n), torch.ones(n), torch.ones(n)), labels


GALLERY, LABELS = _items(400, 1)


def _asked(n: int, seed: int, **options: Any) -> tuple[Searches, Embeddings]:
    asked, labels = _items(n, seed, **options)
    return search_open_set(asked.mean, GALLERY.mean, lambda rows: labels[rows][:, None] == LABELS), asked


def _calibrated(seed: int, *, wrong: float | None, n: int = 300, **options: Any) -> Calibration:
    return calibrated(*_asked(n, seed), targets=Targets(far=0.5, ood=0.01, wrong=wrong), **options)


def _answered(calibration: Calibration, seed: int, n: int = 2000) -> tuple[int, int]:
    searches, asked = _asked(n, seed)
    decisions = calibration.decide(search_flat(GALLERY, asked, 50), asked)
    answered = decisions.codes == MATCH
    return int(answered.sum()), int((answered & ~searches.correct).sum())


def test_a_target_of_wrong_answers_raises_the_threshold() -> None:
    plain, strict = _calibrated(0, wrong=None), _calibrated(0, wrong=0.2)
    acceptance = strict.acceptances[0]
    threshold = control_selective_risk(acceptance.statistics, ~acceptance.is_right, target=0.2)
    assert plain.accept_above == acceptance.false_accepts.threshold(0.5)
    assert strict.accept_above == max(threshold, plain.accept_above) > plain.accept_above
    assert len(acceptance.statistics) == 300
    (all_answered, all_wrong), (few_answered, few_wrong) = (_answered(one, 77) for one in (plain, strict))
    assert all_wrong / all_answered > 0.2 >= few_wrong / few_answered
    assert few_answered > 100


def test_given_strangers_count_as_wrong_answers_and_made_ones_do_not() -> None:
    searches, strangers = _asked(60, 5, first=CLASSES)
    given = OtherQueries(strangers, searches.cosines)
    calibration = _calibrated(0, wrong=0.5, strangers=given)
    assert len(calibration.acceptances[0].statistics) == 360
    assert not calibration.acceptances[0].is_right[300:].any()
    assert len(_calibrated(0, wrong=0.5).acceptances[0].statistics) == 300


def test_a_class_of_strangers_counts_as_one_wrong_answer() -> None:
    searches, strangers = _asked(60, 5, first=CLASSES)
    given = OtherQueries(strangers, searches.cosines, classes=torch.arange(60) % 20)
    acceptance = _calibrated(0, wrong=0.5, strangers=given).acceptances[0]
    assert len(acceptance.statistics) == len(acceptance.is_right) == 320
    assert not acceptance.is_right[300:].any()


@pytest.mark.parametrize(
    ("wrong", "n", "message"),
    [
        (0.0, 300, r"target wrong.*\(0, 1\), got 0"),
        (0.005, 300, r"target wrong \(--target-wrong\): .*0.005 .*598"),
        (0.02, 300, r"target wrong \(--target-wrong\): no threshold.*0.02: .*300"),
    ],
)
def test_a_share_of_wrong_answers_that_cannot_be_promised_is_refused(wrong: float, n: int, message: str) -> None:
    searches, asked = _asked(n, 0)
    searches = (
        Searches(**{**vars(searches), "correct": torch.zeros(n, dtype=torch.bool)}) if wrong == 0.02 else searches
    )
    with pytest.raises(ValueError, match=message):
        calibrated(searches, asked, targets=Targets(far=0.5, ood=0.1, wrong=wrong), accept="cosine")


def test_what_cannot_be_promised_accepts_nothing() -> None:
    acceptance = _calibrated(0, wrong=None).acceptances[0]
    hopeless = Acceptance(**{**vars(acceptance), "is_right": torch.zeros_like(acceptance.is_right)})
    assert hopeless.threshold(far=0.5, wrong=0.1) == math.inf
    with pytest.raises(ValueError, match="2995 calibration"):
        hopeless.threshold(far=0.5, wrong=0.001)


@pytest.mark.slow
def test_of_those_answered_few_are_wrong_in_nineteen_of_twenty_calibrations() -> None:
    """By the cross-validated statistics of the learned probability; the confidence is 0.95."""
    target, broken = 0.2, 0
    for seed in range(100):
        answered, wrong = _answered(_calibrated(1000 + seed, wrong=target), 5000 + seed)
        broken += answered > 0 and wrong / answered > target + 2 * math.sqrt(target * (1 - target) / answered)
    assert broken <= 10  # of 100 at 0.05, exceeded by chance in 1 of 100


def test_promises_pass_through_a_file(tmp_path: Path) -> None:
    unseen = UnseenClasses(
        torch.tensor(sorted(map(label_key, ("a", "b", "b")))), torch.tensor([0.1, 0.2, 0.3]).double()
    )
    saved = _calibrated(0, wrong=0.2, unseen=unseen)
    save_calibration(tmp_path, saved)
    loaded = load_calibration(tmp_path, key="k")
    assert (loaded.targets, loaded.accept_above) == (saved.targets, saved.accept_above)
    for one, other in zip(loaded.acceptances, saved.acceptances, strict=True):
        assert torch.equal(one.statistics, other.statistics)
        assert torch.equal(one.is_right, other.is_right)
    assert loaded.unseen is not None
    assert torch.equal(loaded.unseen.labels, unseen.labels)
    assert torch.equal(loaded.unseen.left_out, unseen.left_out)


def test_p_values_of_new_classes_are_those_of_the_first_hit() -> None:
    names = ["cat", "cat", "dog", "eel", "fox"]
    keys, order = torch.tensor([label_key(name) for name in names]).sort()
    unseen = UnseenClasses(keys, torch.tensor([0.9, 0.9, 0.2, 0.3, 0.5]).double()[order])
    calibration = _calibrated(0, wrong=None, unseen=unseen)
    first, labels = torch.tensor([0.95, 0.4, 0.1, 0.4, 0.4]), ["cat", "dog", "fox", "", "gnu"]
    place = {name: keys.tolist().index(label_key(name)) for name in names}
    nearest = torch.tensor([place[label] for label in labels[:3]])
    expected = list(
        zip(unseen.p_new(first[:3], nearest).tolist(), unseen.p_in_gallery(first[:3]).tolist(), strict=True)
    )
    assert calibration.unseen_p_values(first, labels) == [*expected, None, None]
    assert expected[0][0] < expected[2][0]
    assert _calibrated(0, wrong=None).unseen_p_values(first, labels) == [None] * 5
