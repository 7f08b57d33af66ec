"""Answers to queries and pairs: all their numbers and words come from the present calibration."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lam import datasets
from lam.gallery.gallery import places_of
from lam.retrieval.decisions.calibration import Calibration, Targets
from lam.retrieval.decisions.conformal import ConformalScores
from lam.retrieval.decisions.unseen_classes import UnseenClasses
from lam.retrieval.index.hits import Hits, label_key
from lam.runs.data import loader_of
from lam.runs.finished import Run
from lam.service.answers import Responder
from lam.service.embedder import embedding_of
from lam.service.engine import Engine
from lam.service.queries import Query, Search
from lam.tuning.ambiguity import SEVERAL, UNSEEN
from lam.vmf.distribution import credible_cosine
from lam.vmf.embeddings import KAPPA_RANGE
from tests.helpers import stored


@pytest.mark.parametrize("dimension", [2, 3, 64, 512])
def test_the_credible_cap_is_that_of_the_distribution(dimension: int) -> None:
    responder = Responder(None, dimension)
    generator = torch.Generator().manual_seed(0)
    kappa = 10 ** (14 * torch.rand(50, generator=generator, dtype=torch.float64) - 6)
    kappa = torch.cat([kappa, torch.tensor(KAPPA_RANGE, dtype=torch.float64)])
    exact = credible_cosine(kappa, dimension)
    found = torch.tensor([responder.credible_cosine(value) for value in kappa.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)


def test_without_calibration_nothing_is_promised() -> None:
    responder = Responder(None, 3)
    assert responder.state(10) == "none"
    assert responder.is_uncertain(1.0) is None
    assert responder.thresholds is None
    assert responder.summary is None


@pytest.fixture
def made(shared_engine: Engine) -> Calibration:
    """A calibration with features to compare with, and pairs."""
    assert shared_engine.responder.calibration is not None
    return shared_engine.responder.calibration


def test_steps_of_the_accept_threshold_are_of_rate_and_of_recall(made: Calibration) -> None:
    generator = torch.Generator().manual_seed(0)
    strangers = torch.rand(500, generator=generator).double()
    right = torch.rand(300, generator=generator).double() + 0.5
    wrong = torch.full((20,), -torch.inf, dtype=torch.float64)
    (acceptance, *_) = made.acceptances
    finds_right = replace(
        acceptance, false_accepts=ConformalScores.of(strangers), right_hits=torch.cat([wrong, right.sort().values])
    )
    many = replace(made, targets=Targets(far=0.01, ood=0.1, conformal_miss=0.1), acceptances=(finds_right,))
    few = replace(made, acceptances=(replace(acceptance, right_hits=wrong[:5]),))
    for calibration in (many, made, few):
        summary = Responder(calibration, 3).summary
        assert summary is not None
        rows = summary.false_accept
        assert summary.accept == calibration.accept
        assert summary.share_without_match == 0.5
        assert rows == sorted(rows, key=lambda row: row.threshold)
        assert calibration.accept_above in [row.threshold for row in rows]
        for row in rows:
            assert row.rate == calibration.false_accepts.rate(row.threshold)
            assert row.recall == calibration.recall(row.threshold)
        assert json.loads(summary.to_json())["gallery_size"] == calibration.gallery_size
    summary = Responder(many, 3).summary
    assert summary is not None
    place = [row.threshold for row in summary.false_accept].index(many.accept_above)
    assert 0.3 < place / len(summary.false_accept) < 0.7
    recall = [row.recall for row in summary.false_accept[place:]]
    assert max(before - after for before, after in pairwise(recall)) < 0.05
    assert recall[-1] == 0


@pytest.fixture
def image(shared_engine: Engine) -> Query:
    """A blank image."""
    preprocessing = shared_engine.embedder.encoder.preprocessing
    assert preprocessing is not None
    assert preprocessing.shape is not None
    (query,) = shared_engine.embedder._embedded(torch.zeros(1, *preprocessing.shape))
    return query


def answer_of(responder: Responder, query: Query, hits: Hits, described: Any, **options: Any) -> dict[str, Any]:
    search, size = Search(query, hits.ids.shape[1] or 10, **options), 60 * bool(described)
    verdict = next(iter(responder.verdicts(None, [query], hits, described)), None)
    answer = responder.answer(search, query, places_of(hits)[0], described, size=size, verdict=verdict, vectors={})
    return json.loads(answer.to_json())


def said(engine: Engine, made: Calibration | None, query: Query, **options: Any) -> dict[str, Any]:
    hits, described = engine.gallery.search(query.embedding, 10)
    return answer_of(Responder(made, 3), query, hits, described, **options)


NO_HITS = Hits(torch.empty(1, 0, dtype=torch.int64), torch.empty(1, 0), torch.empty(1, 0))


def surest(engine: Engine, made: Calibration) -> Query:
    """A query that equals an item of the gallery, with a very large κ."""
    (item,) = stored(engine.gallery, limit=1)
    greatest = -made.detector.conformal_scores("kappa").scores.min().item()
    return Query(embedding_of(torch.from_numpy(item.embedding.copy()), 10 * greatest))


@pytest.mark.parametrize("flag", ["kappa", "knn", "combined"])
def test_thresholds_are_those_in_force_for_the_query(
    shared_engine: Engine, made: Calibration, image: Query, flag: Any
) -> None:
    made = replace(made, flag=flag)
    answer = said(shared_engine, made, image)
    assert (answer["flagged_by"], answer["threshold"]["flag"]) == (flag, flag)
    in_force = Responder(made, 3).thresholds
    assert in_force is not None
    assert answer["threshold"] == in_force.model_dump()
    answer = said(shared_engine, made, replace(image, features=None))
    of_vectors = "kappa" if flag == "kappa" else "mean_cosine"
    assert (answer["flagged_by"], answer["threshold"]["flag"]) == (of_vectors, of_vectors)
    assert answer["threshold"]["flag_above"] == made.detector.conformal_scores(of_vectors).threshold(made.targets.ood)
    assert (answer["decision"] == "abstain") == (answer["ood_score"] > answer["threshold"]["flag_above"])


@pytest.mark.parametrize("flag", ["kappa", "knn", "combined", "cosine"])
def test_without_hits_thresholds_are_those_in_force_too(made: Calibration, image: Query, flag: Any) -> None:
    """Without hits, another flag on another scale replaces a flag by hits."""
    for query in (image, replace(image, features=None)):
        answer = answer_of(Responder(replace(made, flag=flag), 3), query, NO_HITS, {})
        in_force = "knn" if flag in ("knn", "combined") and query is image else "kappa"
        assert (answer["flagged_by"], answer["threshold"]["flag"]) == (in_force, in_force)
        assert answer["threshold"]["flag_above"] == made.detector.conformal_scores(in_force).threshold(made.targets.ood)
        assert (answer["decision"] == "abstain") == (answer["ood_score"] > answer["threshold"]["flag_above"])


def test_hits_are_accepted_in_a_match_alone(shared_engine: Engine, made: Calibration) -> None:
    query = surest(shared_engine, made)
    made = accepting_all(made)
    answer = said(shared_engine, made, query)
    assert answer["decision"] == "match"
    same = [hit["label"] == answer["hits"][0]["label"] for hit in answer["hits"]]
    assert [hit["accepted"] for hit in answer["hits"]] == same
    assert same[0]
    assert not all(same)
    flagged = replace(query, embedding=replace(query.embedding, kappa=torch.full((1,), 1e-6, dtype=torch.float64)))
    for decision, body in (
        ("unknown", said(shared_engine, made, query, min_probability=answer["probability"] + 1e-9)),
        ("unknown", said(shared_engine, accepting_all(made, above=2.0), query)),
        ("abstain", said(shared_engine, made, flagged)),
    ):
        assert body["decision"] == decision
        assert {hit["accepted"] for hit in body["hits"]} == {False}
    assert {hit["accepted"] for hit in said(shared_engine, None, query)["hits"]} == {None}


def accepting_all(made: Calibration, above: float = -2.0) -> Calibration:
    """A calibration whose accept thresholds are all `above`."""
    strangers = torch.full((99,), above, dtype=torch.float64)
    acceptances = [replace(one, false_accepts=ConformalScores.of(strangers)) for one in made.acceptances]
    return replace(made, acceptances=tuple(acceptances))


def test_a_first_hit_without_a_label_is_accepted_alone(shared_engine: Engine, made: Calibration) -> None:
    query = surest(shared_engine, made)
    hits, described = shared_engine.gallery.search(query.embedding, 10)
    unlabelled = {key: replace(info, label="") for key, info in described.items()}
    body = answer_of(Responder(accepting_all(made), 3), query, hits, unlabelled)
    assert body["decision"] == "match"
    assert [hit["accepted"] for hit in body["hits"]] == [True] + [False] * 9


def test_one_number_decides_and_is_the_product_of_two(shared_engine: Engine, made: Calibration, image: Query) -> None:
    for query in (image, surest(shared_engine, made)):
        answer = said(shared_engine, made, query)
        assert answer["probability"] == pytest.approx(answer["known"] * answer["right_if_known"])
        assert answer["accept"] == answer["threshold"]["accept"]
        if answer["accept"] == "probability":
            assert answer["statistic"] == answer["probability"]
        if answer["decision"] != "abstain":
            assert (answer["decision"] == "match") == (answer["statistic"] > answer["threshold"]["accept_above"])
        assert 0 < answer["false_accept"] <= 1
    without = said(shared_engine, None, image)
    names = ("probability", "known", "right_if_known", "accept", "statistic", "false_accept", "unseen")
    assert {without[name] for name in names} == {None}


def test_a_cosine_that_decides_is_the_statistic(shared_engine: Engine, made: Calibration, image: Query) -> None:
    by_cosine = replace(made, acceptances=tuple(replace(one, accept="cosine") for one in made.acceptances))
    answer = said(shared_engine, by_cosine, image)
    assert (answer["accept"], answer["threshold"]["accept"]) == ("cosine", "cosine")
    assert answer["statistic"] == pytest.approx(answer["hits"][0]["score"])
    body = answer_of(Responder(made, 3), image, NO_HITS, {})
    assert (body["statistic"], body["false_accept"]) == (None, 1)
    assert body["decision"] != "match"


def test_a_threshold_that_keeps_no_promise_is_null(shared_engine: Engine, made: Calibration, image: Query) -> None:
    wrong = [replace(one, is_right=torch.zeros_like(one.is_right)) for one in made.acceptances]
    hopeless = replace(made, targets=replace(made.targets, wrong=0.1), acceptances=tuple(wrong))
    answer = said(shared_engine, hopeless, image)
    assert answer["threshold"]["accept_above"] is None
    assert answer["threshold"]["wrong"] == 0.1
    assert answer["decision"] != "match"


def test_an_item_of_a_new_class_is_told_by_a_gallery_with_classes_of_one_item(
    shared_engine: Engine, made: Calibration, image: Query
) -> None:
    assert said(shared_engine, made, image)["unseen"] is None
    _, described = shared_engine.gallery.search(image.embedding, 1)
    (label,) = (info.label for info in described.values())
    keys = torch.tensor([label_key(name) for name in (label, "a", "b", "c", "c")]).sort().values
    near, far = (replace(made, unseen=UnseenClasses(keys, torch.full((5,), at).double())) for at in (-1.0, 1.0))
    for calibration, p_new, p_in_gallery in ((near, 2 / 4, 1.0), (far, 1.0, 1 / 3)):
        unseen = said(shared_engine, calibration, image)["unseen"]
        assert unseen == pytest.approx({"p_new": p_new, "p_in_gallery": p_in_gallery})
        assert said(shared_engine, calibration, image, without="another")["unseen"] is None
    other = replace(near, unseen=UnseenClasses(keys[keys != label_key(label)], torch.zeros(4).double()))
    assert said(shared_engine, other, image)["unseen"] is None  # a class that came later


def test_the_conformal_set_is_the_first_hits(shared_engine: Engine, made: Calibration, image: Query) -> None:
    for depth in (1, 3, 50):
        hits = said(shared_engine, replace(made, depth=depth), image)["hits"]
        assert [hit["conformal"] for hit in hits] == [place < depth for place in range(10)]
    for unpromised in (replace(made, depth=None), None):
        assert {hit["conformal"] for hit in said(shared_engine, unpromised, image)["hits"]} == {None}


def test_each_hit_has_its_interval(shared_engine: Engine, made: Calibration, image: Query) -> None:
    assert made.intervals is not None
    hits = said(shared_engine, made, image)["hits"]
    ends = made.intervals(torch.tensor([[hit["score"] for hit in hits]]), torch.tensor([image.kappa]))[0]
    assert [hit["interval"] for hit in hits] == [pytest.approx(pair) for pair in ends.tolist()]
    for without in (replace(made, intervals=None), None):
        assert {hit["interval"] for hit in said(shared_engine, without, image)["hits"]} == {None}


def test_a_pair_is_judged_at_thresholds_of_its_own(made: Calibration, image: Query) -> None:
    assert made.verifier is not None
    responder = Responder(replace(made, flag="combined"), 3)
    threshold = {"accept_above": made.verifier.impostors.threshold(0.1), "kappa_below": made.kappa_below}
    pair = responder.verify(image, image).threshold
    assert pair is not None
    assert pair.model_dump() == threshold | {"far": 0.1, "ood": 0.1}
    for kappa, decision in ((made.kappa_below / 2, "abstain"), (made.kappa_below * 2, "match")):
        one = Query(embedding_of(image.embedding.mean[0], kappa))
        other = Query(embedding_of(image.embedding.mean[0], made.kappa_below * 2))
        assert responder.verify(one, other).decision == decision


def test_pairs_that_are_too_few_promise_nothing(made: Calibration, image: Query) -> None:
    for calibration in (None, replace(made, verifier=None), replace(made, targets=Targets(far=1e-9, ood=0.1))):
        answer = json.loads(Responder(calibration, 3).verify(image, image).to_json())
        assert answer["score"] == pytest.approx(1)
        assert {answer[name] for name in ("same", "decision", "probability", "far", "threshold")} == {None}


@pytest.fixture(scope="module")
def doubting(calibrated_run: Path) -> Run:
    """The run, with an encoder that has learned its ambiguity."""
    run = Run(calibrated_run)
    run.encoder.learn_ambiguity(loader_of(datasets.load("digits").validation, batch_size=300), seed=0)
    return run


def test_an_answer_says_in_words_why_a_query_is_uncertain(
    shared_engine: Engine, doubting: Run, made: Calibration, image: Query
) -> None:
    ambiguity = doubting.encoder.ambiguity
    assert ambiguity is not None
    embeddings = doubting.encoder.embed(torch.rand(50, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    responder, doubts = Responder(made, 3, ambiguity), ambiguity.doubts(embeddings)
    assert {UNSEEN, SEVERAL} & set(doubts)
    for row in (doubts.index(words) for words in set(doubts)):
        query = Query(embeddings[row : row + 1])
        hits, infos = shared_engine.gallery.search(query.embedding, 2)
        answer = answer_of(responder, query, hits, infos)
        assert answer["doubt"] == doubts[row]
        parts = {name: float(values[row]) for name, values in embeddings.parts().items()}
        assert {name: answer[name] for name in parts} == parts
    hits, infos = shared_engine.gallery.search(image.embedding, 2)
    for by, asked in ((responder, image), (Responder(made, 3), query)):
        body = answer_of(by, asked, hits, infos)
        assert {body[name] for name in ("doubt", *parts)} == {None}


def test_images_and_embeddings_are_searched_in_one_batch(shared_engine: Engine, doubting: Run) -> None:
    image = Query(doubting.encoder.embed(torch.zeros(1, 1, 8, 8)))
    sampled = Query(replace(image.embedding, mean_samples=8))
    sent = Query(embedding_of(torch.tensor([1.0, 0.0, 0.0]), 10.0))
    jobs = [Search(query, 2) for query in (image, sent, sampled)]
    kappas = [answer.kappa for answer in shared_engine.searches.search(jobs)]
    assert kappas == [job.read().kappa for job in jobs]
