"""Choosing the likelihood scale: the tried scales, the choice, and warnings."""

import math
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lam
from lam.hessians import ContrastiveCurvature
from lam.pairs.relation import Relation
from lam.pairs.relevance import LabelRelevance, PlaceRelevance
from lam.retrieval.index.exact import rank
from lam.retrieval.metrics.votes import SampledAnswers
from lam.tuning.scale import CLIPPED_LIMIT, COSINE_LIMIT, NEAR_COSINE, best_posterior, calibrate_scale
from lam.utils.notes import Note
from tests.encoders import small
from tests.encoders.small import make_batches


def fit(batches: small.Batches | None = None, **settings: Any) -> lam.BayesianEncoder:
    """A diagonal posterior with a fixed prior precision, so its shape depends on the scale."""
    return small.fit(batches, **{"structure": "diag", "prior_precision": 1.0, **settings})


@pytest.fixture
def tuned() -> tuple[lam.BayesianEncoder, torch.Tensor, torch.Tensor]:
    """An encoder tuned on held-out data, and the features and labels of these data."""
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4])
    encoder.tune(batches[4:], n_samples=16, greatest=1e8)
    return encoder, encoder.features(batches[4:]), torch.cat([targets for _, targets in batches[4:]])


def twin(encoder: lam.BayesianEncoder, scale: float, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The log score of each query, by loops."""
    posterior = replace(encoder.posterior, likelihood_scale=scale)
    samples = posterior.sampled_embeddings(features, n_samples=16).double()
    own = F.normalize(F.linear(features, posterior.weight, posterior.bias)).double()
    found = []
    for q in range(len(labels)):
        hit, *others = (labels[nearest(vectors, q)] for vectors in (own, *samples))
        right = (sum(int(other == hit) for other in others) + 0.5) / (16 + 1)
        found.append(-math.log(right if hit == labels[q] else 1 - right))
    return torch.tensor(found, dtype=torch.float64)


def nearest(vectors: torch.Tensor, q: int) -> int:
    """The row that is nearest to row q."""
    cosines = (vectors @ vectors[q]).tolist()
    return max((item for item in range(len(vectors)) if item != q), key=cosines.__getitem__)


def test_every_trial_has_the_score_of_its_votes(tuned):
    encoder, features, labels = tuned
    trials = encoder.tuning.trials
    scales = [trial.scale for trial in trials]
    assert scales == sorted(scales)
    assert (scales[0], scales[-1]) == (1.0, 1e8)
    best = min(trials, key=lambda trial: trial.score)
    assert best.behind == best.error == 0
    of_best = twin(encoder, best.scale, features, labels)
    for trial in trials[:: len(trials) // 2]:
        scores = twin(encoder, trial.scale, features, labels)
        assert trial.score == pytest.approx(float(scores.mean()))
        assert trial.behind == pytest.approx(float((scores - of_best).mean()), abs=1e-12)
        assert trial.error == pytest.approx(float((scores - of_best).std()) / len(labels) ** 0.5, abs=1e-12)


def test_the_largest_scale_within_one_standard_error_of_the_best_is_chosen(tuned):
    encoder = tuned[0]
    tuning = encoder.tuning
    assert encoder.posterior.scale == tuning.likelihood_scale == tuning.chosen.scale == tuning.interval[1]
    assert [
        trial.scale for trial in tuning.trials if trial.scale > tuning.likelihood_scale and trial.within_error
    ] == []
    above = min(trial.scale for trial in tuning.trials if trial.scale > tuning.likelihood_scale)
    assert above / tuning.likelihood_scale <= 10**0.25 * 1.001  # the end is found to a quarter of a power of ten
    assert tuning.interval[0] <= min(tuning.trials, key=lambda trial: trial.score).scale


def test_where_the_prior_follows_the_scale_the_best_is_chosen():
    batches = make_batches(8, N=32)
    encoder = small.fit(batches[:4])
    encoder.tune(batches[4:], n_samples=16)
    tuning, features = encoder.tuning, encoder.features(batches[4:])
    least = min(trial.score for trial in tuning.trials)
    assert tuning.chosen.score == least
    wider = [trial.scale for trial in tuning.trials if trial.score == least and trial.scale < tuning.likelihood_scale]
    assert tuning.direction_cosine >= NEAR_COSINE or not [
        trial for trial in tuning.trials if trial.score == least and trial.scale > tuning.likelihood_scale
    ]
    for scale in wider:
        other = replace(encoder.posterior, likelihood_scale=scale).predict(features, n_samples=16, mean="sampled").mean
        own = F.normalize(encoder.posterior.outputs(features))
        assert float((own * other).sum(1).mean()) < NEAR_COSINE
    assert encoder.posterior.prior_precision is None


def test_prior_and_curvature_stay_as_they_are():
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4])
    before = encoder.posterior
    encoder.tune(batches[4:], n_samples=16, greatest=1e8)
    assert encoder.posterior.prior_precision == before.prior_precision
    assert encoder.posterior.curvature is before.curvature


def test_what_was_tried_is_in_the_metrics_and_in_the_file(tuned, tmp_path):
    encoder, features, labels = tuned
    metrics = lam.evaluate(encoder, [(torch.randn(16, 6), torch.arange(16) % 4)]).metrics
    tuning = encoder.tuning
    assert metrics["tuned_scale"] == encoder.posterior.scale
    assert (metrics["tuned_scale_low"], metrics["tuned_scale_high"]) == tuning.interval
    assert metrics["tuned_score"] == tuning.chosen.score
    assert metrics["tuned_score_error"] == tuning.chosen.error
    assert metrics["tuned_ece"] == tuning.chosen.ece
    assert metrics["tuned_cosine"] == tuning.direction_cosine
    encoder.save(tmp_path / "encoder")
    assert lam.load(tmp_path / "encoder", encoder.network).tuning == tuning
    own = F.normalize(F.linear(features, encoder.posterior.weight, encoder.posterior.bias))
    hits = rank(own, k=10)[0]
    answers = SampledAnswers(encoder.posterior.sampled_embeddings(features, n_samples=16), LabelRelevance(labels), hits)
    assert tuning.chosen.ece == answers.votes().binned().expected_error


def test_as_many_samples_vote_as_the_encoder_evaluates_with() -> None:
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4])
    encoder.n_samples = 7
    encoder.tune(batches[4:], greatest=1e8)
    features, labels = encoder.features(batches[4:]), torch.cat([targets for _, targets in batches[4:]])
    hits = rank(F.normalize(F.linear(features, encoder.posterior.weight, encoder.posterior.bias)), k=10)[0]
    answers = SampledAnswers(encoder.posterior.sampled_embeddings(features, n_samples=7), LabelRelevance(labels), hits)
    assert encoder.tuning is not None
    assert encoder.tuning.chosen.ece == answers.votes().binned().expected_error


def few_items(seed: int) -> tuple[lam.BayesianEncoder, torch.Tensor, torch.Tensor]:
    """Sixty items to fit on and sixty to tune on, of twenty classes that differ in few of many directions."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(256, 256, generator=generator)).Q
    centres = F.pad(torch.randn(20, 8, generator=generator), (0, 248))
    labels = torch.arange(120) % 20
    features = (centres[labels] + 0.5 * torch.randn(120, 256, generator=generator)) @ basis.T
    options = lam.Laplace(margin=0.7, structure="diag", prior_precision=1.0)
    encoder = lam.fit_features(features[:60], labels[:60], basis[:, :8].T.contiguous(), None, options, seed=seed)
    return encoder, features[60:], labels[60:]


def test_few_items_do_not_make_the_posterior_one_that_knows_nothing():
    by_error, by_score = [], []
    for seed in range(3):
        encoder, features, labels = few_items(seed)
        encoder.tune([(features, labels)], n_samples=16, greatest=1e8)
        least = min(encoder.tuning.trials, key=lambda trial: trial.ece).scale
        vague = replace(encoder.posterior, likelihood_scale=least)
        own, sampled = (vague.predict(features, mean=mean).mean for mean in ("network", "sampled"))
        by_error.append(float((own * sampled).sum(1).mean()))
        by_score.append(encoder.tuning.direction_cosine)
    assert sum(cosine < COSINE_LIMIT for cosine in by_error) >= 2  # the calibration error alone would choose this
    assert min(by_score) > 0.99


def test_scales_at_which_every_kappa_is_one_bound_are_not_chosen():
    labels = torch.arange(40) % 4
    features = torch.eye(4)[labels] + 0.01 * torch.randn(40, 4)
    encoder = lam.fit_features(features, labels, torch.eye(4)[:3] + 0.1, margin=0.7)
    with pytest.warns(Note, match="40 validation queries.*width"):
        encoder.tune([(features, labels)])
    low, high = encoder.tuning.interval
    assert low <= encoder.tuning.likelihood_scale <= high
    assert not encoder.embed(features).capped.any()
    with pytest.raises(ValueError, match="κ.*1e.08.*every likelihood scale"):
        encoder.tune([(features, labels)], least=1e20, greatest=1e24)


def test_a_posterior_so_wide_that_samples_point_elsewhere_is_told():
    batches = make_batches(2, N=32)
    encoder = fit(batches[:1], prior_precision=1e-3)
    with pytest.warns(UserWarning, match=r"samples.*\(mean cosine 0\."):
        encoder.tune(batches[1:], n_samples=8, least=1e-6, greatest=1e-3)


def test_tuning_stays_in_its_range_and_says_when_it_ends_there():
    encoder = fit(prior_precision=100.0)
    with pytest.warns(Note, match="determine the posterior's width"):
        encoder.tune(make_batches(), n_samples=4, least=2e-3, greatest=1.0)
    assert all(2e-3 <= trial.scale <= 1.0 for trial in encoder.tuning.trials)
    assert encoder.tuning.likelihood_scale == 1.0
    with pytest.raises(ValueError, match="8 items.*one label"):
        encoder.tune([(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))])


