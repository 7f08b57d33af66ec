"""Calibration and decisions: promised rates hold, also after saving and loading; errors name mistakes."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.retrieval.decisions.abstention import DECISIONS, SearchDecisions, decision_codes
from lam.retrieval.decisions.acceptance import ACCEPTS, PROBABILITY
from lam.retrieval.decisions.calibrate import OtherQueries
from lam.retrieval.decisions.calibration import Calibration, Histogram, Targets
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.files import load_calibration, save_calibration
from lam.retrieval.decisions.probability import probability_bins
from lam.retrieval.decisions.verification import Verifier
from lam.retrieval.index.faiss_index import Index
from lam.retrieval.index.hits import Hits
from lam.retrieval.metrics.open_set import Searches, search_open_set
from lam.retrieval.metrics.reference import EXPONENTS, Reference
from lam.vmf.distribution import VonMisesFisher, credible_cosine
from lam.vmf.embeddings import KAPPA_RANGE, Embeddings
from tests.retrieval.decisions.calibrated import calibrated

TARGETS = Targets(far=0.05, ood=0.1, conformal_miss=0.1)


def _items(n: int, seed: int, *, classes: int = 6) -> tuple[Embeddings, torch.Tensor]:
    """Points around six centres in R^8; a small κ puts a point farther away."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(classes, 8, generator=torch.Generator().manual_seed(99))
    labels = torch.randint(0, classes, (n,), generator=generator)
    kappa = 10 ** (1 + 2 * torch.rand(n, generator=generator))
    points = torch.nn.functional.normalize(centers[labels], dim=1)
    points = points + torch.randn(n, 8, generator=generator) * (8 / kappa.sqrt()[:, None]) * 0.3
    mean = torch.nn.functional.normalize(points, dim=1)
    return Embeddings(mean, kappa, torch.ones(n), torch.ones(n)), labels


@cache
def _searches(queries: int = 400, seed: int = 0) -> tuple[Searches, Embeddings, Embeddings]:
    asked, labels = _items(queries, seed)
    gallery, others = _items(300, 1000)
    found = search_open_set(asked.mean, gallery.mean, lambda rows: labels[rows][:, None] == others)
    return found, asked, gallery


@cache
def _plain() -> Calibration:
    found, asked, _ = _searches()
    return calibrated(found, asked, targets=TARGETS)


def _calibration(**options: Any) -> Calibration:
    found, asked, _ = _searches()
    return calibrated(found, asked, **{"targets": TARGETS, **options}) if options else _plain()


def _hits(queries: Embeddings, gallery: Embeddings, k: int = 50) -> Hits:
    index = Index(8)
    index.add(gallery, torch.arange(len(gallery)))
    return index.search(queries, k)


def test_decisions_are_what_the_thresholds_say_query_by_query() -> None:
    calibration, (_, asked, gallery) = _calibration(), _searches(seed=5)
    hits = _hits(asked, gallery)
    decisions = calibration.decide(hits, asked, gallery_size=300)
    assert isinstance(decisions, SearchDecisions)
    assert set(decisions.flagged_by) == {calibration.flag}
    for ood_score, statistic, decision in zip(
        decisions.ood_score.tolist(), decisions.statistic.tolist(), decisions.decision, strict=True
    ):
        flagged, accepted = ood_score > calibration.flag_above, statistic > calibration.accept_above
        assert decision == ("abstain" if flagged else "match" if accepted else "unknown")
    assert torch.equal(decisions.probability, decisions.p_known * decisions.right_if_known)
    assert torch.equal(decisions.false_accept <= 0.05, decisions.statistic > calibration.accept_above)
    assert torch.equal(decisions.score, hits.scores[:, 0])
    assert decisions.share("abstain") == pytest.approx(0.1, abs=0.06)
    assert sum(decisions.share(decision) for decision in DECISIONS) == pytest.approx(1)
    assert torch.equal(decisions.p_value <= 0.1, decisions.codes == DECISIONS.index("abstain"))
    assert not decisions.stale


