import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lam.pairs.pairs import Neighbours, Pairs, check_labels
from lam.pairs.relation import Relation
from lam.pairs.relevance import PlaceRelevance, relevance_of
from tests.helpers import unchecked


def test_by_label_counts_every_ordered_pair_once():
    labels = torch.tensor([3, 1, 3, 3, 2])
    pairs = Pairs.by_label(labels)
    for a in range(5):
        for b in range(5):
            assert bool(pairs.positive[a, b]) == (a != b and labels[a] == labels[b])
            assert bool(pairs.negative[a, b]) == (labels[a] != labels[b])
    assert (pairs.n_positives, pairs.n_negatives, pairs.size) == (6, 14, 5)
    assert pairs.n_positives == int(pairs.positive.sum())


def test_pairs_by_label_are_the_same_before_and_after_their_matrices_are_formed():
    for labels in ([3, 1, 3, 3, 2], [7], []):
        pairs = Pairs.by_label(torch.tensor(labels, dtype=torch.long))
        before = pairs.paired
        formed = replace(copy.deepcopy(pairs))
        assert "positive" not in vars(pairs)
        assert before.equal(pairs.positive.any(1) | pairs.negative.any(1))
        assert before.equal(pairs.paired)
        assert formed.negative.equal(pairs.negative)
    with pytest.raises(AttributeError, match="Pairs.*'positives'"):
        _ = pairs.positives


def test_matrices_that_are_first_read_in_a_transform_are_had_after_it():
    pairs = Pairs.by_label(torch.tensor([0, 1, 0]))
    gradient = torch.func.grad(lambda x: (x * pairs.positive).sum())(torch.ones(3, 3))
    assert gradient.equal(pairs.positive.float())


def test_by_distance_leaves_out_what_is_between():
    positions = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 20.0], [0.0, 25.0], [0.0, 25.5]])
    pairs = Pairs.by_distance(positions, 10.0, 25.0)
    assert pairs.positive.nonzero().tolist() == [[0, 1], [1, 0], [2, 3], [2, 4], [3, 2], [3, 4], [4, 2], [4, 3]]
    assert pairs.negative[0].tolist() == [False, False, False, False, True]
    assert not pairs.negative.diagonal().any()