@pytest.mark.parametrize("layers", ["last", "all"])
def test_the_share_of_clipped_variance_does_not_depend_on_the_cut_into_batches(layers: str):
    (inputs, labels), *batches = make_batches(5, N=32)
    inputs = inputs * torch.linspace(0.1, 5, len(inputs))[:, None]
    encoder, shares = fit(batches, layers=layers), []
    encoder.fitted = None
    for cut in (32, 29):
        encoder.tune(list(zip(inputs.split(cut), labels.split(cut), strict=True)), n_samples=8, greatest=1e4)
        assert encoder.tuning is not None
        shares.append(encoder.tuning.clipped_share)
    assert 0 < shares[0] == pytest.approx(shares[1], rel=1e-5)


@pytest.mark.parametrize(
    ("structure", "advice"),
    [
        ("diag", r"""split="euclidean", fix='positive'\) \(--method.split=euclidean --method.fix=positive\)"""),
        ("ekfac", r'split="euclidean", negative_weight=0\) \(--method.split=euclidean --method.negative_weight=0\)'),
    ],
    ids=["diag", "ekfac"],
)
def test_tuning_says_when_clipped_weights_make_it_pointless(structure, advice):
    batches = make_batches(8, N=32)
    encoder = fit(batches[:4], structure=structure)
    curvature = encoder.posterior.curvature
    h = curvature.h.abs() + curvature.h.abs().mean()
    h[:, -1 if structure == "ekfac" else 3] = -1
    encoder.posterior = replace(encoder.posterior, curvature=replace(curvature, sums=h[None], counts=None))
    encoder.fitted = None
    with pytest.warns(UserWarning, match=f"variance.*negative curvature.*{advice}") as warned:
        encoder.tune(batches[4:], n_samples=8, greatest=1e8)
    assert len(warned) == 1


