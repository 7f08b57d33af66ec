from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import entropy as scipy_entropy
from scipy.stats import mannwhitneyu, spearmanr
from torch import Tensor

import lam
from lam.encoders.batches import HeldOut
from lam.pairs.relation import Relation
from lam.pairs.relevance import LabelRelevance
from lam.retrieval import auprc, auroc, ausc, map_at_k, rank
from lam.retrieval.metrics.probing import clustering, knn_accuracy, linear_probe
from lam.retrieval.metrics.reference import Reference, knn_distance
from lam.retrieval.metrics.registry import METRICS, Metric, describe
from lam.retrieval.metrics.scores import N_HITS, SCORES, Score, margin, scores_of
from lam.retrieval.metrics.votes import SampledAnswers
from tests.encoders.small import fit, make_batches

KEYS = {"recall@1", "map@1", "map@5", "map@10", "ece", "ece_below_one", "ausc"}


def far_away(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [8 * torch.randn(20, 6, generator=generator) for _ in range(count)]


def test_metrics_are_those_of_the_arrays():
    batches = make_batches(8)
    encoder = fit(batches[:4], likelihood_scale=1e3)
    evaluation = lam.evaluate(
        encoder, batches[4:], far_away(), reference=Reference.of(encoder.features(batches[:4])), n_samples=20
    )
    metrics = evaluation.metrics
    assert metrics.keys() >= KEYS | {
        f"{name}{by}" for name in ("auroc", "auprc") for by in ("", "_variance", "_norm", "_knn")
    }
    labels = torch.cat([targets for _, targets in batches[4:]])
    embeddings = encoder.embed(batches[4:], n_samples=20)
    hits, _ = rank(embeddings.mean, k=1)
    assert metrics["recall@1"] == pytest.approx((labels[hits[:, 0]] == labels).double().mean().item())
    outside = encoder.embed(far_away(), n_samples=20)
    assert metrics["auroc"] == pytest.approx(auroc(-embeddings.kappa, -outside.kappa))
    assert metrics["auroc_variance"] == pytest.approx(auroc(embeddings.variance, outside.variance))
    assert metrics["prevalence"] == pytest.approx(60 / 124)
    assert metrics["map@1"] == metrics["recall@1"] == metrics["precision@1"]
    cosines = rank(outside.mean, embeddings.mean, k=2)[1]
    own_cosines = rank(embeddings.mean, k=2)[1]
    assert metrics["auroc_cosine"] == pytest.approx(auroc(-own_cosines[:, 0], -cosines[:, 0]))
    ranked = [rank(embeddings.mean, k=N_HITS), rank(outside.mean, embeddings.mean, k=N_HITS)]
    margins = [margin(found, labels[hits]) for hits, found in ranked]
    assert metrics["auprc_margin"] == pytest.approx(auprc(*margins))
    assert metrics["ausc_margin"] == pytest.approx(ausc(labels[hits[:, 0]] == labels, margins[0]))
    assert metrics["ausc"] == pytest.approx(ausc(labels[hits[:, 0]] == labels, -embeddings.kappa))
    ranked, _ = rank(embeddings.mean, k=5)
    relevance = labels[ranked] == labels[:, None]
    assert metrics["map@5"] == pytest.approx(map_at_k(relevance, labels.bincount()[labels] - 1, k=5))
    samples = encoder.posterior.sampled_embeddings(encoder.features(batches[4:]), n_samples=20)
    answers = SampledAnswers(samples, LabelRelevance(labels), rank(embeddings.mean, k=10)[0])
    assert metrics["ece"] == pytest.approx(answers.votes().binned().expected_error)
    assert metrics["auroc_norm"] > 0.9
    assert len(evaluation.ood_embeddings["ood"]) == 60


def test_what_is_costly_is_measured_where_it_is_asked_for():
    batches = make_batches(8)
    encoder = fit(batches[:4], likelihood_scale=1e3)
    train, labels = encoder.features(batches[:4]), torch.cat([targets for _, targets in batches[:4]])
    test, truth = encoder.features(batches[4:]), torch.cat([targets for _, targets in batches[4:]])
    options: dict[str, Any] = {"reference": Reference.of(train, labels), "n_samples": 4}
    costly = {"knn_accuracy", "linear_probe", "nmi", "ari", "purity"}
    assert not costly & lam.evaluate(encoder, batches[4:], **options).metrics.keys()
    evaluation = lam.evaluate(encoder, batches[4:], costly=True, **options)
    unit, other = F.normalize(train), F.normalize(test)
    assert evaluation.metrics["knn_accuracy"] == pytest.approx(knn_accuracy(unit, labels, other, truth, k=20))
    assert evaluation.metrics["linear_probe"] == pytest.approx(linear_probe(unit, labels, other, truth))
    agreement = clustering(evaluation.embeddings.mean, truth)
    assert agreement is not None
    assert evaluation.metrics["nmi"] == pytest.approx(agreement.nmi)
    alone = lam.evaluate(encoder, batches[4:], costly=True, n_samples=4).metrics
    assert costly & alone.keys() == {"nmi", "ari", "purity"}


def test_nmi_ari_and_purity_are_of_the_same_clusters_which_are_formed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import scipy.cluster.hierarchy as hierarchy

    formed, ward = [], hierarchy.ward
    monkeypatch.setattr(hierarchy, "ward", lambda rows: formed.append(len(rows)) or ward(rows))
    batches = make_batches(4)
    metrics = lam.evaluate(fit(batches, likelihood_scale=1e3), batches, costly=True, n_samples=4).metrics
    assert None not in (metrics["nmi"], metrics["ari"], metrics["purity"])
    assert len(formed) == 1


@pytest.mark.usefixtures("as_in_production")
def test_doubt_is_compared_with_the_entropy_of_peoples_labels_and_right_answers_with_wrong_ones():
    batches = make_batches(8)
    encoder = fit(batches[:4], likelihood_scale=1e3)
    n = sum(len(targets) for _, targets in batches[4:])
    soft = torch.rand(n, 5, generator=torch.Generator().manual_seed(0)).softmax(1).requires_grad_()
    evaluation = lam.evaluate(encoder, HeldOut(batches[4:], soft_labels=soft), n_samples=4)
    for key, score in (("entropy_correlation", "kappa"), ("entropy_correlation_variance", "variance")):
        expected = spearmanr(
            scipy_entropy(soft.detach().double().numpy(), axis=1), evaluation.scores[score].numpy()
        ).statistic
        assert evaluation.metrics[key] == pytest.approx(expected, abs=1e-6)
    kappa, right = evaluation.embeddings.kappa.double().numpy(), evaluation.correct.numpy()
    if right.any() and not right.all():
        expected = mannwhitneyu(kappa[right], kappa[~right], method="asymptotic").pvalue
        assert evaluation.metrics["mann_whitney_p"] == pytest.approx(expected)
    for wrong, shape in ((soft[1:], "63, 5"), (soft[:, 0], "64,"), (torch.tensor(1.0), "")):
        with pytest.raises(ValueError, match=rf"soft_labels must have .* 64 items, got \({shape}\)"):
            lam.evaluate(encoder, HeldOut(batches[4:], soft_labels=wrong), n_samples=4)


def test_several_sets_have_names_and_the_first_is_the_main_one():
    batches = make_batches(8)
    encoder = fit(batches[:4])
    sets = {"far": far_away(1), "near": [batches[0][0]]}
    metrics = lam.evaluate(encoder, batches[4:], sets, n_samples=8).metrics
    alone = lam.evaluate(encoder, batches[4:], far_away(1), n_samples=8).metrics
    assert metrics["auroc"] == alone["auroc"]
    assert {"auroc@near", "auprc_variance@near", "prevalence@near"} <= metrics.keys()
    assert not any("knn" in key for key in metrics)


def test_queries_without_a_match_are_left_out_and_counted():
    batches = make_batches(2, N=20)
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    labels = labels.clone()
    labels[5] = 99
    encoder = fit(batches)
    evaluation = lam.evaluate(encoder, [(inputs, labels)], n_samples=8)
    assert evaluation.metrics["n_without_relevant"] == 1
    assert not evaluation.answerable[5]
    assert evaluation.metrics["recall@1"] == pytest.approx(
        evaluation.correct[evaluation.answerable].double().mean().item()
    )


def test_without_any_match_metrics_are_undefined_not_zero():
    encoder = fit()
    evaluation = lam.evaluate(encoder, [(torch.randn(5, 6), torch.arange(5))], n_samples=4)
    for name in ("recall@1", "map@5", "ausc", "ece"):
        assert evaluation.metrics.get(name) is None
    assert evaluation.reliability is None


def test_the_score_by_neighbours_is_that_of_a_double_loop(monkeypatch):
    monkeypatch.setattr("lam.retrieval.metrics.reference._BLOCK", 2)
    generator = torch.Generator().manual_seed(0)
    features, reference = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    got = knn_distance(features, Reference.of(reference), k=3)
    for row, value in zip(features, got, strict=True):
        cosines = sorted((torch.cosine_similarity(row, other, dim=0).item() for other in reference), reverse=True)
        assert value.item() == pytest.approx(1 - cosines[2], abs=1e-6)
    with pytest.raises(ValueError, match="k = 12.*11"):
        knn_distance(features, Reference.of(reference), k=12)


def test_every_score_is_higher_for_what_is_uncertain():
    encoder = fit()
    features = encoder.features(far_away(1))
    embeddings = encoder.embed(far_away(1))
    scores = scores_of({"embeddings": embeddings, "features": features, "reference": Reference.of(features[:6])})
    assert torch.equal(scores["kappa"], -embeddings.kappa)
    assert torch.equal(scores["norm"], features.norm(dim=1))
    distances = {"knn", "mahalanobis", "global_mahalanobis", "radial_mahalanobis", "mahalanobis_knn"}
    assert set(scores) == {"kappa", "variance", "norm", *distances}
    assert set(scores_of({"embeddings": embeddings, "features": features, "reference": None})) == {*scores} - distances


def test_a_score_or_metric_that_is_entered_is_measured_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spread = Score("1 − R̄", "R̄", "samples disagree", lambda embeddings: 1 - embeddings.resultant, ("embeddings",))
    wrong = Metric(
        "error", "lower", "share of wrong first hits", lambda hits: 1 - hits[:, 0].double().mean(), ("relevance",)
    )
    monkeypatch.setitem(SCORES, "spread", spread)
    monkeypatch.setitem(METRICS, "error", wrong)
    batches = make_batches(8)
    sets = {"far": far_away(1), "near": [batches[0][0]]}
    metrics = lam.evaluate(fit(batches[:4]), batches[4:], sets, n_samples=8).metrics
    assert {"ausc_spread", "auroc_spread", "auprc_spread", "auroc_spread@near"} <= metrics.keys()
    assert metrics["error"] == pytest.approx(1 - (metrics["recall@1"] or 0))
    assert describe("auroc_spread@near").name == "AUROC, by R̄, against near"


def test_bad_input_is_refused():
    encoder = fit()
    batches = make_batches()
    with pytest.raises(ValueError, match="loader.*inputs with labels"):
        lam.evaluate(encoder, [batches[0][0]])
    with pytest.raises(ValueError, match="in-distribution items.*2"):
        lam.evaluate(encoder, [(torch.randn(1, 6), torch.tensor([0]))])
    with pytest.raises(ValueError, match="'ood' is empty"):
        lam.evaluate(encoder, batches, [])
    with pytest.raises(ValueError, match="5 items.*4 labels"):
        lam.evaluate(encoder, [(torch.randn(5, 6), torch.arange(4))])
    with pytest.raises(ValueError, match="5 items.*4 labels"):  # which the next makes up for
        lam.evaluate(encoder, [(torch.randn(5, 6), torch.arange(4)), (torch.randn(4, 6), torch.arange(5))])


def test_places_are_found_by_their_distance_in_a_gallery_of_their_own():
    generator = torch.Generator().manual_seed(1)
    places = 1000.0 * torch.arange(12)[:, None] * torch.ones(2)
    positions = torch.cat([places + 5 * torch.rand(12, 2, generator=generator) for _ in range(3)])
    inputs = torch.cat([torch.eye(12)] * 3) + 0.05 * torch.randn(36, 12, generator=generator)
    near = Relation(positive_within=10.0)
    encoder = lam.fit(
        torch.nn.Linear(12, 6), [(inputs, positions)], lam.Laplace(margin=0.7, pairs=near), progress=False
    )
    is_query = torch.arange(36) < 12
    in_gallery = torch.ones(36, dtype=torch.bool)
    in_gallery[[12 + 3, 24 + 3]] = False  # nothing is left near the fourth query
    evaluation = lam.evaluate(
        encoder, HeldOut([(inputs[in_gallery], positions[in_gallery])], is_query[in_gallery]), n_samples=16
    )
    embeddings = encoder.embed(inputs[in_gallery], n_samples=16)
    kept = positions[in_gallery]
    correct, found = [], []
    for query in range(12):
        cosines = embeddings.mean[12:] @ embeddings.mean[query]
        nearest = 12 + int(cosines.argmax())
        found.append(nearest)
        correct.append(bool((kept[nearest] - kept[query]).norm() <= 10))
    assert evaluation.hits[:, 0].tolist() == found
    assert evaluation.correct.tolist() == correct
    assert evaluation.metrics["n_without_relevant"] == 1
    assert evaluation.metrics["recall@1"] == pytest.approx(sum(correct) / 11)
    assert evaluation.metrics["no_match_prevalence"] == pytest.approx(1 / 12)
    rank_of_fourth = 1 + int((evaluation.scores["cosine"] > evaluation.scores["cosine"][3]).sum())
    assert evaluation.metrics["no_match_auprc"] == pytest.approx(1 / rank_of_fourth)
    assert {"no_match_auprc_kappa", "recall@5", "map@5", "ece", "ausc"} <= evaluation.metrics.keys()
    assert len(evaluation.gallery) == 22
    wider = lam.evaluate(encoder, HeldOut([(inputs, positions)], is_query, 5000.0), n_samples=4)
    assert wider.metrics["recall@10"] >= evaluation.metrics["recall@10"]


@pytest.mark.parametrize("costly", [False, True])
def test_a_reference_of_another_encoder_is_refused(costly: bool):
    batches = make_batches(2)
    encoder, reference = fit(batches), Reference.of(torch.randn(9, 3), torch.arange(9) % 2)
    with pytest.raises(ValueError, match="reference.*width 3"):
        lam.evaluate(encoder, batches, reference=reference, n_samples=4, costly=costly)


def test_an_encoder_whose_ood_score_is_the_neighbours_needs_a_reference_and_names_the_others():
    batches = make_batches(4)
    encoder = lam.fit(torch.nn.Identity(), batches, lam.Laplace(margin=0.7, head="identity"), progress=False)
    with pytest.raises(ValueError, match="k-NN distance: give reference"):
        lam.evaluate(encoder, batches, far_away(), n_samples=4)
    reference = Reference.of(encoder.features(batches))
    metrics = lam.evaluate(encoder, batches, far_away(), reference=reference, n_samples=4).metrics
    features = encoder.features(batches)
    assert lam.evaluate(encoder, batches, far_away(), reference=features, n_samples=4).metrics == metrics
    outside = torch.cat(far_away())
    inside = torch.cat([inputs for inputs, _ in batches])
    assert metrics["auroc"] == pytest.approx(auroc(knn_distance(inside, reference), knn_distance(outside, reference)))
    assert {"auroc_kappa", "auroc_variance", "auroc_norm"} <= metrics.keys()
    assert "auroc_knn" not in metrics
