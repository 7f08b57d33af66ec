from pathlib import Path

import pytest
import torch

import lam
from lam.cli import main
from lam.utils.files import read_json
from tests.conftest import TINY

pytestmark = pytest.mark.long

ONLINE = "digits laplace_online"


def test_a_run_trains_online_and_hands_back_the_same_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "run"
    assert main(["run", *ONLINE.split(), "--quiet", f"--output={folder}", *TINY]) == 0
    assert "auroc" in capsys.readouterr().out
    metrics = read_json(folder / "metrics.json")
    assert {"recall@1", "ece", "ausc", "auroc", "auroc_variance", "seconds_train"} <= metrics.keys()
    assert "seconds_fit" not in metrics
    encoder = lam.load(folder / "encoder")
    assert encoder.posterior.curvature.counts is None
    assert encoder.posterior.scale == metrics["tuned_scale"]
    assert len(encoder.embed(torch.rand(3, 1, 8, 8))) == 3


def test_training_online_goes_on_after_a_stop(tmp_path: Path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["run", *ONLINE.split(), "--quiet", f"--output={whole}", *TINY]) == 0
    assert main(["run", *ONLINE.split(), "--quiet", f"--output={stopped}", *TINY]) == 0
    for name in ("MANIFEST.json", "encoder/MANIFEST.json"):
        (stopped / name).unlink()
    assert main(["run", str(stopped), "--quiet"]) == 0
    one, other = (lam.load(folder / "encoder").posterior for folder in (whole, stopped))
    assert torch.equal(one.curvature.sums, other.curvature.sums)
    assert torch.equal(one.weight, other.weight)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--method.memory_factor=1.5", r"memory_factor must lie in (0, 1), got 1.5"),
        ("--method.update=sum", "method.update"),
        ("--checkpoint=setup.cfg", "laplace_online cannot start from a trained network"),
    ],
)
def test_wrong_settings_are_one_line_before_any_work(option, message, tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["run", *ONLINE.split(), "--quiet", f"--output={folder}", option]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not folder.exists()
