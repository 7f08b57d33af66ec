import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lam.encoders.deterministic import NormEncoder
from lam.methods import Norm
from lam.vmf import KAPPA_RANGE, bessel_ratio
from tests.methods import small_data as small

DATA = small.images()


@pytest.fixture(scope="module")
def encoder() -> NormEncoder:
    encoder = Norm().train(small.network(), DATA, small.training()).encoder
    assert isinstance(encoder, NormEncoder)
    return encoder


def test_kappa_is_the_length_of_the_heads_output(encoder: NormEncoder):
    network = encoder.network
    with torch.no_grad():
        output = network.head(network.features(DATA.images))
    embeddings = encoder.embed(DATA.images)
    torch.testing.assert_close(embeddings.mean, F.normalize(output))
    torch.testing.assert_close(embeddings.kappa, output.norm(dim=1))
    torch.testing.assert_close(embeddings.resultant, bessel_ratio(3, output.norm(dim=1)))
    torch.testing.assert_close(embeddings.variance, 1 - embeddings.resultant**2)


def test_a_length_beyond_the_range_is_its_end():
    network = nn.Linear(2, 2, bias=False).double()
    network.weight.data = 1e10 * torch.eye(2, dtype=torch.float64)
    embeddings = NormEncoder(network, "").embed(torch.eye(2, dtype=torch.float64))
    assert (embeddings.kappa == KAPPA_RANGE[1]).all()
    assert embeddings.mean.dtype == torch.float64
    tiny = NormEncoder(network, "").embed(1e-20 * torch.eye(2, dtype=torch.float64))
    assert (tiny.kappa == KAPPA_RANGE[0]).all()
    with pytest.raises(ValueError, match="features.*nan.*item 1, feature 0"):
        NormEncoder(network, "").embed(torch.tensor([[1.0, 1.0], [float("nan"), 1.0]], dtype=torch.float64))


def test_embedding_leaves_a_spectral_norm_in_training_as_it_is():
    network = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    NormEncoder(network, "").embed(torch.rand(5, 6))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_joint_samples_of_each_item_are_its_own_whatever_it_shows(encoder: NormEncoder):
    samples = encoder.predict(DATA.images[:1].expand(2, -1, -1, -1), n_samples=20, joint=True).samples
    assert not torch.equal(samples[:, 0], samples[:, 1])


def test_joint_samples_are_of_the_distribution_and_of_the_seed(encoder: NormEncoder):
    prediction = encoder.predict(DATA.images[:4], n_samples=1000, joint=True)
    cosines = (prediction.samples * prediction.embeddings.mean).sum(-1).double()
    error = cosines.std(0) / 1000**0.5
    assert ((cosines.mean(0) - prediction.embeddings.resultant).abs() < 4 * error).all()
    other = NormEncoder(encoder.network, encoder.head, seed=1).predict(DATA.images[:4], n_samples=1000, joint=True)
    assert not torch.equal(other.samples, prediction.samples)
