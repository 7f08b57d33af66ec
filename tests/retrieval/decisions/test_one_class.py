"""P(known) is low for queries that are unusual in any direction, and high for usual queries."""

import numpy as np
import pytest
import torch
from sklearn.covariance import LedoitWolf

from lam.retrieval.decisions.match_probability import UNUSUAL, OneClassModel, is_evidence
from lam.retrieval.decisions.probability import RankOdds, folds
from lam.retrieval.metrics.scores import SCORES

_FAR = 10.0  # distances are positive


def _scores(n: int, seed: int) -> dict[str, torch.Tensor]:
    """Three scores that depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    common, own = torch.randn(n, generator=generator), torch.randn(3, n, generator=generator)
    return {"kappa": (common + own[0]).exp(), "norm": common + 0.1 * own[1], "knn": _FAR + own[2] - common}


def _extended(values: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Extended log odds of ranks, value by value."""
    rank = RankOdds.of(torch.from_numpy(values))
    spread = np.subtract(*np.percentile(values, [75, 25]))
    odds = []
    for value in new.tolist():
        above, below = max(value - rank.values[-1], 0), max(rank.values[0] - value, 0)
        inside = float(np.interp(value, rank.values, rank.odds))
        odds.append(inside + np.log1p(above / spread) - np.log1p(below / spread))
    return np.array(odds)


def test_p_known_is_that_of_a_slow_twin() -> None:
    scores, new = _scores(200, 0), {name: 2.5 * values for name, values in _scores(40, 1).items()}
    new["knn"] -= 1.5 * _FAR
    scores["mean_cosine"], new["mean_cosine"] = scores["knn"] + scores["norm"], new["knn"] + new["norm"]
    known = OneClassModel.fit(scores)
    old, later = ({name: values.double().numpy() for name, values in of.items()} for of in (scores, new))
    x, z = (np.stack([_extended(old[name], of[name]) for name in known.evidence], 1) for of in (old, later))

    def surprise(learned: dict[str, np.ndarray], of: dict[str, np.ndarray]) -> np.ndarray:
        shares = [1 / (1 + np.exp(-_extended(learned[name], of[name]))) for name in ("knn", "mean_cosine")]
        return -np.log(((1 - np.array(shares)) ** -0.5).mean(0) ** -2)

    distances, surprises = np.zeros(200), np.zeros(200)
    for fold, rest in ((fold.numpy(), rest.numpy()) for fold, rest in folds(200)):
        distances[fold] = np.sqrt(LedoitWolf().fit(x[rest]).mahalanobis(x[fold]))
        of_rest, of_fold = ({name: values[rows] for name, values in old.items()} for rows in (rest, fold))
        surprises[fold] = surprise(of_rest, of_fold)
    apart = np.sqrt(LedoitWolf().fit(x).mahalanobis(z))
    unusual = np.maximum(_extended(distances, distances), _extended(surprises, surprises))
    of_new = np.maximum(_extended(distances, apart), _extended(surprises, surprise(old, later)))
    p = np.array([(1 + (unusual >= one).sum()) / 201 * np.exp(min(0, unusual.max() - one)) for one in of_new])
    p = np.where(later["knn"] < old["knn"].min(), 1, np.minimum(1, p / UNUSUAL))
    np.testing.assert_allclose(known(new).numpy(), p)
    assert 0 < float(known(new).min()) < 1


def test_queries_like_those_calibrated_on_are_known() -> None:
    means = [float(OneClassModel.fit(_scores(300, seed))(_scores(300, 1000 + seed)).mean()) for seed in range(20)]
    assert sum(means) / len(means) > 1 - UNUSUAL / 2 - 0.003


def test_whichever_way_a_score_goes_it_is_unusual_and_so_is_what_breaks_their_relation() -> None:
    scores = _scores(500, 0)
    known = OneClassModel.fit(scores)
    middle = {name: values.median() for name, values in scores.items()}
    for name, value in (("norm", 30.0), ("norm", -30.0), ("knn", 40.0), ("kappa", 1e6)):
        assert float(known({**_row(middle), name: torch.tensor([value])})) < 0.2, (name, value)
    assert float(known(_row(middle))) == 1
    usual_each = {**_row(middle), "norm": torch.tensor([2.0]), "knn": torch.tensor([_FAR + 2.0])}
    assert float(known(usual_each)) < 0.2  # they move against each other


def test_what_is_nearer_to_a_known_item_than_every_calibration_query_is_known() -> None:
    scores = _scores(500, 0)
    scores["cosine"] = -0.5 - 0.01 * scores["norm"]
    training = {**_row({name: values.median() for name, values in scores.items()}), "kappa": torch.tensor([-1e6])}
    known = OneClassModel.fit(scores)
    assert float(known(training)) < 0.2
    for name, value in (("knn", 1.0), ("cosine", -0.9)):
        assert float(known({**training, name: torch.tensor([value])})) == 1
    with_copy = {**scores, "knn": torch.cat([torch.zeros(1), scores["knn"][1:]])}
    assert float(OneClassModel.fit(with_copy)({**training, "knn": torch.tensor([1e-12])})) == 1
    collapsed = {**scores, "cosine": 1e-7 * torch.rand(500) - 1 + 1e-6}  # all hits have nearly the cosine 1
    assert float(OneClassModel.fit(collapsed)({**training, "cosine": torch.tensor([-1 + 1.5e-6])})) < 0.2


def _row(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value[None] for name, value in values.items()}


def test_of_few_queries_what_is_far_is_unknown_and_what_is_constant_does_no_harm() -> None:
    scores = {**_scores(30, 0), "variance": torch.ones(30)}
    known = OneClassModel.fit(scores)
    assert float(known({**_scores(300, 1), "variance": torch.ones(300)}).mean()) > 0.95
    middle = _row({name: values.median() for name, values in scores.items()})
    of_knn = [float(known({**middle, "knn": torch.tensor([value])})) for value in (_FAR, 20.0, 110.0, 1e4, 1e8)]
    assert of_knn[0] == 1
    assert of_knn == sorted(of_knn, reverse=True)
    assert of_knn[-1] < 0.2
    one = {name: values[:1] for name, values in scores.items()}
    assert ((p := OneClassModel.fit(one)({name: 1e6 * values for name, values in scores.items()})) > 0).all()
    assert (p <= 1).all()


def test_what_labels_say_and_what_the_first_hit_decides_is_no_evidence() -> None:
    none = {"margin", "votes", "weighted_votes", "cosine", "cosine_spread"}
    assert {name for name in SCORES if not is_evidence(name)} == none
    scores = {**_scores(60, 0), "votes": torch.rand(60)}
    assert OneClassModel.fit(scores).evidence == ("kappa", "norm", "knn")
    with pytest.raises(ValueError, match=r"P\(known\).*kappa, norm, knn; missing: norm, knn"):
        OneClassModel.fit(_scores(60, 0))({"kappa": torch.rand(3)})
