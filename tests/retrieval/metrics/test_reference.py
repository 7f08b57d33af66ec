"""Distances to known items against slow twins."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.covariance import ledoit_wolf

from lam.retrieval.metrics import reference as reference_module
from lam.retrieval.metrics.reference import (
    COMPONENTS,
    NEIGHBOUR,
    Gaussians,
    Reference,
    knn_distance,
    mahalanobis,
    relative_mahalanobis,
)
from lam.retrieval.metrics.registry import scores_of

M, N, P = 60, 9, 5


def features(seed: int = 0, width: int = P, count: int = M) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return torch.randn(count, width, generator=generator, dtype=torch.float64) + 2 * F.one_hot(labels, width)


LABELS = torch.arange(M) % 3


def quadratic(x: torch.Tensor, mean: torch.Tensor, covariance: torch.Tensor) -> float:
    return float((x - mean) @ torch.linalg.solve(covariance, x - mean))


def covariance(centered: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(ledoit_wolf(centered.numpy(), assume_centered=True)[0])


def test_mahalanobis_is_the_least_quadratic_form_and_its_relative_form_takes_off_that_of_all() -> None:
    known, new = features(), features(1, count=N)
    reference = Reference.of(known, LABELS)
    unit = F.normalize(known)
    means = [unit[label == LABELS].mean(0) for label in range(3)]
    within = covariance(torch.cat([unit[label == LABELS] - means[label] for label in range(3)]))
    total = covariance(unit - unit.mean(0))
    nearest = [min(quadratic(x, mean, within) for mean in means) for x in F.normalize(new)]
    together = [quadratic(x, unit.mean(0), total) for x in F.normalize(new)]
    torch.testing.assert_close(mahalanobis(new, reference), torch.tensor(nearest).double(), rtol=1e-5, atol=1e-5)
    expected = torch.tensor(nearest).double() - torch.tensor(together).double()
    torch.testing.assert_close(relative_mahalanobis(new, reference), expected, rtol=1e-5, atol=1e-5)
    distances = [math.log(d) + math.log(k) for d, k in zip(nearest, knn_distance(new, reference).tolist(), strict=True)]
    together = scores_of({"features": new, "reference": reference})["mahalanobis_knn"]
    torch.testing.assert_close(together, torch.tensor(distances).double(), rtol=1e-5, atol=1e-5)


def test_without_labels_all_items_are_of_one_class() -> None:
    known, new = features(), features(1, count=N)
    one_class = Reference.of(known, torch.zeros(M, dtype=torch.int64))
    torch.testing.assert_close(mahalanobis(new, Reference.of(known)), mahalanobis(new, one_class))
    torch.testing.assert_close(relative_mahalanobis(new, one_class), torch.zeros(N).double(), atol=1e-6, rtol=0)
    assert "relative_mahalanobis" not in scores_of({"features": new, "reference": Reference.of(known)})
    assert "relative_mahalanobis" in scores_of({"features": new, "reference": one_class})


def test_lengths_of_features_tell_nothing() -> None:
    known, new = features(), features(1, count=N)
    reference, scale = Reference.of(known, LABELS), torch.rand(N, 1, generator=torch.Generator().manual_seed(2)) + 0.1
    for distance in (mahalanobis, relative_mahalanobis, knn_distance):
        torch.testing.assert_close(distance(new * scale, reference), distance(new, reference))


def test_wide_features_are_reduced_and_the_same_every_time() -> None:
    width = COMPONENTS + 40
    known = features(width=width)
    reference = Reference.of(known, LABELS)
    assert reference.gaussians.basis.shape == (width, M - 1)  # M items about their mean
    new = features(1, width=width, count=N)
    got = mahalanobis(new, reference)
    assert got.isfinite().all()
    torch.testing.assert_close(got, mahalanobis(new, Reference.of(known, LABELS)), rtol=0, atol=0)
    far = -known.mean(0, keepdim=True)
    assert mahalanobis(far, reference) > got.median()


def test_a_component_that_is_rounding_moves_no_distance() -> None:
    known, new = features(width=COMPONENTS + 40), features(1, width=COMPONENTS + 40, count=N)
    nudged = known * (1 + 1e-7 * torch.randn(known.shape, generator=torch.Generator().manual_seed(2)))
    for distance in (mahalanobis, relative_mahalanobis):
        got, again = (distance(new, Reference.of(items, LABELS)) for items in (known, nudged))
        torch.testing.assert_close(again, got, rtol=1e-3, atol=1e-3)


def test_a_few_items_of_which_each_is_a_class_are_enough() -> None:
    known = features(count=2)
    reference = Reference.of(known, torch.arange(2))
    assert mahalanobis(known, reference).tolist() == pytest.approx([0, 0], abs=1e-3)
    assert mahalanobis(-known, reference).isfinite().all()
    assert Gaussians.of(F.normalize(known[:1])).means.shape == (1, P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_neighbour_is_the_one_of_a_full_sort(dtype: torch.dtype) -> None:
    known, new = features().to(dtype), features(1, count=N).to(dtype)
    cosines = (F.normalize(new).double() @ F.normalize(known).double().T).sort(1, descending=True).values
    got = knn_distance(new, Reference.of(known))
    assert got.dtype == dtype
    torch.testing.assert_close(got, (1 - cosines[:, NEIGHBOUR - 1]).to(dtype), rtol=1e-5, atol=1e-6)


def test_what_a_reference_refuses() -> None:
    with pytest.raises(ValueError, match="features of at least one item, got none"):
        Reference.of(torch.zeros(0, P))
    with pytest.raises(ValueError, match="reference features must be finite, got nan at index 1"):
        Reference.of(torch.tensor([[1.0], [math.nan]]))


@pytest.mark.parametrize("distance", [knn_distance, mahalanobis, relative_mahalanobis])
def test_a_reference_of_another_encoder_is_refused(distance: Callable[..., torch.Tensor]) -> None:
    reference = Reference.of(features(), LABELS)
    with pytest.raises(ValueError, match="has features of width 5, these have 8: it is of another encoder; give"):
        distance(features(1, width=8), reference)


def test_it_says_what_it_takes() -> None:
    reference = Reference.of(torch.ones(3, P))
    assert (len(reference), reference.unit.nbytes) == (3, 3 * P * 4)


def test_distances_that_several_scores_share_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compute = reference_module.unit_knn_distance
    monkeypatch.setattr(reference_module, "unit_knn_distance", lambda *a, **k: (calls.append(1), compute(*a, **k))[1])
    assert "mahalanobis_knn" in scores_of({"features": features(1, count=N), "reference": Reference.of(features())})
    assert len(calls) == 1
