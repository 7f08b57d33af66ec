"""The accept statistic: its promises, by simulation, and the choice between scores, by construction."""

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
import torch

from lam.retrieval.decisions.acceptance import PROBABILITY, Acceptance
from lam.retrieval.decisions.calibrate import OtherQueries
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.conformal import ConformalScores, least_rate
from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.match_probability import MatchProbability
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.open_set import search_open_set
from lam.retrieval.metrics.reference import Reference
from lam.vmf.embeddings import Embeddings
from tests.retrieval.decisions.calibrated import calibrated
from tests.retrieval.decisions.simulation import NAMES, WORLDS, rates

FOUR_ERRORS = 4.0  # no mean rate of 21 in a test should exceed it by chance


def mean_rates(world: str, n: int, targets: tuple[float, ...], times: int) -> Counter[str]:
    """Fail if a mean rate over calibration sets exceeds its target by more than chance; count the chosen statistics."""
    generator, chosen = torch.Generator().manual_seed(n), Counter[str]()
    found = defaultdict[tuple[str, str, float], list[float]](list)
    for _ in range(times):
        once, accept = rates(WORLDS[world], n, targets, generator)
        chosen[accept] += 1
        for event, rate in once.items():
            found[event].append(rate)
    for (event, by, target), values in found.items():
        rate = torch.tensor(values, dtype=torch.float64)
        error = max(float(rate.std()), target * (1 - target) / n**0.5) / times**0.5
        assert float(rate.mean()) <= target + FOUR_ERRORS * error, (event, by, target, float(rate.mean()))
    return chosen


@pytest.mark.long
@pytest.mark.parametrize("world", WORLDS)
def test_whatever_decides_the_rates_are_kept_on_average(world: str) -> None:
    mean_rates(world, 30, (0.1, 0.3), 30)


@pytest.mark.slow
@pytest.mark.timeout(10800)
@pytest.mark.parametrize("n", [20, 40, 100, 300])
@pytest.mark.parametrize("world", WORLDS)
def test_whatever_decides_the_rates_are_kept_on_average_of_many_sets(world: str, n: int) -> None:
    """2,000 calibration sets for each world, 500 of each size."""
    chosen = mean_rates(world, n, (0.05, 0.1, 0.2), 500)
    assert world != "useful" or n < 100 or chosen[PROBABILITY] > 250


def _fit(evidence: Evidence, accept: str | None = None) -> Acceptance:
    return Acceptance.fit(evidence, MatchProbability.fit, accept=accept)[0]


def test_a_single_score_is_the_same_function_whatever_was_learned() -> None:
    """So its threshold is exact, and its rate follows the law of `ConformalScores`."""
    evidence, classes = WORLDS["useful"].evidence(50, torch.Generator().manual_seed(0))
    for name in NAMES:
        learned = _fit(evidence, name)
        assert torch.equal(learned.false_accepts.scores, (-evidence.no_match.scores[name]).sort().values)
        of_strangers, _ = Acceptance.fit(
            evidence, MatchProbability.fit, accept=name, of_strangers=True, classes=classes
        )
        assert torch.equal(of_strangers.false_accepts.scores, (-evidence.strangers.scores[name]).sort().values)
        assert of_strangers.false_accepts.n_units == 50
        none = torch.full((50,), torch.nan, dtype=torch.float64)
        scores = evidence.queries.scores
        assert torch.equal(learned.statistic(scores, none), -scores[name])
        right = torch.where(evidence.right, -scores[name], -torch.inf)[evidence.has_match]
        assert torch.equal(learned.right_hits, right.sort().values)
        assert name in learned.evidence


def test_the_probability_is_that_of_the_answer_and_its_scores_are_out_of_fold() -> None:
    evidence, _ = WORLDS["useful"].evidence(60, torch.Generator().manual_seed(0))
    learned, right = Acceptance.fit(evidence, MatchProbability.fit, accept=PROBABILITY)
    without, of_known = torch.empty(60, dtype=torch.float64), torch.empty(60, dtype=torch.float64)
    for fold in range(5):
        answer, held = MatchProbability.fit(evidence.without(fold)), evidence.queries.fold == fold
        without[held] = answer(evidence.no_match[held].scores)
        of_known[held] = answer.right(evidence.queries[held].scores)
    assert torch.equal(learned.false_accepts.scores, without.sort().values)
    assert torch.equal(right, of_known[evidence.has_match])
    assert learned.match_probability == MatchProbability.fit(evidence)
    assert learned.evidence == learned.match_probability.evidence