class LiveMatrices(TorchDispatchMode):
    """The greatest number of results of one shape that exist at a time."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.results, self.most = shape, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if getattr(result, "shape", None) == self.shape:
            self.results.append(weakref.ref(result))
            self.most = max(self.most, sum(each() is not None for each in self.results))
        return result


def test_positions_of_many_coordinates_need_no_more_matrices():
    def most(width: int) -> int:
        with LiveMatrices(30, 30) as live:
            Pairs.by_distance(torch.randn(30, width), 1.0)
        return live.most

    assert most(3) == most(100) < 8


def gap(a: float, b: float) -> float:
    """The angle between two directions, by the arc cosine."""
    turn = math.radians(a - b)
    return math.degrees(math.acos(max(-1.0, min(1.0, math.cos(turn)))))


@pytest.mark.parametrize("within", [0.5, 45.0, 130.0, 180.0])
def test_near_places_seen_in_other_directions_are_neither(within):
    generator = torch.Generator().manual_seed(3)
    positions = torch.rand(40, 2, generator=generator) * 60
    angles = (torch.rand(40, generator=generator) * 1440 - 720).round()
    angles[::7] = torch.nan
    pairs = Pairs.by_distance(positions, 20.0, 30.0, angles=angles, angle_within=within)
    for a in range(40):
        for b in range(40):
            distance = math.dist(positions[a].tolist(), positions[b].tolist())
            known = not (angles[a].isnan() or angles[b].isnan())
            fits = not known or gap(angles[a].item(), angles[b].item()) <= within + 1e-6
            assert bool(pairs.positive[a, b]) == (a != b and distance <= 20 and fits)
            assert bool(pairs.negative[a, b]) == (distance > 30)
    assert pairs.n_positives == int(pairs.positive.sum()) > 0


def test_directions_differ_the_shorter_way_round():
    angles = torch.tensor([350.0, 5.0, 20.0, 185.0, -355.0])
    pairs = Pairs.by_distance(torch.zeros(5, 2), 1.0, angles=angles, angle_within=15.0)
    assert pairs.positive.nonzero().tolist() == [
        [0, 1],
        [0, 4],
        [1, 0],
        [1, 2],
        [1, 4],
        [2, 1],
        [2, 4],
        [4, 0],
        [4, 1],
        [4, 2],
    ]
    assert pairs.n_negatives == 0


@pytest.mark.parametrize("size", [0, 1])
def test_fewer_than_two_items_form_no_pair(size):
    assert Pairs.by_label(torch.zeros(size, dtype=torch.long)).n_positives == 0
    assert Pairs.by_distance(torch.zeros(size, 2), 1.0).n_negatives == 0


def test_tuples_of_a_real_miner_are_taken():
    from pytorch_metric_learning.miners import BatchEasyHardMiner, TripletMarginMiner

    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(12, 4, generator=generator))
    labels = torch.arange(12) % 3
    everything = Pairs.by_label(labels)
    for miner in (TripletMarginMiner(margin=0.2), BatchEasyHardMiner()):
        tuples = miner(embeddings, labels)
        pairs = Pairs.from_tuples(tuples, 12, n_positives=everything.n_positives, n_negatives=everything.n_negatives)
        assert pairs.positive.sum() == len(tuples[0])
        assert pairs.negative.sum() == len(tuples[-1])
        assert not (pairs.positive.bool() & ~everything.positive).any()
        assert (pairs.n_positives, pairs.n_negatives) == (36, 96)


@pytest.mark.usefixtures("as_in_production")
def test_names_for_labels_are_refused_with_advice_to_number_them():
    with pytest.raises(ValueError, match="'cat'.*index"):
        Pairs.by_label(["cat", "dog"])  # pyright: ignore[reportArgumentType]


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"labels.*\(N,\).*torch.float32"):
        Pairs.by_label(torch.zeros(3))
    with pytest.raises(ValueError, match="positions.*nan.*index 1"):
        Pairs.by_distance(torch.tensor([[0.0], [float("nan")]]), 1.0)
    with pytest.raises(ValueError, match="0 < positive_within <= negative_beyond, got 5.0 and 2.0"):
        Pairs.by_distance(torch.zeros(2, 1), 5.0, 2.0)
    with pytest.raises(ValueError, match=r"positions.*\(N, X\).*torch.float32 \(2, 0\)"):
        Pairs.by_distance(torch.zeros(2, 0), 1.0)
    for angles, within, message in (
        (torch.zeros(2), None, "angles.*angle_within.*together"),
        (None, 30.0, "angles.*angle_within.*together"),
        (torch.zeros(2), 0.0, "angle_within.*0.*180 degrees.*0.0"),
        (torch.zeros(2), 181.0, "angle_within.*0.*180 degrees.*181.0"),
        (torch.tensor([0.0, -math.inf]), 30.0, "angles.*infinity.*index 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Pairs.by_distance(torch.zeros(2, 1), 5.0, angles=angles, angle_within=within)
    with pytest.raises(ValueError, match=r"angles.*\(2,\).*torch.float32 \(3,\)"):
        unchecked(Pairs.by_distance.__func__)(Pairs, torch.zeros(2, 1), 5.0, angles=torch.zeros(3), angle_within=9.0)
    counts = {"n_positives": 2, "n_negatives": 4}
    zero, one, far = torch.tensor([0]), torch.tensor([1]), torch.tensor([9])
    with pytest.raises(ValueError, match="3 or 4 index tensors"):
        Pairs.from_tuples((zero, one), 3, **counts)
    for tuples, message in (
        (None, "miner.*NoneType"),
        (([0], [1], [2]), "a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            unchecked(Pairs.from_tuples.__func__)(Pairs, tuples, 3, **counts)
    with pytest.raises(ValueError, match=r"indices.*\[0, 3\).*9"):
        Pairs.from_tuples((zero, one, far), 3, **counts)
    with pytest.raises(ValueError, match=r"its own pair, got \(0, itself\)"):
        Pairs.from_tuples((zero, zero, one), 3, **counts)
    with pytest.raises(ValueError, match="two integer indices, got .*int64 \\(1,\\) and torch.int64 \\(2,\\)"):
        Pairs.from_tuples((zero, one, torch.tensor([1, 2])), 3, **counts)
    with pytest.raises(ValueError, match="two integer indices, got .*float32"):
        Pairs.from_tuples((zero, one.float(), one), 3, **counts)
    with pytest.raises(ValueError, match="n_positives.*1 for 2"):
        Pairs.from_tuples((zero, one, one + 1), 3, n_positives=1, n_negatives=4)
    repeated = torch.tensor([0, 0, 0])
    pairs = Pairs.from_tuples((repeated, repeated + 1, repeated + 2), 3, n_positives=2, n_negatives=4)
    assert pairs.positive[0, 1] == 1.5


def as_matrix(pairs: torch.Tensor, size: int) -> torch.Tensor:
    matrix = torch.zeros(size, size, dtype=torch.bool)
    matrix[pairs[:, 0], pairs[:, 1]] = True
    return matrix | matrix.T


@pytest.mark.parametrize("beyond", [None, 30.0])
@pytest.mark.parametrize("within", [None, 45.0])
def test_neighbours_of_a_data_set_are_the_pairs_of_one_batch(beyond, within):
    generator = torch.Generator().manual_seed(5)
    targets = torch.rand(60, 3, generator=generator, dtype=torch.float64) * 100
    targets[:, 2] *= 3.6
    targets[::9, 2] = torch.nan if within is not None else 0.0
    relation = Relation("dataset", 20.0, beyond, within)
    pairs, neighbours = relation.pairs(targets), relation.neighbours(targets)
    assert torch.equal(as_matrix(neighbours.positive, 60), pairs.positive)
    near = as_matrix(torch.cat([neighbours.positive, neighbours.neither]), 60)
    assert torch.equal(~near & ~torch.eye(60, dtype=torch.bool), pairs.negative)
    assert torch.equal(relation.positions(targets), targets if within is None else targets[:, :2])


@pytest.mark.parametrize("within", [None, 45.0])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_whole_metres_and_degrees_may_be_integers(dtype: torch.dtype, within: float | None):
    targets = torch.randint(0, 60, (40, 3), generator=torch.Generator().manual_seed(0)).to(dtype)
    relation = Relation("dataset", 20.0, 30.0, within)
    one, other = relation.pairs(targets), relation.pairs(targets.double())
    assert torch.equal(one.positive, other.positive)
    assert torch.equal(one.negative, other.negative)
    assert torch.equal(relation.neighbours(targets).positive, relation.neighbours(targets.double()).positive)
    relevance = relevance_of(relation, targets)
    assert torch.equal(relevance.count(), relevance_of(relation, targets.double()).count())


@pytest.mark.parametrize(("within", "beyond"), [(0.5, 1.3), (1.3, 2.5), (2.5, 3.5), (2.5, 2.5)])
def test_places_exactly_at_a_distance_count_alike_everywhere(within: float, beyond: float):
    """Decimetres are not binary fractions: by rounding, points 0.3 and 0.4 apart along the axes may miss 0.5."""
    positions = torch.randint(0, 60, (300, 2), generator=torch.Generator().manual_seed(0)).double() / 10
    squares = (positions[:, None] - positions[None]).square().sum(-1)
    exact = (10 * positions).round()
    for distance in (within, beyond):
        on_it = (exact[:, None] - exact[None]).square().sum(-1) == round((10 * distance) ** 2)
        assert (squares[on_it] > distance**2).any(), "the grid must try the rule"
    pairs, near = Pairs.by_distance(positions, within, beyond), Neighbours.by_distance(positions, within, beyond)
    assert torch.equal(pairs.positive, (squares <= within**2).fill_diagonal_(False))
    assert torch.equal(pairs.negative, squares > beyond**2)
    assert torch.equal(as_matrix(near.positive, 300), pairs.positive)
    known = as_matrix(torch.cat([near.positive, near.neither]), 300).fill_diagonal_(True)
    assert torch.equal(~known, pairs.negative)
    relevant = PlaceRelevance(positions, within).of_rows(torch.arange(300)).fill_diagonal_(False)
    assert torch.equal(relevant, pairs.positive)


def test_a_relation_with_angles_is_for_places():
    with pytest.raises(ValueError, match="angle_within.*positive_within.*places"):
        Relation(angle_within=30.0)
    with pytest.raises(ValueError, match="angle_within.*0.*180 degrees.*nan"):
        Relation(positive_within=10.0, angle_within=math.nan)


def test_labels_that_mean_none_are_refused():
    with pytest.raises(ValueError, match="labels.*-1, 2"):
        check_labels(torch.tensor([0, 0, 1, 1, -1, -1]))
