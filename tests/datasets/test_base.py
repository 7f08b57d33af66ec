"""Laws of every data set: labels fit the classes, subsets hold the chosen items, splits are disjoint and stratified."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from lam.datasets.base import ImagesAsFiles, MissingDataError, TensorImages, stratified_split
from lam.datasets.splits import Splits, carve, fraction_of
from lam.inputs.preprocessing import Preprocessing


def pixels(n: int, channels: int = 1, side: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randint(0, 256, (n, channels, side, side), generator=generator, dtype=torch.uint8)


def data_set(n: int = 30, n_classes: int = 3) -> TensorImages:
    """The first pixel of every image is its position."""
    images = pixels(n)
    images[:, 0, 0, 0] = torch.arange(n)
    return TensorImages(images, torch.arange(n) % n_classes)


def positions(images: TensorImages) -> list[int]:
    return (images.images[:, 0, 0, 0] * 255).round().int().tolist()


class TestTensorImages:
    def test_items_images_and_batches_agree(self):
        images = data_set()
        assert len(images) == 30
        assert images.shape == (1, 4, 4)
        assert images.classes == ("0", "1", "2")
        assert images.images.dtype == torch.float32
        assert 0 <= images.images.min() < images.images.max() <= 1
        for index in (0, 7, 29, -1):
            image, label = images[index]
            assert torch.equal(image, images.images[index])
            assert (label, type(label)) == (int(images.labels[index]), int)
        assert torch.equal(images.batch([3, 1]), images.images[[3, 1]])

    def test_items_are_what_preprocessing_gives_for_the_same_image(self):
        preprocessing = Preprocessing(size=(4, 4), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
        stored = pixels(2, channels=3)
        images = TensorImages(stored, torch.tensor([0, 0]), preprocessing=preprocessing)
        picture = Image.fromarray(stored[1].permute(1, 2, 0).numpy())
        torch.testing.assert_close(images[1][0], preprocessing(picture), rtol=0, atol=0)

    def test_floating_point_values_are_ready(self):
        values = torch.randn(3, 1, 2, 2, dtype=torch.float64)
        images = TensorImages(values, torch.tensor([0, 1, 0]))
        assert torch.equal(images.images, values)
        assert images.preprocessing == Preprocessing(mode="L", size=(2, 2))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_a_loader_gives_the_same_items_in_order(self, workers):
        images = data_set()
        batches = list(DataLoader(images, batch_size=8, num_workers=workers))
        assert torch.equal(torch.cat([batch for batch, _ in batches]), images.images)
        assert torch.equal(torch.cat([labels for _, labels in batches]), images.labels)

    def test_iteration_ends(self):
        assert len(list(data_set())) == 30

    def test_subset_keeps_order_and_repeats(self):
        part = data_set().subset([5, 2, 2])
        assert positions(part) == [5, 2, 2]
        assert part.labels.tolist() == [2, 2, 2]
        assert part.classes == ("0", "1", "2")

    def test_limit_is_stratified_seeded_and_at_most_all(self):
        images = data_set()
        part = images.limit(6, seed=1)
        assert torch.bincount(part.labels).tolist() == [2, 2, 2]
        assert positions(part) == positions(images.limit(6, seed=1))
        assert positions(part) != positions(images.limit(6, seed=2))
        assert len(images.limit(1000)) == 30

    def test_limit_below_two_a_class_keeps_few_classes_and_those_with_matches(self):
        labels = torch.cat([torch.arange(20), torch.arange(5).repeat_interleave(5)])  # 5 classes of 6, 15 of 1
        images = TensorImages(pixels(45), labels)
        part = images.limit(12)
        assert torch.bincount(part.labels).max() == 4
        assert part.labels.max() < 5
        assert torch.equal(part.labels, images.limit(12).labels)
        assert len(images.limit(1)) == 1
        many = images.limit(39)  # more than four of each class: topped up
        assert len(many) == 39
        assert torch.bincount(many.labels, minlength=20).min() >= 1

    def test_targets_are_the_labels(self):
        assert torch.equal(data_set().targets, data_set().labels)

    def test_global_randomness_is_untouched(self):
        state = torch.get_rng_state()
        data_set().limit(5)
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("as_in_production")
class TestRefusals:
    @pytest.mark.parametrize(
        ("images", "labels", "message"),
        [
            (pixels(2), torch.tensor([0]), "pixels.*1 labels.*2"),
            (pixels(2)[0], torch.tensor([0, 0]), r"shape \(N, 1 or 3, H, W\).*torch.uint8.*\(1, 4, 4\)"),
            (pixels(2, channels=2), torch.tensor([0, 0]), r"of shape \(N, 1 or 3, H, W\)"),
            (pixels(2).int(), torch.tensor([0, 0]), "images.*uint8 or floating.*torch.int32"),
            (pixels(0), torch.tensor([]).long(), "'tensors'.*no items"),
            (pixels(2), torch.tensor([0.0, 1.0]), r"labels.*int64.*\(N,\).*torch.float32"),
            (pixels(2), torch.tensor([0, -1]), "labels.*0 to 0, got -1 at index 1"),
        ],
    )
    def test_bad_tensors(self, images, labels, message):
        with pytest.raises(ValueError, match=message):
            TensorImages(images, labels)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_values_that_are_not_finite(self, value):
        values = torch.zeros(4, 1, 2, 2)
        values[2, 0, 1, 1] = value
        with pytest.raises(ValueError, match="NaN or infinity.*index 2"):
            TensorImages(values, torch.zeros(4).long())

    def test_labels_without_a_class(self):
        with pytest.raises(ValueError, match="labels.*0 to 1, got 2 at index 1"):
            TensorImages(pixels(2), torch.tensor([0, 2]), classes=("a", "b"))

    def test_preprocessing_of_another_shape(self):
        with pytest.raises(ValueError, match=r"images.*\(1, 4, 4\).*preprocessing.*\(3, 4, 4\)"):
            TensorImages(pixels(2), torch.tensor([0, 1]), preprocessing=Preprocessing(size=(4, 4)))

    @pytest.mark.parametrize(
        ("indices", "message"),
        [
            ([], "non-empty list"),
            ([0.5], "indices.*float64"),
            ([True, False] * 15, "indices.*integers.*bool.*list"),
            (torch.arange(30) < 3, "indices.*torch.bool"),
            ([[1]], "non-empty list"),
            ([3, 30], "indices.*0 to 29, got 30"),
            ([-1], "indices.*0 to 29, got -1"),
        ],
    )
    def test_bad_indices(self, indices, message):
        with pytest.raises(ValueError, match=message):
            data_set().subset(indices)

    def test_bad_limit(self):
        with pytest.raises(ValueError, match="limit.*1.*0"):
            data_set().limit(0)

    @pytest.mark.parametrize("sizes", [(0, 3), (20, 11)])
    def test_bad_sizes(self, sizes):
        with pytest.raises(ValueError, match="sizes.*1.*30"):
            stratified_split(data_set().labels, sizes, seed=0)

    def test_carving_leaves_something(self):
        with pytest.raises(ValueError, match=r"sizes.*1.*\(10, 20, 0\)"):
            carve(data_set(), (10, 20), seed=0)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
    def test_bad_fractions(self, fraction):
        with pytest.raises(ValueError, match=r"validation.*\(0, 1\)"):
            fraction_of(10, fraction, name="validation")

    def test_splits_of_different_kinds(self):
        images = data_set()
        with pytest.raises(ValueError, match=r"train.*\(1, 4, 4\), test.*\(3, 4, 4\)"):
            Splits(train=images, validation=images, test=TensorImages(pixels(2, channels=3), torch.tensor([0, 1])))
        with pytest.raises(ValueError, match="train.*validation.*share"):
            Splits(train=images, validation=data_set(30, 2), test=images)


class TestStratifiedSplit:
    def test_balanced_classes_are_divided_exactly(self):
        labels = torch.arange(600) % 6
        parts = stratified_split(labels, (60, 120, 30), seed=4)
        for part, each in zip(parts, (10, 20, 5), strict=True):
            assert torch.bincount(labels[part]).tolist() == [each] * 6

    @settings(deadline=None, max_examples=30)
    @given(st.lists(st.integers(0, 5), min_size=3, max_size=60), st.data())
    def test_parts_are_disjoint_deterministic_and_near_their_share(self, labels, data):
        n = len(labels)
        first = data.draw(st.integers(1, n - 1))
        sizes = (first, data.draw(st.integers(1, n - first)))
        labels = torch.tensor(labels)
        parts = stratified_split(labels, sizes, seed=n)
        assert [len(part) for part in parts] == list(sizes)
        together = torch.cat(parts)
        assert len(together.unique()) == len(together)
        assert all(map(torch.equal, parts, stratified_split(labels, sizes, seed=n)))
        counts = torch.bincount(labels)
        for part, size in zip(parts, sizes, strict=True):
            share = counts * size / n
            assert (torch.bincount(labels[part], minlength=len(counts)) - share).abs().max() < 3

    def test_small_classes_have_their_fair_chance_of_every_part(self):
        labels = torch.cat([torch.zeros(98).long(), torch.tensor([1, 1])])
        hits = [int((labels[stratified_split(labels, (20, 80), seed=seed)[0]] == 1).sum()) for seed in range(100)]
        assert abs(sum(hits) / 100 - 0.4) < 4 * (0.4 * 0.6 / 100) ** 0.5

    def test_other_seeds_give_other_parts(self):
        labels = torch.arange(100) % 5
        assert not torch.equal(*(stratified_split(labels, (50,), seed=seed)[0] for seed in (0, 1)))

    def test_carved_parts_are_everything(self):
        images = data_set()
        parts = carve(images, (6, 9), seed=0)
        assert [len(part) for part in parts] == [6, 9, 15]
        assert sorted(position for part in parts for position in positions(part)) == list(range(30))


def test_data_sets_of_different_kinds_are_joined_by_their_items():
    images = data_set()
    other = ImagesAsFiles(images, images.preprocessing)
    joined = images.joined(other)
    assert joined.labels.tolist() == [*images.labels.tolist(), *other.labels.tolist()]
    assert joined.classes == images.classes
    part = joined.subset([1, len(images) + 2])
    for (item, label), (expected, own) in zip(part, (images[1], other[2]), strict=True):
        assert torch.equal(item, expected)
        assert label == own
    assert part.preview(1) == other.preview(2)


def test_missing_data_is_both_kinds_of_error():
    error = MissingDataError("gone")
    assert isinstance(error, ValueError)
    assert isinstance(error, FileNotFoundError)
    assert str(error) == "gone"
