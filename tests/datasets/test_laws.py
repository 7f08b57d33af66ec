"""Laws of every data set by name: items, targets, subsets, seeds, shapes, and missing files."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lam.datasets import DATASETS, OOD_SETS, Dataset, MissingDataError, Splits, load, load_ood
from tests.datasets import layouts

CITIES = {"train_cities": ["boston"], "validation_cities": ["amman"], "test_cities": ["cph"]}
MAKE: dict[str, Callable[[Path], Any]] = {
    **{"mnist": layouts.mnist, "fashionmnist": layouts.mnist, "cifar10": layouts.cifar10, "svhn": layouts.svhn},
    "folder": lambda root: layouts.folder(root, {"cat": 20, "dog": 10}),
    "cub200": lambda root: layouts.cub200(root, n_classes=24, each=2),
    "cars196": lambda root: layouts.cars196(root, n_classes=24, each=2),
    "lfw": lambda root: layouts.lfw(root, {f"Ann_{i}": 1 + i % 3 for i in range(20)}, {"Bob": 2}),
    "msls": lambda root: layouts.msls(root, ["boston", "amman", "cph"]),
    "places": lambda root: layouts.places(root, [{"path": f"{i}.png", "x": 5.0 * i, "y": 7.0} for i in range(20)]),
    **dict.fromkeys(("texts", "banking77"), layouts.texts),
    "clinc150": layouts.clinc150,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "msls": CITIES,
    **{name: {"validation": 10} for name in ("mnist", "fashionmnist", "cifar10", "svhn")},
}
SEEDLESS = ("clinc150", "msls", "places")  # their splits are published, or cut by position
SHIPPED = ("digits", "docstrings", "spots")  # with a library


def small(name: str, root: Path, seed: int = 0) -> Splits:
    """A data set from few files, of small images."""
    options = dict(OPTIONS.get(name, {}))
    if "preprocessing" in inspect.signature(DATASETS[name]).parameters:
        options["preprocessing"] = {"crop": 8}
    return load(name, root=None if name in SHIPPED else root, seed=seed, **options)


def identity(part: Dataset) -> list[str | bytes]:
    return list(part.names) or [part[row][0].numpy().tobytes() for row in range(len(part))]


@pytest.mark.parametrize("name", DATASETS)
def test_items_targets_and_subsets_belong_together(tmp_path: Path, name: str) -> None:
    MAKE.get(name, lambda root: root)(tmp_path)
    state = torch.get_rng_state()
    for part in small(name, tmp_path).parts().values():
        last = len(part) - 1
        for row in {0, last}:
            item, target = part[row]
            assert item.shape == part.shape
            assert torch.equal(torch.as_tensor(target).double(), part.targets[row].double())
        turned = part.subset([last, 0])
        assert turned.classes == part.classes
        assert torch.equal(turned.targets, part.targets[[last, 0]])
        assert torch.equal(turned[0][0], part[last][0])
        assert turned.preview(1) == part.preview(0) or part.preview(0).path == f"{part.name} 0"
        joined = part.joined(turned)
        assert torch.equal(joined.targets, torch.cat([part.targets, turned.targets]))
        assert torch.equal(joined[len(part)][0], part[last][0])
        assert list(turned.files) == [part.files[last], part.files[0]] if part.files else not turned.files
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", DATASETS)
def test_parts_are_disjoint_and_the_seed_decides(tmp_path: Path, name: str) -> None:
    MAKE.get(name, lambda root: root)(tmp_path)
    first, again, other = (small(name, tmp_path, seed) for seed in (0, 0, 1))
    assert identity(first.validation) == identity(again.validation)
    assert (identity(first.validation) == identity(other.validation)) == (name in SEEDLESS)
    if first.train.files:
        files = [file for part in first.parts().values() for file in part.files]
        assert len(set(files)) == len(files)


@pytest.mark.parametrize("name", DATASETS | OOD_SETS)
def test_items_out_of_the_distribution_have_the_shape_of_those_in_it(tmp_path: Path, name: str) -> None:
    MAKE.get(name.removesuffix("_oos"), lambda root: root)(tmp_path)
    is_text = name in ("texts", "banking77", "descriptions", "docstrings") or name.startswith("clinc150")
    root = tmp_path if name.removesuffix("_oos") in MAKE else None
    if name == "texts":
        root = tmp_path / "test.csv"
    like = load("docstrings" if is_text else "digits").test
    options = OPTIONS.get(name, {}) if name not in OOD_SETS else {}
    items, again = (load_ood(name, like=like, root=root, seed=1, **options) for _ in range(2))
    assert items.shape == items[0][0].shape == like.shape
    assert identity(items) == identity(again)


@pytest.mark.parametrize("name", sorted(DATASETS.keys() - set(SHIPPED)))
def test_a_missing_root_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(MissingDataError, match=str(tmp_path / "absent")):
        load(name, root=tmp_path / "absent")
