"""P(first hit is right): learned from many scores, calibrated, and explained by shares."""

import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from scipy import optimize
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from lam.retrieval.decisions.probability import (
    MIN_PER_OUTCOME,
    Correctness,
    MonotoneRegression,
    RankOdds,
    cross_validated,
    folds,
    probability_bins,
)
from lam.retrieval.metrics.uncertainty import r_auroc


def _searches(n: int, seed: int, *, shift: float = 1.0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Three scores: two useful ones on different scales, and a useless one."""
    generator = torch.Generator().manual_seed(seed)
    truth, noise = torch.randn(n, generator=generator), torch.randn(3, n, generator=generator)
    scores = {"cosine": truth + noise[0], "votes": (3 * (truth + noise[1])).exp(), "norm": noise[2]}
    return scores, truth + 0.5 * torch.randn(n, generator=generator) < shift


def test_the_odds_of_a_rank_are_those_that_counting_gives() -> None:
    score = torch.tensor([2.0, 5.0, 5.0, 9.0])
    rank = RankOdds.of(score)
    for value in score.tolist():
        share = float(((score < value).sum() + 0.5 * (score == value).sum()) / 4)
        assert float(rank(torch.tensor([value]))) == pytest.approx(math.log(share / (1 - share)))
    half_way = (rank.odds[0] + rank.odds[1]) / 2
    assert rank(torch.tensor([-1e9, 3.5, 1e9])).tolist() == pytest.approx([rank.odds[0], half_way, rank.odds[-1]])
    assert RankOdds.of(torch.ones(3))(torch.tensor([0.0, 1.0, 7.0])).tolist() == [0, 0, 0]


def test_the_odds_of_a_rank_among_very_many_are_exact() -> None:
    n = 300_000
    assert RankOdds.of(torch.arange(float(n))).odds[-1] == pytest.approx(math.log(2 * n - 1), rel=1e-12)


def test_ranks_of_many_values_are_kept_by_few_knots() -> None:
    score = torch.randn(5000, generator=torch.Generator().manual_seed(0)).double()
    rank = RankOdds.of(score)
    assert len(rank.values) <= 65
    share = (score.argsort().argsort() + 0.5) / 5000
    assert float((rank(score).sigmoid() - share).abs().max()) < 0.01
    assert (rank(score.sort().values).diff() > 0).all()


def test_the_probability_is_that_of_a_slow_twin() -> None:
    scores, correct = _searches(300, seed=0)
    model = Correctness.fit(scores, correct)
    x = np.stack([rank(scores[name]).numpy() for name, rank in zip(model.evidence, model.ranks, strict=True)], 1)
    right = correct.numpy()
    sums, losses = {}, {}

    def learned(rows: np.ndarray, outcomes: np.ndarray, penalty: float) -> LogisticRegression:
        more = np.vstack([rows, rows.min(0), rows.max(0)])
        return LogisticRegression(C=penalty, solver="newton-cholesky").fit(more, np.append(outcomes, [True, False]))

    for penalty in (0.01, 0.1, 1.0):
        sums[penalty] = np.zeros(300)
        for fold, rest in folds(300):
            part = learned(x[rest.numpy()], right[rest.numpy()], penalty)
            sums[penalty][fold.numpy()] = part.decision_function(x[fold.numpy()])
        chance = 1 / (1 + np.exp(-sums[penalty]))
        losses[penalty] = -np.log(np.where(right, chance, 1 - chance)).mean()
    best = min(losses, key=losses.__getitem__)
    rising = IsotonicRegression(out_of_bounds="clip").fit(sums[best], right)
    total = learned(x, right, best).decision_function(x)
    levels = np.interp(total, rising.X_thresholds_, rising.y_thresholds_.clip(1 / 302, 301 / 302))
    expected = (300 * levels + 300 / (1 + np.exp(-total))) / 600
    np.testing.assert_allclose(model(scores).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("period", [2, 5, 10])
def test_each_fold_holds_something_of_everything_also_where_items_come_by_turns(period: int) -> None:
    kind = torch.arange(300) % period
    parts = [fold for fold, _ in folds(300)]
    assert all(kind[fold].unique().numel() == period for fold in parts)
    assert torch.stack(parts).sum(0).eq(1).all()


def test_many_scores_do_better_than_each_of_them_and_stay_calibrated() -> None:
    model = Correctness.fit(*_searches(1000, seed=1))
    scores, correct = _searches(5000, seed=2)
    probability = model(scores)
    assert r_auroc(correct, -probability) > 0.02 + max(r_auroc(correct, scores[name]) for name in scores)
    assert probability_bins(probability, correct).expected_error < 0.04
    assert ((probability > 0) & (probability < 1)).all()
    assert next(iter(model.worth)) in ("cosine", "votes")
    assert model.worth["norm"] < 0.1
    assert sum(model.worth.values()) == pytest.approx(1)


def test_the_order_stays_where_the_levels_do_not_tell() -> None:
    model = replace(Correctness.fit(*_searches(200, seed=3)), knots=(0.0,), levels=(0.7,))
    scores, _ = _searches(500, seed=4)
    x = torch.stack([rank(scores[name]) for name, rank in zip(model.evidence, model.ranks, strict=True)], 1)
    total = x @ torch.tensor(model.weights, dtype=torch.float64)
    assert torch.equal(model(scores).argsort(), total.argsort())
    flat = replace(model, n=10**9)(scores)
    assert float((flat - 0.7).abs().max()) < 1e-5
    assert torch.equal(flat.argsort(), total.argsort())


def test_with_few_mistakes_one_score_is_what_can_be_learned_from() -> None:
    scores, correct = _searches(200, seed=5, shift=9.0)
    correct[: MIN_PER_OUTCOME - 1] = False
    assert Correctness.fit(scores, correct).evidence == ("cosine",)
    assert Correctness.fit({"norm": scores["norm"], "votes": scores["votes"]}, correct).evidence == ("norm",)
    correct[MIN_PER_OUTCOME - 1] = False
    assert Correctness.fit(scores, correct).evidence == ("cosine", "votes", "norm")


@pytest.mark.parametrize("right", [True, False])
def test_where_all_answers_are_alike_there_is_laplace_s_doubt_and_an_order(right: bool) -> None:
    scores, _ = _searches(30, seed=0)
    model = Correctness.fit(scores, torch.full((30,), right))
    probability = model(scores)
    assert float(probability.mean()) == pytest.approx(31 / 32 if right else 1 / 32, abs=0.02)
    assert torch.equal(probability.argsort(), (-scores["cosine"]).argsort())
    one = {"cosine": scores["cosine"][:1]}
    alone = cross_validated(one, torch.tensor([right]))
    assert alone.tolist() == pytest.approx([2 / 3 if right else 1 / 3], abs=0.01)


def test_numbers_go_through_json_unchanged() -> None:
    model = Correctness.fit(*_searches(100, seed=6))
    assert TypeAdapter(Correctness).validate_json(json.dumps(asdict(model))) == model


def test_bins_equal_counting_and_are_closed_on_the_right() -> None:
    probability, correct = (
        torch.tensor([0.0, 0.1, 0.11, 1, 1], dtype=torch.float64),
        torch.tensor([0, 1, 1, 1, 0]).bool(),
    )
    bins = probability_bins(probability, correct)
    assert bins.count.tolist() == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert bins.expected_error == pytest.approx((2 * 0.45 + 0.89 + 2 * 0.5) / 5)
    assert math.isnan(probability_bins(probability[:0], correct[:0]).expected_error)


def test_what_is_refused() -> None:
    scores, correct = _searches(40, seed=7)
    with pytest.raises(ValueError, match="probability.*index 1"):
        probability_bins(torch.tensor([0.5, 1.5]), torch.tensor([True, True]))
    with pytest.raises(ValueError, match="votes.*shape"):
        Correctness.fit({**scores, "votes": scores["votes"][:3]}, correct)
    with pytest.raises(ValueError, match="cosine .*finite"):
        Correctness.fit({"cosine": scores["cosine"] * math.nan}, correct)
    model = Correctness.fit(scores, correct)
    with pytest.raises(ValueError, match="cosine, votes, norm; missing: votes"):
        model({"cosine": scores["cosine"], "norm": scores["norm"]})


def test_a_weight_that_rounding_takes_below_zero_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = {"a": torch.arange(20.0), "b": torch.arange(20.0).flip(0)}
    is_known = torch.arange(20) < 10
    found = optimize.OptimizeResult(x=np.array([1.0, -1e-19, 0.5]))
    monkeypatch.setattr(optimize, "minimize", lambda *args, **options: found)
    assert MonotoneRegression.fit(scores, is_known).weights == (1.0, 0.0)