def clipped_encoder(**settings: Any) -> lam.BayesianEncoder:
    return clipped(fit(make_batches(8, N=32)[:4], **settings))


def clipped(encoder: lam.BayesianEncoder) -> lam.BayesianEncoder:
    """The encoder with most of its variance from weights with negative curvature."""
    curvature = encoder.posterior.curvature
    if encoder.posterior.structure.name == "kron":
        curvature = replace(curvature, sums=-curvature.sums)
    else:
        h = curvature.h.abs() + curvature.h.abs().mean()
        h[:, 3] = -1
        curvature = replace(curvature, sums=h[None], counts=None)
    encoder.posterior = replace(encoder.posterior, curvature=curvature)
    return encoder


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_posterior_of_clipped_weights_is_fitted_again_without_them(structure: str):
    encoder, held_out = clipped_encoder(structure=structure), make_batches(8, N=32)[4:]
    relevance = LabelRelevance(torch.cat([labels for _, labels in held_out]))
    options: dict[str, Any] = {"n_samples": 8, "greatest": 1e8}
    scores = {}
    for curvature in ContrastiveCurvature(0.7).non_negative():
        if structure == "diag" or not curvature.has_cross_terms:
            other = fit(make_batches(8, N=32)[:4], curvature=curvature, structure=structure)
            scores[curvature] = calibrate_scale(other.posterior, [other.features(held_out)], relevance, **options)
    with pytest.warns(Note, match=r"refitted, as \d+%"):
        encoder.tune(held_out, **options)
    best = min(scores, key=lambda curvature: scores[curvature].tuning.chosen.score)
    assert len(scores) == (3 if structure == "diag" else 2)
    assert encoder.posterior.curvature.curvature == best
    assert torch.equal(encoder.posterior.curvature.h, scores[best].posterior.curvature.h)
    assert encoder.tuning.chosen == scores[best].tuning.chosen
    assert encoder.tuning.replaced.curvature["split"] == "arccos"
    assert encoder.tuning.replaced.clipped_share > CLIPPED_LIMIT > encoder.tuning.clipped_share == 0


class Removed(list):
    """Batches that can be read once, such as files that are deleted later."""

    def __iter__(self) -> Any:
        yield from [self.pop() for _ in self[:]] or Path("/removed").read_bytes()


@pytest.mark.parametrize("read_once", [iter, Removed])
def test_batches_that_can_be_read_only_once_leave_the_posterior_with_a_warning(read_once: Any):
    expect_no_refit(clipped(fit(read_once(make_batches(8, N=32)[:4]))))


