from pathlib import Path

import pytest
import torch

import lam
from lam import methods
from lam.encoders.deterministic import DeterministicEncoder
from lam.methods import Deterministic
from lam.vmf.embeddings import KAPPA_RANGE
from tests.methods import small_data as small

DATA = small.images()


def test_the_embeddings_are_the_networks_and_claim_no_uncertainty():
    network = small.network()
    encoder, histories = Deterministic().train(network, DATA, small.training())
    assert list(histories) == ["network"]
    embeddings = encoder.embed(DATA.images)
    with torch.no_grad():
        torch.testing.assert_close(embeddings.mean, network(DATA.images))
    assert (embeddings.kappa == KAPPA_RANGE[1]).all()
    assert embeddings.capped.all()
    assert (embeddings.resultant == 1).all()
    assert (embeddings.variance == 0).all()
    assert encoder.dimension == 3
    assert encoder.preprocessing == DATA.preprocessing


def test_a_trained_network_stays_as_it_is():
    network = small.network()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    encoder, histories = Deterministic().train(network, DATA, small.training(pretrained=True))
    assert histories == {}
    assert not encoder.network.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_an_encoder_is_read_back_to_the_bit(tmp_path: Path):
    encoder = Deterministic().train(small.network(), DATA, small.training(pretrained=True)).encoder
    encoder.save(tmp_path / "encoder")
    loaded = lam.load(tmp_path / "encoder")
    assert isinstance(loaded, DeterministicEncoder)
    assert torch.equal(loaded.embed(DATA.images).mean, encoder.embed(DATA.images).mean)
    assert loaded.preprocessing == encoder.preprocessing


def test_it_is_evaluated_without_a_calibration_and_its_kappa_tells_nothing():
    encoder = Deterministic().train(small.network(), DATA, small.training()).encoder
    features = encoder.predict(DATA.images).features
    evaluation = lam.evaluate(encoder, small.batches(small.images(seed=3)), [small.outside()], reference=features)
    assert evaluation.calibration is None
    assert evaluation.metrics["ece"] is None
    assert evaluation.metrics["auroc"] == 0.5
    assert evaluation.metrics["auroc_knn"] > 0.5
    assert evaluation.metrics["recall@1"] > 0.25


@pytest.mark.parametrize("name", ["deterministic", "norm", "knn_distance", "mc_dropout", "deep_ensemble"])
def test_a_method_is_found_by_name_and_refuses_no_data(name: str):
    encoder = methods.find(name)().train(small.network(dropout=0.1), DATA, small.training()).encoder
    assert encoder.kind == name
    with pytest.raises(ValueError, match="there are no inputs to embed"):
        encoder.embed([])


def test_a_batch_of_nothing_is_refused():
    encoder = Deterministic().train(small.network(dropout=0.1), DATA, small.training()).encoder
    with pytest.raises(ValueError, match="there are no inputs to embed"):
        encoder.embed(DATA.images[:0])