@pytest.mark.parametrize("accept", ["cosine", "mean_cosine", "kappa", PROBABILITY])
def test_a_hit_is_accepted_by_what_was_asked_for(tmp_path: Path, accept: str) -> None:
    calibration, (found, asked, gallery) = _calibration(accept=accept), _searches(seed=5)
    save_calibration(tmp_path, calibration)
    hits = _hits(asked, gallery)
    for one in (calibration, load_calibration(tmp_path, key="k")):
        decisions = one.decide(hits, asked)
        assert one.accept == accept
        own = decisions.probability if accept == PROBABILITY else -one.scores(hits, asked)[accept]
        assert torch.equal(decisions.statistic, own)
        accepted = (decisions.statistic > one.accept_above) & (decisions.codes != DECISIONS.index("abstain"))
        assert torch.equal(accepted, decisions.codes == DECISIONS.index("match"))
    if accept == "cosine":  # this function does not depend on the data, so its threshold is exact
        without = _searches()[0].non_mated
        assert torch.equal(calibration.false_accepts.scores.float(), without.sort().values)
        assert calibration.accept_above == ConformalScores.of(without).threshold(0.05)
    foreign = float((decisions.statistic[~found.correct] > calibration.accept_above).double().mean())
    answered = float((decisions.statistic[found.correct] > calibration.accept_above).double().mean())
    assert accept == "kappa" or answered > 2 * foreign


def test_a_calibration_chooses_the_exponent_of_its_reference_once(monkeypatch: pytest.MonkeyPatch) -> None:
    exponents: list[float] = []
    misfit = Reference._misfit  # pyright: ignore[reportPrivateUsage]

    def counted(self: Reference, exponent: float, is_first: torch.Tensor) -> float:
        exponents.append(exponent)
        return misfit(self, exponent, is_first)

    monkeypatch.setattr(Reference, "_misfit", counted)
    (_, asked, gallery), labels = _searches(), _items(300, 1000)[1]
    reference = Reference.of(gallery.mean * torch.linspace(1, 2, 300)[:, None], labels)
    _calibration(features=asked.mean, reference=reference, classes=_items(400, 0)[1], gallery_labels=labels)
    assert sorted(exponents) == sorted(EXPONENTS)


def test_what_is_accepted_by_must_be_known_and_there_must_be_evidence_of_it() -> None:
    with pytest.raises(ValueError, match="accept.*probability, kappa, .*'length'"):
        _calibration(accept="length")
    with pytest.raises(ValueError, match="accept.*probability, kappa, .*'knn'"):
        _calibration(accept="knn")  # without features
    assert ACCEPTS[0] == PROBABILITY


def test_a_score_that_needs_features_gives_way_to_the_probability_for_vectors() -> None:
    _, asked, gallery = _searches()
    calibration = _calibration(accept="knn", features=asked.mean, reference=Reference.of(gallery.mean))
    assert [one.accept for one in calibration.acceptances] == ["knn", PROBABILITY]
    hits = _hits(asked, gallery)
    decisions = calibration.decide(hits, asked)
    assert torch.equal(decisions.statistic, decisions.probability)
    accept_above = calibration.acceptances[1].false_accepts.threshold(0.05)
    flagged = decisions.codes == DECISIONS.index("abstain")
    accepted = (decisions.statistic > accept_above) & ~flagged
    assert torch.equal(accepted, decisions.codes == DECISIONS.index("match"))


def _strangers(gallery: Embeddings) -> tuple[Embeddings, Hits]:
    """Queries with directions far from all classes, and their hits."""
    mean, kappa = -gallery.mean.roll(3, 1), gallery.kappa
    strangers = Embeddings(mean, kappa, kappa, kappa)
    return strangers, _hits(strangers, gallery)


@pytest.mark.long
def test_strangers_are_less_known_than_known_queries_whoever_taught_it() -> None:
    _, asked, gallery = _searches()
    strangers, hits = _strangers(gallery)
    of_known = _hits(asked, gallery)
    given = OtherQueries(strangers[:100], hits.scores[:100])
    for teachers in (None, given):
        made = _calibration(strangers=teachers, of_strangers=False)
        known, foreign = made.decide(of_known, asked), made.decide(hits, strangers)
        assert float(foreign.p_known.mean()) < 0.5 * float(known.p_known.mean())
        assert float(foreign.probability.mean()) < 0.5 * float(known.probability.mean())
    plain, taught = (
        float(_calibration(**one).decide(hits, strangers).p_known.mean()) for one in ({}, {"strangers": given})
    )
    assert taught < plain


