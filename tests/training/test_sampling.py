"""The items of a batch and the pairs of the loss: both follow from the seed, also after a checkpoint."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytorch_metric_learning.miners import BatchEasyHardMiner, TripletMarginMiner
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor, nn

from lam import losses
from lam.pairs import Mining, Pairs, Relation
from lam.training import Minibatch, Step
from lam.training.batches import Batches
from tests.training.test_training import Images, Interrupted, fit, network, same

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = [1, 2, 3, 5, 8, 21]  # of the classes: 40 items
UNEVEN = torch.arange(6).repeat_interleave(torch.tensor(SIZES))[torch.randperm(40, generator=torch.Generator())]


class Uneven(Images):
    """Images of classes of 1 to 21 items."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = UNEVEN


def batches(epoch: int = 0, seed: int = 0, **options: Any) -> Batches:
    return Batches(Uneven(), **{"batch_size": 12, "per_class": 3, "seed": seed, "epoch": epoch} | options)


def listed(made: Batches) -> list[list[int]]:
    return [made.indices(batch) for batch in range(len(made))]


def test_a_batch_holds_as_many_items_of_each_class_as_there_are_and_none_twice() -> None:
    epoch_batches = batches()
    assert len(epoch_batches) == 4  # as without `per_class`: the last one is full, too
    for indices in listed(epoch_batches):
        assert len(set(indices)) == len(indices) == 12
        counts = Counter(UNEVEN[indices].tolist())
        assert 0 not in counts  # the class of one item
        *whole, last = counts  # in the order in which they were drawn
        assert all(counts[label] == min(3, SIZES[label]) for label in whole)
        assert 1 <= counts[last] <= min(3, SIZES[last])


def test_where_most_classes_have_one_item_every_positive_pair_is_of_two_items() -> None:
    labels = torch.cat([torch.arange(30), torch.arange(30, 39).repeat_interleave(4)])
    data = Images(size=66)
    data.labels = labels
    epoch_batches = Batches(data, batch_size=16, per_class=4, seed=0, epoch=0)
    for indices in listed(epoch_batches):
        assert len(set(indices)) == 16
        assert Pairs.by_label(labels[indices]).n_positives == 4 * 4 * 3


def test_batches_are_smaller_only_where_all_classes_do_not_fill_them() -> None:
    data = Images(size=10)
    data.labels = torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 4, 5])
    epoch_batches = Batches(data, batch_size=12, per_class=4, seed=0, epoch=0)
    assert [sorted(indices) for indices in listed(epoch_batches)] == [[0, 1, 2, 3, 4, 5, 6]]
    epoch_batches = Batches(data, batch_size=6, per_class=2, seed=0, epoch=0)
    assert {len(set(indices)) for indices in listed(epoch_batches)} == {6}


def test_of_large_classes_batches_are_as_those_of_pytorch_metric_learning() -> None:
    state = np.random.get_state()  # noqa: NPY002
    labels = Images().labels
    theirs = torch.tensor([int(i) for i in MPerClassSampler(labels, 3, batch_size=12, length_before_new_iter=48)])
    np.random.set_state(state)  # noqa: NPY002
    mine = listed(Batches(Images(), batch_size=12, per_class=3, seed=0, epoch=0))
    for indices in (*theirs.split(12), *map(torch.tensor, mine)):
        assert len(indices.unique()) == 12
        assert torch.bincount(labels[indices]).tolist() == [3] * 4


def test_classes_and_items_are_drawn_evenly() -> None:
    data = Images(size=43)
    data.labels = torch.arange(6).repeat_interleave(torch.tensor([1, 4, 4, 5, 8, 21]))
    epochs = [Batches(data, batch_size=12, per_class=3, seed=0, epoch=epoch) for epoch in range(300)]
    drawn = torch.tensor([i for one in epochs for indices in listed(one) for i in indices])
    per_class = torch.bincount(data.labels[drawn]) / len(drawn)
    torch.testing.assert_close(per_class, torch.tensor([0, *[1 / 5] * 5]), atol=0.02, rtol=0)
    per_item = torch.bincount(drawn, minlength=43)[data.labels == 5] / len(drawn)
    torch.testing.assert_close(per_item, torch.full((21,), 1 / 5 / 21), atol=0.003, rtol=0)


def test_seed_epoch_and_place_decide_a_batch() -> None:
    first = listed(batches())
    assert listed(batches()) == first
    assert batches().indices(3) == first[3]
    assert listed(batches(epoch=1)) != first
    assert listed(batches(seed=1)) != first
    assert len({tuple(sorted(indices)) for indices in first}) == len(first)


