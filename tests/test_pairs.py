import pytest
import torch

from lam.pairs import Pairs


def test_by_label_counts_every_ordered_pair_once():
    labels = torch.tensor([3, 1, 3, 3, 2])
    pairs = Pairs.by_label(labels)
    for a in range(5):
        for b in range(5):
            assert bool(pairs.positive[a, b]) == (a != b and labels[a] == labels[b])
            assert bool(pairs.negative[a, b]) == (labels[a] != labels[b])
    assert (pairs.n_positives, pairs.n_negatives, pairs.size) == (6, 14, 5)


def test_by_distance_leaves_out_what_is_between():
    positions = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 20.0], [0.0, 25.0], [0.0, 25.5]])
    pairs = Pairs.by_distance(positions, 10.0, 25.0)
    assert pairs.positive.nonzero().tolist() == [[0, 1], [1, 0], [2, 3], [2, 4], [3, 2], [3, 4], [4, 2], [4, 3]]
    assert pairs.negative[0].tolist() == [False, False, False, False, True]
    assert not pairs.negative.diagonal().any()


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


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match=r"labels must be integers of shape \(N,\), got torch.float32"):
        Pairs.by_label(torch.zeros(3))
    with pytest.raises(ValueError, match="positions must be finite, got .*nan.* at index 1"):
        Pairs.by_distance(torch.tensor([[0.0], [float("nan")]]), 1.0)
    with pytest.raises(ValueError, match="0 < positive_within <= negative_beyond, got 5.0 and 2.0"):
        Pairs.by_distance(torch.zeros(2, 1), 5.0, 2.0)
    counts = {"n_positives": 2, "n_negatives": 4}
    zero, one, far = torch.tensor([0]), torch.tensor([1]), torch.tensor([9])
    with pytest.raises(ValueError, match="3 or 4 index tensors"):
        Pairs.from_tuples((zero, one), 3, **counts)
    with pytest.raises(ValueError, match=r"indices must lie in \[0, 3\), got 9"):
        Pairs.from_tuples((zero, one, far), 3, **counts)
    with pytest.raises(ValueError, match=r"its own pair, got \(0, itself\)"):
        Pairs.from_tuples((zero, zero, one), 3, **counts)
    with pytest.raises(ValueError, match="two integer indices, got .*int64 \\(1,\\) and torch.int64 \\(2,\\)"):
        Pairs.from_tuples((zero, one, torch.tensor([1, 2])), 3, **counts)
    with pytest.raises(ValueError, match="two integer indices, got .*float32"):
        Pairs.from_tuples((zero, one.float(), one), 3, **counts)
    with pytest.raises(ValueError, match="n_positives must be .* chose from, got 1 for 2 different ones chosen"):
        Pairs.from_tuples((zero, one, one + 1), 3, n_positives=1, n_negatives=4)
    repeated = torch.tensor([0, 0, 0])
    pairs = Pairs.from_tuples((repeated, repeated + 1, repeated + 2), 3, n_positives=2, n_negatives=4)
    assert pairs.positive[0, 1] == 1.5
