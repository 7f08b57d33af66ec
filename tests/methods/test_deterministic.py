import torch

import lam
from lam.methods import Deterministic
from lam.retrieval.metrics.reference import Reference
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


def test_it_is_evaluated_without_a_calibration_and_its_kappa_tells_nothing():
    encoder = Deterministic().train(small.network(), DATA, small.training()).encoder
    features = encoder.predict(DATA.images).features
    evaluation = lam.evaluate(
        encoder, small.batches(small.images(seed=3)), [small.outside()], reference=Reference.of(features)
    )
    assert evaluation.reliability is None
    assert evaluation.metrics["ece"] is None
    assert evaluation.metrics["auroc"] == 0.5
    assert evaluation.metrics["auroc_knn"] > 0.5
    assert evaluation.metrics["recall@1"] > 0.25