def test_false_accepts_are_promised_of_the_strangers_where_that_is_asked_for() -> None:
    _, _, gallery = _searches()
    strangers, hits = _strangers(gallery)
    classes = torch.arange(100) // 5
    given = OtherQueries(strangers[:100], hits.scores[:100], classes=classes)
    promised, learned_from = (_calibration(strangers=given, of_strangers=of) for of in (True, False))
    assert (promised.false_accepts.n_units, len(promised.false_accepts)) == (20, 100)
    assert promised.false_accepts.rate(promised.accept_above) <= 0.05
    assert learned_from.false_accepts.classes is None
    assert len(learned_from.false_accepts) == 400
    with pytest.raises(ValueError, match="target far .*0.01.*99 classes, got 20"):
        _calibration(strangers=given, targets=replace(TARGETS, far=0.01))


def test_a_mixture_of_strangers_alone_tells_nothing_and_the_next_teach() -> None:
    _, _, gallery = _searches()
    strangers, hits = _strangers(gallery)
    given = OtherQueries(strangers[:100], hits.scores[:100])
    opposite = OtherQueries(strangers[:100], torch.full_like(hits.scores[:100], -1.0))
    plain, of_mixture = (
        _calibration(strangers=given, share=0.2),
        _calibration(strangers=given, mixture=opposite, share=0.2),
    )
    assert of_mixture.match_probability == plain.match_probability
    assert of_mixture.facts["share_of_strangers"][2] == 1  # the estimate is kept, but not used


def test_thresholds_of_a_slider_stand_above_those_in_force() -> None:
    calibration, (_, asked, gallery) = _calibration(), _searches(seed=5)
    hits = _hits(asked, gallery)
    assert calibration.decide(hits, asked, accept_above=-2.0, flag_above=math.inf).share("match") == 1
    assert calibration.decide(hits, asked, flag_above=-math.inf).share("abstain") == 1
    several = _calibration(features=asked.mean, reference=Reference.of(gallery.mean), flag="combined")
    stricter = several.flag_above - 2  # without features, another flag decides, by its own threshold
    assert several.decide(hits, asked, features=asked.mean, flag_above=stricter).share("abstain") > 0.2
    assert torch.equal(several.decide(hits, asked, flag_above=stricter).codes, several.decide(hits, asked).codes)
    for threshold in ("accept_above", "flag_above"):
        with pytest.raises(ValueError, match=f"{threshold}.*NaN"):
            calibration.decide(hits, asked, **{threshold: math.nan})
    assert calibration.false_accepts.rate(calibration.accept_above) <= 0.05
    assert calibration.detector.conformal_scores(calibration.flag).rate(calibration.flag_above) <= 0.1
    assert calibration.detector.conformal_scores("kappa").rate(-calibration.kappa_below) <= 0.1
    low, high = calibration.false_accepts.interval(1.0)
    assert low == 0 < calibration.false_accepts.rate(1.0) == 1 / 401 < high


def test_recall_falls_as_the_threshold_rises(tmp_path: Path) -> None:
    calibration, searches = _calibration(accept="cosine"), _searches()[0]
    mated = searches.has_mate.tolist()
    found = [
        score if right else -math.inf
        for score, right, has_mate in zip(searches.score.tolist(), searches.correct.tolist(), mated, strict=True)
        if has_mate
    ]
    save_calibration(tmp_path, calibration)
    for one in (calibration, load_calibration(tmp_path, key="k")):
        for cosine in (-1.0, 0.0, 0.5, calibration.accept_above, found[0], 1.0):
            assert one.recall(cosine) == pytest.approx(sum(score > cosine for score in found) / len(found))
    assert calibration.recall(-1.0) == pytest.approx(float(searches.correct[searches.has_mate].double().mean()))
    assert calibration.recall(1.0) == 0


