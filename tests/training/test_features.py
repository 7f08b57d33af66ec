"""Training on features of a frozen part: the same network, with each input read and computed once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lam import losses
from lam.datasets import TensorImages
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.models import EmbeddingNetwork, frozen
from lam.models.frozen import Frozen, frozen_in, with_head
from lam.training import Training, train
from lam.training.batches import FeatureItems, with_features


class Pixels(Frozen):
    """A fixed projection of all pixels."""

    def __init__(self) -> None:
        projection = nn.Linear(3 * 16, 6)
        nn.init.normal_(projection.weight, generator=torch.Generator().manual_seed(0))
        nn.init.zeros_(projection.bias)
        super().__init__(projection, 6)
        self.n_computed = 0

    def keys(self, inputs: Tensor) -> list[bytes]:
        return [row.numpy().tobytes() for row in inputs]

    def compute(self, inputs: Tensor) -> Tensor:
        self.n_computed += len(inputs)
        return self._frozen[0](inputs.flatten(1))


class Read(TensorImages):
    """Images that count how often they are read."""

    n_read = 0

    def __getitems__(self, indices: list[int]) -> Any:
        type(self).n_read += len(indices)
        return super().__getitems__(indices)


def network() -> EmbeddingNetwork:
    torch.manual_seed(1)
    return with_head(Pixels(), name="pixels", dimension=3, head="train", dropout=0.5, sha256=None)


def images() -> Read:
    pixels = torch.rand(40, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    return Read(pixels, torch.arange(40) % 4)


def trained(dataset: Any) -> EmbeddingNetwork:
    result = network()
    options: Any = {"epochs": 3, "batch_size": 16, "accelerator": "cpu", "progress": False}
    train(result, dataset, Training(loss=losses.build(margin=0.7), **options))
    return result


def test_each_item_is_read_and_computed_once_and_the_network_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Read.n_read = 0
    once = trained(images())
    assert Read.n_read == 40
    assert frozen_in(once).n_computed == 40  # type: ignore[union-attr]
    monkeypatch.setattr(frozen, "KEPT_BYTES", 0)
    monkeypatch.setattr("lam.training.batches.KEPT_BYTES", 0)
    every_time = trained(images())
    assert Read.n_read == 40 + 3 * 40
    assert frozen_in(every_time).n_computed == 3 * 40  # type: ignore[union-attr]
    for one, other in zip(once.parameters(), every_time.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_features_stand_in_place_of_items_and_all_else_is_as_it_was() -> None:
    dataset, own = images(), network()
    items = with_features(own, dataset)
    assert isinstance(items, FeatureItems)
    assert (len(items), items.classes) == (40, dataset.classes)
    assert torch.equal(items.labels, dataset.labels)
    features, label = items[5]
    torch.testing.assert_close(features, own.features[0](dataset.batch([5]))[0])
    assert int(label) == 1
    assert with_features(own, dataset).features is items.features
    torch.testing.assert_close(own.eval()(features[None]), own(dataset.batch([5])))


def test_what_is_read_differently_each_time_or_has_no_frozen_part_stays_as_it_is() -> None:
    dataset = images()
    augmented = Augmented(dataset, AugmentationOptions(flip=0.5))
    assert with_features(network(), augmented) is augmented
    plain = EmbeddingNetwork(nn.Flatten(), nn.Linear(48, 3))
    assert with_features(plain, dataset) is dataset
    pairs = [(torch.zeros(3, 4, 4), 0)]
    assert with_features(network(), pairs) is pairs
