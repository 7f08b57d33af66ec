"""An answer's probability: P(known) and P(right | known) together, and the expected cost of the answer."""

import json
from dataclasses import asdict

import pytest
import torch
from pydantic import TypeAdapter

from lam.retrieval.decisions.evidence import Evidence, Group, folds_of
from lam.retrieval.decisions.match_probability import DensityRatio, MatchProbability, OneClassModel
from lam.retrieval.decisions.probability import Correctness

CORRECT = torch.rand(300, generator=torch.Generator().manual_seed(0)) < 0.7


def _scores(n: int, seed: int, *, shift: float = 0.0) -> dict[str, torch.Tensor]:
    draws = torch.randn(2, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return {"kappa": draws[0] + shift, "knn": draws[1]}


def _evidence(scores: dict[str, torch.Tensor], right: torch.Tensor, strangers: dict[str, torch.Tensor]) -> Evidence:
    """Evidence of known queries and of strangers; no query is searched without its matches."""
    none = {name: values[:0] for name, values in scores.items()}
    queries = Group(scores, folds_of(torch.arange(len(right))))
    foreign = Group(strangers, folds_of(torch.arange(len(strangers["kappa"]))))
    return Evidence(queries, torch.ones(len(right)).bool(), right, Group(none), foreign)


def test_an_answer_is_the_product_of_both_and_goes_through_json_unchanged() -> None:
    scores, new = _scores(300, 0), _scores(50, 1)
    answer = MatchProbability.fit(_evidence(scores, CORRECT, _scores(0, 2)))
    assert answer.contrast is None
    assert torch.equal(answer(new), OneClassModel.fit(scores)(new) * Correctness.fit(scores, CORRECT)(new))
    assert answer.evidence == {"kappa", "knn"}
    assert TypeAdapter(MatchProbability).validate_json(json.dumps(asdict(answer))) == answer


def test_what_looks_like_strangers_is_no_more_known_than_they_are() -> None:
    scores, new = _scores(300, 0), _scores(50, 1, shift=2.0)
    strangers = _scores(200, 2, shift=2.0)
    answer = MatchProbability.fit(_evidence(scores, CORRECT, strangers), share=0.3)
    contrast = DensityRatio.from_strangers(scores, [strangers], share=0.3)
    assert answer.contrast == contrast
    assert torch.equal(answer.p_known(new), torch.minimum(OneClassModel.fit(scores)(new), contrast(new)))
    assert float(answer.p_known(new).mean()) < 0.5 < float(OneClassModel.fit(scores)(new).mean())
    assert TypeAdapter(MatchProbability).validate_json(json.dumps(asdict(answer))) == answer


def test_unlabelled_queries_teach_where_they_hold_both_kinds_and_strangers_where_they_do_not() -> None:
    scores, far = _scores(300, 0), _scores(200, 2, shift=6.0)
    evidence = _evidence(scores, CORRECT, far)
    mixed = {name: torch.cat([values, far[name]]) for name, values in _scores(200, 3).items()}
    taught = MatchProbability.fit(evidence, mixture=mixed).contrast
    assert taught == DensityRatio.from_mixture(scores, mixed)
    of_known_alone = MatchProbability.fit(evidence, share=0.2, mixture=_scores(200, 3)).contrast
    assert of_known_alone == DensityRatio.from_strangers(scores, [far], share=0.2)
    assert MatchProbability.fit(_evidence(scores, CORRECT, _scores(0, 2)), mixture=_scores(200, 3)).contrast is None


def test_answering_below_a_cost_is_the_cheapest_of_all_rules() -> None:
    """Against every threshold on the probability, for queries from the model's own distribution."""
    scores = _scores(300, 0)
    evidence = _evidence(scores, scores["knn"] < 1.0, _scores(200, 2, shift=2.0))
    answer = MatchProbability.fit(evidence, share=0.3)  # different scores determine right and known
    foreign = _scores(2000, 4, shift=2.0)
    queries = {name: torch.cat([values, foreign[name]]) for name, values in _scores(4000, 3).items()}
    known, right = answer.p_known(queries), answer.right(queries)
    wrong, stranger, abstain = 1.0, 5.0, 0.4
    expected = known * (1 - right) * wrong + (1 - known) * stranger
    cost = answer.cost(queries, wrong=wrong, stranger=stranger)
    assert torch.allclose(cost, expected)

    def paid(answered: torch.Tensor) -> float:
        return float(torch.where(answered, expected, abstain).mean())

    probability = known * right
    least_of_thresholds = min(paid(probability > bound) for bound in probability.unique())
    assert paid(cost < abstain) < least_of_thresholds
    with pytest.raises(ValueError, match="costs.*wrong=-1.0 and stranger=1.0"):
        answer.cost(queries, wrong=-1.0, stranger=1.0)
    with pytest.raises(ValueError, match="costs.*wrong=nan"):
        answer.cost(queries, wrong=float("nan"), stranger=1.0)