def test_false_accepts_of_new_queries_are_at_the_target() -> None:
    """New queries search a gallery without their matches; the rate is for one calibration set."""
    _, _, gallery = _searches()
    stored = _items(300, 1000)[1]
    calibration = _calibration()
    assert calibration.accept == PROBABILITY
    rates = []
    for seed in range(9, 19):
        asked, labels = _items(400, seed)
        statistics = torch.cat(
            [
                calibration.decide(_hits(asked[labels == own], gallery[stored != own]), asked[labels == own]).statistic
                for own in stored.unique()
            ]
        )
        rates.append(float((statistics > calibration.accept_above).double().mean()))
    low, high = calibration.false_accepts.interval(calibration.accept_above, level=0.999)
    assert low <= sum(rates) / len(rates) <= high


def test_the_conformal_set_holds_a_match_as_often_as_promised() -> None:
    calibration = _calibration()
    found = _searches(seed=7)[0]
    missed = float((found.rank > int(calibration.depth or 0)).double().mean())
    assert missed < 0.1 + 4 * math.sqrt(0.09 / 400)


def test_the_credible_cosine_is_that_of_the_cap_of_each_query() -> None:
    asked = _searches(20, seed=3)[1]
    cosine = credible_cosine(asked.kappa, asked.dimension, level=0.8)
    for query in range(20):
        cap = VonMisesFisher(asked.mean[query].double(), asked.kappa[query].double()).credible_cap(0.8)
        assert float(cosine[query]) == pytest.approx(float(cap), rel=1e-6)
    assert (credible_cosine(asked.kappa, asked.dimension, level=0.99) <= cosine).all()


def test_probabilities_are_calibrated_on_new_queries() -> None:
    calibration = _calibration()
    asked = [_searches(seed=seed) for seed in range(20, 30)]
    probability = torch.cat([calibration.decide(_hits(items, of), items).right_if_known for _, items, of in asked])
    correct = torch.cat([found.correct for found, _, _ in asked])
    assert 0.5 < float(correct.double().mean()) < 0.99
    assert probability_bins(probability, correct).expected_error < 0.06
    assert float(probability[correct].mean()) > float(probability[~correct].mean()) + 0.1


def test_hits_beyond_those_that_it_was_calibrated_on_change_nothing() -> None:
    _, asked, gallery = _searches()
    stored = _items(300, 1000)[1]
    calibration = _calibration(gallery_labels=stored)
    fifty, more = (_hits(asked, gallery, k) for k in (50, 120))
    one, other = (calibration.decide(hits, asked, labels=stored[hits.ids]) for hits in (fifty, more))
    assert torch.equal(one.probability, other.probability)
    assert torch.equal(one.codes, other.codes)


def test_a_gallery_without_hits_or_with_one_is_answered() -> None:
    calibration, (_, asked, gallery) = _calibration(flag="kappa"), _searches(5, seed=3)
    empty = Index(8).search(asked, 3)
    decisions = calibration.decide(empty, asked, flag_above=math.inf, gallery_size=0)
    assert decisions.decision == ("unknown",) * 5
    assert decisions.probability.tolist() == [0] * 5
    assert decisions.stale
    alone = _hits(asked, gallery[:1])
    assert calibration.decide(alone, asked, gallery_size=1).probability.isfinite().all()
    assert calibration.decide(alone, asked, gallery_size=1).stale
    with pytest.raises(ValueError, match="k=50 hits.*300.*k=1"):
        calibration.decide(alone, asked)
    none = calibration.decide(Index(8).search(asked[:0], 3), asked[:0])
    assert len(none) == 0
    assert math.isnan(none.share("match"))


def test_a_gallery_is_stale_beyond_a_fifth() -> None:
    calibration = _calibration()
    assert calibration.gallery_size == 300
    assert [calibration.is_stale(size) for size in (239, 240, 300, 360, 361)] == [True, False, False, False, True]


