from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lam.encoders.ensemble import DropoutEncoder, mask_of, thinned
from lam.methods import McDropout
from lam.models import EmbeddingNetwork
from lam.utils.random import derive_seed
from lam.vmf import VonMisesFisher, mean_resultant_length
from tests.methods import small_data as small

DATA = small.images()


@pytest.fixture(scope="module")
def encoder() -> DropoutEncoder:
    encoder = McDropout().train(small.network(dropout=0.2), DATA, small.training(seed=4)).encoder
    assert isinstance(encoder, DropoutEncoder)
    return encoder


def by_hand(network: EmbeddingNetwork, inputs: Tensor, seed: int, sample: int) -> Tensor:
    """The outputs of one thinned network, layer by layer."""
    values = inputs
    for name, layer in network.features.named_children():
        if isinstance(layer, nn.Dropout2d):
            generator = torch.Generator().manual_seed(derive_seed(seed, sample, f"features.{name}"))
            kept = [torch.rand(1, generator=generator).item() >= layer.p for _ in range(values.shape[1])]
            values = torch.stack(
                [values[:, i] / (1 - layer.p) if keep else 0 * values[:, i] for i, keep in enumerate(kept)], 1
            )
        else:
            values = layer(values)
    return network.head(values)


def test_masks_do_not_depend_on_the_default_type():
    values, expected = torch.ones(2, 50), mask_of(nn.Dropout(0.5), torch.ones(2, 50), seed=1)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(mask_of(nn.Dropout(0.5), values, seed=1), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_samples_are_those_of_thinned_networks_made_by_hand(encoder: DropoutEncoder):
    prediction = encoder.predict(DATA.images, n_samples=6, joint=True)
    with torch.no_grad():
        outputs = torch.stack([by_hand(encoder.network, DATA.images, 4, s) for s in range(6)])
    torch.testing.assert_close(prediction.samples, F.normalize(outputs, dim=-1))
    torch.testing.assert_close(prediction.embeddings.variance, outputs.var(0).sum(1))
    expected = mean_resultant_length(F.normalize(outputs, dim=-1), unbiased=True)
    torch.testing.assert_close(prediction.embeddings.mean, expected.mean)
    torch.testing.assert_close(prediction.embeddings.resultant, expected.resultant.float())
    torch.testing.assert_close(prediction.embeddings.kappa, expected.kappa().float())
    with torch.no_grad():
        torch.testing.assert_close(prediction.features, encoder.network.features(DATA.images))


def test_more_dropout_means_less_certainty_and_seeds_differ():
    kappas = []
    for rate in (0.05, 0.5):
        embeddings = DropoutEncoder(small.network(dropout=rate), "head").embed(DATA.images, n_samples=50)
        kappas.append(embeddings.kappa.mean())
    assert kappas[0] > 2 * kappas[1]
    one, two = (DropoutEncoder(small.network(dropout=0.2), "head", seed=seed) for seed in (0, 1))
    assert not torch.equal(one.embed(DATA.images).kappa, two.embed(DATA.images).kappa)


def test_nothing_is_left_behind_even_by_a_failure(encoder: DropoutEncoder):
    state = torch.get_rng_state()
    hooks = [len(module._forward_hooks) for module in encoder.network.modules()]
    encoder.embed(DATA.images, n_samples=2)
    with pytest.raises(RuntimeError), thinned(encoder.network, seed=0, sample=0):
        encoder.network(torch.zeros(1, 5))
    assert [len(module._forward_hooks) for module in encoder.network.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert not encoder.network.training


@pytest.mark.parametrize(
    ("layer", "shape", "mask"),
    [
        (nn.Dropout(0.5), (3, 40), (1, 40)),
        (nn.Dropout(0.5), (3, 7, 9), (1, 7, 9)),
        (nn.Dropout1d(0.5), (3, 40, 6), (1, 40, 1)),
        (nn.Dropout2d(0.5), (3, 40, 2, 2), (1, 40, 1, 1)),
        (nn.Dropout3d(0.5), (3, 40, 2, 2, 2), (1, 40, 1, 1, 1)),
    ],
)
def test_masks_have_the_shape_of_what_is_dropped(layer: Any, shape: tuple[int, ...], mask: tuple[int, ...]):
    actual = mask_of(layer, torch.ones(shape, dtype=torch.float64), 0)
    assert actual.shape == mask
    assert actual.unique().tolist() == [0, 2]
    assert actual.dtype == torch.float64


def test_a_mask_keeps_the_mean():
    mask = mask_of(nn.Dropout(0.05), torch.ones(1, 100_000), 0)
    assert mask.mean().item() == pytest.approx(1, abs=4 * (0.05 / 0.95 / 100_000) ** 0.5)


class Backbone(nn.Module):
    """A network that counts its passes, with one dropout layer before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.dropout, self.head = nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 3)
        self.passes = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.passes += 1
        return self.head(self.dropout(self.body(inputs).relu()))


def test_layers_below_the_only_dropout_before_the_head_run_once():
    network = Backbone()
    inputs = torch.randn(5, 6)
    prediction = DropoutEncoder(network, "head", seed=2).predict(inputs, n_samples=4, joint=True)
    assert network.passes == 1
    for sample, expected in enumerate(prediction.samples):
        network.eval()
        with thinned(network, seed=2, sample=sample), torch.no_grad():
            torch.testing.assert_close(F.normalize(network(inputs)), expected)


class Aside(Backbone):
    """A network with dropout before a classifier, not before the head."""

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.body(inputs).relu()
        self.logits = self.dropout(features).sum(1)
        return self.head(features)


def test_dropout_beside_the_head_does_not_count_as_before_it():
    prediction = DropoutEncoder(Aside(), "head").predict(torch.randn(5, 6), n_samples=4, joint=True)
    assert prediction.samples is not None
    assert torch.equal(prediction.samples, prediction.samples[:1].expand(4, -1, -1))


def test_float64_stays_and_kappa_is_that_of_the_fitted_distribution():
    network = Backbone().double()
    prediction = DropoutEncoder(network, "head").predict(
        torch.randn(5, 6, dtype=torch.float64), n_samples=400, joint=True
    )
    assert prediction.embeddings.kappa.dtype == torch.float64
    fitted = VonMisesFisher.fit(prediction.samples)
    torch.testing.assert_close(prediction.embeddings.kappa, fitted.concentration, rtol=0.05, atol=0)


def test_what_has_no_dropout_is_refused():
    with pytest.raises(ValueError, match="mc_dropout.*dropout layers.*network.options.dropout=0.05"):
        McDropout().train(small.network(), DATA, small.training())
    with pytest.raises(ValueError, match="no such layer"):
        DropoutEncoder(nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), "1")
