import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lam
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.encoders.deterministic import NeighbourEncoder
from lam.methods import KnnDistance
from lam.methods.base import reference_inputs
from lam.vmf import KAPPA_RANGE, bessel_ratio, bessel_ratio_complement
from tests.methods import small_data as small

DATA = small.images()


@pytest.fixture(scope="module")
def encoder() -> NeighbourEncoder:
    encoder = KnnDistance(k=3, reference=30).train(small.network(), DATA, small.training(seed=5)).encoder
    assert isinstance(encoder, NeighbourEncoder)
    return encoder


def test_the_mean_cosine_of_the_distribution_is_that_to_the_neighbour(encoder: NeighbourEncoder):
    queries = small.images(8, seed=9).images
    embeddings = encoder.embed(queries)
    reference = torch.cat(list(reference_inputs(DATA, 30, seed=5)))
    with torch.no_grad():
        neighbours, items = (encoder.network.features(images).double() for images in (reference, queries))
    for item, kappa in zip(items, embeddings.kappa, strict=True):
        cosines = sorted((F.cosine_similarity(item, other, dim=0).item() for other in neighbours), reverse=True)
        assert bessel_ratio(3, kappa.double()).item() == pytest.approx(cosines[2], abs=1e-6)
    torch.testing.assert_close(embeddings.resultant, bessel_ratio(3, embeddings.kappa))


def test_cosines_near_one_keep_their_digits_and_the_ends_are_the_ranges():
    angle = 1e-3
    reference = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    encoder = NeighbourEncoder(nn.Linear(2, 2), "", reference=reference, k=1)
    features = torch.tensor([[1.0, angle], [1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    kappa = encoder.concentration(features)
    complement = bessel_ratio_complement(2, kappa[:1])
    assert complement.item() == pytest.approx(1 - torch.cos(torch.tensor(angle).double()).item(), rel=1e-4)
    assert kappa[1] == KAPPA_RANGE[1]
    assert kappa[2:].tolist() == [0, 0]
    assert (encoder.embed(features).kappa[2:] == KAPPA_RANGE[0]).all()


def test_the_reference_is_drawn_by_the_seed_and_no_larger_than_the_data():
    state = torch.get_rng_state()
    first, again, other = (torch.cat(list(reference_inputs(DATA, 10, seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    everything = torch.cat(list(reference_inputs(DATA, 1000, seed=0)))
    assert torch.equal(everything.sum((1, 2, 3)).sort().values, DATA.images.sum((1, 2, 3)).sort().values)
    assert torch.equal(torch.get_rng_state(), state)
    augmented = Augmented(DATA, AugmentationOptions(crop_scale=0.3))
    assert torch.equal(torch.cat(list(reference_inputs(augmented, 10, seed=0))), first)


def test_inputs_far_from_the_reference_are_out_of_distribution(encoder: NeighbourEncoder):
    metrics = lam.evaluate(encoder, small.batches(small.images(seed=3)), [small.outside()], n_samples=5).metrics
    assert metrics["auroc"] > 0.9


def test_what_cannot_be_a_reference_is_refused(encoder: NeighbourEncoder):
    with pytest.raises(ValueError, match="reference.*k = 5.*2"):
        NeighbourEncoder(encoder.network, "head", reference=torch.eye(2))
    with pytest.raises(ValueError, match="reference.*2.0.*index 1"):
        NeighbourEncoder(encoder.network, "head", reference=torch.diag(torch.tensor([1.0, 2.0])), k=1)
