"""AnInfoNCE's members and hard negatives: the pairs of a step, the history, and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lam.datasets import TensorImages
from lam.datasets.augmented import AugmentationOptions, Augmented, ViewsOfKinds
from lam.losses import AnInfoNCE, SupCon
from lam.methods import Aninfonce
from lam.methods.deterministic import AnInfoNCEStep, rows_of_members
from lam.pairs import Mining, Pairs
from lam.training.steps import Minibatch
from tests.methods import small_data as small

LABELS = torch.tensor([0, 0, 1, 1, 2])


def batch_of(labels: Tensor, inputs: Tensor, **options: Any) -> Minibatch:
    return Minibatch(inputs, Pairs.by_label(labels), 0, torch.Generator().manual_seed(0), labels, **options)


@pytest.mark.parametrize("mining", [Mining("all"), Mining("hard")])
def test_a_step_adds_up_the_members_each_of_its_own_views(mining: Mining) -> None:
    views = torch.nn.functional.normalize(torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0)), dim=2)
    loss = AnInfoNCE(4, n_members=3, margin=0.7)
    with torch.no_grad():
        loss.log_concentration.add_(torch.rand(3, 4, generator=torch.Generator().manual_seed(1)))
    batch = batch_of(LABELS.repeat(3), views.flatten(0, 1), mining=mining)
    step = AnInfoNCEStep(Aninfonce(n_members=3).settings(), "")
    value = step.backward(torch.nn.Identity(), loss, batch, lambda value: value.backward())
    expected = torch.zeros(())
    for number in range(3):
        alone = AnInfoNCE(4)
        alone.log_concentration = torch.nn.Parameter(loss.log_concentration[number : number + 1].detach())
        own = batch_of(LABELS, views[number], mining=mining)
        expected = expected + alone(views[number], own.choose_pairs(views[number], loss))
    torch.testing.assert_close(value, expected.detach())
    assert loss.log_concentration.grad is not None
    assert (loss.log_concentration.grad.abs().sum(1) > 0).all() or mining.miner == "hard"


def test_members_compare_unit_vectors_of_a_network_that_ends_in_its_linear_layer() -> None:
    outputs = 5 * torch.rand(10, 4, generator=torch.Generator().manual_seed(0)) + 1
    batches = [batch_of(LABELS.repeat(2), rows) for rows in (outputs, torch.nn.functional.normalize(outputs))]
    step, loss = AnInfoNCEStep(Aninfonce(n_members=2).settings(), ""), AnInfoNCE(4, n_members=2)
    long, unit = (step.value(torch.nn.Identity(), loss, batch) for batch in batches)
    torch.testing.assert_close(long, unit)


def test_of_several_processes_each_has_the_views_of_its_own_items() -> None:
    batch = batch_of(torch.zeros(10, dtype=torch.long), torch.zeros(10, 1), sizes=(6, 4))
    assert [rows.tolist() for rows in rows_of_members(batch, 2)] == [[0, 1, 2, 6, 7], [3, 4, 5, 8, 9]]


def test_members_see_crops_of_their_own_and_keep_the_flips() -> None:
    method = Aninfonce(n_members=3)
    scales = [options.crop_scale for options in method.kinds(AugmentationOptions(crop_scale=0.5, flip=0.25))]
    assert scales[0] is None
    assert scales[1:] == [pytest.approx(0.65), pytest.approx(0.3)]
    assert {options.flip for options in method.kinds(AugmentationOptions(flip=0.25))} == {0.25}
    data = Augmented(small.images(), AugmentationOptions(flip=1.0))
    views = ViewsOfKinds(data, method.kinds())
    images, labels = zip(*views.__getitems__([4, 9]), strict=True)
    assert list(labels) == [0, 1] * 3
    assert torch.equal(images[0], small.images().images[4])
    assert not torch.equal(images[2], images[0])
    assert torch.equal(views.labels, small.images().labels)
    assert len(views) == 48


def test_members_learn_different_concentrations_and_resume_to_the_bit(tmp_path: Path) -> None:
    method, data = Aninfonce(n_members=2, crop_scales=(1.0, 0.2)), small.images()

    def trained(**options: Any) -> tuple[Tensor, list[float]]:
        network = small.network()
        histories = method.train(network, data, small.training(**options)).histories
        return network.head.weight.detach(), histories["network"].learned["concentration"]

    weight, learned = trained(epochs=2)
    assert len(learned) == 6
    assert learned[:3] != learned[3:]
    trained(epochs=1, folder=tmp_path)
    resumed, learned_again = trained(epochs=2, folder=tmp_path)
    assert torch.equal(resumed, weight)
    assert learned_again == learned
    assert not torch.equal(small.network().head.weight, weight)


@pytest.mark.parametrize("n_members", [1, 2])
def test_without_normalisation_the_loss_compares_what_the_head_gives(n_members: int) -> None:
    network, labels = small.network(), LABELS.repeat(n_members)
    batch = batch_of(labels, torch.rand(len(labels), 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    method, loss = Aninfonce(n_members=n_members, normalise=False), AnInfoNCE(3, n_members=n_members, margin=0.7)
    step = AnInfoNCEStep(method.settings(), "head")
    value = step.backward(network, loss, batch, lambda value: value.backward())
    raw = network.head(network.features(batch.inputs)).detach()
    assert ((raw.norm(dim=1) - 1).abs() > 0.05).any()
    pairs, rows = Pairs.by_label(LABELS), enumerate(raw.view(n_members, 5, 3))
    terms = [loss.of_member(of_member, pairs, number) for number, of_member in rows]
    torch.testing.assert_close(value, torch.stack(terms).sum().detach())
    assert network.head.weight.grad is not None
    assert network.head.weight.grad.any()
    weights = []
    for normalise in (True, False):
        network = small.network()
        trained = Aninfonce(n_members=n_members, normalise=normalise).train(network, small.images(), small.training())
        weights.append(network.head.weight.detach())
        lengths = trained.encoder.embed(small.images().images[:4]).mean.norm(dim=1)
        torch.testing.assert_close(lengths, torch.ones(4))
    assert not torch.equal(*weights)


def test_hard_negatives_are_told_to_the_loss() -> None:
    loss = Aninfonce(negatives=2.0).training_loss(SupCon(0.5), 3)
    assert loss.get_buffer("negatives").tolist() == [2.0] * 3
    assert loss.learned()["concentration"] == [pytest.approx(3.0)] * 3
    training = small.training(miner="hard", loss=SupCon(0.5))
    weights = []
    for negatives in (0.0, 2.0):
        network = small.network()
        Aninfonce(negatives=negatives).train(network, small.images(), training)
        weights.append(network.head.weight.detach())
    assert not torch.equal(*weights)


def test_one_positive_concentration_is_a_curvature_and_nothing_else_is() -> None:
    learned = {"concentration": [1.0, 2.0]}
    assert Aninfonce().trained_by(SupCon(0.5), 2, learned)["concentration"] == (1.0, 2.0)
    assert Aninfonce(negatives=1.0).trained_by(SupCon(0.5), 2, {"concentration": [1.0, -0.1]}) == {}
    assert Aninfonce(n_members=2).trained_by(SupCon(0.5), 1, learned) == {}
    assert Aninfonce(normalise=False).trained_by(SupCon(0.5), 2, learned) == {}


def test_members_of_what_is_no_image_are_refused() -> None:
    rows = TensorImages(torch.rand(12, 1, 8, 8), torch.arange(12) % 3)
    flat = [(image.flatten(), label) for image, label in (rows[number] for number in range(12))]
    network = torch.nn.Sequential(torch.nn.Linear(64, 3))
    with pytest.raises(ValueError, match="views.*crops.*n_members=1"):
        Aninfonce(n_members=2).check(network, flat, small.training())
    with pytest.raises(ValueError, match="pairs.*2 members.*of_members"):
        AnInfoNCE(2, n_members=2)(torch.eye(2), Pairs.by_label(torch.tensor([0, 1])))
