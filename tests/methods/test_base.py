"""All methods: they resume only their own checkpoints, and leave global random states unchanged."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from lam import losses
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.encoders.base import at_least_float32
from lam.encoders.deterministic import DeterministicEncoder, NormEncoder
from lam.methods import DeepEnsemble, Deterministic, find
from lam.methods.base import Trained, head_of
from lam.pairs.relation import Relation
from tests.methods import small_data as small

AS_THEY_ARE = ("deterministic", "norm", "knn_distance", "mc_dropout", "pfe", "laplace_posthoc")
"""Methods that train one network by the gradient of the loss at its own weights."""

OPTIONS: dict[str, Any] = {"knn_distance": {"reference": 20}}


def train(method: str, **options: Any) -> Trained:
    made = find(method)(**OPTIONS.get(method, {}))
    return made.train(small.network(dropout=0.1), small.images(), small.training(**options))


@pytest.mark.parametrize("method", [*AS_THEY_ARE, "hib"])
def test_a_checkpoint_of_another_method_is_refused_and_both_are_named(tmp_path: Path, method: str) -> None:
    first = "norm" if method == "deterministic" else "deterministic"
    train(first, folder=tmp_path)
    with pytest.raises(ValueError, match=f"has other settings: method '{first}', now '{method}'"):
        train(method, folder=tmp_path)
    assert train(first, folder=tmp_path).histories["network"].best_epoch == 1


def test_a_loss_of_classes_is_refused_for_places_before_any_work(tmp_path: Path) -> None:
    options: dict[str, Any] = {"relation": Relation("batch", 10.0, 25.0), "folder": tmp_path / "checkpoints"}
    for method, loss in (("pfe", "varcon"), ("varcon", "contrastive")):
        training = small.training(loss=losses.build(loss, margin=0.7), **options)
        with pytest.raises(ValueError, match="VarCon needs classes"):
            find(method)().check(small.network(), small.images(), training)


def test_a_trained_network_moves_to_the_device_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {1: torch.device("cpu"), (1,): torch.device("meta")}

    def fabric(_accelerator: str, devices_: Any, _precision: str) -> SimpleNamespace:
        return SimpleNamespace(device=devices[devices_ if devices_ == 1 else tuple(devices_)])

    monkeypatch.setattr("lam.training._fabric", fabric)
    network = small.network()
    Deterministic().train_network(network, small.images(), small.training(pretrained=True, devices=[1]))
    assert network.head.weight.is_meta


def test_a_checkpoint_of_an_ensemble_is_one_of_its_member(tmp_path: Path) -> None:
    ensemble, data = DeepEnsemble(n_members=2, reference=20), small.images()
    ensemble.train(small.network(), data, small.training(folder=tmp_path))
    with pytest.raises(ValueError, match="method 'deep_ensemble', now 'deterministic'"):
        Deterministic().train(small.network(), data, small.training(folder=tmp_path / "member-1"))


def test_the_head_is_found_without_drawing_a_view() -> None:
    views = Augmented(small.images(), AugmentationOptions(crop_scale=0.3, flip=0.5))
    state = torch.get_rng_state()
    assert head_of(small.network(), views) == "head"
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_is_widened_and_nothing_else(given: torch.dtype, expected: torch.dtype) -> None:
    assert at_least_float32(torch.ones(2, 3, dtype=given)).dtype == expected


def test_embeddings_of_a_half_precision_network_are_float32() -> None:
    for encoder in (DeterministicEncoder, NormEncoder):
        found = encoder(nn.Linear(4, 2).bfloat16(), "").embed(torch.randn(3, 4).bfloat16())
        assert found.mean.dtype == torch.float32


@pytest.mark.parametrize("method", [*AS_THEY_ARE, "hib"])
def test_the_direction_is_the_networks_own_to_the_bit_whatever_is_sampled(method: str) -> None:
    encoder, inputs = train(method).encoder, small.images().images
    with torch.no_grad():
        output = encoder.network(inputs)
    for n_samples in (2, 9):
        found = encoder.predict(inputs, n_samples=n_samples, joint=True).embeddings
        if method == "mc_dropout":  # its directions are means of samples
            assert found.mean_samples == n_samples
        else:
            assert found.mean_samples is None
            assert torch.equal(found.mean, torch.nn.functional.normalize(output))


@pytest.mark.parametrize("method", ["hib", "mcinfonce", "simclr", "laplace_online"])
def test_a_batch_norm_after_the_head_is_refused(method: str) -> None:
    """Before the training, the batch norm is the identity, so the head seems to give the output."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="head '3'.*direction"):
        find(method)().train(network, small.images(), small.training())


def test_what_is_no_data_set_is_refused_by_its_kind() -> None:
    for wrong in (DataLoader(small.images()), small.network(), None):
        with pytest.raises(ValueError, match=f"and items .input, label., got {type(wrong).__name__}: .*loader.dataset"):
            Deterministic().train(small.network(), wrong, small.training())


@pytest.mark.parametrize("method", ["deterministic", "laplace_posthoc", "laplace_online"])
def test_inputs_of_items_may_be_arrays(method: str) -> None:
    data = small.images()
    tensors = list(zip(data.images, data.labels.tolist(), strict=True))
    arrays = [(image.numpy(), label) for image, label in tensors]
    found, expected = (
        find(method)().train(small.network(), items, small.training()).encoder for items in (arrays, tensors)
    )
    assert torch.equal(found.embed(data.images).mean, expected.embed(data.images).mean)
    assert found.trained_on == expected.trained_on


@pytest.mark.usefixtures("as_in_production")
@pytest.mark.parametrize("kind", ["Image", "dict", "list"])
def test_inputs_that_are_no_arrays_are_refused(kind: str) -> None:
    made = {
        "Image": Image.new("L", (8, 8)),
        "dict": {"pixels": torch.zeros(8)},
        "list": [torch.zeros(8), torch.zeros(8)],
    }
    with pytest.raises(ValueError, match=f"inputs.*{kind}"):
        Deterministic().train(small.network(), [(made[kind], number % 2) for number in range(8)], small.training())


@pytest.mark.parametrize(
    ("label", "message"), [(lambda n: f"class {n}", "labels.*'class"), (lambda n: n - 1, "got -1")]
)
def test_labels_of_a_data_set_without_a_list_of_them_are_checked(label: Any, message: str) -> None:
    items = [(image, label(number % 3)) for number, image in enumerate(small.images().images)]
    with pytest.raises(ValueError, match=message):
        Deterministic().train(small.network(), items, small.training())
