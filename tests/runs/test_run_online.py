import re
from pathlib import Path

import pytest
import torch

from lam import load
from lam.utils.files import read_json
from tests.conftest import TINY
from tests.runs.conftest import Lam

pytestmark = pytest.mark.long

ONLINE = "digits laplace_online"


def test_a_run_trains_online_and_hands_back_the_same_encoder(tmp_path: Path, lam: Lam):
    folder = tmp_path / "run"
    assert "auroc" in lam("run", *ONLINE.split(), "--quiet", f"--output={folder}", *TINY).out
    metrics = read_json(folder / "metrics.json")
    assert {"recall@1", "ece", "ausc", "auroc", "auroc_variance", "seconds_train"} <= metrics.keys()
    assert "seconds_fit" not in metrics
    encoder = load(folder / "encoder")
    assert encoder.posterior.curvature.counts is None
    assert encoder.posterior.scale == metrics["tuned_scale"]
    assert len(encoder.embed(torch.rand(3, 1, 8, 8))) == 3


def test_training_online_goes_on_after_a_stop(tmp_path: Path, lam: Lam):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder in (whole, stopped):
        lam("run", *ONLINE.split(), "--quiet", f"--output={folder}", *TINY)
    for name in ("MANIFEST.json", "encoder/MANIFEST.json"):
        (stopped / name).unlink()
    lam("run", stopped, "--quiet")
    one, other = (load(folder / "encoder").posterior for folder in (whole, stopped))
    assert torch.equal(one.curvature.sums, other.curvature.sums)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--method.memory_factor=1.5", r"memory_factor.*\(0, 1\), got 1.5"),
        ("--method.update=sum", "method.update"),
        ("--checkpoint=setup.cfg", "laplace_online.*trained network"),
    ],
)
def test_wrong_settings_are_one_line_before_any_work(option, message, tmp_path, lam):
    folder = tmp_path / "run"
    said = lam("run", *ONLINE.split(), "--quiet", f"--output={folder}", option, code=1).err
    assert re.search(message, said)
    assert said.count("\n") == 1
    assert not folder.exists()