def test_several_scores_flag_by_those_that_there_is_evidence_for() -> None:
    _found, asked, gallery = _searches()
    calibration = _calibration(flag="combined", features=asked.mean, reference=Reference.of(gallery.mean[:50]))
    hits = _hits(asked, gallery)
    assert calibration.detector.combined is not None
    scores = {"kappa", "knn", "mahalanobis", "cosine", "mean_cosine"}
    assert set(calibration.detector.combined.evidence) == scores
    assert calibration.decide(hits, asked, features=asked.mean).share("abstain") == pytest.approx(0.1, abs=0.05)
    near, far = (calibration.decide(hits, asked, features=sign * asked.mean).ood_score for sign in (1, -1))
    assert (far >= near - 1e-9)[calibration.decide(hits, asked, features=asked.mean).codes != 2].double().mean() > 0.9
    by_hits = replace(calibration, flag="mean_cosine").decide(hits, asked)
    assert torch.equal(calibration.decide(hits, asked).codes, by_hits.codes)


@pytest.mark.parametrize("flag", ["knn", "mahalanobis"])
def test_flags_by_distance_look_at_features(flag: str) -> None:
    _found, asked, gallery = _searches()
    known: dict[str, Any] = {"features": asked.mean, "reference": Reference.of(gallery.mean[:50])}
    calibration = _calibration(flag=flag, **known)
    hits = _hits(asked, gallery)
    far = -asked.mean
    assert calibration.decide(hits, asked, features=asked.mean).share("abstain") < 0.2
    assert calibration.decide(hits, asked, features=far).share("abstain") > 0.35
    assert set(calibration.decide(hits, asked).flagged_by) == {"mean_cosine"}
    assert calibration.decide(hits, asked).share("abstain") == pytest.approx(0.1, abs=0.01)
    with pytest.raises(ValueError, match="width 8.*3: .*reference"):
        calibration.decide(hits, asked, features=far[:, :3])


@pytest.mark.long
@pytest.mark.parametrize("flag", ["cosine", "votes", "norm"])
def test_a_flag_can_be_any_score_that_there_is(flag: str) -> None:
    found, asked, gallery = _searches()
    stored = _items(300, 1000)[1]
    labels = stored[found.hits]
    features = asked.mean * torch.arange(1, 401)[:, None]
    calibration = _calibration(flag=flag, gallery_labels=stored, features=features)
    decisions = calibration.decide(_hits(asked, gallery), asked, labels=labels, features=features)
    assert torch.equal(decisions.codes == 2, decisions.ood_score > calibration.flag_above)
    assert 0 < decisions.share("abstain") < 0.11 or flag == "votes"
    by_kappa = -asked.kappa.double() > -calibration.kappa_below
    own = decisions.ood_score > calibration.flag_above
    assert torch.equal(calibration.flagged(asked, features), own if flag == "norm" else by_kappa)
    empty = calibration.decide(
        Index(8).search(asked, 50), asked, labels=labels[:, :0], features=features, gallery_size=0
    )
    assert torch.equal(empty.codes == 2, own if flag == "norm" else by_kappa)
    assert calibration.detector.substitute(flag, "input") == ("mean_cosine" if flag == "norm" else flag)
    with pytest.raises(ValueError, match="flag 'p_known'.*ambiguity"):
        _calibration(flag="p_known")


def test_the_probability_rests_on_what_there_is_of_a_query() -> None:
    found, asked, gallery = _searches()
    stored = _items(300, 1000)[1]
    labels = stored[found.hits]
    known: dict[str, Any] = {"features": asked.mean, "reference": Reference.of(gallery.mean)}
    calibration = _calibration(gallery_labels=stored, **known)
    of_all, of_vectors, unlabelled = (set(one.match_probability.evidence) for one in calibration.acceptances)
    distances = {"knn", "mahalanobis", "global_mahalanobis", "radial_mahalanobis", "mahalanobis_knn"}
    assert of_all - of_vectors == {"variance", "norm", *distances}
    assert of_vectors - unlabelled == {"votes", "weighted_votes"}
    hits = _hits(asked, gallery)
    everything = calibration.decide(hits, asked, features=asked.mean, labels=labels).probability
    vectors = calibration.decide(hits, asked, labels=labels).probability
    without = calibration.decide(hits, asked).probability
    labelled = calibration.scores(hits, asked, features=asked.mean, labels=labels)
    bare = calibration.scores(hits, asked)
    assert (labelled["margin"] != bare["margin"]).any()
    for probability, one, scores in zip(
        (everything, vectors, without), calibration.acceptances, (labelled, labelled, bare), strict=True
    ):
        assert torch.equal(probability, one.match_probability(scores))
    some = labels.clone()
    some[::2, 7] = -1
    mixed = calibration.decide(hits, asked, labels=some).probability
    assert torch.equal(mixed[::2], without[::2])
    assert torch.equal(mixed[1::2], vectors[1::2])
    flagged_by = replace(calibration, flag="votes").decide(hits, asked, labels=some).flagged_by
    assert set(flagged_by[::2]) == {"mean_cosine"}
    assert set(flagged_by[1::2]) == {"votes"}


