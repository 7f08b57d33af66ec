"""Runs that start from weights, which replace training: errors, and no execution of code in files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lam import models
from lam.models.weights import load_weights
from lam.runs.config_files import load_config
from lam.runs.finished import Run
from lam.runs.run import run
from lam.utils.files import write_tensors
from tests.conftest import tiny

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.mark.parametrize(
    "suffix", [*(pytest.param(suffix, marks=pytest.mark.long) for suffix in ("safetensors", "pth")), "wrapped.pth"]
)
def test_a_checkpoint_takes_the_place_of_training(suffix: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    state = models.build("convnet8", dimension=3, seed=5).state_dict()
    path = tmp_path / f"weights.{suffix}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if "wrapped" in suffix else state, path)
    result = run(tiny(tmp_path / "run", f"--checkpoint={path}"), progress=False)
    network = Run(result.folder).encoder.network
    assert network is not None
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert "seconds_train" not in result.metrics
    path.unlink()
    assert run(load_config(result.folder), progress=False).metrics == result.metrics


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(os.environ["LAM_TEST_TOUCHED"]),)


def test_a_checkpoint_is_never_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touched = tmp_path / "touched"
    monkeypatch.setenv("LAM_TEST_TOUCHED", str(touched))
    torch.save({"state_dict": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(ValueError, match="hostile.pth.*plain weights .*torch.save"):
        run(tiny(tmp_path / "run", f"--checkpoint={tmp_path / 'hostile.pth'}"), progress=False)
    assert not touched.exists()
    assert not (tmp_path / "run").exists()


def test_a_missing_checkpoint_is_refused_before_data_are_read(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", f"--checkpoint={tmp_path / 'missing.pth'}", "--data.root=no_data")
    with pytest.raises(ValueError, match="missing.pth.*not exist"):
        run(config, progress=False)


def test_a_checkpoint_that_does_not_fit_is_refused_before_any_work(tmp_path: Path) -> None:
    network = models.build("convnet8", dimension=3)
    torch.save(models.build("convnet8", dimension=4).state_dict(), tmp_path / "wide.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    (tmp_path / "noise.safetensors").write_bytes(bytes(range(100)))
    message = r"wide.pth: .*head.weight.*\(3, 512\).*\(4, 512\)"
    with pytest.raises(ValueError, match=message):
        run(tiny(tmp_path / "run", f"--checkpoint={tmp_path / 'wide.pth'}"), progress=False)
    assert not (tmp_path / "run").exists()
    write_tensors(tmp_path / "tensors.safetensors", {"last/network/head.weight": torch.zeros(2)})
    for name, message in (
        ("list.pth", "list.pth holds no state_dict of tensors"),
        ("noise.safetensors", "noise.safetensors.*plain weights"),
        ("missing.pth", "missing.pth.*not exist"),
        ("", "is a folder: .*RUN/encoder"),
        ("tensors.safetensors", "unfinished training: .*`lam run`"),
    ):
        with pytest.raises(ValueError, match=message):
            load_weights(network, tmp_path / name)
