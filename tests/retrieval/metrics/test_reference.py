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
    EXPONENTS,
    NEIGHBOUR,
    Gaussians,
    Reference,
    global_mahalanobis,
    knn_distance,
    layer_change,
    mahalanobis,
    radial_mahalanobis,
    relative_mahalanobis,
)
from lam.retrieval.metrics.scores import scores_of

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


def test_the_global_distance_is_the_quadratic_form_of_all_items_whatever_their_labels() -> None:
    known, new = features(), features(1, count=N)
    unit = F.normalize(known)
    expected = [quadratic(x, unit.mean(0), covariance(unit - unit.mean(0))) for x in F.normalize(new)]
    got = global_mahalanobis(new, Reference.of(known))
    torch.testing.assert_close(got, torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(global_mahalanobis(new, Reference.of(known, LABELS)), got)
    assert torch.equal(global_mahalanobis(known[:1], Reference.of(known[:1])), torch.zeros(1).double())  # of itself


def of_varied_length(power: float, seed: int = 0, count: int = M) -> torch.Tensor:
    """Classes with Gaussian noise, whose lengths are raised to a power: below 1, they vary less."""
    x = features(seed, count=count)
    return x * x.norm(dim=1, keepdim=True) ** (power - 1)


def of_exponent(x: torch.Tensor, exponent: float) -> torch.Tensor:
    return torch.stack([row / row.norm() ** exponent for row in x])


def misfit(known: torch.Tensor, exponent: float) -> float:
    """|log| of variance over squared mean of held-out squared distances, relative to 2/P for Gaussian data."""
    z = of_exponent(known, exponent)
    is_first = torch.randperm(M, generator=torch.Generator().manual_seed(0)) < M // 2
    found = []
    for half in (is_first, ~is_first):
        means = [z[half & (label == LABELS)].mean(0) for label in range(3)]
        within = covariance(torch.cat([z[half & (label == LABELS)] - means[label] for label in range(3)]))
        far = torch.tensor([min(quadratic(x, mean, within) for mean in means) for x in z[~half]])
        found.append(float(far.var(correction=0) / far.mean() ** 2))
    return abs(math.log(sum(found) / 2 / (2 / P)))


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 4.0])
def test_the_radial_distance_has_the_exponent_whose_held_out_distances_vary_as_gaussian_ones_do(power: float) -> None:
    known, new = of_varied_length(power), of_varied_length(power, 1, N)
    reference = Reference.of(known, LABELS)
    if power:
        misfits = {exponent: misfit(known, exponent) for exponent in EXPONENTS}
        assert reference.exponent == min(misfits, key=lambda one: misfits[one])
    z = of_exponent(known, reference.exponent)
    means = [z[label == LABELS].mean(0) for label in range(3)]
    within = covariance(torch.cat([z[label == LABELS] - means[label] for label in range(3)]))
    nearest = [min(quadratic(x, mean, within) for mean in means) for x in of_exponent(new, reference.exponent)]
    got = radial_mahalanobis(new, reference)
    torch.testing.assert_close(got, torch.tensor(nearest).double(), rtol=1e-4, atol=1e-5)


def test_lengths_that_are_noise_are_taken_off_and_gaussian_ones_kept() -> None:
    generator = torch.Generator().manual_seed(3)
    gaussian = torch.randn(600, 20, generator=generator, dtype=torch.float64)
    noise = torch.randn(600, 1, generator=generator, dtype=torch.float64).mul(1.5).exp()
    assert Reference.of(gaussian).exponent == 0
    assert Reference.of((gaussian + 4) * noise).exponent == 1
    new = torch.cat([gaussian[:1], 3 * gaussian[:1]])
    near, far = radial_mahalanobis(new, Reference.of(gaussian))
    assert far > 5 * near


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_few_items_and_lengths_that_say_nothing_leave_unit_vectors(count: int) -> None:
    known, new = features(count=count), features(1, count=N)
    few = Reference.of(known, torch.arange(count))
    assert count > 3 or few.exponent == 1
    assert radial_mahalanobis(new, few).isfinite().all()
    for same in (Reference.of(F.normalize(features()), LABELS), Reference(F.normalize(features()), LABELS)):
        assert same.exponent == 1
        assert torch.equal(radial_mahalanobis(new, same), mahalanobis(new, same))
    zero = Reference.of(torch.zeros(M, P), LABELS)
    assert radial_mahalanobis(torch.zeros(1, P), zero).tolist() == [0]