@pytest.mark.parametrize("flag", ["votes", "weighted_votes", "margin", "combined"])
@pytest.mark.parametrize("share", [0.9, 0.3])
def test_a_gallery_that_is_labelled_in_part_keeps_its_promises(flag: str, share: float) -> None:
    stored = _items(300, 1000)[1]
    calibration = _calibration(gallery_labels=stored, flag=flag)
    flagged, probability, correct = [], [], []
    for seed in range(20, 26):
        found, asked, gallery = _searches(seed=seed)
        hits = _hits(asked, gallery)
        unlabelled = torch.rand(300, generator=torch.Generator().manual_seed(seed)) > share
        decisions = calibration.decide(hits, asked, labels=stored.masked_fill(unlabelled, -1)[hits.ids])
        flagged.append((decisions.codes == 2).double())
        probability.append(decisions.right_if_known)
        correct.append(found.correct.double())
    assert torch.cat(flagged).mean() < 0.1 + 4 * math.sqrt(0.09 / 400)
    assert abs(torch.cat(probability).mean() - torch.cat(correct).mean()) < 0.05


def test_targets_that_the_sample_cannot_promise_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(ValueError, match=r"target far \(--target-far\).*0.001.*999.*400"):
        _calibration(targets=Targets())
    with pytest.raises(ValueError, match=r"target ood \(--target-ood\).*0.002.*499"):
        _calibration(targets=Targets(far=0.05, ood=0.002))
    assert _calibration(targets=Targets(far=0.05, conformal_miss=0.001)).depth is None


def test_what_is_refused() -> None:
    found, asked, gallery = _searches()
    with pytest.raises(ValueError, match=r"target far.*\(0, 1\), got 0"):
        Targets(far=0.0)
    with pytest.raises(ValueError, match="queries and searches.*3 and 400"):
        calibrated(found, asked[:3])
    alike = replace(found, others=torch.full_like(found.others, -torch.inf))
    with pytest.raises(ValueError, match="without a match.*none"):
        calibrated(alike, asked)
    strangers = replace(found, rank=torch.zeros(400, dtype=torch.int64), correct=torch.zeros(400).bool())
    with pytest.raises(ValueError, match="have a match.*none"):
        calibrated(strangers, asked, targets=TARGETS)
    calibration = _calibration()
    with pytest.raises(ValueError, match="hits and queries.*400 and 3"):
        calibration.decide(_hits(asked, gallery), asked[:3])
    hits, labels = _hits(asked, gallery), torch.zeros(len(asked), 50, dtype=torch.int64)
    for wrong in (labels[:1], labels[:, :10]):
        with pytest.raises(ValueError, match="labels and hits.*shape"):
            calibration.decide(hits, asked, labels=wrong)
    with pytest.raises(ValueError, match="features and queries.*10 and 400"):
        calibration.decide(hits, asked, features=asked.mean[:10])
    with pytest.raises(ValueError, match="statistic.*hold NaN"):
        decision_codes(torch.tensor([False]), torch.tensor([math.nan]), accept_above=0.0)


