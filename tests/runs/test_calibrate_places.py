"""Calibration of a run on places: positions decide which items match, also in the run's gallery."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lam.runs.calibration_options import CalibrationOptions
from lam.runs.calibration_searches import Inputs, search_known
from lam.runs.config_files import load_config
from lam.runs.finished import Run
from lam.runs.run import run
from tests.datasets import layouts
from tests.runs.conftest import Lam

N, STEP, WITHIN = 240, 6.0, 25.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a street whose colour changes along it, seen twice at every place."""
    root, generator = tmp_path_factory.mktemp("street"), np.random.default_rng(0)
    rows = [{"path": f"{i}.png", "x": STEP * (i // 2), "y": 0, "area": "street"} for i in range(N)]
    layouts.table(root / "places.csv", rows)
    for i in range(N):
        colour = 127 + 100 * np.cos(i // 2 * np.array([0.11, 0.047, 0.023]))
        pixels = colour + generator.normal(0, 6, (16, 16, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(root / f"{i}.png")
    settings = [
        f"--data.root={root}",
        "--data.options.preprocessing.size=32",
        f"--output={root}-run",
        "--network={name: convnet32, dimension: 8, options: {}}",
        "--training.epochs=1",
    ]
    return run(load_config("places laplace_posthoc", settings), progress=False).folder


@pytest.mark.filterwarnings("ignore:the gallery holds the places")
def test_half_of_the_validation_split_joins_the_gallery_and_positions_say_what_matches(trained: Path) -> None:
    inputs = Inputs(Run(trained), CalibrationOptions(), progress=False)
    known = search_known(inputs)
    assert inputs.splits is not None
    relevance, stored = known.searchable.relevance, Run(trained).gallery
    queries, candidates, validation = relevance.queries, relevance.candidates, inputs.splits.validation
    joined = candidates[candidates < len(validation)]
    assert len(queries) + len(joined) == len(validation)
    assert len(candidates) == len(known.searchable.items) == len(stored)
    vectors = known.searchable.items.mean[len(joined) :]
    rows = torch.cdist(vectors.double(), stored.embeddings.mean.double()).argmin(1)
    ids = [int(stored.items[row].id) for row in rows.tolist()]
    places = torch.cat([validation.targets[joined], inputs.splits.test.targets[ids]])
    distances = torch.cdist(validation.targets[queries], places)
    matches = distances <= WITHIN
    assert torch.equal(known.searches.correct, matches[torch.arange(len(queries)), known.searches.hits[:, 0]])
    assert matches[:, : len(joined)].any(1).float().mean() > 0.9


@pytest.mark.filterwarnings("ignore:the gallery holds the places")
def test_a_calibration_of_places_fits_the_gallery(trained: Path, lam: Lam) -> None:
    targets = ["--target-far=0.05", "--target-ood=0.05", "--target-miss=0.1"]
    lam("calibrate", trained, "--quiet", *targets)
    calibration = Run(trained).calibration
    assert calibration is not None
    assert not calibration.is_stale(len(Run(trained).gallery.items))


@pytest.mark.parametrize("label", ["street", ""])
def test_items_of_ones_own_have_no_positions(trained: Path, tmp_path: Path, lam: Lam, label: str) -> None:
    shutil.copytree(trained, own := tmp_path / "run")
    picture = next(Path(f"{trained}".removesuffix("-run")).glob("*.png"))
    (tmp_path / "list.csv").write_text(f"path,id,label\n{picture},0,{label}\n")
    lam("index", own, "--list", tmp_path / "list.csv", "--quiet")
    assert "no positions" in lam("calibrate", own, "--quiet", code=1).err