def test_the_targets_of_torchvision_are_labels() -> None:
    targets: Any = Uneven()
    targets.targets = targets.labels.tolist()
    del targets.labels
    assert listed(Batches(targets, batch_size=12, per_class=3, seed=0, epoch=0)) == listed(batches())
    with pytest.raises(ValueError, match="= 8 classes, .* got 5:"):
        fit(network(), targets, per_class=2)


def test_without_it_batches_pass_through_the_data() -> None:
    indices = listed(batches(per_class=None))
    assert [len(batch) for batch in indices] == [12, 12, 12, 4]
    assert sorted(i for batch in indices for i in batch) == list(range(40))


MINED = {"miner": "semihard", "max_pairs": 20, "per_class": 4}


def test_a_resumed_run_of_mined_balanced_batches_ends_where_an_uninterrupted_one_ends(tmp_path: Path) -> None:
    options = {"checkpoint_every": 1, "epochs": 3, **MINED}
    whole, stopped, resumed = network(), network(), network(seed=5)
    history = fit(whole, Uneven(), **options)
    with pytest.raises(KeyboardInterrupt):
        fit(stopped, Uneven(), folder=tmp_path, step=Interrupted(5), **options)
    again = fit(resumed, Uneven(), folder=tmp_path, num_workers=1, **options)
    assert same(whole, resumed)
    assert again.losses == history.losses


@pytest.mark.parametrize("miner", ["easy", "semihard", "hard", TripletMarginMiner(margin=0.2), BatchEasyHardMiner()])
def test_the_step_takes_the_pairs_that_the_miner_chose(miner: Any) -> None:
    class Watching(Step):
        def backward(
            self, network: nn.Module, loss: Any, batch: Minibatch, backward: Callable[[Tensor], None]
        ) -> Tensor:
            assert batch.targets is not None
            network.eval()
            value = super().backward(network, loss, batch, backward)
            embeddings = network(batch.inputs)
            expected = Mining(miner).choose(
                embeddings, Pairs.by_label(batch.targets), batch.targets, margin=0.7, generator=torch.Generator()
            )
            torch.testing.assert_close(value, loss(embeddings, expected).detach())
            return value

    fit(network(), step=Watching(), miner=miner, epochs=1)


def test_all_pairs_are_the_default_and_mining_changes_the_weights() -> None:
    plain, named, semihard, drawn = (network() for _ in range(4))
    fit(plain)
    fit(named, miner="all")
    fit(semihard, miner="semihard")
    fit(drawn, max_pairs=5)
    assert same(plain, named)
    assert not same(plain, semihard)
    assert not same(plain, drawn)


def test_places_are_mined_by_name() -> None:
    class Places:
        images, positions = Images().images, torch.randn(40, 2, generator=torch.Generator().manual_seed(0))

        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.images[index], self.positions[index]

    near = Relation(positive_within=0.5, negative_beyond=1.0)

    for name in ("contrastive", "squared", "pml", "log_posterior"):
        loss = losses.build(name, margin=0.7)
        assert fit(network(), Places(), loss=loss, relation=near, miner="semihard", epochs=3).losses[-1] >= 0
    with pytest.raises(ValueError, match="needs labels.*choose"):
        fit(network(), Places(), relation=near, miner=TripletMarginMiner())
    with pytest.raises(ValueError, match="per_class.*data set with labels"):
        fit(network(), Places(), relation=near, per_class=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"miner": "hard"}, "miner 'semihard', now 'hard'"),
        ({"miner": TripletMarginMiner(margin=0.3)}, "miner 'semihard', now {'class': 'TripletMarginMiner'.*'0.3'"),
        ({"max_pairs": None}, "max_pairs 20, now None"),
        ({"per_class": 8}, "per_class 4, now 8"),
        ({"per_class": None}, "per_class 4, now None"),
    ],
)
def test_a_checkpoint_of_other_mining_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    fit(network(), folder=tmp_path, epochs=1, **MINED)
    with pytest.raises(ValueError, match=f"has other settings: {message}"):
        fit(network(), folder=tmp_path, epochs=1, **MINED | options)


def test_labels_that_do_not_fit_the_data_are_refused() -> None:
    data = Images()
    data.labels = data.labels[:30]
    with pytest.raises(ValueError, match="dataset has 40 items, but 30 labels"):
        fit(network(), data, relation=Relation(positive_within=1.0), per_class=4)


def test_data_without_two_items_of_a_class_are_refused() -> None:
    data: Any = Images()
    data.groups = torch.arange(40)  # of places: no two are close together
    with pytest.raises(ValueError, match="groups of places.*2 items.*0"):
        fit(network(), data, per_class=4)
    data.groups[1] = data.groups[3] = 0
    with pytest.raises(ValueError, match="= 4 classes, .* got 1:"):
        fit(network(), data, per_class=4)
