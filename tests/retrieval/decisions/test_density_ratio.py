"""P(known) from strangers or from unlabelled queries, tested on known densities."""

import json
from dataclasses import asdict

import pytest
import torch
from pydantic import TypeAdapter
from torch.distributions import Normal

from lam.retrieval.decisions.match_probability import DensityRatio

APART = 2.0
KNOWN, STRANGER = Normal(0.0, 1.0), Normal(APART, 1.0)


def _scores(n: int, seed: int, share: float = 0.0) -> dict[str, torch.Tensor]:
    """κ of known queries and of a share of strangers, and a score without information."""
    generator = torch.Generator().manual_seed(seed)
    kappa, noise = torch.randn(2, n, generator=generator, dtype=torch.float64)
    return {"kappa": kappa + APART * (torch.arange(n) < round(share * n)), "knn": noise}


def _density(distribution: Normal, x: torch.Tensor) -> torch.Tensor:
    return distribution.log_prob(x).exp()


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_from_strangers_it_is_the_posterior_of_their_densities(share: float) -> None:
    contrast = DensityRatio.from_strangers(_scores(4000, 0), [_scores(1000, 1, 1.0)], share=share)
    new = {**_scores(500, 2, 0.5)}
    known, stranger = (_density(one, new["kappa"]) for one in (KNOWN, STRANGER))
    expected = (1 - share) * known / ((1 - share) * known + share * stranger)
    assert float((contrast(new) - expected).abs().mean()) < 0.02
    assert contrast.share == share
    assert contrast.interval is None
    assert contrast.holds_both


def test_from_a_mixture_it_is_that_of_its_share() -> None:
    share = 0.4
    contrast = DensityRatio.from_mixture(_scores(4000, 0), _scores(4000, 1, share))
    low, high = contrast.interval or (0.0, 0.0)
    assert low < share < high
    assert abs(contrast.share - share) < 0.05
    assert contrast.holds_both
    new = _scores(500, 2, share)
    known, stranger = (_density(one, new["kappa"]) for one in (KNOWN, STRANGER))
    expected = (1 - share) * known / ((1 - share) * known + share * stranger)
    assert float((contrast(new) - expected).abs().mean()) < 0.05


@pytest.mark.long
def test_of_known_queries_alone_or_of_strangers_alone_nothing_is_told() -> None:
    missed, shares = 0, list[float]()
    for seed in range(20):
        contrast = DensityRatio.from_mixture(_scores(300, seed), _scores(200, 100 + seed))
        assert contrast.interval is not None
        missed += contrast.interval[0] > 0
        shares.append(contrast.share)
    assert missed <= 2
    assert sum(shares) / len(shares) < 0.12
    far = {name: values + 30 * (name == "kappa") for name, values in _scores(200, 1).items()}
    foreign = DensityRatio.from_mixture(_scores(300, 0), far)
    assert foreign.interval is not None
    assert foreign.interval[1] == 1
    assert not foreign.holds_both


@pytest.mark.parametrize("is_mixture", [False, True])
def test_it_goes_through_json_unchanged(is_mixture: bool) -> None:
    known, others = _scores(100, 0), _scores(80, 1, 0.5)
    contrast = DensityRatio.from_mixture(known, others) if is_mixture else DensityRatio.from_strangers(known, [others])
    assert TypeAdapter(DensityRatio).validate_json(json.dumps(asdict(contrast))) == contrast
    assert ((contrast(known) >= 0) & (contrast(known) <= 1)).all()


def test_each_kind_of_strangers_weighs_as_much_as_the_next() -> None:
    """For any numbers of the two kinds, the regression weighs the scores that detect them equally."""
    known = _scores(2000, 0)
    near, far = _scores(50, 1, 1.0), {"kappa": _scores(4000, 2)["kappa"], "knn": _scores(4000, 2)["knn"] + APART}
    contrast = DensityRatio.from_strangers(known, [near, far])
    weights, spreads = contrast.regression.weights, contrast.regression.spreads
    of_kappa, of_knn = (weight / spread for weight, spread in zip(weights, spreads, strict=True))
    assert abs(of_kappa - of_knn) < 0.3 * of_knn
    empty = {name: values[:0] for name, values in near.items()}
    assert DensityRatio.from_strangers(known, [empty, far]) == DensityRatio.from_strangers(known, [far])


def test_only_scores_that_a_stranger_raises_are_looked_at_and_bad_arguments_are_refused() -> None:
    known, strangers = _scores(60, 0), _scores(60, 1, 1.0)
    more = {"norm": torch.rand(60), "variance": torch.rand(60)}
    contrast = DensityRatio.from_strangers({**known, **more}, [{**strangers, **more}])
    assert set(contrast.regression.evidence) == {"kappa", "knn"}
    with pytest.raises(ValueError, match=r"share.*without a match.*\(0, 1\).*1.0"):
        DensityRatio.from_strangers(known, [strangers], share=1.0)
    none = {name: values[:0] for name, values in strangers.items()}
    with pytest.raises(ValueError, match="unlabelled query, got none"):
        DensityRatio.from_mixture(known, none)


def test_of_a_mixture_what_labels_say_is_no_evidence() -> None:
    known, mixture, votes = _scores(60, 0), _scores(60, 1, 0.5), {"votes": torch.rand(60)}
    contrast = DensityRatio.from_mixture({**known, **votes}, {**mixture, **votes})
    assert set(contrast.regression.evidence) == {"kappa", "knn"}
