"""p-values of new classes: exact, with each item as the last one, and on draws from known distributions."""

import math

import numpy as np
import pytest
import torch
from jaxtyping import Bool
from scipy.stats import binom
from torch import Tensor

from lam.retrieval.decisions.unseen_classes import UnseenClasses

LEVELS = (0.01, 0.05, 0.1, 0.25)
N = 120
NEAR = torch.tensor([0.3])


def classes(law: str, generator: np.random.Generator, n: int = N + 1) -> np.ndarray:
    """The classes of n draws."""
    if law == "Zipf":
        return generator.zipf(1.3, n)
    if law == "uniform, few items a class":
        return generator.integers(100, size=n)
    if law == "all known":
        return generator.integers(8, size=n)
    drawn: list[int] = []  # a Dirichlet process of concentration 20
    for i in range(n):
        is_new = generator.random() < 20 / (20 + i)
        drawn.append(max(drawn, default=0) + 1 if is_new else drawn[generator.integers(i)])
    return np.array(drawn)


def items(labels: np.ndarray, generator: np.random.Generator, *, spread: float = 0.25, dimensions: int = 8) -> Tensor:
    """A unit vector for each item, around the direction of its class."""
    _, position = np.unique(labels, return_inverse=True)
    centres = generator.normal(size=(position.max() + 1, dimensions))
    centres /= np.linalg.norm(centres, axis=1, keepdims=True)
    vectors = centres[position] + spread * generator.normal(size=(len(labels), dimensions))
    return torch.from_numpy(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


def last_of(labels: Tensor, cosines: Tensor, last: int) -> tuple[UnseenClasses, Tensor, Tensor]:
    """The gallery without one item, with the nearness of that item and the position of the nearest."""
    rest = torch.arange(len(labels)) != last
    among = cosines[rest][:, rest].clone().fill_diagonal_(-math.inf)
    near = cosines[last][rest]
    return UnseenClasses(labels[rest], among.amax(1)), near.amax()[None], near.argmax()[None]


@pytest.mark.parametrize("law", ["Zipf", "uniform, few items a class", "Dirichlet process", "all known"])
@pytest.mark.parametrize("seed", range(3))
def test_of_the_items_that_may_have_come_last_no_more_than_promised_are_below_a_level(law: str, seed: int) -> None:
    """The guarantee itself, without randomness: each of the items is equally likely to be the last."""
    generator = np.random.default_rng(seed)
    labels = torch.from_numpy(classes(law, generator, 40))
    cosines = (lambda v: v @ v.T)(items(labels.numpy(), generator))
    is_single = (labels[:, None] == labels).sum(1) == 1
    found = [last_of(labels, cosines, last) for last in range(40)]
    new = torch.cat([gallery.p_new(score, nearest) for gallery, score, nearest in found])
    known = torch.cat([gallery.p_in_gallery(score) for gallery, score, _ in found])
    for which, p in ((is_single, new), (~is_single, known)):
        size = int(which.sum())
        for level in [k / size + 1e-12 for k in range(1, size)]:
            assert int((p[which] <= level).sum()) <= level * size
    blind = torch.tensor([gallery.share_of_new for gallery, _, _ in found])
    assert all((blind[is_single] <= level).sum() <= level * 40 + 1e-9 for level in torch.linspace(0.01, 1, 100))


def rates(law: str, count: int, *, spread: float = 0.25) -> tuple[Bool[Tensor, " R"], dict[str, Tensor]]:
    """Whether each of R queries is of a new class, and its p-values, each query with a gallery of its own."""
    generator = np.random.default_rng(1)
    is_new, p = [], {"new": [], "known": []}
    for _ in range(count):
        drawn = classes(law, generator)
        vectors = items(drawn, generator, spread=spread)
        labels = torch.from_numpy(drawn)
        gallery, score, nearest = last_of(labels, vectors @ vectors.T, N)
        is_new.append(bool((labels[:N] != labels[N]).all()))
        p["new"].append(float(gallery.p_new(score, nearest)))
        p["known"].append(float(gallery.p_in_gallery(score)))
    return torch.tensor(is_new), {key: torch.tensor(values) for key, values in p.items()}


CASES = [(300, 0.25), *(pytest.param(2000, spread, marks=pytest.mark.slow) for spread in (0.05, 0.25, 3.0))]


@pytest.mark.parametrize(("count", "spread"), CASES)
@pytest.mark.parametrize("law", ["Zipf", "uniform, few items a class", "Dirichlet process", "all known"])
def test_the_promises_hold_over_galleries(law: str, count: int, spread: float) -> None:
    is_new, p = rates(law, count, spread=spread)
    for what, values in p.items():
        which = is_new if what == "new" else ~is_new
        for level in LEVELS:
            assert int((values[which] <= level).sum()) <= binom.ppf(0.99999, int(which.sum()), level)
    wrong = torch.where(is_new, p["new"] <= 0.1, p["known"] <= 0.1)
    assert int(wrong.sum()) <= binom.ppf(0.99999, count, 0.1)


def test_near_items_are_known_and_far_ones_are_strangers() -> None:
    is_new, p = rates("Dirichlet process", 200, spread=0.03)
    assert float((p["known"][is_new] <= 0.1).double().mean()) > 0.7
    assert float((p["new"][~is_new] <= 0.1).double().mean()) > 0.7


def test_p_values_by_a_double_loop() -> None:
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(25, size=40))
    left_out = torch.from_numpy(generator.integers(10, size=40) / 10)  # with ties
    scores, nearest = (
        torch.from_numpy(generator.integers(10, size=30) / 10),
        torch.from_numpy(generator.integers(40, size=30)),
    )
    gallery = UnseenClasses(labels, left_out)
    alone = [sum(int(other) == int(label) for other in labels) == 1 for label in labels]
    several = len(labels) - sum(alone)
    for q, score in enumerate(scores):
        near = sum(alone[i] and bool(left_out[i] >= score or i == nearest[q]) for i in range(40))
        far = sum(not alone[i] and bool(left_out[i] <= score) for i in range(40))
        second = any(alone[i] and bool(left_out[i] <= score) for i in range(40))
        assert gallery.p_new(scores, nearest)[q] == (1 + near) / (1 + sum(alone))
        assert gallery.p_in_gallery(scores)[q] == (1 + far + second) / (1 + several + second)


def test_the_share_of_single_items_bounds_the_share_of_new_classes() -> None:
    generator = np.random.default_rng(0)
    drawn = [classes("Zipf", generator) for _ in range(1500)]
    happened = np.mean([not (each[:N] == each[N]).any() for each in drawn])
    p = [UnseenClasses(torch.from_numpy(each[:N]), torch.zeros(N)).share_of_new for each in drawn]
    assert happened <= np.mean(p) + 4 * math.sqrt(0.25 / 1500)
    _, counts = np.unique(drawn[0][:N], return_counts=True)
    assert p[0] == (int((counts == 1).sum()) + 1) / (N + 1)


def test_a_gallery_without_single_items_says_nothing_of_known_classes() -> None:
    gallery = UnseenClasses(torch.tensor([0, 0, 1, 1]), torch.tensor([0.9, 0.9, 0.8, 0.8]))
    scores, nearest = torch.tensor([1.0]), torch.tensor([0])
    assert gallery.p_new(scores, nearest).tolist() == [1.0]
    single = UnseenClasses(torch.tensor([3]), torch.tensor([-math.inf]))
    assert single.p_new(scores, nearest).tolist() == [1.0]
    assert single.p_in_gallery(scores).tolist() == [1.0]
    assert gallery.p_in_gallery(torch.zeros(0)).tolist() == []