def test_a_loader_that_lost_items_leaves_the_posterior_with_a_warning():
    batches = make_batches(8, N=32)[:4]
    encoder = clipped(fit(batches))
    del batches[2:]
    expect_no_refit(encoder)


def expect_no_refit(encoder: lam.BayesianEncoder) -> None:
    with pytest.warns(UserWarning, match="weights.*curvature.*split"):
        encoder.tune(make_batches(8, N=32)[4:], n_samples=8, greatest=1e8)
    assert encoder.tuning.replaced is None


class Noisy(list):
    """Batches with noise from the global generator, as from random views."""

    def __iter__(self) -> Any:
        return ((inputs + 0.1 * torch.randn_like(inputs), labels) for inputs, labels in super().__iter__())


def test_the_second_fit_keeps_the_prior_and_neither_reads_nor_changes_global_settings():
    sums = []
    for seed in (1, 2):
        encoder = clipped(fit(Noisy(make_batches(8, N=32)[:4])))
        encoder.posterior = replace(encoder.posterior, prior_precision=7.0)
        state = torch.manual_seed(seed).get_state()
        with torch.inference_mode(), pytest.warns(Note, match="refitted"):
            encoder.tune(make_batches(8, N=32)[4:], n_samples=8, greatest=1e8)
        assert encoder.posterior.prior_precision == 7.0
        assert not encoder.posterior.curvature.sums.is_inference()
        assert torch.equal(torch.get_rng_state(), state)
        sums.append(encoder.posterior.curvature.sums)
    assert torch.equal(*sums)


def test_copies_sums_and_encoders_that_forgot_items_do_not_keep_the_batches_of_the_fit(tmp_path: Path):
    encoder = fit()
    assert encoder.fitted is not None
    encoder.save(tmp_path / "encoder")
    assert copy(encoder).fitted is deepcopy(encoder).fitted is (encoder + encoder).fitted is None
    assert lam.load(tmp_path / "encoder", network=encoder.network).fitted is None
    encoder.forget(make_batches()[:1])
    assert encoder.fitted is None


def test_the_posterior_is_not_fitted_again_where_nothing_is_clipped_and_stays_where_others_clip_too():
    encoder, held_out = fit(make_batches(8, N=32)[:4]), make_batches(8, N=32)[4:]
    encoder.fitted = object()  # its use would raise an AttributeError
    encoder.tune(held_out, n_samples=8, greatest=1e8)
    assert encoder.tuning.replaced is None
    relevance = LabelRelevance(torch.cat([labels for _, labels in held_out]))
    options: dict[str, Any] = {"n_samples": 8, "greatest": 1e8}
    clipped = clipped_encoder()
    old = calibrate_scale(clipped.posterior, [clipped.features(held_out)], relevance, **options)
    new = calibrate_scale(encoder.posterior, [clipped.features(held_out)], relevance, **options)
    assert best_posterior(old, [new]).posterior is new.posterior
    assert best_posterior(old, [old]) is best_posterior(old, []) is old


def test_places_are_scored_by_their_first_hit():
    torch.manual_seed(3)
    positions = torch.rand(30, 2) * 40
    features = torch.cat([positions / 40, torch.rand(30, 2)], 1)
    near = Relation(positive_within=5.0, negative_beyond=9.0)
    encoder = lam.fit_features(features, positions, torch.eye(3, 4), options=lam.Laplace(margin=0.7, pairs=near))
    relevance = PlaceRelevance(positions, 5.0)
    _, tuning = calibrate_scale(encoder.posterior, [features], relevance, n_samples=8, least=1e2, greatest=1e6)
    posterior = replace(encoder.posterior, likelihood_scale=1e4)
    own, samples = F.normalize(features @ torch.eye(4, 3)), posterior.sampled_embeddings(features, n_samples=8).double()
    scores = []
    for q in range(30):
        hit = positions[nearest(own, q)]
        agree = sum(bool((positions[nearest(sample, q)] - hit).norm() <= 5.0) for sample in samples)
        right = (agree + 0.5) / 9
        scores.append(-math.log(right if (hit - positions[q]).norm() <= 5.0 else 1 - right))
    assert next(trial.score for trial in tuning.trials if trial.scale == 1e4) == pytest.approx(sum(scores) / 30)


def test_progress_counts_the_scales(capsys: pytest.CaptureFixture[str]):
    batches = make_batches(4, N=32)
    encoder = fit(batches[:2])
    encoder.tune(batches[2:], n_samples=4, greatest=1e4)
    assert not capsys.readouterr().err
    encoder.tune(batches[2:], n_samples=4, greatest=1e4, progress=True)
    assert f"tuning: {len(encoder.tuning.trials)} scales" in capsys.readouterr().err
