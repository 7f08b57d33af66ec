"""Groups: a batch can draw several items of one group; for places, items of a group are near each other."""

from pathlib import Path

import torch

from lam.datasets import TensorImages, load
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.datasets.places import PlaceImages
from lam.inputs.preprocessing import Preprocessing
from lam.pairs.pairs import Pairs
from lam.training.batches import Batches
from tests.datasets import layouts

SMALL = Preprocessing(mode="RGB", size=(8, 8))


def placed(positions: torch.Tensor, areas: torch.Tensor) -> PlaceImages:
    paths = [Path(f"{i}.png") for i in range(len(positions))]
    return PlaceImages(paths, areas, positions, name="places", classes=["a", "b"], preprocessing=SMALL)


def test_of_labelled_images_are_the_labels() -> None:
    images = TensorImages(torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 1, 0]))
    assert torch.equal(images.groups, images.labels)
    assert torch.equal(Augmented(images, AugmentationOptions(flip=0.5)).groups, images.labels)


def test_of_places_are_positive_pairs_and_never_cross_areas() -> None:
    generator = torch.Generator().manual_seed(3)
    positions = 60 * torch.rand(400, 2, generator=generator, dtype=torch.float64) - 30
    places = placed(positions, torch.arange(400) % 2)
    same = places.groups[:, None] == places.groups
    assert 0 < len(places.groups.unique()) < 400
    assert bool((places.labels[:, None] == places.labels)[same].all())
    distances = torch.cdist(positions, positions)
    assert float(distances[same].max()) <= 10
    assert bool(same[(distances == 0) & (places.labels[:, None] == places.labels)].all())
    assert torch.equal(places.subset([5, 3, 9]).groups == places.subset([5, 3, 9]).groups[0], same[5][[5, 3, 9]])


def test_batches_of_them_have_a_match_for_every_place_that_has_one(tmp_path: Path) -> None:
    rows = [{"path": f"{i}.png", "x": 700 * (i // 2) + i % 2, "y": 1, "split": "train"} for i in range(40)]
    rows += [{"path": f"{40 + i}.png", "x": 700 * i, "y": 900, "split": "train"} for i in range(60)]  # alone
    rows += [{"path": f"{part}.png", "x": 0, "y": 0, "split": part} for part in ("validation", "test")]
    parts = load("places", root=layouts.places(tmp_path, rows), preprocessing=SMALL)
    batches = Batches(parts.train, batch_size=8, per_class=2, seed=0, epoch=0)
    for batch in range(len(batches)):
        assert len(set(batches.indices(batch))) == 8
        _, positions = batches[batch]
        pairs = Pairs.by_distance(positions, positive_within=10.0, negative_beyond=25.0)
        assert pairs.positive.sum(1).tolist() == [1.0] * 8
