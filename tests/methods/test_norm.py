from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lam
from lam.encoders.concentration import NormEncoder
from lam.methods import Norm
from lam.vmf.bessel import bessel_ratio
from lam.vmf.embeddings import KAPPA_RANGE
from tests.methods import small_data as small

DATA = small.images()


@pytest.fixture(scope="module")
def encoder() -> NormEncoder:
    found = Norm().train(small.network(), DATA, small.training()).encoder
    assert isinstance(found, NormEncoder)
    return found


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
    with pytest.raises(ValueError, match="kappa must be finite and at least 0, got nan at index 1"):
        NormEncoder(network, "").embed(torch.tensor([[1.0, 1.0], [float("nan"), 1.0]], dtype=torch.float64))


def test_kappa_of_an_item_is_the_same_alone_and_in_any_batch(encoder: NormEncoder):
    together = encoder.embed(DATA.images).kappa
    torch.testing.assert_close(encoder.embed([DATA.images[:1], DATA.images[1:7]]).kappa, together[:7])


def test_joint_samples_do_not_depend_on_the_batches(encoder: NormEncoder):
    whole = encoder.predict(DATA.images[:12], n_samples=20, joint=True).samples
    parts = [DATA.images[:1], DATA.images[1:6], DATA.images[6:12]]
    torch.testing.assert_close(encoder.predict(parts, n_samples=20, joint=True).samples, whole)
    same = encoder.predict(DATA.images[:1].expand(2, -1, -1, -1), n_samples=20, joint=True).samples
    assert not torch.equal(same[:, 0], same[:, 1])  # of each item its own, whatever it shows


def test_joint_samples_are_of_the_distribution_and_repeat(encoder: NormEncoder):
    seen = encoder.predict(DATA.images[:4], n_samples=1000, joint=True)
    assert seen.samples.shape == (1000, 4, 3)
    cosines = (seen.samples * seen.embeddings.mean).sum(-1).double()
    error = cosines.std(0) / 1000**0.5
    assert ((cosines.mean(0) - seen.embeddings.resultant).abs() < 4 * error).all()
    state = torch.get_rng_state()
    again = encoder.predict(DATA.images[:4], n_samples=1000, joint=True)
    assert torch.equal(again.samples, seen.samples)
    assert torch.equal(torch.get_rng_state(), state)
    other = NormEncoder(encoder.network, encoder.head, seed=1).predict(DATA.images[:4], n_samples=1000, joint=True)
    assert not torch.equal(other.samples, seen.samples)


def test_an_encoder_is_read_back_to_the_bit_and_evaluated(encoder: NormEncoder, tmp_path: Path):
    NormEncoder(encoder.network, encoder.head, seed=3).save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder")
    assert isinstance(loaded, NormEncoder)
    assert loaded.seed == 3
    assert torch.equal(loaded.embed(DATA.images).kappa, encoder.embed(DATA.images).kappa)
    metrics = lam.evaluate(loaded, small.batches(DATA), [small.outside()], n_samples=5).metrics
    assert 0 <= metrics["ece"] <= 1
    assert 0 <= metrics["auroc"] <= 1
