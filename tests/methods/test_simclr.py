"""SimCLR with an explicit concentration: two views, no labels, and a κ that rises with the views' agreement."""

import pytest
import torch

from lam.datasets import TensorImages
from lam.datasets.augmented import AugmentationOptions, Augmented, TwoViews, Views
from lam.methods import Simclr
from tests.methods import small_data as small

DATA = small.images()


def test_a_batch_has_two_views_of_each_image_and_its_number() -> None:
    views = TwoViews(Augmented(DATA, AugmentationOptions(flip=1.0)), Views(crop_scale=0.5, jitter=0.3))
    assert len(views) == 48
    items = views.__getitems__([5, 2, 9])
    assert [number for _, number in items] == [5, 2, 9, 5, 2, 9]
    assert all(image.shape == (1, 8, 8) for image, _ in items)
    assert not torch.equal(items[0][0], items[3][0])
    plain = TwoViews(DATA, Views()).__getitems__([5])
    assert torch.equal(plain[0][0], DATA.images[5])
    assert torch.equal(plain[1][0], DATA.images[5])


def test_noise_is_drawn_for_each_view_up_to_its_strength() -> None:
    views = TwoViews(DATA, Views(noise=0.5))
    changes = [
        float((view - DATA.images[number]).std() / DATA.images[number].std())
        for _ in range(20)
        for view, number in views.__getitems__([5, 9])
    ]
    assert len(set(changes)) == 80
    assert max(changes) < 0.7  # the deviation of 64 draws varies
    assert max(changes) > 0.35
    assert min(changes) < 0.15


def test_labels_of_the_training_part_are_not_read() -> None:
    one = Simclr().train(small.network(), DATA, small.training()).encoder
    relabelled = TensorImages(DATA.images, torch.zeros(48, dtype=torch.long))
    other = Simclr().train(small.network(), relabelled, small.training(miner="semihard", per_class=4)).encoder
    assert torch.equal(one.embed(DATA.images).mean, other.embed(DATA.images).mean)
    assert torch.equal(one.embed(DATA.images).kappa, other.embed(DATA.images).kappa)


@pytest.mark.long
def test_kappa_is_the_mean_agreement_of_the_views_over_the_regulariser() -> None:
    method = Simclr(crop_scale=1.0, jitter=0.0, hidden=16)
    training = small.training(epochs=40, batch_size=48, learning_rate=1e-2)
    encoder = method.train(small.network(), DATA, training).encoder
    kappa = encoder.embed(DATA.images).kappa  # views that agree entirely: λ_a / (2λ) = 5
    assert kappa.median() == pytest.approx(5.0, abs=1.0)


def test_items_that_are_no_images_are_refused() -> None:
    texts = [(torch.zeros(12, dtype=torch.uint8), 0)] * 4
    with pytest.raises(ValueError, match=r"crops of images.*\(12,\)"):
        TwoViews(texts, Views())
    with pytest.raises(ValueError, match=r"jitter.*\[0, 1\).*-1"):
        Views(jitter=-1.0)
