"""Altered images, and the score that an encoder recommends because of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lam
from lam.methods import LaplacePosthoc
from lam.retrieval.metrics.registry import METRICS
from lam.tuning.alterations import Recommendation, alterations
from tests.methods.small_data import images, network, training


def fitted(**options: Any) -> Any:
    return LaplacePosthoc(batch_size=16, **options).train(network(), images(), training()).encoder


def batches(seed: int = 1) -> list[Any]:
    return list(torch.utils.data.DataLoader(images(seed=seed), batch_size=20))


def test_altered_images_have_the_shape_and_the_values_of_the_images():
    known = torch.rand(5, 2, 9, 11, generator=torch.Generator().manual_seed(0))
    made = alterations(known)
    assert set(made) == {"inverted", "permuted", "blurred"}
    low, high = known.amin((1, 2, 3), keepdim=True), known.amax((1, 2, 3), keepdim=True)
    torch.testing.assert_close(made["inverted"] + known, (low + high).expand_as(known))
    torch.testing.assert_close(made["permuted"].flatten(2).sort(2)[0], known.flatten(2).sort(2)[0])
    assert made["blurred"].var((2, 3)).max() < known.var((2, 3)).min()
    for kind, altered in made.items():
        assert altered.shape == known.shape
        torch.testing.assert_close(alterations(known[2:3])[kind], altered[2:3])  # whatever the batch
    assert not torch.equal(alterations(known, seed=1)["permuted"], made["permuted"])


def test_the_score_of_the_highest_mean_is_recommended():
    recommendation = Recommendation({"kappa": {"a": 0.9, "b": 0.5}, "variance": {"a": 0.8, "b": 0.7}})
    assert recommendation.score == "variance"
    assert recommendation.metrics() == pytest.approx({"kappa_on_altered": 0.7, "variance_on_altered": 0.75})
    assert recommendation.metrics().keys() <= METRICS.keys()


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_a_recommendation_is_that_of_the_auroc_of_each_score_and_is_saved(structure: str, tmp_path: Path):
    encoder = fitted(structure=structure)
    assert encoder.recommendation is None
    recommendation = encoder.recommend(batches())
    assert recommendation == encoder.recommendation
    known = torch.cat([inputs for inputs, _ in batches()])
    inside, outside = encoder.embed(known), encoder.embed(alterations(known)["inverted"])
    expected = lam.retrieval.auroc(inside.variance, outside.variance)
    assert recommendation.auroc["variance"]["inverted"] == pytest.approx(expected, abs=1e-3)
    expected = lam.retrieval.auroc(-inside.kappa, -outside.kappa)
    assert recommendation.auroc["kappa"]["inverted"] == pytest.approx(expected, abs=1e-3)
    encoder.save(tmp_path)
    loaded: Any = lam.load(tmp_path)
    assert loaded.recommendation == recommendation
    assert recommendation.metrics().items() <= loaded.diagnostics(loaded.features(known)).items()
    loaded.tune([], by="marginal_likelihood")
    assert loaded.recommendation is None


def test_a_method_recommends_where_inputs_are_images_alone():
    encoder, method = fitted(), LaplacePosthoc(tune="marginal_likelihood")
    method.tune_on(encoder, batches())
    assert encoder.recommendation is not None
    features = torch.randn(12, 6), torch.arange(12) % 3
    flat = lam.fit(nn.Sequential(nn.Linear(6, 3)), [features], margin=1.0, progress=False)
    method.tune_on(flat, [features])
    assert flat.recommendation is None
    with pytest.raises(ValueError, match="images.*altered"):
        flat.recommend([features])
    with pytest.raises(ValueError, match="no inputs"):
        encoder.recommend([])