@pytest.mark.parametrize("k", [1, 3, M + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_layer_change_is_what_neighbours_by_feature_lack_in_cosine(k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    layer = torch.randn(P, 4, generator=generator, dtype=torch.float64)
    known, new = features(), features(1, count=N)
    reference = Reference.of(known.to(dtype), embeddings=(known @ layer).to(dtype))
    expected = []
    for x in new:
        before = sorted(range(M), key=lambda j, x=x: -float(F.cosine_similarity(x, known[j], dim=0)))[:k]
        cosines = [float(F.cosine_similarity(x @ layer, known[j] @ layer, dim=0)) for j in range(M)]
        best = sorted(cosines, reverse=True)[:k]
        expected.append(sum(best) / len(best) - sum(cosines[j] for j in before) / len(before))
    got = layer_change(new.to(dtype), F.normalize(new @ layer).to(dtype), reference, k=k)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), torch.tensor(expected).double(), rtol=0, atol=1e-5)
    assert (got >= 0).all()
    assert k <= M or not got.any()  # all are neighbours


def test_a_last_layer_that_changes_nothing_is_no_evidence() -> None:
    known = features()
    assert Reference.of(known, embeddings=2 * known).embeddings is None
    assert Reference.of(known, embeddings=-known).embeddings is not None


def test_what_the_layer_change_refuses() -> None:
    known, new = features(), features(1, count=N)
    with pytest.raises(ValueError, match="reference.*no embeddings.*Reference.of"):
        layer_change(new, new, Reference.of(known))
    with pytest.raises(ValueError, match="dimension 3.*5"):
        layer_change(new, new, Reference.of(known, embeddings=known[:, :3]))
    with pytest.raises(ValueError, match="^k .*1.*0"):
        layer_change(new, new, Reference.of(known, embeddings=-known), k=0)


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
    for distance in (mahalanobis, relative_mahalanobis, global_mahalanobis, knn_distance):
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


def test_long_features_of_half_precision_become_unit_vectors_and_zeros_stay() -> None:
    long = torch.full((2, 2048), 2000.0)
    long[0] = 0
    assert torch.equal(Reference.of(long.half()).unit, Reference.of(long).unit)


def test_what_a_reference_refuses() -> None:
    with pytest.raises(ValueError, match="features.*one item.*none"):
        Reference.of(torch.zeros(0, P))
    with pytest.raises(ValueError, match="reference features.*nan at index 1"):
        Reference.of(torch.tensor([[1.0], [math.nan]]))
    with pytest.raises(ValueError, match="embeddings.*row for each.*2"):
        Reference.of(torch.ones(3, P), embeddings=torch.ones(2, P))
    with pytest.raises(ValueError, match="reference embeddings.*inf at index 1"):
        Reference.of(torch.ones(2, P), embeddings=torch.tensor([[1.0], [math.inf]]))


@pytest.mark.parametrize(
    "distance", [knn_distance, mahalanobis, relative_mahalanobis, global_mahalanobis, radial_mahalanobis]
)
def test_a_reference_of_another_encoder_is_refused(distance: Callable[..., torch.Tensor]) -> None:
    reference = Reference.of(features(), LABELS)
    with pytest.raises(ValueError, match="width 5.*8: .*reference"):
        distance(features(1, width=8), reference)


def test_it_says_what_it_takes() -> None:
    reference = Reference.of(torch.ones(3, P), torch.arange(3), embeddings=torch.eye(3, 2))
    assert (len(reference), reference.nbytes) == (3, 3 * (P * 4 + 8 + 4 + 2 * 4))


def test_distances_that_several_scores_share_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compute = reference_module.unit_knn_distance
    monkeypatch.setattr(reference_module, "unit_knn_distance", lambda *a, **k: (calls.append(1), compute(*a, **k))[1])
    assert "mahalanobis_knn" in scores_of({"features": features(1, count=N), "reference": Reference.of(features())})
    assert len(calls) == 1
