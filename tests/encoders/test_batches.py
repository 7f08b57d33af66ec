"""Batches of a loader, and a single batch in its place, of inputs with labels or positions."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lam
from lam.encoders.batches import HeldOut, as_batches
from lam.models.head import n_items
from lam.pairs import Relation
from tests.encoders.small import make_batches, make_network

IMAGES, FEATURES, LABELS, POSITIONS = (
    torch.rand(40, 3, 4, 4),
    torch.rand(40, 8),
    torch.arange(40) % 4,
    torch.rand(40, 2),
)


def test_inputs_with_labels_or_positions_are_one_batch() -> None:
    for pair in ((IMAGES, LABELS), (IMAGES, POSITIONS), [FEATURES, LABELS], (IMAGES, LABELS.tolist())):
        assert as_batches(pair) == [pair]
    for batches in (
        [IMAGES, IMAGES],
        [FEATURES, FEATURES],
        [(IMAGES, POSITIONS)] * 2,
        [IMAGES, LABELS[:7]],
        [IMAGES[:2], (IMAGES, LABELS)],
    ):
        assert as_batches(batches) is batches
    assert as_batches((FEATURES, POSITIONS), labelled=True) == [(FEATURES, POSITIONS)]


@pytest.mark.parametrize("inputs", [IMAGES, FEATURES])
def test_places_need_no_loader(inputs: torch.Tensor) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 3))
    options = lam.Laplace(margin=0.7, pairs=Relation(positive_within=0.2))
    encoder, same = (
        lam.fit(network, places, options, progress=False) for places in ((inputs, POSITIONS), [(inputs, POSITIONS)])
    )
    assert torch.equal(encoder.posterior.curvature.sums, same.posterior.curvature.sums)
    encoder.tune(HeldOut((inputs, POSITIONS), relevant_within=0.2))
    same.tune(HeldOut([(inputs, POSITIONS)], relevant_within=0.2))
    assert encoder.posterior.likelihood_scale == same.posterior.likelihood_scale
    encoder.forget((inputs[:10], POSITIONS[:10]))
    assert encoder.posterior.n_items == 30


def test_places_in_whole_metres_are_fitted_and_tuned() -> None:
    inputs, labels = make_batches(1, N=64)[0]
    positions, options = (
        30 * labels[:, None].expand(-1, 2),
        lam.Laplace(margin=0.7, pairs=Relation(positive_within=6.0)),
    )
    encoder, same = (
        lam.fit(make_network(), [(inputs, places)], options, progress=False)
        for places in (positions, positions.double())
    )
    encoder.tune([(inputs, positions)])
    same.tune([(inputs, positions.double())])
    assert torch.equal(encoder.embed(inputs).kappa, same.embed(inputs).kappa)


def test_data_sets_words_and_nothing_are_no_batches() -> None:
    with pytest.raises(ValueError, match=r"TensorDataset.*torch\.utils\.data\.DataLoader"):
        as_batches(TensorDataset(IMAGES, LABELS))
    for wrong in ("photographs", None, 7):
        with pytest.raises(ValueError, match=f"batch.*loader.*{wrong!r}"):
            as_batches(wrong)


def test_an_empty_batch_leaves_tuning_and_ambiguity_as_they_are() -> None:
    batches = make_batches(2, N=40)
    inputs, labels = batches[0]
    encoder, other = (lam.fit(make_network(), batches, margin=0.7, progress=False) for _ in range(2))
    for each, held_out in ((encoder, batches), (other, [(inputs[:0], labels[:0]), *batches])):
        each.trained_on = []
        each.tune(held_out)
        each.learn_ambiguity(held_out)
    assert other.tuning == encoder.tuning
    assert torch.equal(other.embed(inputs).kappa, encoder.embed(inputs).kappa)


@pytest.mark.parametrize(
    ("inputs", "n"),
    [
        (torch.zeros(0, 3), 0),
        ({"ids": torch.zeros(0, 3), "temperature": torch.tensor(2.0)}, 0),
        (torch.zeros(2, 3), 2),
        ({"ids": torch.zeros(2, 3), "past": torch.zeros(0, 3)}, 2),
        (torch.tensor(1.0), 1),
        ("text", 1),
    ],
    ids=["no row", "no named row", "rows", "named rows", "number", "text"],
)
def test_a_batch_has_the_items_of_its_longest_tensor(inputs: Any, n: int) -> None:
    assert n_items(inputs) == n