def _split(n: int, *telling: str, apart: float = 3.0, seed: int = 0) -> Evidence:
    """Evidence of n queries, half of them right; scores in `telling` are higher if the first hit is not right."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randn(3, len(NAMES), n, generator=generator, dtype=torch.float64)
    asked, no_match, strangers = (dict(zip(NAMES, kind, strict=True)) for kind in draw)
    for name in telling:
        no_match[name], strangers[name] = no_match[name] + apart, strangers[name] + apart
    fold, every = folds_of(torch.arange(n)), torch.ones(n).bool()
    queries, no_match, strangers = (Group(scores, fold) for scores in (asked, no_match, strangers))
    return Evidence(queries, every, every, no_match, strangers)


@pytest.mark.parametrize("name", ["kappa", "knn"])
def test_a_perfect_score_decides_where_little_can_be_learned(name: str) -> None:
    for seed in range(5):
        learned = _fit(_split(9, name, apart=30.0, seed=seed))
        assert learned.accept == name
        assert float(learned.right_hits.min()) > float(learned.false_accepts.scores[-1])


def test_a_score_with_many_ties_at_its_best_does_not_decide() -> None:
    """A threshold above the ties accepts no query, however well the score separates the others."""
    evidence = _split(9, "knn", apart=30.0)
    tied = evidence.no_match.scores["knn"].clone()
    tied[:3] = evidence.queries.scores["knn"].min() - 1
    assert _fit(evidence).accept == "knn"
    no_match = Group({**evidence.no_match.scores, "knn": tied}, evidence.no_match.fold)
    assert _fit(replace(evidence, no_match=no_match)).accept != "knn"


def test_where_scores_know_more_together_the_probability_decides() -> None:
    for seed in range(3):
        assert _fit(_split(150, *NAMES, apart=1.2, seed=seed)).accept == PROBABILITY


def test_where_all_tell_the_same_the_first_cosine_decides_of_few() -> None:
    evidence = _split(9, "knn", apart=30.0)
    kinds = {
        kind: Group({**group.scores, "cosine": group.scores["knn"]}, group.fold)
        for kind in ("queries", "no_match", "strangers")
        for group in (getattr(evidence, kind),)
    }
    assert _fit(replace(evidence, **kinds)).accept == "cosine"


def test_what_is_refused() -> None:
    evidence, _ = WORLDS["useful"].evidence(20, torch.Generator().manual_seed(0))
    for accept in ("votes", "length"):
        with pytest.raises(ValueError, match=f"accept.*probability, kappa, cosine, knn.*'{accept}'"):
            _fit(evidence, accept)
    alone = replace(evidence, no_match=evidence.no_match[torch.arange(0)])
    with pytest.raises(ValueError, match="without a match.*none"):
        _fit(alone)


KNOWN_CLASSES, STRANGE_CLASSES, WIDTH = 15, 10, 16
_CENTERS = torch.randn(KNOWN_CLASSES + STRANGE_CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))


def _items(classes: torch.Tensor, seed: int, *, spread: float = 0.55) -> Embeddings:
    """Gaussian classes as directions; κ carries no information."""
    generator = torch.Generator().manual_seed(seed)
    points = _CENTERS[classes] + spread * torch.randn(len(classes), WIDTH, generator=generator)
    kappa = 10 ** (1 + torch.rand(len(classes), generator=generator))
    return Embeddings(torch.nn.functional.normalize(points), kappa, kappa, kappa)


GALLERY_LABELS = torch.arange(KNOWN_CLASSES).repeat(4)
GALLERY, REFERENCE_LABELS = _items(GALLERY_LABELS, 1), torch.arange(KNOWN_CLASSES).repeat(20)
REFERENCE = Reference.of(_items(REFERENCE_LABELS, 2).mean, REFERENCE_LABELS)


def _hits(queries: Embeddings, gallery: Embeddings = GALLERY) -> Hits:
    index = Index(WIDTH)
    index.add(gallery, torch.arange(len(gallery)))
    return index.search(queries, min(50, len(gallery)))


def _people(n: int, seed: int, **options: object) -> Calibration:
    """A calibration on n queries of 15 classes; the gallery has 4 items of each."""
    classes = torch.randint(0, KNOWN_CLASSES, (n,), generator=torch.Generator().manual_seed(seed))
    queries = _items(classes, 100 + seed)
    searches = search_open_set(queries.mean, GALLERY.mean, lambda rows: classes[rows][:, None] == GALLERY_LABELS)
    known = {
        "targets": Targets(far=max(0.1, least_rate(n)), ood=max(0.1, least_rate(n)), conformal_miss=0.2),
        "features": queries.mean,
        "gallery_labels": GALLERY_LABELS,
        "classes": classes,
        "reference": REFERENCE,
        **options,
    }
    return calibrated(searches, queries, **known)


def _asked(classes: torch.Tensor, seed: int) -> tuple[Hits, Embeddings, dict[str, torch.Tensor]]:
    queries = _items(classes, seed)
    hits = _hits(queries)
    return hits, queries, {"features": queries.mean, "labels": GALLERY_LABELS[hits.ids]}


KNOWN = torch.arange(KNOWN_CLASSES).repeat(20)
STRANGE = KNOWN_CLASSES + torch.arange(STRANGE_CLASSES).repeat(20)


@pytest.mark.parametrize("n", [60, 200])
def test_where_classes_are_few_strangers_are_less_known(n: int) -> None:
    calibration = _people(n, 0)
    known, strange = (calibration.decide(hits, of, **more) for hits, of, more in (_asked(KNOWN, 3), _asked(STRANGE, 4)))
    for column in ("p_known", "probability"):
        assert float(getattr(strange, column).mean()) < 0.5 * float(getattr(known, column).mean())
    assert float(known.p_known.mean()) > 0.6


def test_of_few_queries_nothing_fails_and_nothing_breaks_off() -> None:
    """From 5 to 60 calibration queries, the share of known queries with a right answer never falls."""
    hits, queries, more = _asked(KNOWN, 3)
    right = GALLERY_LABELS[hits.ids[:, 0]] == KNOWN
    answered = {}
    for n in (5, 10, 20, 38, 60):
        shares = []
        for seed in range(4):
            calibration = _people(n, seed)
            assert calibration.flag != "kappa"
            assert len(calibration.detector.conformal_scores(calibration.flag)) == n
            decisions = calibration.decide(hits, queries, **more)
            assert decisions.probability.isfinite().all()
            shares.append(float((right & (decisions.codes == 0)).double().mean()))
        answered[n] = sum(shares) / len(shares)
    assert answered[60] > 0.5
    assert all(
        answered[more] > answered[fewer] - 0.15 for fewer, more in zip(answered, list(answered)[1:], strict=False)
    )


def test_for_vectors_and_hits_without_labels_the_rates_are_those_promised_too() -> None:
    """Over ten calibration sets, for queries without a match: without features, without labels, or without both."""
    rate = {"vectors": 0.0, "unlabelled": 0.0, "neither": 0.0}
    for seed in range(10):
        calibration = _people(60, seed)
        assert len(calibration.acceptances) == 3
        for own in range(KNOWN_CLASSES):
            kept = (own != GALLERY_LABELS).nonzero()[:, 0]
            queries = _items(torch.full((8,), own), 1000 * seed + own)
            hits = _hits(queries, GALLERY[kept])
            labels = GALLERY_LABELS[kept][hits.ids]
            for kind, more in (
                ("vectors", {"labels": labels}),
                ("unlabelled", {"features": queries.mean}),
                ("neither", {}),
            ):
                decisions = calibration.decide(hits, queries, gallery_size=len(kept), **more)
                accepted = (decisions.false_accept <= 0.1).double().mean()
                rate[kind] += float(accepted) / KNOWN_CLASSES / 10
    assert all(value < 0.1 + 4 * (0.09 / 60 / 10) ** 0.5 for value in rate.values()), rate


@pytest.mark.long
def test_through_calibrate_false_accepts_of_classes_never_seen_are_those_promised() -> None:
    """The calibration has strangers of ten classes; the queries are strangers of new classes."""
    centers = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(11))
    accepted = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(60, generator=generator)
        given, new = (centers[part].repeat_interleave(6, 0) for part in (order[:20], order[20:]))

        def queries(points: torch.Tensor, draw: torch.Generator = generator) -> Embeddings:
            points = points + 0.55 * torch.randn(points.shape, generator=draw)
            kappa = torch.ones(len(points))
            return Embeddings(torch.nn.functional.normalize(points), kappa, kappa, kappa)

        teachers, later = queries(given), queries(new)
        found = _hits(teachers)
        strangers = OtherQueries(
            teachers, found.scores, GALLERY_LABELS[found.ids], teachers.mean, torch.arange(20).repeat_interleave(6)
        )
        calibration = _people(60, seed, strangers=strangers)
        assert calibration.false_accepts.n_units == 20
        hits = _hits(later)
        decisions = calibration.decide(hits, later, features=later.mean, labels=GALLERY_LABELS[hits.ids])
        accepted.append(float((decisions.statistic > calibration.accept_above).double().mean()))
    rate = torch.tensor(accepted)
    assert float(rate.mean()) < 0.1 + 4 * float(rate.std()) / 10**0.5


def test_so_few_queries_promise_the_least_rate() -> None:
    calibration = _people(5, 0)
    assert calibration.targets.far == least_rate(5) == 0.167
    assert calibration.false_accepts.rate(calibration.accept_above) == pytest.approx(1 / 6)
    assert isinstance(calibration.false_accepts, ConformalScores)
    with pytest.raises(ValueError, match="target far .*0.1.*9 .*5: .*target"):
        _people(5, 0, targets=Targets(far=0.1, ood=0.2))
