"""Augmentation: random crops and flips, their pixels, and equal draws in a resumed run."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning_fabric  # noqa: F401  # sets an environment variable when it is imported
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from lam import losses, models
from lam.datasets import FolderImages, TensorImages, Texts
from lam.datasets.augmented import AugmentationOptions, Augmented
from lam.inputs.preprocessing import Preprocessing
from lam.runs.config_files import load_config
from lam.training import Training, train

BOTH = AugmentationOptions(crop_scale=0.3, flip=0.5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> FolderImages:
    """Two noisy photographs of 90 × 120 pixels, one of them turned by its EXIF data, read at 16 × 16."""
    folder, random = tmp_path_factory.mktemp("photographs"), np.random.default_rng(0)
    upright = Image.fromarray(random.integers(0, 256, (90, 120, 3), dtype=np.uint8))
    turned = Image.fromarray(random.integers(0, 256, (120, 90, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.save(folder / "upright.png")
    turned.save(folder / "turned.png", exif=exif)
    return FolderImages(
        [folder / "upright.png", folder / "turned.png"],
        torch.tensor([1, 0]),
        name="photographs",
        classes=("a", "b"),
        preprocessing=Preprocessing.imagenet(16),
    )


def _ramp(n: int = 4, size: int = 8) -> TensorImages:
    """Images in which the value of a pixel is its column."""
    columns = torch.arange(size, dtype=torch.float32).expand(n, 1, size, size).clone()
    return TensorImages(columns, torch.arange(n) // 2, name="ramps")


def test_nothing_is_drawn_by_default(files: FolderImages) -> None:
    for dataset in (files, _ramp()):
        state = torch.get_rng_state()
        augmented = Augmented(dataset, AugmentationOptions())
        assert torch.equal(augmented[1][0], dataset[1][0])
        assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("index", [0, 1])
def test_crops_of_files_are_cut_at_full_resolution(files: FolderImages, index: int) -> None:
    augmented = Augmented(files, AugmentationOptions(crop_scale=0.1))
    torch.manual_seed(index)
    view, label = augmented[index]
    torch.manual_seed(index)
    upright = Preprocessing()(files.paths[index])
    assert upright.shape == (3, 90, 120)
    top, left, height, width = RandomResizedCrop.get_params(upright, [0.1, 1.0], [3 / 4, 4 / 3])
    pixels = (upright[:, top : top + height, left : left + width] * 255).round().to(torch.uint8)
    part = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((16, 16), Image.Resampling.BILINEAR)
    expected = files.preprocessing.normalize(torch.from_numpy(np.array(part)).permute(2, 0, 1))
    torch.testing.assert_close(view, expected)
    assert label == files.labels[index]


def test_small_crops_of_large_files_keep_their_detail(tmp_path: Path) -> None:
    columns = np.tile(np.array([0, 255], np.uint8), (600, 300))
    Image.fromarray(columns).save(tmp_path / "stripes.png")
    options: Any = {"name": "stripes", "classes": ("a",), "preprocessing": Preprocessing(mode="L", size=(64, 64))}
    files = FolderImages([tmp_path / "stripes.png"], torch.tensor([0]), **options)
    views = Augmented(files, AugmentationOptions(crop_scale=0.002))
    torch.manual_seed(0)
    assert max(float(views[0][0].std()) for _ in range(100)) > 0.2
    assert float(files[0][0].std()) < 0.1


def test_files_without_a_crop_are_flipped_after_preprocessing(files: FolderImages) -> None:
    flipped = Augmented(files, AugmentationOptions(flip=1.0))
    assert torch.equal(flipped[0][0], files[0][0].flip(-1))


def test_the_data_set_itself_stays_as_it_is(files: FolderImages) -> None:
    before = files[0][0]
    augmented = Augmented(files, BOTH)
    assert not torch.equal(augmented[0][0], augmented[0][0])
    assert torch.equal(files[0][0], before)
    assert augmented.preprocessing == files.preprocessing
    assert type(augmented.preprocessing) is Preprocessing


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    dataset = FolderImages(
        [tmp_path / "broken.png"],
        torch.tensor([0]),
        name="broken",
        classes=("a",),
        preprocessing=Preprocessing.imagenet(16),
    )
    with pytest.raises(ValueError, match="broken.png.*image"):
        Augmented(dataset, BOTH)[0]


def test_texts_are_refused() -> None:
    texts = Texts(["ab", "cd"], torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"items.*\(4096,\).*augmentation"):
        Augmented(texts, AugmentationOptions(flip=1.0))


def test_crops_of_tensors_have_the_areas_and_ratios_asked_for() -> None:
    size = 100
    rows = torch.arange(size, dtype=torch.float32)[:, None].expand(size, size)
    image = torch.stack([rows, rows.T, torch.zeros(size, size)])[None]
    augmented = Augmented(TensorImages(image, torch.tensor([0])), AugmentationOptions(crop_scale=0.25, crop_ratio=2.0))
    areas, ratios = [], []
    for _ in range(150):
        view, _ = augmented[0]
        height, width = ((view[axis].max() - view[axis].min()).item() + 1 for axis in (0, 1))
        areas.append(height * width / size**2)
        ratios.append(width / height)
    assert 0.2 < min(areas) < 0.35
    assert 0.85 < max(areas) <= 1.02
    assert 0.48 < min(ratios) < 0.7
    assert 1.4 < max(ratios) < 2.1


@pytest.mark.parametrize("crop_scale", [None, 0.5])
def test_half_of_the_images_are_flipped(crop_scale: float | None) -> None:
    augmented = Augmented(_ramp(), AugmentationOptions(crop_scale=crop_scale, flip=0.5))
    flipped = sum(int(view[0, 0, 0] > view[0, 0, -1]) for view in (augmented[0][0] for _ in range(400)))
    assert abs(flipped - 200) < 4 * math.sqrt(100)


def test_extreme_shapes_still_give_a_view(tmp_path: Path) -> None:
    paths = [tmp_path / "wide.png", tmp_path / "high.png", tmp_path / "dot.png"]
    for path, size in zip(paths, [(300, 1), (1, 300), (1, 1)], strict=True):
        Image.new("RGB", size, "red").save(path)
    labels = torch.tensor([0, 0, 0])
    dataset = FolderImages(paths, labels, name="strips", classes=("a",), preprocessing=Preprocessing.imagenet(8))
    for view, _ in Augmented(dataset, BOTH).__getitems__([0, 1, 2]):
        assert view.shape == (3, 8, 8)
        assert view.isfinite().all()


def test_it_is_a_data_set_like_the_one_it_wraps(files: FolderImages) -> None:
    for dataset in (files, _ramp()):
        augmented = Augmented(dataset, BOTH)
        assert len(augmented) == len(dataset)
        assert torch.equal(augmented.labels, dataset.labels)
        for name in ("name", "classes", "shape", "preprocessing"):
            assert getattr(augmented, name) == getattr(dataset, name)
        part = augmented.subset([1])
        assert isinstance(part, Augmented)
        assert part.labels.tolist() == [dataset.labels[1].item()]


def test_targets_of_another_kind_are_kept(files: FolderImages) -> None:
    positions = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    class Places(FolderImages):
        @property
        def targets(self) -> Tensor:
            return positions

        def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
            return self.preprocessing(self.paths[index]), positions[index]

    places = Places(files.paths, files.labels, name="places", classes=("a", "b"), preprocessing=files.preprocessing)
    augmented = Augmented(places, AugmentationOptions(flip=1.0))
    assert torch.equal(augmented.targets, positions)
    view, target = augmented[1]
    assert torch.equal(target, positions[1])
    assert torch.equal(view, files[1][0].flip(-1))


def test_a_batch_is_read_at_once_where_the_data_can() -> None:
    calls: list[list[int]] = []

    class Batched(TensorImages):
        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int | Tensor]]:
            calls.append(indices)
            return super().__getitems__(indices)

    ramp = _ramp()
    items = Augmented(Batched(ramp.images, ramp.labels), AugmentationOptions(flip=1.0)).__getitems__([3, 0])
    assert calls == [[3, 0]]
    assert [label for _, label in items] == [1, 0]
    assert torch.equal(items[0][0], ramp[3][0].flip(-1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(tmp_path: Path, num_workers: int) -> None:
    def run(folder: Path | None, epochs: int) -> Tensor:
        images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        data = Augmented(TensorImages(images, torch.arange(12) % 3), BOTH)
        network = models.build("convnet8", dimension=3, dropout=0.2)
        loss = losses.build(margin=0.7)
        options: dict[str, Any] = {"batch_size": 6, "accelerator": "cpu", "progress": False, "num_workers": num_workers}
        train(network, data, Training(loss=loss, epochs=epochs, folder=folder, **options))
        return network.head.weight.detach()

    state = torch.get_rng_state()
    uninterrupted = run(None, 2)
    run(tmp_path / "run", 1)
    assert torch.equal(run(tmp_path / "run", 2), uninterrupted)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop_scale": 0.0}, r"crop_scale.*\(0, 1\].*None.*no crop.*0.0"),
        ({"crop_scale": 1.5}, "got 1.5"),
        ({"crop_ratio": 0.5}, "crop_ratio.*1.*0.5"),
        ({"crop_ratio": math.inf}, "got inf"),
        ({"flip": -0.1}, r"flip.*\[0, 1\].*-0.1"),
        ({"flip": math.nan}, "got nan"),
    ],
)
def test_options_outside_their_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AugmentationOptions(**options)


def test_options_are_a_section_of_a_configuration() -> None:
    config = load_config("digits norm", ["--augmentation.crop_scale=0.08", "--augmentation.flip=0.5"])
    assert config.augmentation == AugmentationOptions(crop_scale=0.08, flip=0.5)
    assert config.resolved()["augmentation"] == asdict(config.augmentation)