def test_pairs_are_verified_by_thresholds_of_their_own() -> None:
    found, asked, gallery = _searches()
    cosine = (asked.mean * gallery.mean[found.nearest]).sum(1)
    verifier = Verifier.of(cosine, asked.kappa, gallery.kappa[found.nearest], found.correct)
    calibration = _calibration(verifier=verifier)
    first, second = asked[:50], gallery[found.nearest[:50]]
    decisions = calibration.verify(first, second)
    accept = verifier.impostors.threshold(0.05)
    for row, decision in enumerate(decisions.decision):
        unsure = min(float(first.kappa[row]), float(second.kappa[row])) < calibration.kappa_below
        score = float(first.mean[row].double() @ second.mean[row].double())
        assert decision == ("abstain" if unsure else "match" if score > accept else "unknown")
    with pytest.raises(ValueError, match="without pairs"):
        _calibration().verify(first, second)
    with pytest.raises(ValueError, match="number and dimension"):
        calibration.verify(first, second[:3])


def test_the_histogram_counts_every_value() -> None:
    kappa = torch.tensor([1e-6, 1.0, 3.0, 1e8])
    histogram = Histogram.of(kappa)
    assert sum(histogram.counts) == 4
    assert len(histogram.edges) == len(histogram.counts) + 1
    assert (histogram.edges[0], histogram.edges[-1]) == pytest.approx((1e-6, 1e8))
    assert sum(Histogram.of(torch.ones(5)).counts) == 5
    assert Histogram.of(torch.tensor([0.0, 1.0])).edges[0] == pytest.approx(KAPPA_RANGE[0], rel=1e-5)


@pytest.mark.parametrize("with_reference", [True, False])
def test_a_calibration_is_read_as_it_was_written(tmp_path: Path, with_reference: bool) -> None:
    _found, asked, gallery = _searches()
    labels = torch.arange(len(gallery.mean)) % 7
    reference = Reference.of(3 * gallery.mean, labels, embeddings=gallery.mean.flip(1))
    known: dict[str, Any] = {"features": asked.mean, "reference": reference} if with_reference else {}
    made = replace(_calibration(**known), key="of a run", facts={"gallery": "held-out"})
    save_calibration(tmp_path, made)
    read = load_calibration(tmp_path, key="of a run")
    for one in ("targets", "flag", "accept", "match_probability", "depth", "nearest", "facts", "kappa"):
        assert getattr(read, one) == getattr(made, one), one
    assert read.detector.combined == made.detector.combined
    assert read.detector.ranking == made.detector.ranking
    for own, other in zip(read.acceptances, made.acceptances, strict=True):
        assert (own.accept, own.match_probability) == (other.accept, other.match_probability)
        assert torch.equal(own.false_accepts.scores, other.false_accepts.scores)
        assert torch.equal(own.right_hits, other.right_hits)
    assert read.reliability.expected_error == made.reliability.expected_error
    if read.reference is not None:
        assert torch.equal(read.reference.unit, reference.unit)
        assert read.reference.labels is not None
        assert torch.equal(read.reference.labels, labels)
        assert read.reference.lengths is not None
        assert torch.equal(read.reference.lengths, (3 * gallery.mean).norm(dim=1))
        assert read.reference.embeddings is not None
        assert torch.equal(read.reference.embeddings, torch.nn.functional.normalize(gallery.mean.flip(1)))
    hits = _hits(asked, gallery)
    one, other = (calibration.decide(hits, asked, features=asked.mean) for calibration in (made, read))
    columns = [name for name, values in vars(one).items() if isinstance(values, torch.Tensor)]
    assert len(columns) == 11
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in columns)
    for flag in ("kappa", "knn", "combined") if with_reference else ("kappa",):
        own, other = (detector.conformal_scores(flag) for detector in (read.detector, made.detector))
        assert own.threshold(0.1) == other.threshold(0.1)


def test_a_calibration_of_another_encoder_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    from lam.utils.files import CorruptFileError

    with pytest.raises(ValueError, match="has no calibration: `lam calibrate"):
        load_calibration(tmp_path, key="of a run")
    save_calibration(tmp_path, replace(_calibration(), key="of a run"))
    with pytest.raises(ValueError, match="another network, posterior"):
        load_calibration(tmp_path, key="of another")
    (table,) = (tmp_path / "calibration").glob("*/tables.safetensors")
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match="truncated or altered"):
        load_calibration(tmp_path, key="of a run")


def test_a_tail_is_shown_by_its_sorted_scores() -> None:
    assert ConformalScores.of(torch.tensor([3.0, 1.0])).scores.tolist() == [1.0, 3.0]
