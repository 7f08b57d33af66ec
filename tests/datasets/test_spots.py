"""Spots of photographs that ship with other packages, and images in memory as inputs of a network."""

import pytest
import torch

from lam import datasets
from lam.datasets.base import ImagesAsFiles


def test_views_of_a_spot_differ_and_are_always_the_same() -> None:
    parts = datasets.load("spots", seed=0)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (576, 192, 192)
    assert parts.train.shape == (3, 96, 96)
    views = parts.train.subset((parts.train.labels == 20).nonzero().flatten())
    assert len(torch.unique(views.images.flatten(1), dim=0)) == len(views) >= 2
    again = datasets.load("spots", seed=0)
    assert torch.equal(parts.test.pixels, again.test.pixels)
    assert not torch.equal(parts.test.pixels, datasets.load("spots", seed=1).test.pixels)


def test_no_two_of_all_views_are_alike() -> None:
    parts = datasets.load("spots")
    pixels = torch.cat([part.pixels for part in parts.parts().values()])
    assert len(torch.unique(pixels.flatten(1), dim=0)) == len(pixels) == 960


def test_the_portrait_is_of_the_same_kind() -> None:
    like = datasets.load("spots").test
    portrait = datasets.load_ood("portrait", like=like)
    assert (len(portrait), portrait.shape, len(portrait.classes)) == (168, like.shape, 42)
    assert set(portrait.classes).isdisjoint(like.classes)


def test_images_in_memory_are_read_as_asked() -> None:
    options = {"size": [16, 16], "mean": [0.5] * 3, "std": [0.5] * 3}
    parts = datasets.load("digits", preprocessing=options)
    plain = datasets.load("digits")
    assert isinstance(parts.train, ImagesAsFiles)
    assert parts.train.shape == parts.test.shape == (3, 16, 16)
    assert torch.equal(parts.train.labels, plain.train.labels)
    assert parts.train[0][0].min() >= -1
    with pytest.raises(ValueError, match="docstrings.*no images"):
        datasets.load("docstrings", preprocessing=options)
